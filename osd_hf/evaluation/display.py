"""Format tables and figures, show progress bars, and draw plots."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from osd_hf.acceptance import AcceptanceStats, Comparison
from osd_hf.utils.report import FROZEN, LEARNING, new_curve_figure, new_figure, pooled, rolling_window

T = TypeVar("T")
Estimate = tuple[float, tuple[float, float]]  # a value and its interval

COLORS = ("#9A9A9A", "#E69F00", FROZEN, LEARNING, "#009E73", "#56B4E9", "#CC79A7")
BAR_WINDOW = 50  # requests that a progress bar pools
WHILE_SERVING = "While serving: the draft that learns, and the same draft frozen"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return an aligned table with a header. The first `left` columns are aligned to the left."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def text_line(cells: Sequence[str]) -> str:
        aligned = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    return "\n".join([text_line(header), text_line(["-" * w for w in widths]), *map(text_line, rows)])


def figure(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return a number with fixed digits, or a dash if it is undefined."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """Return a ratio's median with its interval, such as `1.23 [1.12, 1.34]`."""
    low, high = ratio["interval"]
    return f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]"


def stats_interval(stats: AcceptanceStats) -> str:
    """Return the 95% interval of alpha, such as `[0.480, 0.544]`."""
    low, high = stats.alpha_interval
    return "-" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


COMPARED = ("requests of", "n", "tokens/forward frozen", "learning", "acceptance frozen", "learning", "gain [95%]")


def comparison_row(name: str, compared: Comparison) -> list[str]:
    """Return cells of a table with the header `COMPARED`."""
    totals = compared.totals.values()
    rates = [figure(stats.block_efficiency, 2) for stats in totals] + [figure(stats.alpha) for stats in totals]
    low, high = compared.gain_interval
    interval = "" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]"
    return [name, str(len(compared.domains)), *rates, figure(compared.gain, sign=True) + interval]


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items with a progress bar on the standard error."""
    yield from tqdm(items, desc=description, unit=unit, total=total, dynamic_ncols=True)


@contextlib.contextmanager
def learning_bar(total: int | None, description: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar with tokens per target forward of the newest requests. The block gets a function to call
    after each request with the stats of the serving draft and, optionally, of the original draft and the version that
    served."""
    newest = {name: deque[AcceptanceStats](maxlen=BAR_WINDOW) for name in ("tokens/forward", "frozen")}
    with tqdm(total=total, desc=description, unit="request", dynamic_ncols=True) as bar:

        def advance(learned: AcceptanceStats, frozen: AcceptanceStats | None = None, version: Any = None) -> None:
            newest["tokens/forward"].append(learned)
            if frozen is not None:
                newest["frozen"].append(frozen)
            pools = {name: sum(stats, AcceptanceStats()) for name, stats in newest.items() if stats}
            shown = {name: figure(pool.block_efficiency, 2) for name, pool in pools.items()}
            bar.set_postfix(shown if version is None else {**shown, "version": version}, refresh=False)
            bar.update()

        yield advance


def rolling(stats: Sequence[AcceptanceStats], window: int, over: str = "target_forwards", of: str = "emitted") -> Any:
    """Return the ratio of two counts, by default tokens per target forward, pooled over the last `window` requests at
    each request, float64 of shape `(requests,)`; `nan` if it is undefined."""
    counts = np.array([[getattr(s, over), getattr(s, of)] for s in stats], dtype=float).reshape(-1, 2)
    return pooled(counts, window)


def plot_learning(path: Path, compared: Comparison, *, title: str) -> None:
    """Plot tokens per target forward of a frozen and a learning draft over the requests, each point pooled over the
    last ones."""
    count, (frozen, learning) = len(compared.domains), compared.sides.values()
    window = rolling_window(count)
    first = min(max(window // 2, 1), count) - 1  # before, too few requests are pooled
    figure, (axes,) = new_curve_figure(9.0, 4.2, window)
    for stats, style in (
        (learning, {"color": LEARNING, "lw": 2, "label": "learning"}),
        (frozen, {"color": FROZEN, "lw": 1.6, "ls": "--", "label": "frozen"}),
    ):
        axes.plot(range(first + 1, count + 1), rolling(stats, window)[first:], **style)
    axes.legend(loc="upper left", frameon=True, framealpha=0.9)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)


def plot_training(path: Path, history: Sequence[Mapping[str, Any]]) -> None:
    """Plot the acceptance on held-out requests and the loss over the tokens that a trainer has seen."""
    figure, (above, below) = new_figure(9.0, 6.0, 2)
    kinds = ["sampled", "greedy"] if any("eval_alpha_sampled" in entry for entry in history) else []
    for name, axes in (*((f"eval_alpha_{kind}", above) for kind in kinds), ("eval_alpha", above), ("loss", below)):
        points = [(entry["num_input_tokens_seen"], entry[name]) for entry in history if name in entry]
        axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name.removeprefix("eval_"))
    above.set_ylabel("alpha on held-out requests")
    above.legend(loc="lower right")
    below.set_ylabel("loss, nats per token")
    below.set_xlabel("tokens seen, with prompts")
    figure.savefig(path)


def plot_domains(path: Path, compared: Comparison, labels: Mapping[str, str], *, title: str) -> None:
    """Plot alpha: a group of bars per domain, and a bar with its label per draft."""
    bars = {
        name: {label: (part.totals[side].alpha, part.totals[side].alpha_interval) for side, label in labels.items()}
        for name, part in compared.parts().items()
    }
    plot_bars(path, bars, title=title, label="alpha")


def plot_bars(path: Path, bars: Mapping[str, Mapping[str, Estimate]], *, title: str, label: str) -> None:
    """Plot estimates with their 95% intervals in groups of bars."""
    kinds = list(next(iter(bars.values())))
    figure, (axes,) = new_figure(max(9.0, 2.0 + 0.2 * len(bars) * (len(kinds) + 1)), 4.8)
    width = 0.84 / len(kinds)
    for number, kind in enumerate(kinds):
        estimates = [group[kind] for group in bars.values()]
        places = [group + (number - (len(kinds) - 1) / 2) * width for group in range(len(bars))]
        heights = [height for height, _ in estimates]
        # `max(0, nan)` is 0: an undefined interval has no error bar.
        errors = [[max(0, h - low) for h, (low, _) in estimates], [max(0, high - h) for h, (_, high) in estimates]]
        style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0, "ecolor": "#333333", "capsize": 2}
        style |= {"color": COLORS[number % len(COLORS)], "hatch": ("", "///", "...")[number // len(COLORS) % 3]}
        axes.bar(places, heights, width * 0.94, yerr=errors, label=kind, **style)
    axes.axhline(1, color="black", lw=1)
    axes.set_ylabel(f"{label}, with 95% interval")
    axes.set_ylim(0)
    axes.margins(x=0.01)
    axes.set_xticks(range(len(bars)), list(bars))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, ncols=4, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)
