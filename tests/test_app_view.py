"""What the page shows: any text of a visitor or a model is text there, and never markup."""

from __future__ import annotations

import threading
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from osd_hf import AcceptanceStats
from osd_hf.learning.gate import GateDecision
from osd_hf_app import view
from osd_hf_app.sessions import Answer, Batch, Record, Session, Settings, ShownToken, Side

# What view.py writes: tags, and their attributes.
MARKUP = {
    "div": {"class", "role", "aria-label", "aria-live", "aria-busy", "aria-hidden", "tabindex", "style"},
    "span": {"class", "tabindex", "role", "data-said", "aria-label"},
    "table": {"class"},
    "th": {"scope"},
    **{tag: set[str]() for tag in "b br caption code thead tbody tr td".split()},
}
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onmouseover="alert(1)', "' onfocus='alert(1)' x='",
    '"><svg onload=alert(1)>', "</div></span></code></td></table><b>", "<!-- ", "-->", "<![CDATA[ ", "]]>", "<?php ",
    "&lt;script&gt;", "&", "&#60;script&#62;", "<", ">", "\x00<", "javascript:alert(1)", "\u2028</script\u2029>",
    "“”", "\r\n",
]  # fmt: skip
# Signs of markup, whole attacks, and anything else.
TEXTS = st.one_of(
    st.text(min_size=1),
    st.text(alphabet="<>&\"'/=-!?;#x on", min_size=1),
    st.lists(st.sampled_from(HOSTILE) | st.text(max_size=3), min_size=1, max_size=4).map("".join),
).filter(bool)


