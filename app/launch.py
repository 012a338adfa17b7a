"""Start the app from the arguments of `osd-hf app`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import gradio as gr
import torch

from osd_hf_app.page import build
from osd_hf_app.pair import Pair
from osd_hf_app.service import Service
from osd_hf_app.view import CSS

__all__ = ["launch"]


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
    is_bundled = not (args.target or args.draft)
    if args.threads or is_bundled:  # the bundled models are too small for a team of threads
        torch.set_num_threads(args.threads or 1)
    print("loading the models ...", flush=True)
    pair = Pair(args.target, args.draft, dtype=args.dtype, device=args.device)
    service = Service(pair, state=None if args.state is None else Path(args.state))
    # A Space is open to everybody.
    is_public = args.public or bool(os.environ.get("SPACE_ID"))
    page = build(service, is_public=is_public, output_dir=args.output_dir)
    page.queue(default_concurrency_limit=16, max_size=64)
    try:
        page.launch(
            server_name=args.host, server_port=args.port, share=args.share, css=CSS, theme=theme(), ssr_mode=False,
            prevent_thread_lock=True, quiet=True, show_error=True, footer_links=["api", "settings"],
        )  # fmt: skip
        print(f"{page.local_url} serves {pair.name}; Ctrl+C ends it", flush=True)
        page.block_thread()
    finally:
        service.close()
    return 0
