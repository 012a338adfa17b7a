"""What the page shows, as HTML: nothing of a visitor or a model gets into it but as text."""

from __future__ import annotations

from collections import Counter
from html import escape

from osd_hf_app.answers import Answer, Batch, ShownToken
from osd_hf_app.room import Room, compared
from osd_hf_app.service import Session

__all__ = ["CSS", "LEGEND", "corrections", "domain_table", "learner_state", "transcript"]

MOST_CORRECTIONS = 8
SHOWN = 20  # newest entries of a chat
SHOWN_CHARACTERS = 400_000  # of their HTML, the newest entry apart: it is sent again and again
STOP = ' tabindex="0" role="note"'

BUNDLED = (
    "<br><br>The bundled target is tiny: it knows simple SQL, sums, short Python functions and small talk about "
    "money. Suggest a prompt shows what."
)

LEGEND = """<div class="osd-legend" aria-label="What the colors mean">
<span class="osd-t osd-accepted">accepted</span> guessed by the small draft, confirmed by the target
<span class="osd-t osd-corrected">corrected</span> the draft guessed something else: point at it, or tab to it
<span class="osd-t osd-bonus">bonus</span> the target's own next token, free with each check
</div>"""

CSS = """
#chat {border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg);
  background: var(--background-fill-secondary)}
.osd-chat {padding: .75rem; color: var(--body-text-color)}
.osd-chat:focus-visible {outline: 2px solid var(--color-accent)}
.osd-hint {opacity: .8; padding: 1rem}
.osd-you {margin: .4rem 0 .4rem auto; max-width: 85%; width: fit-content; padding: .45rem .75rem;
  border-radius: var(--radius-lg); background: var(--color-accent-soft); white-space: pre-wrap;
  overflow-wrap: anywhere}
.osd-answer {margin: .4rem 0 .2rem; font-family: var(--font-mono); font-size: .92rem; line-height: 1.75;
  white-space: pre-wrap; overflow-wrap: anywhere; min-height: 1.75em}
.osd-t {border-radius: 3px; padding: 1px 0; position: relative}
.osd-legend .osd-t {padding: 1px 6px; margin-left: .5rem; font-family: var(--font-mono)}
.osd-accepted {background: rgba(34, 160, 94, .24)}
.osd-corrected {background: rgba(235, 120, 10, .30); border-bottom: 2px solid rgb(225, 110, 0); cursor: help}
.osd-bonus, .osd-plain, .osd-target {background: rgba(70, 130, 240, .20); border-bottom: 1px dotted rgb(70, 130, 240)}
.osd-legend {font-size: .85rem; line-height: 1.9; color: var(--body-text-color)}
.osd-corrected[data-said]:hover::after, .osd-corrected[data-said]:focus::after {content: attr(data-said);
  position: absolute; left: 0; top: 1.7em; z-index: 20; white-space: pre; padding: .15rem .5rem; border-radius: 5px;
  font-size: .8rem; line-height: 1.5; color: #fff; background: #222; box-shadow: 0 1px 6px rgba(0, 0, 0, .4)}
.osd-figures {font-size: .82rem; color: var(--body-text-color); opacity: .85; margin-bottom: .9rem; min-height: 1.3em;
  font-variant-numeric: tabular-nums}
.osd-error {color: var(--error-text-color, #b91c1c); border-left: 3px solid currentColor; padding-left: .5rem;
  margin-bottom: .9rem; overflow-wrap: anywhere}
.osd-bar {height: .6rem; border-radius: 4px; background: var(--border-color-primary); overflow: hidden;
  margin: .3rem 0}
.osd-bar > div {height: 100%; background: var(--color-accent)}
.osd-state {min-height: 8.2rem; font-size: .92rem; color: var(--body-text-color)}
.osd-state b {font-weight: 600}
.osd-dot {display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .4rem;
  background: #888}
.osd-dot.learning {background: #22a05e}
.osd-dot.failed {background: #d33}
.osd-table {width: 100%; border: none !important; border-collapse: collapse; font-size: .88rem;
  color: var(--body-text-color);
  font-variant-numeric: tabular-nums}
.osd-table th, .osd-table td {text-align: right; padding: .2rem .4rem; border: none !important;
  border-bottom: 1px solid var(--border-color-primary) !important; font-weight: inherit}
.osd-table tr, .osd-table thead, .osd-table tbody {border: none !important}
.osd-table th:first-child, .osd-table td:first-child {text-align: left}
.osd-table caption {text-align: left; font-weight: 600; padding-bottom: .2rem}
.osd-table td code {white-space: pre; background: none}
.osd-side {min-height: 9rem}
.osd-curves {margin: 0; padding: .6rem .75rem .2rem; border: 1px solid var(--border-color-primary);
  border-radius: var(--radius-lg); color: var(--body-text-color)}
.osd-curves figcaption {font-weight: 600; font-size: .92rem; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis}
.osd-curves svg {width: 100%; height: auto; aspect-ratio: 440 / 230; display: block}
.osd-curves text {font-size: 12px; fill: currentColor; opacity: .8}
.osd-grid {stroke: var(--border-color-primary); stroke-width: 1}
.osd-learning, .osd-frozen {fill: none; stroke-width: 2.5; stroke-linejoin: round}
.osd-learning {stroke: #1fa463}
.osd-frozen {stroke: #8a8f98; stroke-dasharray: 7 5}
.osd-learning-dot, .osd-promoted {fill: #1fa463}
.osd-frozen-dot {fill: #8a8f98}
.osd-key {font-weight: 400; margin-right: .7rem; font-size: .85rem}
.osd-key::before {content: ""; display: inline-block; width: 1.6rem; vertical-align: middle; margin-right: .3rem;
  border-top: 3px solid #1fa463}
.osd-key-frozen::before {border-top: 3px dashed #8a8f98}
.osd-key-promoted {font-weight: 400; white-space: nowrap; font-size: .85rem}
"""


