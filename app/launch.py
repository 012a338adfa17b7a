"""Start the app from the arguments of `osd-hf app`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gradio as gr

from osd_hf_app.page import build
from osd_hf_app.pair import Pair
from osd_hf_app.service import Service
from osd_hf_app.view import CSS

__all__ = ["launch"]

THREADS = 200  # of pages that watch an answer


def theme() -> gr.themes.Base:
    """Without fonts from elsewhere, so that the page needs no network."""
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    return gr.themes.Soft(primary_hue="emerald", neutral_hue="slate", **fonts)


def launch(args: argparse.Namespace) -> int:
    """
    Serve the page until interrupted.

    Args:
        args (`argparse.Namespace`):
            Of `osd-hf app`.

    Raises:
        OSDError: models that cannot be loaded or do not fit together, or a state that cannot be read.
    """
    print("loading the models ...", flush=True)
    settings = {"dtype": args.dtype, "device": args.device}
    pair = Pair(args.target, args.draft, **settings)
    state = None if args.state is None else Path(args.state)
    service = Service(pair, state=state, threads=args.threads, **settings)
    # A Space, and what is shared, is open to everybody.
    is_public = args.public or args.share or bool(os.environ.get("SPACE_ID"))
    if not is_public and args.host not in (None, "127.0.0.1", "localhost"):
        print("whoever reaches this address may load models, save, and push with your login: see --public", flush=True)
    page = build(service, is_public=is_public, output_dir=args.output_dir)
    # Answers wait for their turn in the service, which says so; whoever watches one only takes a thread.
    page.queue(default_concurrency_limit=None)
    try:
        page.launch(
            server_name=args.host, server_port=args.port, share=args.share, css=CSS, theme=theme(), ssr_mode=False,
            prevent_thread_lock=True, quiet=True, show_error=True, max_threads=THREADS,
            footer_links=["api", "settings"],
        )  # fmt: skip
        print(f"{page.local_url} serves {pair.name}; Ctrl+C ends it", flush=True)
        page.block_thread()
    finally:
        service.close()
    return 0
