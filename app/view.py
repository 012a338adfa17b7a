"""What the page shows, as HTML and SVG: nothing of a visitor or a model gets into it but as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from osd_hf.learning.gate import GateDecision
from osd_hf_app.rooms import Record, Room, by_domain, compared, pooled
from osd_hf_app.visitors import Answer, Batch, Session, ShownToken

MOST_CORRECTIONS = 8
SHOWN = 20  # newest entries of a chat
SHOWN_CHARACTERS = 400_000  # of their HTML, the newest entry apart: it is sent again and again
STOP = ' tabindex="0" role="note"'

WINDOW = 8  # requests pooled in a point of a curve
MOST_POINTS = 150
LEAST_REQUESTS = 20  # that the axis has room for
WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 34, 428, 12, 184

CSS = Path(__file__).with_name("style.css").read_text(encoding="utf-8")

LEGEND = """<div class="osd-legend" aria-label="What the colors mean">
<span class="osd-t osd-accepted">accepted</span> guessed by the small draft, confirmed by the target
<span class="osd-t osd-text">repeated</span> from this chat, confirmed
<span class="osd-t osd-corrected">corrected</span> the guess was another: point at it, or tab to it
<span class="osd-t osd-bonus">bonus</span> the target's own next token
</div>"""


def transcript(session: Session) -> str:
    """The newest entries of the chat, for a screen reader as a log."""
    shown = session.entries[-SHOWN:]
    newest = len(shown) - 1
    drawn = [_drawn(entry, is_newest=i == newest) for i, entry in enumerate(shown)]
    while len(drawn) > 1 and sum(map(len, drawn)) > SHOWN_CHARACTERS:
        del drawn[0]
    hint = "" if session.entries else (
        '<div class="osd-hint">Ask something, or let twenty prompts through. A small draft guesses what the target '
        "will say; the target checks several guesses at once, so that a good draft makes it faster, and never changes "
        "what it says. Between answers the draft learns from its mistakes."
        f"{f'<br><br>{escape(about)}' if (about := session.room.pair.about) else ''}</div>"
    )  # fmt: skip
    return (
        f'<div class="osd-chat" role="log" aria-label="Chat" aria-live="polite" '
        f'aria-busy="{str(session.job is not None).lower()}" tabindex="0">{hint}{"".join(drawn)}'
        f"{_alert(session.notice)}</div>"
    )


def _drawn(entry: Answer | Batch, *, is_newest: bool) -> str:
    """An entry; one that is done and no longer the newest is drawn once."""
    draw = _batch if isinstance(entry, Batch) else _answer
    if is_newest or not entry.is_done:
        return draw(entry, is_newest)
    if entry.drawn is None:
        entry.drawn = draw(entry, False)
    return entry.drawn


def _alert(text: str | None) -> str:
    return f'<div class="osd-error" role="alert">{escape(text)}</div>' if text else ""


def _answer(answer: Answer, is_newest: bool) -> str:
    tokens = "".join(_token(token, is_newest) for token in answer.tokens)
    return (
        f'<div class="osd-you">{escape(answer.prompt)}</div><div class="osd-answer">{tokens}</div>'
        f'{_alert(answer.error)}<div class="osd-figures">{_figures(answer)}</div>'
    )


def _token(token: ShownToken, is_newest: bool) -> str:
    """A token; in the newest answer the tab key stops at corrections, in older ones only the pointer does."""
    if token.origin != "corrected":
        return f'<span class="osd-t osd-{token.origin}">{escape(token.text)}</span>'
    sure = "" if token.prob is None else f" ({token.prob:.0%})"
    # What past text had said is not kept.
    said = "past text said another token" if token.said is None else f"the draft said {visible(token.said)}{sure}"
    said = escape(said)
    return (
        f'<span class="osd-t osd-corrected"{STOP if is_newest else ""} data-said="{said}" '
        f'aria-label="{escape(token.text)}, corrected: {said}">{escape(token.text)}</span>'
    )


def visible(text: str) -> str:
    """A token in quotes, with line breaks and tabs made visible."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return f"“{shown}”"


def _figures(answer: Answer) -> str:
    stats = answer.stats
    if answer.error:
        return ""
    if stats is None:
        return f"{answer.waiting} before you" if answer.waiting else "stopped" if answer.is_done else "answering …"
    parts = [*filter(None, [escape(answer.domain)]), f"{stats.emitted} tokens"]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.0f} tokens/s")
    if stats.examined:
        parts.append(f"α {stats.alpha:.2f}")
    if stats.text_examined:
        parts.append(f"α of repeated text {stats.text_alpha:.2f}")
    parts.append(f"{stats.block_efficiency:.1f} tokens per target pass")
    if answer.speedup is not None:
        rate = f"{answer.speedup:.2f}× the target alone"
        parts.append(rate if answer.is_measured else f"about {rate}")
    if answer.is_identical:
        parts.append("✓ the target alone says the same")
    elif answer.is_identical is not None:
        ties = "the target alone differs (half precision: ties)"
        parts.append("✗ the target alone differs" if answer.is_exact else ties)
    parts.append(f"draft version {answer.version}")
    if answer.stopped:
        parts.append("stopped")
    if not answer.is_done and answer.settings.check and not answer.is_measured:
        parts.append("the target answers alone, to compare …")
    return " · ".join(parts)


