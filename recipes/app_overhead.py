"""
What the app's page costs: the same prompts answered three ways in alternation.

    python recipes/app_overhead.py                     # 96 prompts
    python recipes/app_overhead.py --prompts 4         # smoke

live    sent from the page: streamed to it in colors, curves and tables updated every two seconds
still   sent from the page: the first tokens and the end are shown, nothing in between, and nothing is updated
alone   the same call in the same process, while the browser shows nothing

Needs "osd-hf[app]", playwright and a Chromium. Reported, as medians with bootstrap intervals: time of `generate` live
over still, which is what live updates cost, and over alone, which is what the whole page costs; time from the Enter
key to the first token in the page, less that from the call to the first token alone. The bundled pair, greedy, k = 5;
nobody learns meanwhile; app and browser each on a core of their own.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from common import make_parser, run_facts, write_report
from playwright.sync_api import Page, Route, sync_playwright
from tqdm import tqdm

import osd_hf_app.page
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.evaluation.benchmark import median_ratio
from osd_hf_app.launch import theme
from osd_hf_app.page import build
from osd_hf_app.pair import ServedPair
from osd_hf_app.service import Service
from osd_hf_app.view import CSS
from osd_hf_app.visitors import Settings

SETTINGS = Settings(learn=False)
WAYS = ("live", "still", "alone")
FRAME = osd_hf_app.page.FRAME_SECONDS


def without(service: Service, prompt: str) -> dict[str, float]:
    """Answered with nobody watching."""
    session = service.visitors.session(None)
    answer = service.ask(session, prompt, SETTINGS)
    for _ in session.frames(1.0, 1.0, answer):
        pass
    return {"seconds": answer.seconds, "first": answer.first_token_seconds or 0.0}


def watched(service: Service, page: Page, prompt: str) -> dict[str, float]:
    """An answer that is sent from the page, and shown there."""
    page.fill("#prompt textarea", prompt)
    began = time.perf_counter()
    page.press("#prompt textarea", "Enter")
    page.wait_for_selector("#chat .osd-t")
    first = time.perf_counter() - began
    page.wait_for_function("document.querySelector('#chat').innerText.includes('target pass')")
    session = next(reversed(service.visitors.sessions.values()))
    while session.job is not None:
        page.wait_for_timeout(20)
    seconds = session.entries[-1].seconds  # type: ignore[union-attr]
    page.click("#clear")
    page.wait_for_selector("#chat .osd-hint")
    return {"seconds": seconds, "first": first}


def without_clock(route: Route) -> None:
    """Let through all but the clock's calls, which name the domain of the curves: to them nothing has changed."""
    if osd_hf_app.page.ALL in (route.request.post_data or ""):
        route.fulfill(json={"data": [{"__type__": "update"}] * 6, "is_generating": False, "duration": 0.0})
    else:
        route.continue_()


def prepare(page: Page, address: str, way: str) -> None:
    """What the browser shows, and what it is told."""
    page.unroute_all()
    page.goto("about:blank")
    if way == "alone":
        return
    osd_hf_app.page.FRAME_SECONDS = FRAME if way == "live" else 1e3
    if way == "still":
        page.route("**/run/predict**", without_clock)
    page.goto(address)
    page.wait_for_selector("#send:not([disabled])")
    page.locator("#settings button").first.click()
    page.locator("#check input").uncheck()
    page.locator("#learn input").uncheck()


def interval(values: Any) -> list[float]:
    """Median with its 95% bootstrap interval."""
    found = median_ratio(values)
    return [found["median"], *found["interval"]]


def main() -> None:
    parser = make_parser(__doc__, "app_overhead", traces=False)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--block", type=int, default=4, help="prompts between opening and leaving the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The browser is on another machine, as a visitor's is: here on another core.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    started, service = time.time(), Service(ServedPair())
    each = -(-args.prompts // len(DOMAINS))
    samples = [bundled_prompts(domain, each, seed=args.seed) for domain in DOMAINS]
    prompts = [example.prompt for group in zip(*samples, strict=True) for example in group][: args.prompts]
    demo = build(service, output_dir=Path("osd_hf_app"))
    demo.queue(default_concurrency_limit=16)
    _, address, _ = demo.launch(prevent_thread_lock=True, quiet=True, css=CSS, theme=theme(), ssr_mode=False)
    rows = []
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    os.sched_setaffinity(0, set(cores[1:]) or set(cores))  # of what is started now
    with sync_playwright() as playwright, tqdm(total=len(WAYS) * len(prompts)) as bar:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        os.sched_setaffinity(0, {cores[0]})  # whence the answers without a page begin
        page = browser.new_page()
        for number, first in enumerate(range(0, len(prompts), args.block)):
            part = prompts[first : first + args.block]
            found: dict[str, list[dict[str, float]]] = {}
            for turn in range(len(WAYS)):
                way = WAYS[(number + turn) % len(WAYS)]
                prepare(page, address, way)
                found[way] = []
                for prompt in part:
                    found[way].append(without(service, prompt) if way == "alone" else watched(service, page, prompt))
                    bar.update()
            rows += [dict(zip(found, answers, strict=True)) for answers in zip(*found.values(), strict=True)]
        browser.close()
    demo.close()
    service.close()
    more = [r["live"]["first"] - r["alone"]["first"] for r in rows]
    report = {
        "live_over_still": interval([r["live"]["seconds"] / r["still"]["seconds"] for r in rows]),
        "live_over_alone": interval([r["live"]["seconds"] / r["alone"]["seconds"] for r in rows]),
        "total_live_over_still": sum(r["live"]["seconds"] for r in rows) / sum(r["still"]["seconds"] for r in rows),
        "total_live_over_alone": sum(r["live"]["seconds"] for r in rows) / sum(r["alone"]["seconds"] for r in rows),
        "first_token_more_seconds": interval(more),
        "most_first_token_more_seconds": max(more),
        "rows": rows,
    }
    print({key: value for key, value in report.items() if key != "rows"})
    write_report(args.name, report, seed=args.seed, prompts=len(prompts), **run_facts(started))


if __name__ == "__main__":
    main()
