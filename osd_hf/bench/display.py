"""What people see: aligned tables, figures as they are written in them, a progress bar with alpha, plots."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tqdm import tqdm

from osd_hf.metrics import AcceptanceStats, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
Estimate = tuple[float, tuple[float, float]]  # a value and its interval

BAR_WINDOW = 50  # requests over which a progress bar pools alpha
MAX_PANELS = 6
MAX_LABELS = 12

# Colors that stay apart for color-blind readers (Okabe and Ito).
LEARNING, FROZEN, CEILING = "#0072B2", "#D55E00", "#9A9A9A"
COLORS = (CEILING, "#E69F00", FROZEN, LEARNING, "#009E73", "#56B4E9", "#CC79A7")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Lines of a table: a header, a rule, and rows of cells. The first `left` columns are aligned to the left, as the
    others hold figures."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def text_line(cells: Sequence[str]) -> str:
        aligned = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(aligned).rstrip()

    return "\n".join([text_line(header), text_line(["-" * w for w in widths]), *map(text_line, rows)])


def figure(value: float | None, digits: int = 3, *, sign: bool = False) -> str:
    """A number with fixed digits; a dash where it is undefined."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def ratio_text(ratio: Mapping[str, Any]) -> str:
    """A ratio's median with its interval, such as `1.23 [1.12, 1.34]`."""
    low, high = ratio["interval"]
    return f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]"


def stats_interval(stats: AcceptanceStats) -> str:
    """The 95% interval of alpha, such as `[0.480, 0.544]`."""
    low, high = stats.alpha_interval
    return "-" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def comparison_row(name: str, compared: Comparison) -> list[str]:
    """Cells of a table: the name, the number of requests, alpha before and after, and the gain with its interval."""
    alphas = [figure(stats.alpha) for stats in compared.totals.values()]
    low, high = compared.gain_interval
    interval = "" if math.isnan(low) else f" [{low:+.3f}, {high:+.3f}]"
    return [name, str(len(compared.domains)), *alphas, figure(compared.gain, sign=True) + interval]


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """The items, with a progress bar on the standard error."""
    yield from tqdm(items, desc=description, unit=unit, total=total, dynamic_ncols=True)


class AlphaBar:
    """A progress bar on the standard error over `total` requests, if that is known, with alpha of the newest ones."""

    def __init__(self, total: int | None, description: str) -> None:
        self.bar = tqdm(total=total, desc=description, unit="request", dynamic_ncols=True)
        self.learned: deque[AcceptanceStats] = deque(maxlen=BAR_WINDOW)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=BAR_WINDOW)

    def __enter__(self) -> AlphaBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(
        self, learned: AcceptanceStats, frozen: AcceptanceStats | None = None, version: int | None = None
    ) -> None:
        """One request has ended; stats of the draft that served it and of the draft of the beginning, and the version
        that served."""
        self.learned.append(learned)
        shown: dict[str, Any] = {"alpha": _pooled(self.learned)}
        if frozen is not None:
            self.frozen.append(frozen)
            shown["frozen"] = _pooled(self.frozen)
        if version is not None:
            shown["version"] = version
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()


def _pooled(stats: deque[AcceptanceStats]) -> str:
    # Counts only: adding up the stats themselves would copy every request's at each step.
    examined = sum(s.examined for s in stats)
    return figure(sum(s.accepted for s in stats) / examined if examined else None)


def rolling_alpha(stats: Sequence[AcceptanceStats], window: int) -> Any:
    """Alpha of single requests pooled over the last `window` ones, at each request; over fewer at the beginning. Shape
    `(requests,)`, float64; `nan` where nothing was examined."""
    counts = np.array([[s.accepted, s.examined] for s in stats], dtype=float).reshape(-1, 2)
    sums = np.concatenate([np.zeros((1, 2)), counts.cumsum(0)])
    ends = np.arange(1, len(stats) + 1)
    accepted, examined = (sums[ends] - sums[np.maximum(ends - window, 0)]).T
    return np.divide(accepted, examined, out=np.full(len(stats), math.nan), where=examined > 0)


