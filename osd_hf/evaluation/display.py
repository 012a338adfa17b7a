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
from osd_hf.utils.report import LEARNING, new_alpha_figure, new_figure, pooled, rolling_window

T = TypeVar("T")
Estimate = tuple[float, tuple[float, float]]  # a value and its interval

# Colors for color-blind readers (Okabe and Ito), as `LEARNING`.
FROZEN, CEILING = "#D55E00", "#9A9A9A"
COLORS = (CEILING, "#E69F00", FROZEN, LEARNING, "#009E73", "#56B4E9", "#CC79A7")
BAR_WINDOW = 50  # requests over which a progress bar pools alpha
WHILE_SERVING = "Acceptance while serving: the draft that learns, and the same draft frozen"


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


def comparison_row(name: str, compared: Comparison) -> list[str]:
    """Return cells of a table: name, number of requests, alpha before and after, and the gain with its interval."""
    alphas = [figure(stats.alpha) for stats in compared.totals.values()]
    low, high = compared.gain_interval
    interval = "" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]"
    return [name, str(len(compared.domains)), *alphas, figure(compared.gain, sign=True) + interval]


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items with a progress bar on the standard error."""
    yield from tqdm(items, desc=description, unit=unit, total=total, dynamic_ncols=True)


@contextlib.contextmanager
def alpha_bar(total: int | None, description: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar with alpha of the newest requests. The block gets a function to call after each request with
    the stats of the serving draft and, optionally, of the original draft and the version that served."""
    newest = {name: deque[AcceptanceStats](maxlen=BAR_WINDOW) for name in ("alpha", "frozen")}
    with tqdm(total=total, desc=description, unit="request", dynamic_ncols=True) as bar:

        def advance(learned: AcceptanceStats, frozen: AcceptanceStats | None = None, version: Any = None) -> None:
            newest["alpha"].append(learned)
            if frozen is not None:
                newest["frozen"].append(frozen)
            shown = {name: figure(rolling_alpha(stats, BAR_WINDOW)[-1]) for name, stats in newest.items() if stats}
            bar.set_postfix(shown if version is None else {**shown, "version": version}, refresh=False)
            bar.update()

        yield advance


def rolling_alpha(stats: Sequence[AcceptanceStats], window: int) -> Any:
    """Return alpha pooled over the last `window` requests at each request, float64 of shape `(requests,)`; `nan` if
    nothing was examined."""
    counts = np.array([[s.examined, s.accepted] for s in stats], dtype=float).reshape(-1, 2)
    return pooled(counts, window)


def plot_alpha(path: Path, compared: Comparison, *, title: str) -> None:
    """Plot alpha of a frozen and a learning draft over the requests, each point pooled over the last ones."""
    count, (frozen, learning) = len(compared.domains), compared.sides.values()
    window = rolling_window(count)
    first = min(max(window // 2, 1), count) - 1  # before, too few requests are pooled
    figure, axes = new_alpha_figure(9.0, 4.2, window)
    for stats, style in (
        (learning, {"color": LEARNING, "lw": 2, "label": "learning"}),
        (frozen, {"color": FROZEN, "lw": 1.6, "ls": "--", "label": "frozen"}),
    ):
        axes.plot(range(first + 1, count + 1), rolling_alpha(stats, window)[first:], **style)
    axes.legend(loc="lower right", frameon=True, framealpha=0.9)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)


def plot_domains(path: Path, compared: Comparison, labels: Mapping[str, str], *, title: str) -> None:
    """Plot alpha with 95% intervals: a group of bars per domain, and a bar with its label per draft."""
    figure, axes = new_figure(9.0, 4.2)
    parts = compared.parts()
    for number, ((draft, label), color) in enumerate(zip(labels.items(), (FROZEN, LEARNING, CEILING), strict=False)):
        estimates = [(part.totals[draft].alpha, part.totals[draft].alpha_interval) for part in parts.values()]
        places = _bars(axes, estimates, number, len(labels), 0.8, color=color, label=label, capsize=3)
        for place, (height, _) in zip(places, estimates, strict=True):
            axes.text(place, 0.015, f"{height:.2f}", ha="center", va="bottom", color="white", fontsize=9)
    axes.set_ylabel("alpha, with 95% interval")
    axes.set_ylim(0, 1)
    _finish(figure, axes, path, list(parts), title, ncols=len(labels))


def plot_speedups(
    path: Path, speedups: Mapping[str, Mapping[str, tuple[float, tuple[float, float], float | None]]], *, title: str
) -> None:
    """Plot speed-ups with 95% intervals: a group of bars per data set, a bar per system, and a mark for the prediction
    of the cost model."""
    systems = list(next(iter(speedups.values())))
    figure, axes = new_figure(max(9.0, 2.0 + 0.2 * len(speedups) * (len(systems) + 1)), 4.8)
    for number, system in enumerate(systems):
        found = [group[system] for group in speedups.values()]
        style: dict[str, Any] = {
            "color": COLORS[number % len(COLORS)],
            "hatch": ("", "///", "...")[number // len(COLORS) % 3],
        }
        style |= {"edgecolor": "white", "linewidth": 0, "label": system, "capsize": 2}
        estimates = [(height, ends) for height, ends, _ in found]
        places = _bars(axes, estimates, number, len(systems), 0.84, **style)
        if marks := [(place, p) for place, (_, _, p) in zip(places, found, strict=True) if p is not None]:
            x, y = zip(*marks, strict=True)
            last = "predicted by the cost model" if number == len(systems) - 1 else None
            axes.scatter(x, y, marker="D", s=18, color="white", edgecolors="black", linewidths=1, zorder=3, label=last)
    axes.axhline(1, color="black", lw=1)
    axes.set_ylabel("times as fast as the target alone, 95% interval")
    axes.set_ylim(0)
    axes.margins(x=0.01)
    _finish(figure, axes, path, list(speedups), title, ncols=4, fontsize=9)


def _bars(
    axes: Any, estimates: Sequence[Estimate], number: int, count: int, width: float, **style: Any
) -> list[float]:
    """Draw the bars of one of `count` kinds, one per group; returns their positions."""
    places = [group + (number - (count - 1) / 2) * width / count for group in range(len(estimates))]
    heights = [height for height, _ in estimates]
    # `max(0, nan)` is 0: an undefined interval has no error bar.
    errors = [[max(0, h - low) for h, (low, _) in estimates], [max(0, high - h) for h, (_, high) in estimates]]
    axes.bar(places, heights, width / count * 0.94, yerr=errors, ecolor="#333333", **style)
    return places


def _finish(figure: Any, axes: Any, path: Path, groups: Sequence[str], title: str, **legend: Any) -> None:
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, **legend)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)