def _batch(batch: Batch, is_newest: bool) -> str:
    done = sum(answer.stats is not None for answer in batch.answers)
    doing = "stopped" if batch.stop.is_set() else "done" if batch.is_done else "learning" if batch.is_learning else "…"
    last = "".join(_answer(answer, is_newest) for answer in batch.answers[-1:])
    return (
        f'<div class="osd-you">{batch.total} prompts{escape(batch.domain and f" of {batch.domain}")}</div>'
        f'<div class="osd-figures" aria-hidden="{str(not batch.is_done).lower()}">{done} of {batch.total} answered, '
        f'{doing}<div class="osd-bar"><div style="width: {100 * done / batch.total:.0f}%"></div></div></div>'
        f"{last}{_alert(batch.error)}"
    )


def learner_state(room: Room, is_private: bool, is_public: bool = False) -> str:
    """What the learner does, and what became of its last versions; strangers are told of no error word by word."""
    drafts, decisions, state = room.assistant.drafts, room.assistant.decisions, room.state
    spent, saved = room.assistant.learning_seconds, room.assistant.saved_seconds or 0
    versions = [f"{domain or 'all'} v{drafts.serving_version(domain)}" for domain in drafts.domains]
    whose = "your own, which learns from nobody else" if is_private else "shared by all visitors, from whom it learns"
    told = [f"{escape(d.domain or 'all')} v{d.version} {escape(d.outcome)}{_gain(d)}" for d in decisions[:-4:-1]]
    told_failure = "The log of the app says why." if is_public else escape(room.failure or "")
    failure = f'<div class="osd-error">{told_failure}</div>' if room.failure else ""
    return (
        f'<div class="osd-state" role="status"><span class="osd-dot {state}"></span><b>{state}</b> · the draft is '
        f"{whose}<br>serving: {escape(', '.join(versions)) or 'the draft as it was'}"
        f"<br>newest versions: {'; '.join(told) or 'none yet'}"
        f"<br>learning took {spent:.1f} s and saved {saved:.1f} s of answering{failure}</div>"
    )


def _gain(decision: GateDecision) -> str:
    before, after = decision.alpha_before, decision.alpha_after
    return "" if before is None or after is None else f" (held-back α {before:.2f} → {after:.2f})"


def domain_table(room: Room) -> str:
    """Acceptance by domain, over the last twenty requests of each."""
    records = room.snapshot()
    rows = [("all", compared(records)), *((name, compared(part)) for name, part in by_domain(records).items() if name)]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['requests']}</td><td>{_two(row['last_frozen_alpha'])}</td>"
        f"<td>{_two(row['last_learning_alpha'])}</td></tr>"
        for name, row in rows
    )
    first = "domain" if len(rows) > 1 else ""
    return _table("Acceptance α, last 20 requests", [first, "requests", "frozen", "learning"], cells)


def corrections(counted: Counter[tuple[str, str]]) -> str:
    """The most frequent corrections of a chat."""
    rows = "".join(
        f"<tr><td><code>{escape(visible(said))}</code></td><td><code>{escape(visible(meant))}</code></td><td>{n}</td>"
        "</tr>"
        for (said, meant), n in counted.most_common(MOST_CORRECTIONS)
    )
    empty = "<tr><td>none yet</td><td></td><td></td></tr>"
    return _table("Most frequent corrections in your chat", ["draft said", "target said", "times"], rows or empty)


def _table(caption: str, columns: Sequence[str], rows: str) -> str:
    heads = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<div class="osd-side"><table class="osd-table"><caption>{caption}</caption><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def points(records: Sequence[Record], side: str) -> list[tuple[int, float]]:
    """The curve of one side, `"learning"` or `"frozen"`: numbers of requests, and alpha pooled over the last `WINDOW`
    of them; at most `MOST_POINTS`."""
    step = -(-len(records) // MOST_POINTS) or 1
    ends = range(len(records), 0, -step)
    found = [(end, pooled(records[max(end - WINDOW, 0) : end], side)) for end in reversed(ends)]
    return [(end, alpha) for end, alpha in found if alpha is not None]


def curves(records: Sequence[Record], title: str) -> str:
    """Both drafts over requests, and where a new version began to serve; in the page's own colors, read by a screen
    reader, and small enough to be sent often."""
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
    for side in ("frozen", "learning"):
        if curve := points(records, side):
            path = " ".join(f"{x(request)},{y(alpha)}" for request, alpha in curve)
            request, alpha = curve[-1]
            drawn += f'<polyline points="{path}" class="osd-{side}" data-last="{alpha:.4f}"/>'
            drawn += f'<circle cx="{x(request)}" cy="{y(alpha)}" r="3.5" class="osd-{side}-dot"/>'
            said.append(f"{side} draft {alpha:.2f}")
    label = f"{title}: " + (", ".join(said) + " at the end" if said else "no requests yet")
    return (
        f'<figure class="osd-curves"><figcaption>{escape(title)}<br><span class="osd-key osd-key-learning">learning'
        '</span> <span class="osd-key osd-key-frozen">frozen</span> <span class="osd-key-promoted">▲ new version'
        f'</span></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'{lines}<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 36}" text-anchor="middle">requests</text>{drawn}</svg>'
        "</figure>"
    )