class Read(HTMLParser):
    """Reads HTML: its tags with their attributes in order, all its text, and the text inside each class."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.opened: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, str]] = []
        self.data: list[tuple[list[str], str]] = []
        self.feed(html)
        self.close()
        assert self.open == [], "all that was opened is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in MARKUP, tag
        names = [name for name, _ in attributes]
        assert set(names) <= MARKUP[tag], names
        assert len(names) == len(set(names))
        self.opened.append((tag, dict(attributes)))
        if tag != "br":
            self.open.append((tag, dict(attributes).get("class") or tag))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        self.data.append(([name for _, name in self.open], data))

    def refuse(self, *_: Any) -> None:
        raise AssertionError("neither comments nor declarations are written")

    handle_comment = handle_decl = handle_pi = unknown_decl = refuse  # type: ignore[assignment]

    @property
    def text(self) -> str:
        return "".join(data for _, data in self.data)

    def inside(self, name: str) -> str:
        return "".join(data for path, data in self.data if name in path)

    @property
    def skeleton(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attributes)) for tag, attributes in self.opened]

    def values(self, name: str) -> list[str | None]:
        return [attributes[name] for _, attributes in self.opened if name in attributes]


STATS = AcceptanceStats.from_counts(drafted=5, examined=4, accepted=3, emitted=5, target_forwards=2)
ROOM: Any = SimpleNamespace(pair=SimpleNamespace(about="<Ask> what you like."), shown=None)


def session_of(prompt: str, token: str, said: str, error: str, notice: str, domain: str) -> Session:
    """A chat with everything in it that the page can show of a chat."""
    tokens = [ShownToken(token, o) for o in ("accepted", "bonus", "plain", "target")]
    tokens += [ShownToken(token, "corrected", *what) for what in ((said, 0.25), (said,), ())]
    whole = Answer(prompt, Settings(check=True), domain, tokens, is_done=True, stats=STATS, seconds=0.5)
    whole.alone_seconds, whole.is_identical = 1.0, True
    failed = Answer(prompt, Settings(), domain, error=error, is_done=True)
    batch = Batch(domain, 2, [whole, failed], error=error)
    return Session("id", ROOM, entries=[whole, failed, batch], notice=notice)


@given(TEXTS, TEXTS, TEXTS, TEXTS, TEXTS, TEXTS)
def test_the_chat_shows_any_text_as_text(
    prompt: str, token: str, said: str, error: str, notice: str, domain: str
) -> None:
    texts = (prompt, token, said, error, notice, domain)
    read = Read(view.transcript(session_of(*texts)))
    assert read.skeleton == Read(view.transcript(session_of(*["x"] * 6))).skeleton
    assert read.inside("osd-you") == f"{prompt}{prompt}2 prompts of {domain}{prompt}"
    assert read.inside("osd-answer") == token * 7
    assert read.inside("osd-error") == f"{error}{error}{error}{notice}"
    assert read.inside("osd-figures").startswith(f"{domain} · 5 tokens · 10 tokens/s · α 0.75 · ")
    draft = "the draft said “{}”".format(said.replace("\n", "⏎").replace("\t", "⇥"))
    shown = [f"{draft} (25%)", draft, "earlier text continued differently"]
    assert read.values("data-said") == shown
    labels = [label for label in read.values("aria-label") if label != "Chat"]
    assert labels == [f"{token}, corrected: {told}" for told in shown]


def room_of(domain: str, failure: str | None, outcome: str = "promoted", *, is_private: bool = False) -> Any:
    decision = GateDecision(outcome, 2, 2, domain, "no reason", 4, 0.5, 0.75)  # type: ignore[arg-type]
    drafts = SimpleNamespace(domains=(domain,), serving_version=lambda _: 2)
    assistant = SimpleNamespace(drafts=drafts, decisions=(decision,), learning_seconds=2.0, saved_seconds=3.26)
    assistant.stats = SimpleNamespace(speedup=1.5, num_requests=20)
    records = [Record(domain, STATS, STATS, 2)]
    return SimpleNamespace(
        assistant=assistant, state="failed", failure=failure, records=records, is_private=is_private
    )


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_the_panel_shows_any_text_as_text(domain: str, failure: str, outcome: str, is_private: bool) -> None:
    room = room_of(domain, failure, outcome, is_private=is_private)
    read, plain = Read(view.learner_state(room)), room_of("x", "x")
    assert read.skeleton == Read(view.learner_state(plain)).skeleton
    assert read.inside("osd-error") == failure
    assert f"serving: {domain} v2newest versions: {domain} v2 {outcome} (held-back α 0.50 → 0.75)" in read.text
    assert ("private: it learns from you only" in read.text) == is_private
    assert Read(view.learner_state(room, is_public=True)).inside("osd-error") == "See the log of the app."
    table = Read(view.domain_table(room))
    assert table.skeleton == Read(view.domain_table(plain)).skeleton
    assert f"{domain}12.502.500.750.75" in table.text


@given(TEXTS, TEXTS)
def test_both_drafts_are_compared_on_the_newest_answer_or_else_on_that_of_the_app(prompt: str, token: str) -> None:
    def answer_with(learning: int, prompt: str = prompt) -> Answer:
        answer = Answer(prompt, Settings(), "sql")
        for name, forwards in (("frozen", 4), ("learning", learning)):
            stats = AcceptanceStats(emitted=8, target_forwards=forwards)
            answer.sides[name] = Side([ShownToken(token, "accepted"), ShownToken(token, "bonus")], stats, learning)
        return answer

    room: Any = SimpleNamespace(pair=ROOM.pair, shown=None)
    session = Session("id", room)
    assert "answered with both drafts" in view.comparison(session)
    room.shown = answer_with(3, "Shown at first.")
    assert "Shown at first." in view.comparison(session)
    session.entries = [answer_with(2), Answer("Sampled.", Settings(), "sql")]
    read = Read(view.comparison(session))
    assert read.skeleton == Read(view.comparison(Session("id", room))).skeleton
    assert (read.inside("osd-asked"), read.inside("osd-answer")) == (prompt, 4 * token)
    frozen, learning = (
        "frozen draft, version 24 passes for 8 tokens",
        "learning draft, version 22 passes for 8 tokens",
    )
    assert read.inside("osd-head") == frozen + learning


def test_a_page_with_nothing_yet_reads() -> None:
    chat = Read(view.transcript(Session("id", ROOM)))
    assert "Ask something" in chat.inside("osd-hint")
    workspace = room_of("x", None)
    workspace.records, workspace.assistant.decisions, workspace.assistant.drafts.domains = [], (), ()
    state = Read(view.learner_state(workspace))
    assert "serving: the original draftnewest versions: none yet" in state.text
    headline, balance = Read(view.headline(workspace)), Read(view.balance(workspace))
    assert headline.text == "–tokens per pass of the targetno answers yettarget alone: 1"
    assert balance.text.startswith(
        "Answers come at 1.50× the speed of the target alone. Learning used 2.0 s and saved"
    )
    assert balance.text.endswith("saved 3.3 s. Learning has paid for itself.")
    workspace.assistant.saved_seconds, workspace.assistant.stats.speedup = None, None
    assert Read(view.balance(workspace)).text == f"Learning used 2.0 s and saved 0.0 s. {view.WHY_NOT_PAID}"
    workspace.assistant.learning_seconds = 0.0
    assert Read(view.balance(workspace)).text == f"Learning used 0.0 s and saved 0.0 s. {view.WHY_NOT_PAID}"
    workspace.records = [Record("sql", AcceptanceStats(emitted=6, target_forwards=2), STATS, 2)]
    assert "3.00" in Read(view.headline(workspace)).inside("osd-number")
    assert "frozen draft: 2.50 (+20% by learning)" in Read(view.headline(workspace)).text
    workspace.records = []
    assert state.inside("osd-error") == ""
    assert Read(view.domain_table(workspace)).text.endswith("all0––––")


def test_what_an_answer_is_doing_is_said() -> None:
    def figures(**state: Any) -> str:
        answer = Answer("x", Settings(check=True), "sql", **state)
        return Read(view.transcript(Session("id", ROOM, entries=[answer]))).inside("osd-figures")

    assert figures() == "answering …"
    assert figures(position=2) == "2 before you"
    assert figures(is_done=True) == "stopped"
    assert figures(is_done=True, error="x") == ""
    assert figures(stats=STATS, seconds=0.5).endswith("running the target alone, to compare …")
    told = figures(stats=STATS, seconds=0.5, alone_seconds=1.0, is_done=True, is_identical=False)
    assert "about 2.00× the target alone · ✗ the target alone differs · draft version 0" in told
    stop = threading.Event()
    stop.set()
    measured = figures(stats=STATS, seconds=0.5, alone_seconds=1.0, is_measured=True, stop=stop, is_done=True)
    assert "· 2.00× the target alone · draft version 0 · stopped" in measured
    nothing_drafted = AcceptanceStats.from_counts(drafted=0, examined=0, accepted=0, emitted=5, target_forwards=5)
    told = figures(is_done=True, stats=nothing_drafted, seconds=1.0)
    assert told == "sql · 5 tokens · 5 tokens/s · 1.0 tokens per target pass · draft version 0"
