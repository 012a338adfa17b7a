"""Start the app from the arguments of `osd-hf app`."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from starlette.middleware import Middleware

from osd_hf.errors import ConfigError
from osd_hf_app.bounds import bound_console, bound_heap, bound_queue, bound_states
from osd_hf_app.door import Door, is_loopback
from osd_hf_app.page import build
from osd_hf_app.pair import ServedPair
from osd_hf_app.service import Service
from osd_hf_app.smollm2 import smollm2_pair
from osd_hf_app.view import CSS

THREADS = 200  # of pages that watch an answer
WAITING = 64  # events that wait for such a thread
PAGE_STATES = 500  # pages of which gradio remembers something; what is forgotten is sent anew
SWITCH_SECONDS = 0.001  # after which threads make way for each other: a model's many small steps each wait for it
USER = "owner"
PASSWORD = "OSD_HF_APP_PASSWORD"
TRUSTED = "FORWARDED_ALLOW_IPS"  # of uvicorn, read at the launch: proxies whose word on addresses is taken
# Gradio's variables that are heeded; the others could open what the app keeps closed.
HEEDED = {
    f"GRADIO_{name}"
    for name in "SERVER_NAME SERVER_PORT NUM_PORTS ROOT_PATH TEMP_DIR ANALYTICS_ENABLED IS_E2E_TEST".split()
}


def theme() -> gr.themes.Base:
    """A theme without fonts from elsewhere: the page needs no network."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.themes.Soft(primary_hue="emerald", neutral_hue="slate", **fonts)


def exposure(host: str, environment: Mapping[str, str], *, share: bool = False) -> str | None:
    """Why others than this machine reach a page that is bound to the address or name `host` in a process with this
    environment; `None` if they do not. With `share` a public address of gradio's leads here as well."""
    if environment.get("SPACE_ID"):
        return "this is a Space"
    if share:
        return "--share leads here from everywhere"
    if environment.get("GRADIO_ROOT_PATH"):
        return "GRADIO_ROOT_PATH says that a proxy leads here"
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        addresses = {host}
    if all(is_loopback(address.split("%")[0]) for address in addresses):
        return None
    return f"the address {host} is open to others"


def forget_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Remove the variables by which gradio would open more than the app does; returns their names."""
    found = sorted(name for name in environment if name.startswith("GRADIO_") and name not in HEEDED)
    for name in found:
        del environment[name]
    environment["GRADIO_RUN_HISTORY"] = "False"  # browsers would keep what was asked, after the chat is cleared too
    return found


def served_page(service: Service, host: str, port: int | None, *, output_dir: Path, share: bool = False,
                login: tuple[str, str] | None = None) -> gr.Blocks:  # fmt: skip
    """Launch the page with all bounds in place, at the first free port by default; with `share` at a public address of
    gradio's as well. All have to give the name and the password of `login`, where there is one. Raises ConfigError
    where the page is not public, but others can reach it."""
    page = build(service, output_dir=output_dir)
    # Answers wait for their turn in the service, which says so; whoever watches one only takes a thread.
    page.queue(default_concurrency_limit=None, max_size=WAITING, api_open=False)
    bounds: dict[str, Any] = {"has_room": bound_queue(page)} if service.is_public else {}
    door: Any = Middleware(Door, is_public=service.is_public, has_login=login is not None, **bounds)  # type: ignore
    page.launch(
        server_name=host, server_port=port, share=share, auth=login, css=CSS, theme=theme(), ssr_mode=False,
        prevent_thread_lock=True, quiet=True, show_error=True, max_threads=THREADS, mcp_server=False, pwa=False,
        enable_monitoring=False, state_session_capacity=PAGE_STATES, max_file_size=1, allowed_paths=[],
        footer_links=["api", "settings"], app_kwargs={"middleware": [door]},
    )  # fmt: skip
    bound_states(page)
    # The door stands before gradio's own middlewares, one of which allows other sites what they ask for.
    page.app.user_middleware.remove(door)
    page.app.user_middleware.insert(0, door)
    page.app.middleware_stack = page.app.build_middleware_stack()
    bound = [s.getsockname()[0] for server in page.server.servers for s in server.sockets]
    if not service.is_public and login is None and not all(is_loopback(str(address)) for address in bound):
        page.close()
        raise ConfigError(
            f"The page is open to others at {', '.join(bound)}. Serve it with --public, with --login, or on 127.0.0.1."
        )
    return page


def launch(args: Any) -> int:
    """Serve the page until interrupted, by the settings of `osd-hf app`. Raises OSDError where models cannot be
    loaded or do not fit together, or a state cannot be read."""
    print("loading the models ...", flush=True)
    host = args.host or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    why = exposure(host, os.environ, share=args.share)
    is_public = (args.public or why is not None) and not args.login
    login = (USER, os.environ.get(PASSWORD) or secrets.token_urlsafe(12)) if args.login else None
    if is_public and not (args.target or args.pair):  # larger models have blocks that are mapped by themselves
        bound_heap()
    ignored = forget_variables(os.environ)
    if ignored:
        print(f"ignored: {', '.join(ignored)} (see osd-hf app --help for flags)", flush=True)
    told = functools.partial(print, flush=True)
    if args.threads:  # a draft that is made now is measured with as many as serve it
        torch.set_num_threads(args.threads)
    smollm2 = smollm2_pair(device=args.device or "cpu", say=told) if args.pair else None
    pair = ServedPair(args.target, args.draft, smollm2=smollm2, **args.loading)
    service = Service(
        pair, state=args.state_dir, threads=args.threads, is_public=is_public, dtype=args.dtype, device=args.device
    )
    if is_public:
        bound_console()
        if not (args.share or os.environ.get("SPACE_ID")):
            # By default uvicorn believes whatever comes from this machine, and what merely forwards connections here
            # passes on the addresses that strangers invent.
            os.environ.setdefault(TRUSTED, "")
        refused = "nobody loads models, saves, pushes or resets here. For these, use 127.0.0.1, or --login"
        print(f"strangers may come ({why or '--public'}): {refused}", flush=True)
    if login is not None:
        told = f"the password of {PASSWORD}" if os.environ.get(PASSWORD) else f"the password {login[1]}"
        print(f"log in as {USER} with {told}; whoever does has all controls", flush=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        page = served_page(service, host, args.port, output_dir=args.output_dir, share=args.share, login=login)
        print(f"{page.local_url} serves {pair.name}; Ctrl+C ends it", flush=True)
        page.block_thread()
    finally:
        sys.setswitchinterval(interval)
        service.close()
    return 0