def transcript(session: Session) -> str:
    """The newest entries of the chat, for a screen reader as a log."""
    shown = session.entries[-SHOWN:]
    newest = len(shown) - 1
    drawn = [_drawn(entry, is_newest=i == newest) for i, entry in enumerate(shown)]
    while len(drawn) > 1 and sum(map(len, drawn)) > SHOWN_CHARACTERS:
        del drawn[0]
    entries = "".join(drawn)
    notice = f'<div class="osd-error" role="alert">{escape(session.notice)}</div>' if session.notice else ""
    hint = "" if session.entries else (
        '<div class="osd-hint">Ask something, or let twenty prompts through. A small draft guesses what the target '
        "will say; the target checks several guesses at once, so that a good draft makes it faster, and never changes "
        "what it says. Between answers the draft learns from its mistakes."
        f"{BUNDLED if session.room.pair.is_bundled else ''}</div>"
    )  # fmt: skip
    return (
        f'<div class="osd-chat" role="log" aria-label="Chat" aria-live="polite" '
        f'aria-busy="{str(session.job is not None).lower()}" tabindex="0">{hint}{entries}{notice}'
        "</div>"
    )


def _drawn(entry: Answer | Batch, *, is_newest: bool) -> str:
    """An entry; what is done and not the newest any more is drawn once."""
    if is_newest or not entry.is_done:
        return _batch(entry, is_newest) if isinstance(entry, Batch) else _answer(entry, is_newest)
    if entry.drawn is None:
        entry.drawn = _batch(entry, False) if isinstance(entry, Batch) else _answer(entry, False)
    return entry.drawn


def _answer(answer: Answer, is_newest: bool) -> str:
    return f'<div class="osd-you">{escape(answer.prompt)}</div>{_answered(answer, is_newest)}'


def _answered(answer: Answer, is_newest: bool) -> str:
    error = f'<div class="osd-error" role="alert">{escape(answer.error)}</div>' if answer.error else ""
    tokens = "".join(_token(token, is_newest) for token in answer.tokens)
    return f'<div class="osd-answer">{tokens}</div>{error}<div class="osd-figures">{_figures(answer)}</div>'


def _token(token: ShownToken, is_newest: bool) -> str:
    """A token; of the newest answer the tab key stops at corrections, of older ones the pointer alone."""
    if token.said is None:
        return f'<span class="osd-t osd-{token.origin}">{escape(token.text)}</span>'
    sure = "" if token.prob is None else f" ({token.prob:.0%})"
    said = escape(f"the draft said {visible(token.said)}{sure}", quote=True)
    return (
        f'<span class="osd-t osd-corrected"{STOP if is_newest else ""} data-said="{said}" '
        f'aria-label="{escape(token.text, quote=True)}, corrected: {said}">{escape(token.text)}</span>'
    )


