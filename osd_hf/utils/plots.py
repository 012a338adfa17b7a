"""Figures with matplotlib: their style, and the curve of acceptance."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Colors for color-blind readers (Okabe and Ito).
LEARNING, FROZEN, CEILING = "#0072B2", "#D55E00", "#9A9A9A"
COLORS = (CEILING, "#E69F00", FROZEN, LEARNING, "#009E73", "#56B4E9", "#CC79A7")


def new_figure(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Create a figure of `width` x `height` inches, and return it with its panels row by row."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would need global state and a window system.
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).ravel().tolist()
    for axes in panels:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def rolling_window(requests: int) -> int:
    """Return the number of requests that each point of a run of this length averages."""
    return max(8, min(50, requests // 8))


def pooled(requests: NDArray[Any], window: int) -> NDArray[np.float64]:
    """Return alpha over the last `window` requests at each request (`nan` if no token was examined) from the examined
    and accepted tokens of each, `(requests, 2)`."""
    sums = np.concatenate([np.zeros((1, 2)), requests.cumsum(0)])
    ends = np.arange(1, len(requests) + 1)
    examined, accepted = (sums[ends] - sums[np.maximum(ends - window, 0)]).T
    alpha = np.full(len(requests), math.nan)
    np.divide(accepted, examined, out=alpha, where=examined > 0)
    return alpha


def alpha_figure(requests: NDArray[Any], window: int | None, *, last: int) -> Any:
    """Plot alpha over requests, as [`pooled`] takes them. The newest request has the number `last`."""
    window = window or rolling_window(len(requests))
    figure, (axes,) = new_figure(1, 1, 7.0, 2.8)
    axes.plot(np.arange(last - len(requests) + 1, last + 1), pooled(requests, window), color=LEARNING, lw=2)
    axes.set_ylim(0, 1)
    axes.margins(x=0.01)
    axes.set_xlabel("request")
    axes.set_ylabel(f"alpha (last {window} requests)")
    return figure


def svg(figure: Any) -> str:
    """Return the figure as an SVG element."""
    written = io.StringIO()
    figure.savefig(written, format="svg")
    return written.getvalue()[written.getvalue().index("<svg") :]
