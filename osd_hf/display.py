"""What a terminal shows: aligned tables, the way figures are written in them, a progress bar with alpha."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from osd_hf.metrics import AcceptanceStats

__all__ = ["AlphaBar", "figure", "progress", "stats_interval", "text_table"]

T = TypeVar("T")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """
    Lines of a table.

    Args:
        header (`Sequence[str]`):
            Column titles.
        rows (`Sequence[Sequence[str]]`):
            Cells.
        left (`int`, *optional*, defaults to 1):
            Columns aligned to the left; the others hold figures.
    """
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


def stats_interval(stats: AcceptanceStats) -> str:
    """The 95% interval of alpha, such as `[0.480, 0.544]`."""
    low, high = stats.alpha_interval
    return "-" if math.isnan(low) else f"[{low:.3f}, {high:.3f}]"


def progress(items: Iterable[T], description: str, unit: str, total: int | None = None) -> Iterator[T]:
    """The items, behind a progress bar on the standard error."""
    yield from tqdm(items, desc=description, unit=unit, total=total, dynamic_ncols=True)


class AlphaBar:
    """
    A progress bar over requests that shows alpha of the newest ones, on the standard error.

    Args:
        total (`int`, *optional*):
            Requests to come, where it is known.
        description (`str`):
            What is going on.
        window (`int`, *optional*, defaults to 50):
            Requests over which alpha is pooled.
    """

    def __init__(self, total: int | None, description: str, *, window: int = 50) -> None:
        self.bar = tqdm(total=total, desc=description, unit="request", dynamic_ncols=True)
        self.learned: deque[AcceptanceStats] = deque(maxlen=window)
        self.frozen: deque[AcceptanceStats] = deque(maxlen=window)

    def __enter__(self) -> AlphaBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def advance(
        self, learned: AcceptanceStats, frozen: AcceptanceStats | None = None, version: int | None = None
    ) -> None:
        """
        One request has ended.

        Args:
            learned (`AcceptanceStats`):
                Of this request.
            frozen (`AcceptanceStats`, *optional*):
                Of the draft of the beginning on this request.
            version (`int`, *optional*):
                Of the draft that served it.
        """
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
