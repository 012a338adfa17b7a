"""The HTML and SVG of the page. All text of visitors and models is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from osd_hf import AcceptanceStats
from osd_hf.learning.gate import GateDecision
from osd_hf_app.sessions import SIDES, Answer, Batch, Record, Session, ShownToken, Workspace, by_domain, compare_drafts

MAX_CHARACTERS = 400_000  # of a chat's HTML, which is sent again and again; the newest entry may be longer

WINDOW = 8  # requests pooled in a point of a curve
MIN_REQUESTS = 20  # on the axis
WIDTH, HEIGHT = 440, 160
LEFT, RIGHT, TOP, BOTTOM = 24, 428, 8, 134

CSS = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
FOLLOW = Path(__file__).with_name("follow.js").read_text(encoding="utf-8")  # keeps the newest entry in sight

LEGEND = """<div class="osd-legend" aria-label="What the colors mean">
<span class="osd-t osd-accepted">accepted</span> the draft guessed it
<span class="osd-t osd-text">repeated</span> copied from this chat
<span class="osd-t osd-corrected">corrected</span> guessed wrong
<span class="osd-t osd-bonus">bonus</span> the target's own
</div>"""
HINT = "Ask something, or send twenty prompts."
WHY_NOT_PAID = "It has not paid for itself yet: its cost comes first, its savings with each later answer."


def transcript(session: Session) -> str:
    """Return the entries of a chat, with the role of a log for screen readers."""
    newest = len(session.entries) - 1
    entries = [
        _batch(entry, i == newest) if isinstance(entry, Batch) else _answer(entry, i == newest)
        for i, entry in enumerate(session.entries)
    ]
    while len(entries) > 1 and sum(map(len, entries)) > MAX_CHARACTERS:
        del entries[0]
    if not entries:
        about = session.workspace.pair.about
        entries = [f'<div class="osd-hint">{HINT}{f"<br><br>{escape(about)}" if about else ""}</div>']
    return (
        f'<div class="osd-chat" role="log" aria-label="Chat" aria-live="polite" '
        f'aria-busy="{str(session.job is not None).lower()}" tabindex="0">{"".join(entries)}'
        f"{_alert(session.notice)}</div>"
    )


def _alert(text: str | None) -> str:
    return f'<div class="osd-error" role="alert">{escape(text)}</div>' if text else ""


def _answer(answer: Answer, is_newest: bool) -> str:
    tokens = "".join(_token(token, is_newest) for token in answer.tokens)
    return (
        f'<div class="osd-you">{escape(answer.prompt)}</div><div class="osd-answer">{tokens}</div>'
        f'{_alert(answer.error)}<div class="osd-figures">{_figures(answer)}</div>'
    )


def _token(token: ShownToken, is_newest: bool) -> str:
    """Return a token. The tab key stops at corrections of the newest answer only."""
    if token.origin != "corrected":
        return f'<span class="osd-t osd-{token.origin}">{escape(token.text)}</span>'
    if token.drafted is None:  # proposals from earlier text are not recorded
        note = "earlier text continued differently"
    else:
        drafted = token.drafted.replace("\n", "⏎").replace("\t", "⇥")
        probability = "" if token.probability is None else f" ({token.probability:.0%})"
        note = escape(f"the draft said “{drafted}”{probability}")
    focus = ' tabindex="0" role="note"' if is_newest else ""
    return (
        f'<span class="osd-t osd-corrected"{focus} data-said="{note}" '
        f'aria-label="{escape(token.text)}, corrected: {note}">{escape(token.text)}</span>'
    )


def _figures(answer: Answer) -> str:
    stats = answer.stats
    if answer.error:
        return ""
    if stats is None:
        return f"{answer.position} before you" if answer.position else "stopped" if answer.is_done else "answering …"
    parts = [escape(answer.domain)] if answer.domain else []
    parts += [f"{stats.emitted} tokens", f"{stats.emitted / answer.seconds:.0f} tokens/s"]
    if stats.examined:
        parts.append(f"α {stats.alpha:.2f}")
    if stats.text_examined:
        parts.append(f"α of repeated text {stats.text_alpha:.2f}")
    parts.append(f"{stats.block_efficiency:.1f} tokens per target pass")
    if answer.alone_seconds is not None:
        about = "" if answer.is_measured else "about "
        parts.append(f"{about}{answer.alone_seconds / answer.seconds:.2f}× the target alone")
    if answer.is_identical is not None:
        parts.append("✓ the target alone says the same" if answer.is_identical else "✗ the target alone differs")
    parts.append(f"draft version {answer.version}")
    if answer.stop.is_set():
        parts.append("stopped")
    if not answer.is_done and answer.settings.check and not answer.is_measured:
        parts.append("running the target alone, to compare …")
    return " · ".join(parts)


def _batch(batch: Batch, is_newest: bool) -> str:
    done = sum(answer.stats is not None for answer in batch.answers)
    state = "stopped" if batch.stop.is_set() else "done" if batch.is_done else "learning" if batch.is_learning else "…"
    last = "".join(_answer(answer, is_newest) for answer in batch.answers[-1:])
    return (
        f'<div class="osd-you">{batch.total} prompts{escape(batch.domain and f" of {batch.domain}")}</div>'
        f'<div class="osd-figures" aria-hidden="{str(not batch.is_done).lower()}">{done} of {batch.total} answered, '
        f'{state}<div class="osd-bar"><div style="width: {100 * done / batch.total:.0f}%"></div></div></div>'
        f"{last}{_alert(batch.error)}"
    )


def comparison(session: Session) -> str:
    """Return one prompt with the tokens of its answer, colored by origin, with both drafts."""
    answer = session.compared
    if answer is None:
        return '<div class="osd-compared osd-hint">Here the same prompt is answered with both drafts.</div>'
    columns = ""
    for name, side in answer.sides.items():
        tokens = "".join(_token(token, False) for token in side.tokens)
        columns += (
            f'<div><div class="osd-head"><b>{name} draft</b>, version {side.version}<br>'
            f"<b>{side.stats.target_forwards:.0f} passes</b> for {side.stats.emitted:.0f} tokens</div>"
            f'<div class="osd-answer">{tokens}</div></div>'
        )
    return (
        f'<div class="osd-compared"><div class="osd-asked">{escape(answer.prompt)}</div>'
        f'<div class="osd-columns">{columns}</div></div>'
    )


def headline(workspace: Workspace) -> str:
    """Return the tokens per pass of the target as a large number, next to those of the frozen draft."""
    rates = compare_drafts(workspace.records)
    frozen, learning = (rates[f"{side}_tokens_per_target_pass"] for side in SIDES)
    number, beside = "–", "no answers yet"
    if frozen is not None and learning is not None:
        number = f"{learning:.2f}"
        gain = f"{learning / frozen - 1:+.0%} by learning" if learning != frozen else "first version in work"
        beside = f"frozen draft: {frozen:.2f} ({gain})"
    return (
        f'<div class="osd-headline"><div class="osd-number">{number}</div><div><b>tokens per pass of the target</b>'
        f"<br>{beside}<br>target alone: 1</div></div>"
    )


def balance(workspace: Workspace) -> str:
    """Return what learning has cost and saved, and the speed-up over the target alone once it is known."""
    assistant, stats = workspace.assistant, workspace.assistant.stats
    used, saved = assistant.learning_seconds, round(assistant.saved_seconds or 0.0, 1) + 0.0  # 0.0 instead of -0.0
    paid = WHY_NOT_PAID if saved < max(used, 0.1) else "Learning has paid for itself."  # nothing yet is no gain
    speed = ""
    if stats.speedup is not None and stats.num_requests >= MIN_REQUESTS:
        speed = f"Answers come at {stats.speedup:.2f}× the speed of the target alone. "
    return f'<div class="osd-balance">{speed}Learning used {used:.1f} s and saved {saved:.1f} s. {paid}</div>'


def learner_state(workspace: Workspace, is_public: bool = False) -> str:
    """Return what the learner does and its newest versions. In public mode, errors are not shown."""
    assistant, drafts, state = workspace.assistant, workspace.assistant.drafts, workspace.state
    versions = [f"{domain or 'all'} v{drafts.serving_version(domain)}" for domain in drafts.domains]
    newest = [
        f"{escape(d.domain or 'all')} v{d.version} {escape(d.outcome)}{_gain(d)}" for d in assistant.decisions[:-4:-1]
    ]
    kind = "private: it learns from you only" if workspace.is_private else "shared: it learns from all visitors"
    failure = "See the log of the app." if is_public and workspace.failure else workspace.failure
    return (
        f'<div class="osd-state" role="status"><span class="osd-dot {state}"></span><b>{state}</b> · the draft is '
        f"{kind}<br>serving: {escape(', '.join(versions)) or 'the original draft'}"
        f"<br>newest versions: {'; '.join(newest) or 'none yet'}{_alert(failure)}</div>"
    )


def _gain(decision: GateDecision) -> str:
    before, after = decision.alpha_before, decision.alpha_after
    return "" if before is None or after is None else f" (held-back α {before:.2f} → {after:.2f})"


def domain_table(workspace: Workspace) -> str:
    """Return tokens per pass of the target by domain, over the last twenty requests of each."""
    rows = [("all", compare_drafts(workspace.records))]
    rows += [(name, compare_drafts(part)) for name, part in by_domain(workspace.records).items()]
    names = [f"{side}_{what}" for what in ("tokens_per_target_pass", "alpha") for side in SIDES]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['requests']}</td>"
        + "".join(f"<td>{'–' if row[each] is None else f'{row[each]:.2f}'}</td>" for each in names)
        + "</tr>"
        for name, row in rows
    )
    columns = ("domain", "requests", "frozen", "learning", "α frozen", "α learning")
    heads = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return (
        '<div class="osd-side"><table class="osd-table"><caption>Tokens per pass of the target, and acceptance α, '
        f"last 20 requests</caption><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>"
    )


def points(records: Sequence[Record], side: str) -> list[tuple[int, float]]:
    """Return the points of a curve: request numbers, and tokens per pass of the target over `WINDOW` requests."""
    parts = [records[max(end - WINDOW, 0) : end] for end in range(1, len(records) + 1)]
    stats = [sum((getattr(record, side) for record in part), AcceptanceStats()) for part in parts]
    return [(end, float(each.block_efficiency)) for end, each in enumerate(stats, 1) if each.target_forwards]


def curves(workspace: Workspace, domain: str | None) -> str:
    """Return tokens per pass of the target with both drafts, over the requests, with marks where a new version began
    to serve."""
    records = [record for record in workspace.records if domain in (None, record.domain)]
    title = "Tokens per pass of the target"
    if workspace.pair.domains:
        title += f", {domain or 'all domains'}"
    last = max(len(records), MIN_REQUESTS)
    both = {side: points(records, side) for side in SIDES}
    top = max([2, *(math.ceil(rate) for curve in both.values() for _, rate in curve)])

    def x(request: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * request / last, 1)

    def y(rate: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (rate - 1) / (top - 1), 1)

    svg = ""
    for rate in range(1, top + 1):
        svg += f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y(rate)}" y2="{y(rate)}" class="osd-grid"/>'
        svg += f'<text x="{LEFT - 6}" y="{y(rate) + 4}" text-anchor="end">{rate}</text>'
    for request in (0, last // 2, last):
        svg += f'<text x="{x(request)}" y="{BOTTOM + 16}" text-anchor="middle">{request}</text>'
    serving: dict[str, int] = {}
    for i, record in enumerate(records, 1):
        if record.version > serving.get(record.domain, record.version):
            svg += f'<path d="M{x(i)} {BOTTOM} l-4 7 h8 z" class="osd-promoted"/>'
        serving[record.domain] = record.version
    spoken = []
    for side, curve in both.items():
        if curve:
            path = " ".join(f"{x(request)},{y(rate)}" for request, rate in curve)
            request, rate = curve[-1]
            svg += f'<polyline points="{path}" class="osd-{side}" data-last="{rate:.4f}"/>'
            svg += f'<circle cx="{x(request)}" cy="{y(rate)}" r="3.5" class="osd-{side}-dot"/>'
            spoken.append(f"{side} draft {rate:.2f}")
    label = f"{title}: {', '.join(spoken)} at the end" if spoken else f"{title}: no requests yet"
    return (
        f'<figure class="osd-curves"><figcaption>{escape(title)}<br><span class="osd-key osd-key-learning">learning'
        '</span> <span class="osd-key osd-key-frozen">frozen</span> <span class="osd-key-promoted">▲ new version'
        f'</span></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{svg}</svg></figure>"
    )