def rolling_window(requests: int) -> int:
    """Requests pooled in a point of a run of this length: enough to be steady, few enough to show the learning."""
    return max(8, min(50, requests // 8))


def plot_alpha(
    path: Path, learning: Sequence[AcceptanceStats], frozen: Sequence[AcceptanceStats], domains: Sequence[str | None],
    *, window: int, title: str,
) -> None:  # fmt: skip
    """Draw alpha over the requests as a PNG file, from the stats of the draft that learned, those of the same draft
    frozen and the labels, in order; a point pools `window` requests. Domains that were served one after the other are
    shaded; a few mixed ones get a panel each, many are drawn as one."""
    blocks = [(name, len(list(group))) for name, group in groupby(domains)]
    names = list(dict.fromkeys(domains))
    shades = names != [None] and len(blocks) <= min(2 * len(names), MAX_LABELS)
    if shades or len(names) == 1 or len(names) > MAX_PANELS:
        figure, (axes,) = _figure(1, 1, 9.0, 4.2)
        _draw(axes, range(1, len(learning) + 1), learning, frozen, window)
        if shades:
            _shade(axes, blocks)
        axes.set_xlabel("request")
        axes.set_ylabel(f"alpha (last {window} requests)")
        axes.legend(loc="lower right", frameon=True, framealpha=0.9)
        axes.set_title(title, loc="left", fontsize=11, pad=20 if shades else 6)
    else:
        columns = min(2, len(names))
        rows = -(-len(names) // columns)
        figure, panels = _figure(rows, columns, 9.0, 1.0 + 2.4 * rows)
        share = max(4, round(window * 2 / len(names)))
        for number, (axes, name) in enumerate(zip(panels, sorted(names, key=str), strict=False)):
            chosen = [i for i, domain in enumerate(domains) if domain == name]
            _draw(axes, [i + 1 for i in chosen], [learning[i] for i in chosen], [frozen[i] for i in chosen], share)
            axes.set_title(str(name), loc="left", fontsize=10)
            if number % columns == 0:
                axes.set_ylabel(f"alpha (last {share} of the domain)")
            if number >= len(names) - columns:
                axes.set_xlabel("request, all domains mixed")
        panels[0].legend(loc="lower right", frameon=True, framealpha=0.9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def plot_domains(path: Path, bars: Mapping[str, Mapping[str, Estimate]], *, title: str) -> None:
    """Draw bars with 95% intervals as a PNG file, a group per domain and a bar per draft, from domain -> draft ->
    alpha and its interval."""
    figure, (axes,) = _figure(1, 1, 9.0, 4.2)
    drafts = list(next(iter(bars.values())))
    for number, (draft, color) in enumerate(zip(drafts, (FROZEN, LEARNING, CEILING), strict=False)):
        estimates = [group[draft] for group in bars.values()]
        places = _bars(axes, estimates, number, len(drafts), 0.8, color=color, label=draft, capsize=3)
        for place, (height, _) in zip(places, estimates, strict=True):
            axes.text(place, 0.015, f"{height:.2f}", ha="center", va="bottom", color="white", fontsize=9)
    axes.set_ylabel("alpha, with 95% interval")
    axes.set_ylim(0, 1)
    _finish(figure, axes, path, list(bars), title, ncols=len(drafts))


def plot_speedups(
    path: Path, speedups: Mapping[str, Mapping[str, tuple[float, tuple[float, float], float | None]]], *, title: str
) -> None:
    """Draw bars with 95% intervals as a PNG file, a group per data set and a bar per system, from data set -> system
    -> times as fast as the target alone, its interval, and the prediction of the cost model, a mark in the bar."""
    systems = list(next(iter(speedups.values())))
    figure, (axes,) = _figure(1, 1, max(9.0, 2.0 + 0.2 * len(speedups) * (len(systems) + 1)), 4.8)
    for number, system in enumerate(systems):
        found = [group[system] for group in speedups.values()]
        places = _bars(
            axes, [(height, ends) for height, ends, _ in found], number, len(systems), 0.84,
            color=COLORS[number % len(COLORS)], label=system, capsize=2,
            hatch=("", "///", "...")[number // len(COLORS) % 3], edgecolor="white", linewidth=0,
        )  # fmt: skip
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
    axes: Axes, estimates: Sequence[Estimate], number: int, count: int, width: float, **style: Any
) -> list[float]:
    """Draw the bars of one of `count` kinds, a bar in each group, whose bars have this width together; returns their
    places."""
    places = [group + (number - (count - 1) / 2) * width / count for group in range(len(estimates))]
    heights = [height for height, _ in estimates]
    # Where an interval is undefined there is no error bar: `max(0, nan)` is 0.
    errors = [[max(0, h - low) for h, (low, _) in estimates], [max(0, high - h) for h, (_, high) in estimates]]
    axes.bar(places, heights, width / count * 0.94, yerr=errors, ecolor="#333333", **style)
    return places


def _finish(figure: Any, axes: Axes, path: Path, groups: Sequence[str], title: str, **legend: Any) -> None:
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), frameon=False, **legend)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no global state, no window system.
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for axes in panels:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _draw(
    axes: Axes, requests: Sequence[int], learning: Sequence[AcceptanceStats], frozen: Sequence[AcceptanceStats],
    window: int,
) -> None:  # fmt: skip
    # The first points pool fewer requests than the window and jump about.
    first = min(max(window // 2, 1), len(requests)) - 1
    axes.plot(requests[first:], rolling_alpha(learning, window)[first:], color=LEARNING, lw=2, label="learning")
    axes.plot(requests[first:], rolling_alpha(frozen, window)[first:], color=FROZEN, lw=1.6, ls="--", label="frozen")
    axes.set_ylim(0, 1)
    axes.margins(x=0.01)


def _shade(axes: Axes, blocks: Sequence[tuple[str | None, int]]) -> None:
    start = 0.5
    for number, (name, count) in enumerate(blocks):
        axes.axvspan(start, start + count, color="#000000", alpha=0.05 if number % 2 else 0.0, lw=0)
        label = str(name or "no domain")
        axes.annotate(
            label, (start + count / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
            textcoords="offset points", ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
        start += count
