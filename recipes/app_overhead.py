"""
What the app's page costs: the same prompts answered with a browser that watches, and with none, in alternation.

    python recipes/app_overhead.py                     # 48 prompts, each both ways
    python recipes/app_overhead.py --prompts 4         # smoke

Needs "osd-hf[app]", playwright and a Chromium. With the page: sent from it, streamed to it in colors, curves and
tables updated each second. Without: the same call in the same process while the browser shows nothing. Reported: time
of `generate` over that without the page, the median of the ratios with its bootstrap interval, and the time from the
Enter key to the first token in the page less that from the call to the first token without. The bundled pair, greedy,
k = 5; nobody learns meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import run_facts, write_report
from playwright.sync_api import Page, sync_playwright
from tqdm import tqdm

from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf_app.answers import Settings
from osd_hf_app.launch import theme
from osd_hf_app.page import build
from osd_hf_app.pair import Pair
from osd_hf_app.service import Service
from osd_hf_app.view import CSS

SETTINGS = Settings(learn=False)


def without(service: Service, prompt: str) -> dict[str, float]:
    """Answered with nobody watching."""
    session = service.session(None)
    answer = service.ask(session, prompt, SETTINGS)
    while not answer.is_done:
        session.wait(session.revision, 1.0)
    return {"seconds": answer.seconds, "first": answer.first_token_seconds or 0.0}


def watched(service: Service, page: Page, prompt: str) -> dict[str, float]:
    """Sent from the page, and shown there."""
    page.fill("#prompt textarea", prompt)
    began = time.perf_counter()
    page.press("#prompt textarea", "Enter")
    page.wait_for_selector("#chat .osd-t")
    first = time.perf_counter() - began
    page.wait_for_function("document.querySelector('#chat').innerText.includes('target pass')")
    session = next(reversed(service.sessions.values()))
    while session.job is not None:
        session.wait(session.revision, 1.0)
    seconds = session.entries[-1].seconds  # type: ignore[union-attr]
    page.click("#clear")
    page.wait_for_selector("#chat .osd-hint")
    return {"seconds": seconds, "first": first}


def opened(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("#settings button").first.click()
    page.locator("#check input").uncheck()
    page.locator("#learn input").uncheck()


def interval(values: Any) -> list[float]:
    """Median with its 95% bootstrap interval."""
    values, rng = np.asarray(values), np.random.default_rng(0)
    medians = [float(np.median(rng.choice(values, len(values)))) for _ in range(2000)]
    return [float(np.median(values)), *map(float, np.percentile(medians, [2.5, 97.5]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--block", type=int, default=4, help="prompts between opening and leaving the page")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="app_overhead", help="of the report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, service = time.time(), Service(Pair())
    each = -(-args.prompts // len(DOMAINS))
    samples = [bundled_prompts(domain, each, seed=args.seed) for domain in DOMAINS]
    prompts = [example.prompt for group in zip(*samples, strict=True) for example in group][: args.prompts]
    demo = build(service, output_dir=Path("osd_hf_app"))
    demo.queue(default_concurrency_limit=16)
    _, address, _ = demo.launch(prevent_thread_lock=True, quiet=True, css=CSS, theme=theme(), ssr_mode=False)
    rows = []
    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright, tqdm(total=2 * len(prompts)) as bar:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        for part in (prompts[i : i + args.block] for i in range(0, len(prompts), args.block)):
            found: dict[bool, list[dict[str, float]]] = {}
            for with_page in (True, False) if len(rows) // args.block % 2 == 0 else (False, True):
                if with_page:
                    opened(page, address)
                else:
                    page.goto("about:blank")
                found[with_page] = []
                for prompt in part:
                    found[with_page].append(watched(service, page, prompt) if with_page else without(service, prompt))
                    bar.update()
            rows += [{"with": w, "without": o} for w, o in zip(found[True], found[False], strict=True)]
        browser.close()
    demo.close()
    service.close()
    report = {
        "ratio": interval([r["with"]["seconds"] / r["without"]["seconds"] for r in rows]),
        "first_token_more_seconds": interval([r["with"]["first"] - r["without"]["first"] for r in rows]),
        "most_first_token_more_seconds": max(r["with"]["first"] - r["without"]["first"] for r in rows),
        "rows": rows,
    }
    print({key: value for key, value in report.items() if key != "rows"})
    write_report(args.name, report, seed=args.seed, prompts=len(prompts), **run_facts(started))


if __name__ == "__main__":
    main()
