"""Start the app with the settings of `osd-hf app`."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from osd_hf_app.access import AccessMiddleware, is_loopback, limit_log, limit_queue
from osd_hf_app.page import build
from osd_hf_app.pair import ServedPair
from osd_hf_app.service import Service
from osd_hf_app.view import CSS

MAX_THREADS = 200  # pages that watch an answer
MAX_WAITING = 64  # events that wait for such a thread
MAX_PAGE_STATES = 100  # pages of which Gradio remembers something
USER, PASSWORD_VARIABLE = "owner", "OSD_HF_APP_PASSWORD"  # of the login
PROXY_VARIABLE = "FORWARDED_ALLOW_IPS"  # of uvicorn: proxies that may name the visitor's address
# Gradio's variables that are used; others could open what the app keeps closed.
GRADIO_VARIABLES = "SERVER_NAME SERVER_PORT NUM_PORTS ROOT_PATH TEMP_DIR ANALYTICS_ENABLED IS_E2E_TEST".split()


def exposure(host: str, environment: Mapping[str, str], *, share: bool = False) -> str | None:
    """Return why other machines can reach a page at this address, or `None` if they cannot."""
    if environment.get("SPACE_ID"):
        return "this is a Space"
    if share:
        return "--share gives it a public address"
    if environment.get("GRADIO_ROOT_PATH"):
        return "GRADIO_ROOT_PATH names a proxy"
    name = host.strip("[]")
    is_local = is_loopback(f"[{name}]" if ":" in name else name)
    return None if is_local else f"other machines can reach the address {host}"


def remove_variables(environment: MutableMapping[str, str]) -> list[str]:
    """Remove unknown variables of Gradio; return their names."""
    known = [f"GRADIO_{name}" for name in GRADIO_VARIABLES]
    found = sorted(name for name in environment if name.startswith("GRADIO_") and name not in known)
    for name in found:
        del environment[name]
    environment["GRADIO_RUN_HISTORY"] = "False"  # browsers would keep prompts after the chat was cleared
    return found


def serve(
    service: Service, host: str, port: int | None, *, output_dir: Path, share: bool, login: tuple[str, str] | None
) -> gr.Blocks:
    """Launch the page with all limits, by default at the first free port; `login` is a name and a password."""
    page = build(service, output_dir=output_dir)
    # Answers are scheduled by the service, not by Gradio.
    page.queue(default_concurrency_limit=None, max_size=MAX_WAITING, api_open=False)
    if service.is_public:
        limit_queue(page)
    access: Any = Middleware(AccessMiddleware, is_public=service.is_public, has_login=login is not None)
    address: dict[str, Any] = {"server_name": host, "server_port": port, "share": share, "auth": login}
    closed: dict[str, Any] = {"mcp_server": False, "pwa": False, "enable_monitoring": False, "allowed_paths": []}
    limits = {"max_threads": MAX_THREADS, "state_session_capacity": MAX_PAGE_STATES, "max_file_size": 1}
    # No web fonts, so that the page needs no network.
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    theme = gr.themes.Soft(primary_hue="emerald", neutral_hue="slate", **fonts)
    style: dict[str, Any] = {"css": CSS, "theme": theme, "ssr_mode": False, "footer_links": ["api", "settings"]}
    console = {"prevent_thread_lock": True, "quiet": True, "show_error": True}
    page.launch(**address, **closed, **limits, **style, **console, app_kwargs={"middleware": [access]})
    # Moved before Gradio's own middlewares, one of which grants other sites what they ask for.
    page.app.user_middleware.remove(access)
    page.app.user_middleware.insert(0, access)
    page.app.middleware_stack = page.app.build_middleware_stack()
    return page


def launch(args: Any) -> int:
    """Serve the page until interrupted. Raises OSDError if the models or the saved session cannot be used."""
    say = functools.partial(print, flush=True)
    say("loading the models ...")
    host = args.host or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
    reason = exposure(host, os.environ, share=args.share)
    is_public = args.public or (reason is not None and not args.login)
    password = os.environ.get(PASSWORD_VARIABLE)
    login = (USER, password or secrets.token_urlsafe(12)) if args.login else None
    if ignored := remove_variables(os.environ):
        say(f"ignored: {', '.join(ignored)} (see osd-hf app --help for flags)")
    pair = ServedPair(args.load_pair(), args.target, args.draft, is_smollm2=args.pair == "smollm2")
    service = Service(pair, state=args.state_dir, threads=args.threads, is_public=is_public)
    if is_public:
        limit_log()
        if not (args.share or os.environ.get("SPACE_ID")):
            # By default, uvicorn trusts local proxies, also those that pass on addresses which visitors invent.
            os.environ.setdefault(PROXY_VARIABLE, "")
        say(f"public mode ({reason or '--public'}): visitors cannot save, push, or reset; --login allows it")
    if login is not None:
        say(f"log in as {USER} with the password {f'in {PASSWORD_VARIABLE}' if password else login[1]}")
    try:
        if not args.target:  # a draft of one's own learns from one's own prompts only
            service.demonstrate()
        page = serve(service, host, args.port, output_dir=args.output_dir, share=args.share, login=login)
        say(f"{page.local_url} serves {pair.name}; Ctrl+C ends it")
        page.block_thread()
    finally:
        service.sessions.close()
    return 0