def visible(text: str) -> str:
    """A token in quotes, with its line breaks and tabs to be seen."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return f"“{shown}”"


def _figures(answer: Answer) -> str:
    if answer.error:
        return ""
    if answer.stats is None:
        if answer.waiting:
            return f"{answer.waiting} before you"
        return "stopped" if answer.is_done else "answering …"
    stats = answer.stats
    parts = [f"{escape(answer.domain)}", f"{stats.emitted} tokens"]
    if answer.tokens_per_second is not None:
        parts.append(f"{answer.tokens_per_second:.0f} tokens/s")
    if stats.examined:
        parts.append(f"α {stats.alpha:.2f}")
    parts.append(f"{stats.block_efficiency:.1f} tokens per target pass")
    if answer.speedup is not None:
        rate = f"{answer.speedup:.2f}× the target alone"
        parts.append(rate if answer.is_measured else f"about {rate}")
    if answer.is_identical is not None:
        differs = (
            "✗ the target alone differs" if answer.is_exact else "the target alone differs (half precision: ties)"
        )
        parts.append("✓ the target alone says the same" if answer.is_identical else differs)
    parts.append(f"draft version {answer.version}")
    if answer.stopped:
        parts.append("stopped")
    if not answer.is_done and answer.settings.check and not answer.is_measured:
        parts.append("the target answers alone, to compare …")
    return " · ".join(parts)


def _batch(batch: Batch, is_newest: bool) -> str:
    done = sum(answer.stats is not None for answer in batch.answers)
    doing = "stopped" if batch.stop.is_set() else "done" if batch.is_done else "learning" if batch.is_learning else "…"
    shown = batch.answers[-1] if batch.answers else None
    last = "" if shown is None else _answer(shown, is_newest)
    error = f'<div class="osd-error" role="alert">{escape(batch.error)}</div>' if batch.error else ""
    return (
        f'<div class="osd-you">{batch.total} prompts of {escape(batch.domain)}</div>'
        f'<div class="osd-figures" aria-hidden="{str(not batch.is_done).lower()}">{done} of {batch.total} answered, '
        f'{doing}<div class="osd-bar"><div style="width: {100 * done / batch.total:.0f}%"></div></div></div>'
        f"{last}{error}"
    )


def learner_state(room: Room, is_private: bool, is_public: bool = False) -> str:
    """What the learner does, and what became of its last versions; to strangers no error is told word by word."""
    assistant, state = room.assistant, room.state
    drafts = assistant.drafts
    versions = [f"{domain or 'all'} v{drafts.serving_version(domain)}" for domain in drafts.domains]
    whose = "your own, which learns from nobody else" if is_private else "shared by all visitors, from whom it learns"
    decisions = assistant.decisions
    told = [f"{escape(d.domain or 'all')} v{d.version} {escape(d.outcome)}{_gain(d)}" for d in decisions[:-4:-1]]
    told_failure = "The log of the app says why." if is_public else escape(room.failure or "")
    failure = f'<div class="osd-error">{told_failure}</div>' if room.failure else ""
    return (
        f'<div class="osd-state" role="status"><span class="osd-dot {state}"></span><b>{state}</b> · the draft is '
        f"{whose}<br>serving: {escape(', '.join(versions)) or 'the draft as it was'}"
        f"<br>newest versions: {'; '.join(told) or 'none yet'}{failure}</div>"
    )


def _gain(decision: object) -> str:
    before, after = getattr(decision, "alpha_before", None), getattr(decision, "alpha_after", None)
    return "" if before is None or after is None else f" (held-back α {before:.2f} → {after:.2f})"


def domain_table(room: Room) -> str:
    """Acceptance by domain, over the last twenty requests of each."""
    records = room.snapshot()
    names = list(dict.fromkeys(record.domain for record in records))
    rows = [("all", compared(records))] + [
        (name, compared([record for record in records if record.domain == name])) for name in names
    ]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{row['requests']}</td><td>{_two(row['last_frozen_alpha'])}</td>"
        f"<td>{_two(row['last_learning_alpha'])}</td></tr>"
        for name, row in rows
    )
    return (
        '<div class="osd-side"><table class="osd-table"><caption>Acceptance α, last 20 requests</caption><thead><tr>'
        '<th scope="col">domain</th><th scope="col">requests</th><th scope="col">frozen</th>'
        f'<th scope="col">learning</th></tr></thead><tbody>{cells}</tbody></table></div>'
    )


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def corrections(counted: Counter[tuple[str, str]]) -> str:
    """The most frequent corrections of a chat."""
    rows = "".join(
        f"<tr><td><code>{escape(visible(said))}</code></td><td><code>{escape(visible(meant))}</code></td><td>{n}</td>"
        "</tr>"
        for (said, meant), n in counted.most_common(MOST_CORRECTIONS)
    )
    return (
        '<div class="osd-side"><table class="osd-table"><caption>Most frequent corrections in your chat</caption>'
        '<thead><tr><th scope="col">draft said</th><th scope="col">target said</th><th scope="col">times</th></tr>'
        f"</thead><tbody>{rows or '<tr><td>none yet</td><td></td><td></td></tr>'}</tbody></table></div>"
    )
