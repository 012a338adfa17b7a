"""Parts of the app that stand alone: domains, turns, pieces of text, settings, curves."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from waiting import LONG

import osd_hf
from osd_hf import AcceptanceStats
from osd_hf.bundled import DOMAINS, GENERAL, bundled_prompts, find_domain
from osd_hf.errors import ConfigError
from osd_hf.utils.streaming import INCOMPLETE, Pieces, text_of
from osd_hf_app.sessions import Record, Settings
from osd_hf_app.sharing import FairQueue, Quota, RateLimit, visitor_id
from osd_hf_app.view import WINDOW, curves, points

# --- domains --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 7])
def test_prompts_that_the_classifier_has_not_seen_find_their_domain(seed: int) -> None:
    right = {d: sum(find_domain(e.prompt) == d for e in bundled_prompts(d, 100, seed=seed)) for d in DOMAINS}
    # Sums about money are like finance.
    assert right.pop("math") >= 90
    assert min(right.values()) >= 98


@pytest.mark.parametrize(
    "prompt", ["", " \n\t", "qwzx vbnm plokij", "Приветствую вас, друзья", "你好", "\U0001f600" * 9, "¿", "x" * 20_000]
)
def test_a_prompt_like_no_sample_is_general(prompt: str) -> None:
    assert find_domain(prompt) == GENERAL


# --- pieces ---------------------------------------------------------------------------------------------------------

BUNDLED = AutoTokenizer.from_pretrained(Path(osd_hf.__file__).parent / "bundled" / "target", local_files_only=True)
# Most characters of most alphabets take several tokens of the bundled tokenizer.
TEXTS = st.text() | st.text(alphabet="aé€\u0301\u200d\U0001f469\U0001f680漢字 \n", min_size=1)
CUTS = st.lists(st.integers(1, 7), max_size=40)


def whole(ids: list[int]) -> str:
    return str(BUNDLED.decode(ids, skip_special_tokens=True))


def parts(ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    start = 0
    for size in sizes:
        yield ids[start : start + size]
        start += size
    yield ids[start:]


def pushed(ids: list[int], sizes: list[int], tokenizer: Any = BUNDLED) -> list[str]:
    pieces = Pieces(tokenizer)
    for part in parts(ids, sizes):
        pieces.push(part)
    return pieces.texts


@given(TEXTS, st.lists(st.integers(0, len(BUNDLED) - 1), max_size=60), CUTS)
def test_pieces_joined_are_the_text_however_they_come(text: str, others: list[int], sizes: list[int]) -> None:
    for ids in (BUNDLED(text, add_special_tokens=False)["input_ids"], others):
        texts, expected, pieces = pushed(ids, sizes), whole(ids), Pieces(BUNDLED)
        pieces.push(ids)
        assert texts == pieces.texts
        assert len(texts) == len(ids)
        assert "".join(texts) + pieces.unfinished == expected
        assert not pieces.unfinished or expected.endswith(INCOMPLETE)  # only an unfinished end is not shown


def test_special_tokens_show_nothing_and_have_names_of_their_own() -> None:
    ids = [BUNDLED.bos_token_id, *BUNDLED("ab", add_special_tokens=False)["input_ids"], BUNDLED.eos_token_id]
    texts = pushed(ids, [])
    assert texts[0] == texts[-1] == ""
    assert "".join(texts) == "ab"
    assert text_of(BUNDLED, ids[-1:]) == BUNDLED.eos_token


def test_spaces_that_a_tokenizer_leaves_out_at_the_beginning_stay_inside() -> None:
    vocab = {"<s>": 0, "</s>": 1, "▁": 2, "▁one": 3, "▁two": 4, "s": 5}
    backend = Tokenizer(WordLevel(vocab, unk_token="s"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    for ids in ([3, 4, 5, 3], [2, 3, 2, 2, 4], [0, 3, 0, 4], [3, 0, 1, 4, 5, 1]):
        assert "".join(pushed(ids, [], tokenizer)) == tokenizer.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("k", [0, 5, "0", "33", True, "Auto", None], "one of auto, 1, 2, 3, 5, 8, 12"),
        ("max_new_tokens", [0, 513, 9.5, True, "9", None], "an integer from 1 to 512"),
        ("temperature", [0, -1, 5.1, float("nan"), float("inf"), "1", None], "above 0 and at most 5"),
        ("top_p", [0, -0.1, 1.1, float("nan"), "1", None], "above 0 and at most 1"),
    ],
)
def test_a_setting_outside_its_range_is_refused(name: str, values: list[Any], rule: str) -> None:
    for value in values:
        with pytest.raises(ConfigError) as refused:
            Settings(**{name: value})
        assert str(refused.value) == f"`{name}` must be {rule}, got {value!r}."


# --- curves ---------------------------------------------------------------------------------------------------------


def counted(forwards: int, emitted: int) -> AcceptanceStats:
    """The counts of an answer; a forward emits at least one token."""
    return AcceptanceStats(target_forwards=forwards, emitted=max(forwards, emitted) if forwards else 0)


def record(domain: str = "sql", version: int = 0, *, learning: Any = (4, 12), frozen: Any = (4, 5)) -> Any:
    return Record(domain, counted(*learning), counted(*frozen), version)


SIDES = st.tuples(st.integers(0, 9), st.integers(0, 9))
RECORDS = st.lists(st.builds(record, domain=st.sampled_from(DOMAINS), learning=SIDES, frozen=SIDES), max_size=40)


@given(RECORDS, st.sampled_from(["learning", "frozen"]))
def test_a_point_pools_the_window_that_ends_with_it(records: list[Record], side: str) -> None:
    expected = []
    for end in range(1, len(records) + 1):
        window = [getattr(r, side) for r in records[max(0, end - WINDOW) : end]]
        forwards, emitted = sum(s.target_forwards for s in window), sum(s.emitted for s in window)
        if forwards:
            expected.append((end, emitted / forwards))
    assert points(records, side) == expected


def svg_of(records: list[Record], domain: str | None = None) -> ElementTree.Element:
    workspace: Any = SimpleNamespace(records=records, pair=SimpleNamespace(domains=DOMAINS))
    found = re.search(r"<svg .*</svg>", curves(workspace, domain), re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def promotions(records: list[Record]) -> int:
    return sum(path.get("class") == "osd-promoted" for path in svg_of(records).iter("path"))


@given(RECORDS, st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")))
def test_the_picture_is_xml_and_inside_its_box(records: list[Record], domain: str) -> None:
    svg = svg_of(records, domain)
    # XML makes spaces of what stands in an attribute and is one.
    assert (svg.get("aria-label") or "").startswith(f"Tokens per pass of the target, {domain or 'all domains'}: ")
    width, height = (float(x) for x in (svg.get("viewBox") or "").split()[2:])
    assert {element.tag for element in svg.iter()} <= {"svg", "line", "text", "path", "polyline", "circle"}
    for line in svg.iter("polyline"):
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_the_picture_says_where_both_curves_end_and_marks_new_versions() -> None:
    svg = svg_of([record(learning=(4, 12), frozen=(4, 5)) for _ in range(30)])
    ends = {line.get("class"): line.get("data-last") for line in svg.iter("polyline")}
    assert ends == {"osd-learning": "3.0000", "osd-frozen": "1.2500"}
    title = "Tokens per pass of the target, all domains"
    assert svg.get("aria-label") == f"{title}: frozen draft 1.25, learning draft 3.00 at the end"
    for nothing in ([], [record(learning=(0, 0), frozen=(0, 0))]):
        assert svg_of(nothing).get("aria-label") == f"{title}: no requests yet"
    served = [("sql", 0), ("math", 0), ("sql", 1), ("math", 0), ("math", 2), ("sql", 1), ("math", 2), ("python", 0)]
    assert promotions([record(domain, version) for domain, version in served]) == 2
    # The first version and rolled back ones are not new.
    assert promotions([record(version=version) for version in (3, 3, 4, 2, 2, 5)]) == 2


# --- visitors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "visitor"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("testclient", "unknown"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_a_visitor_is_an_address_or_a_network_of_them(host: str | None, visitor: str) -> None:
    assert visitor_id(host) == visitor


@given(st.integers(1, 60), st.lists(st.sampled_from("abcdef"), max_size=200))
def test_nobody_holds_more_than_is_left_and_newcomers_find_a_place(capacity: int, takers: list[str]) -> None:
    shares = Quota(capacity)
    for taker in takers:
        held, free = shares.held[taker], capacity - shares.held.total()
        assert shares.acquire(taker) == (held < free or (not held and free > -capacity))
    assert all(held <= capacity // 2 + 1 for held in shares.held.values())
    assert shares.held.total() <= 2 * capacity
    total = shares.held.total()
    assert shares.acquire("somebody new") == (total < 2 * capacity)
    for taker, held in list(shares.held.items()):
        for _ in range(held):
            shares.release(taker)
    assert not shares.held


def test_a_rate_leaves_something_to_each_however_many_hurry() -> None:
    now = [0.0]
    rate = RateLimit(12, 2.0, clock=lambda: now[0])
    taken = [sum(rate.acquire(name) for _ in range(20)) for name in "abcdefgh"]
    assert taken[0] == 6
    assert min(taken) >= 1
    now[0] = 2.0
    assert sum(rate.acquire("h") for _ in range(20)) == 6
    now[0] = 4.0
    assert sum(rate.acquire(None) for _ in range(20)) == 12


class Visits:
    """Threads in a queue whose clock is moved by hand."""

    def __init__(self, max_started: int = 3) -> None:
        self.now = 0.0
        self.queue = FairQueue(max_started, work=lambda: self.now)
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []

    def add(
        self,
        visitor: str | None,
        name: str,
        seconds: float = 0.0,
        rounds: int = 1,
        keep_waiting: Callable[[int], bool] = lambda position: True,
    ) -> None:
        """Start a visit and wait until it has a place in the queue; each of its rounds takes so many seconds."""
        arrived = threading.Event()

        def wait(position: int) -> bool:
            arrived.set()
            return keep_waiting(position)

        def visit() -> None:
            with self.queue.slot(wait, visitor=visitor) as slot:
                for _ in range(rounds if slot is not None else 0):
                    self.order.append(name)
                    self.now += seconds
                    self.queue.yield_to_others(slot)
            arrived.set()

        self.threads.append(threading.Thread(target=visit))
        self.threads[-1].start()
        assert arrived.wait(LONG)

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(LONG)
        return self.order


def test_visits_run_one_at_a_time_and_visitors_take_turns() -> None:
    visits, positions = Visits(), list[int]()
    with visits.queue.slot():
        for i in range(4):
            visits.add("many", f"many {i}", seconds=1.0)
        visits.add("one", "one", seconds=1.0, keep_waiting=lambda position: positions.append(position) is None)
        visits.add(None, "trusted 0")
        visits.add(None, "trusted 1")
        assert visits.order == []
    assert visits.join() == ["trusted 0", "trusted 1", "many 0", "one", "many 1", "many 2", "many 3"]
    assert positions[0] == 5  # ahead
    with pytest.raises(KeyError), visits.queue.slot():  # a failure frees the queue
        raise KeyError("x")
    visits.add("one", "after")
    assert visits.join()[-1] == "after"


def test_a_long_answer_gives_way_in_its_middle_and_goes_on() -> None:
    visits = Visits()
    with visits.queue.slot():
        visits.add("long", "long", seconds=1.0, rounds=3)
        visits.add("short", "short", seconds=0.1)
        visits.add("long", "next", seconds=0.1)
    assert visits.join() == ["long", "short", "long", "long", "next"]


@pytest.mark.parametrize(("max_started", "first"), [(1, ["long", "long", "long", "short"]), (2, ["long", "short"])])
def test_no_more_answers_begin_than_there_is_memory_for(max_started: int, first: list[str]) -> None:
    visits = Visits(max_started)
    with visits.queue.slot():
        visits.add("long", "long", seconds=1.0, rounds=3)
        visits.add("long", "never first", seconds=1.0)
        visits.add("short", "short")
    assert visits.join()[: len(first)] == first


def test_a_new_address_is_no_better_than_whoever_used_floor() -> None:
    visits = Visits()
    visits.add("old", "old", seconds=1.0)
    visits.join()
    with visits.queue.slot():
        visits.add("old", "old again")
        visits.add("new", "new")
    assert visits.join() == ["old", "old again", "new"]


def test_work_done_while_nobody_waited_counts_against_nobody() -> None:
    visits = Visits()
    for visitor in ("late", "modest"):
        visits.add(visitor, "before")
        visits.join()
    visits.add("modest", "alone", seconds=100.0)
    visits.join()
    visits.order.clear()
    with visits.queue.slot():
        visits.add("late", "late", seconds=1.0, rounds=3)
        visits.add("modest", "modest", seconds=1.0)
    assert visits.join() == ["late", "modest", "late", "late"]


def test_one_who_has_gone_leaves_the_slots() -> None:
    visits, gone, positions = Visits(), threading.Event(), list[int]()
    with visits.queue.slot():
        visits.add("a", "a", keep_waiting=lambda position: not gone.is_set())
        gone.set()
        visits.threads[0].join(LONG)
        visits.add("b", "b", keep_waiting=lambda position: positions.append(position) is None)
        assert set(positions) == {1}  # the running one is ahead
    assert visits.join() == ["b"]
