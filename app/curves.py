"""The two curves as SVG: in the page's own colors, read by a screen reader, and small enough to be sent often."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from osd_hf_app.room import Record, pooled

__all__ = ["WINDOW", "curves", "points"]

WINDOW = 8  # requests pooled in a point
MOST_POINTS = 150
LEAST_REQUESTS = 20  # that the axis has room for

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 34, 428, 12, 184


def points(records: Sequence[Record], side: str) -> list[tuple[int, float]]:
    """
    A curve: up to which of these requests, and alpha pooled over the last `WINDOW` of them; at most `MOST_POINTS`.

    Args:
        records (`Sequence[Record]`):
            Requests in order.
        side (`str`):
            `"learning"` or `"frozen"`.
    """
    step = -(-len(records) // MOST_POINTS) or 1
    ends = range(len(records), 0, -step)
    found = [(end, pooled(records[max(end - WINDOW, 0) : end], side)) for end in reversed(ends)]
    return [(end, alpha) for end, alpha in found if alpha is not None]


def curves(records: Sequence[Record], title: str) -> str:
    """The picture: both drafts over requests, and where a new version began to serve."""
    last = max(len(records), LEAST_REQUESTS)

    def x(request: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * request / last, 1)

    def y(alpha: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * alpha, 1)

    lines = "".join(
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(a / 5)}" y2="{y(a / 5)}" class="osd-grid"/>'
        f'<text x="{LEFT - 6}" y="{y(a / 5) + 4}" text-anchor="end">{a / 5:.1f}</text>'
        for a in range(6)
    )
    step = next(s for s in (5, 10, 20, 50, 100, 200, 500, 1000) if last / s <= 8 or s == 1000)
    lines += "".join(
        f'<text x="{x(r)}" y="{BOTTOM + 16}" text-anchor="middle">{r}</text>' for r in range(0, last + 1, step)
    )
    # By domain each draft has versions of its own.
    serving: dict[str, int] = {}
    for i, record in enumerate(records, 1):
        if record.version > serving.get(record.domain, record.version):
            lines += f'<path d="M{x(i)} {BOTTOM} l-4 7 h8 z" class="osd-promoted"/>'
        serving[record.domain] = record.version
    drawn, said = "", []
    for side, name in (("frozen", "frozen draft"), ("learning", "learning draft")):
        curve = points(records, side)
        path = " ".join(f"{x(request)},{y(alpha)}" for request, alpha in curve)
        if curve:
            end = curve[-1]
            drawn += f'<polyline points="{path}" class="osd-{side}" data-last="{end[1]:.4f}"/>'
            drawn += f'<circle cx="{x(end[0])}" cy="{y(end[1])}" r="3.5" class="osd-{side}-dot"/>'
            said.append(f"{name} {end[1]:.2f}")
    label = f"{title}: " + (", ".join(said) + " at the end" if said else "no requests yet")
    return (
        f'<figure class="osd-curves"><figcaption>{escape(title)}<br><span class="osd-key osd-key-learning">learning'
        '</span> <span class="osd-key osd-key-frozen">frozen</span> <span class="osd-key-promoted">▲ new version'
        f'</span></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">'
        f'{lines}<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 36}" text-anchor="middle">requests</text>{drawn}</svg>'
        "</figure>"
    )
