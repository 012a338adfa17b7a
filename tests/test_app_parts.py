"""Parts of the app that stand alone: domains, turns, pieces of text, settings, curves."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
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
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.errors import ConfigError
from osd_hf.utils.streaming import INCOMPLETE, MOST_PENDING, Pieces, text_of
from osd_hf_app.rooms import OTHER, SAMPLES, Record, classifier
from osd_hf_app.sharing import MAX_VISITORS, Rate, Shares, Turn, Turns, visitor_at
from osd_hf_app.view import MOST_POINTS, WINDOW, curves, points
from osd_hf_app.visitors import Settings

PATIENCE = LONG


# --- domains --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def domain_of() -> Any:
    return classifier({d: [e.prompt for e in bundled_prompts(d, SAMPLES, seed=1)] for d in DOMAINS})


@pytest.mark.parametrize("seed", [0, 7])
def test_prompts_that_the_classifier_has_not_seen_find_their_domain(domain_of: Any, seed: int) -> None:
    right = {d: sum(domain_of(e.prompt) == d for e in bundled_prompts(d, 100, seed=seed)) for d in DOMAINS}
    # Sums about money are like finance.
    assert right.pop("math") >= 90
    assert min(right.values()) >= 98


@pytest.mark.parametrize(
    "prompt", ["", " \n\t", "qwzx vbnm plokij", "Приветствую вас, друзья", "你好", "\U0001f600" * 9, "¿", "x" * 20_000]
)
def test_a_prompt_like_no_sample_is_general(domain_of: Any, prompt: str) -> None:
    assert domain_of(prompt) == OTHER


def test_a_prompt_mostly_of_unknown_words_is_general(domain_of: Any) -> None:
    assert domain_of("CREATE TABLE customers (id INTEGER, name TEXT);") == "sql"
    assert domain_of("TABLE " + "zwoing " * 9) == OTHER


def test_a_tie_is_general() -> None:
    both = classifier({"one": ["red green blue"], "two": ["red green blue"]})
    assert both("red green blue") == OTHER
    differing = classifier({"one": ["red " * 20], "two": ["blue " * 20]})
    assert [differing(p) for p in ("red red", "blue blue", "red blue")] == ["one", "two", OTHER]


def test_one_domain_is_enough() -> None:
    assert classifier({"one": ["red green"]})("red") == "one"


@given(st.text())
def test_any_text_has_a_domain(text: str) -> None:
    known = classifier({"one": ["red 1 + 2"], "two": ["blue ( )"]})
    assert known(text) in ("one", "two", OTHER)


# --- turns ----------------------------------------------------------------------------------------------------------


class Line(deque[threading.Event]):
    """Says when somebody has queued."""

    def __init__(self) -> None:
        super().__init__()
        self.queued = threading.Semaphore(0)

    def append(self, mine: threading.Event) -> None:
        super().append(mine)
        self.queued.release()


def watched() -> tuple[Turns, threading.Semaphore]:
    turns = Turns()
    line = turns._line = Line()
    return turns, line.queued


def test_turns_go_in_the_order_of_arrival_and_one_at_a_time() -> None:
    turns, queued = watched()
    order: list[int] = []
    inside = threading.Lock()

    def visit(number: int) -> None:
        with turns.turn():
            assert inside.acquire(blocking=False)
            order.append(number)
            inside.release()

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(12)]
    with turns.turn():
        assert queued.acquire(timeout=PATIENCE)
        for thread in threads:
            thread.start()
            assert queued.acquire(timeout=PATIENCE)
        assert len(turns) == 13
        assert order == []
    for thread in threads:
        thread.join(PATIENCE)
    assert order == list(range(12))
    assert len(turns) == 0


def test_someone_who_comes_again_and_again_lets_others_in_between() -> None:
    turns, queued = watched()
    order: list[str] = []
    other_waits = threading.Event()

    def many() -> None:
        for _ in range(3):
            with turns.turn():
                order.append("many")
                assert other_waits.wait(PATIENCE)

    def one() -> None:
        with turns.turn():
            order.append("one")

    first, second = threading.Thread(target=many), threading.Thread(target=one)
    first.start()
    assert queued.acquire(timeout=PATIENCE)
    second.start()
    assert queued.acquire(timeout=PATIENCE)
    other_waits.set()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert order == ["many", "one", "many", "many"]


def test_an_exception_passes_the_turn_on() -> None:
    turns, queued = watched()
    done = threading.Event()

    def visit() -> None:
        with turns.turn():
            done.set()

    thread = threading.Thread(target=visit)
    with pytest.raises(KeyError), turns.turn():
        assert queued.acquire(timeout=PATIENCE)
        thread.start()
        assert queued.acquire(timeout=PATIENCE)
        raise KeyError("x")
    assert done.wait(PATIENCE)
    thread.join(PATIENCE)
    assert len(turns) == 0


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


@given(TEXTS.filter(lambda text: not text.endswith(INCOMPLETE)), CUTS)
def test_pieces_joined_are_the_text_however_they_come(text: str, sizes: list[int]) -> None:
    ids = BUNDLED(text, add_special_tokens=False)["input_ids"]
    texts = pushed(ids, sizes)
    assert len(texts) == len(ids)
    assert "".join(texts) == whole(ids)
    assert texts == pushed(ids, [])


@given(st.lists(st.integers(0, len(BUNDLED) - 1), max_size=60), CUTS)
def test_of_any_tokens_only_an_unfinished_end_is_not_shown(ids: list[int], sizes: list[int]) -> None:
    joined, text, pieces = "".join(pushed(ids, sizes)), whole(ids), Pieces(BUNDLED)
    assert text.startswith(joined)
    assert joined == text or text.endswith(INCOMPLETE)
    pieces.push(ids)
    assert joined + pieces.unfinished == text


def test_a_character_of_several_tokens_is_shown_by_the_last_of_them() -> None:
    ids = BUNDLED("a\U0001f680b", add_special_tokens=False)["input_ids"]
    texts = pushed(ids, [])
    assert len(ids) > 3
    assert texts == ["a", *[""] * (len(ids) - 3), "\U0001f680", "b"]


def test_what_never_becomes_a_character_is_shown_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = BUNDLED("\U0001f680", add_special_tokens=False)["input_ids"][-1]
    decode, lengths, ids = type(BUNDLED).decode, list[int](), [rest] * 100
    monkeypatch.setattr(
        type(BUNDLED), "decode", lambda self, ids, **how: lengths.append(len(ids)) or decode(self, ids, **how)
    )
    pieces = Pieces(BUNDLED)
    pieces.push(ids)
    assert max(lengths) <= 4 * MOST_PENDING
    joined = "".join(pieces.texts)
    assert len(joined) >= 90
    assert joined + pieces.unfinished == whole(ids)


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


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values", "rule"),
    [
        ("k", [0, -1, 33, 2.0, True, "5", "Auto", None], 'an integer from 1 to 32, or "auto"'),
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


@pytest.mark.parametrize(
    "settings", [{}, {"k": 1}, {"k": 32}, {"k": "auto"}, {"max_new_tokens": 1}, {"max_new_tokens": 512},
                 {"temperature": 5}, {"temperature": 0.01}, {"top_p": 1}, {"top_p": 0.01}]
)  # fmt: skip
def test_a_setting_inside_its_range_is_taken(settings: dict[str, Any]) -> None:
    Settings(**settings)


def test_greedy_settings_say_nothing_of_sampling() -> None:
    settings = Settings(temperature=2.0, top_p=0.5, max_new_tokens=7)
    assert settings.generate_kwargs == {"do_sample": False, "max_new_tokens": 7}
    sampled = Settings(temperature=2.0, top_p=0.5, max_new_tokens=7, do_sample=True).generate_kwargs
    assert sampled == {"do_sample": True, "max_new_tokens": 7, "temperature": 2.0, "top_p": 0.5, "top_k": 0}


# --- curves ---------------------------------------------------------------------------------------------------------


def counted(examined: int, accepted: int) -> AcceptanceStats:
    return AcceptanceStats(drafted=examined, examined=examined, accepted=min(accepted, examined))


def record(
    number: int = 1, domain: str = "sql", version: int = 0, *, learning: Any = (4, 3), frozen: Any = (4, 1)
) -> Any:
    return Record(number, domain, counted(*learning), counted(*frozen), version)


SIDES = st.tuples(st.integers(0, 9), st.integers(0, 9))
RECORDS = st.lists(st.builds(record, domain=st.sampled_from(DOMAINS), learning=SIDES, frozen=SIDES), max_size=40)


@given(RECORDS, st.sampled_from(["learning", "frozen"]))
def test_a_point_pools_the_window_that_ends_with_it(records: list[Record], side: str) -> None:
    expected = []
    for end in range(1, len(records) + 1):
        window = [getattr(r, side) for r in records[max(0, end - WINDOW) : end]]
        examined, accepted = sum(s.examined for s in window), sum(s.accepted for s in window)
        if examined:
            expected.append((end, accepted / examined))
    assert points(records, side) == expected


@pytest.mark.parametrize("count", [1, MOST_POINTS - 1, MOST_POINTS, MOST_POINTS + 1, 2 * MOST_POINTS + 1, 4999])
def test_there_are_so_many_points_at_most_and_the_last_request_is_one(count: int) -> None:
    found = points([record(i) for i in range(count)], "learning")
    ends = [end for end, _ in found]
    assert len(ends) == count if count <= MOST_POINTS else MOST_POINTS / 2 <= len(ends) <= MOST_POINTS
    assert ends[-1] == count
    assert ends == sorted(set(ends))
    assert ends[0] >= 1


def svg_of(records: list[Record], title: str = "title") -> ElementTree.Element:
    found = re.search(r"<svg .*</svg>", curves(records, title), re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def promotions(records: list[Record]) -> int:
    return sum(path.get("class") == "osd-promoted" for path in svg_of(records).iter("path"))


@given(RECORDS, st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")))
def test_the_picture_is_xml_and_inside_its_box(records: list[Record], title: str) -> None:
    svg = svg_of(records, title)
    # XML makes spaces of what stands in an attribute and is one.
    assert (svg.get("aria-label") or "").startswith(f"{title}: ")
    width, height = (float(x) for x in (svg.get("viewBox") or "").split()[2:])
    assert {element.tag for element in svg.iter()} <= {"svg", "line", "text", "path", "polyline", "circle"}
    for line in svg.iter("polyline"):
        for point in (line.get("points") or "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_the_picture_says_where_both_curves_end() -> None:
    svg = svg_of([record(i, learning=(4, 3), frozen=(4, 1)) for i in range(30)], "Alpha")
    ends = {line.get("class"): line.get("data-last") for line in svg.iter("polyline")}
    assert ends == {"osd-learning": "0.7500", "osd-frozen": "0.2500"}
    assert svg.get("aria-label") == "Alpha: frozen draft 0.25, learning draft 0.75 at the end"
    assert svg_of([], "Alpha").get("aria-label") == "Alpha: no requests yet"
    nothing_drafted = record(learning=(0, 0), frozen=(0, 0))
    assert svg_of([nothing_drafted], "Alpha").get("aria-label") == "Alpha: no requests yet"


def test_a_new_version_is_marked_once_in_its_own_domain() -> None:
    served = [("sql", 0), ("math", 0), ("sql", 1), ("math", 0), ("math", 2), ("sql", 1), ("math", 2), ("python", 0)]
    assert promotions([record(i, domain, version) for i, (domain, version) in enumerate(served)]) == 2
    assert promotions([record(i, "sql", 0) for i in range(30)]) == 0
    assert promotions([]) == 0


def test_those_who_wait_are_told_how_many_are_before_them() -> None:
    turns, told = Turns(), []
    begun, ended = threading.Event(), threading.Event()

    def wait() -> None:
        with turns.turn(lambda before: (told.append(before), begun.set())):
            ended.set()

    with turns.turn():
        thread = threading.Thread(target=wait)
        thread.start()
        assert begun.wait(LONG)
        assert told == [1]
    assert ended.wait(LONG)
    thread.join(LONG)
    assert told == [1, 0]


def test_a_version_that_is_rolled_back_is_no_new_one() -> None:
    records = [record(i, version=version) for i, version in enumerate((3, 3, 4, 2, 2, 5), 1)]
    assert curves(records, "x").count("osd-promoted") == 2  # 4 and 5; what served when counting began was there


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
    assert visitor_at(host) == visitor


@given(st.integers(1, 60), st.lists(st.sampled_from("abcdef"), max_size=200))
def test_nobody_holds_more_than_is_left_and_newcomers_find_a_place(capacity: int, takers: list[str]) -> None:
    shares = Shares(capacity)
    for taker in takers:
        held, free = shares.held[taker], capacity - shares.held.total()
        assert shares.take(taker) == (held < free or (not held and free > -capacity))
    assert all(held <= capacity // 2 + 1 for held in shares.held.values())
    assert shares.held.total() <= 2 * capacity
    total = shares.held.total()
    assert shares.take("somebody new") == (total < 2 * capacity)
    for taker, held in list(shares.held.items()):
        for _ in range(held):
            shares.give(taker)
    assert not shares.held


def test_those_who_are_trusted_are_bound_by_the_capacity_alone() -> None:
    shares = Shares(3)
    assert [shares.take(None) for _ in range(4)] == [True, True, True, False]


def test_a_rate_leaves_to_each_what_they_need_however_many_hurry() -> None:
    now = [0.0]
    rate = Rate(12, 2.0, clock=lambda: now[0])
    assert [sum(rate.take(name) for _ in range(20)) for name in "abcdefgh"] == [6, 6, 6, 6, 0, 0, 0, 0]
    now[0] = 2.0
    # As many as four came: a share for each, and one for somebody new.
    assert [sum(rate.take(name) for _ in range(20)) for name in "abcde"] == [2] * 5
    now[0] = 9.0
    assert sum(rate.take("a") for _ in range(20)) == 6
    assert sum(rate.take(None) for _ in range(20)) == 12


class Visits:
    """Threads in a line whose clock is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(work=lambda: self.now)
        self.line = self.turns._line = Line()  # type: ignore[assignment]
        self.order: list[str] = []
        self.threads: list[threading.Thread] = []

    def queue(self, visitor: str | None, name: str, seconds: float = 0.0, rounds: int = 1, **settings: Any) -> None:
        """Let somebody queue, and wait until they have; each of their rounds takes so many seconds."""

        def visit() -> None:
            with self.turns.turn(visitor=visitor, **settings) as turn:
                for _ in range(rounds if turn is not None else 0):
                    self.order.append(name)
                    self.now += seconds
                    turn.give_way()

        self.threads.append(threading.Thread(target=visit))
        self.threads[-1].start()
        assert self.line.queued.acquire(timeout=PATIENCE)

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(PATIENCE)
        return self.order


def test_one_visitor_who_queues_often_comes_after_another_who_queues_once() -> None:
    visits = Visits()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        for i in range(4):
            visits.queue("many", f"many {i}", seconds=1.0)
        visits.queue("one", "one", seconds=1.0)
    assert visits.join() == ["many 0", "one", "many 1", "many 2", "many 3"]


def test_a_long_answer_gives_way_in_its_middle_and_goes_on() -> None:
    visits = Visits()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("long", "long", seconds=1.0, rounds=3)
        visits.queue("short", "short", seconds=0.1)
        visits.queue("long", "next", seconds=0.1)
    assert visits.join() == ["long", "short", "long", "long", "next"]


def test_no_more_answers_begin_than_there_is_memory_for() -> None:
    visits = Visits()
    visits.turns.max_begun = 1
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("long", "long", seconds=1.0, rounds=3)
        visits.queue("short", "short")
    assert visits.join() == ["long", "long", "long", "short"]


def test_what_must_be_alone_waits_for_those_who_have_begun_and_for_no_later_ones() -> None:
    visits = Visits()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("a", "a", seconds=1.0, rounds=2)
        visits.queue("b", "b", seconds=2.0, rounds=2)
        visits.queue(None, "alone", alone=True)
        visits.queue("c", "c")
    assert visits.join() == ["a", "b", "a", "b", "alone", "c"]


def test_a_new_address_is_no_better_than_whoever_used_least() -> None:
    visits = Visits()
    visits.queue("old", "old", seconds=1.0)
    visits.join()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("old", "old again")
        visits.queue("new", "new")
    assert visits.join() == ["old", "old again", "new"]


def test_work_done_while_nobody_waited_counts_against_nobody() -> None:
    visits = Visits()
    for visitor in ("late", "modest"):
        visits.queue(visitor, "before")
        visits.join()
    visits.queue("modest", "alone", seconds=100.0)
    visits.join()
    visits.order.clear()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("late", "late", seconds=1.0, rounds=3)
        visits.queue("modest", "modest", seconds=1.0)
    assert visits.join() == ["late", "modest", "late", "late"]


def test_one_who_comes_back_goes_before_those_who_have_worked_meanwhile() -> None:
    visits = Visits()
    visits.queue("modest", "before")
    visits.join()

    def visit(name: str) -> None:
        with visits.turns.turn(visitor=name) as turn:
            for _ in range(3):
                visits.order.append(name)
                visits.now += 1.0
                if len(visits.order) == 5:
                    visits.queue("modest", "modest")
                turn.give_way()

    visits.order.clear()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        for name in "ab":
            visits.threads.append(threading.Thread(target=visit, args=(name,)))
            visits.threads[-1].start()
            assert visits.line.queued.acquire(timeout=PATIENCE)
    visits.join()
    assert visits.order == ["a", "b", "b", "a", "a", "modest", "b"]


def test_only_the_work_of_ones_own_thread_is_counted() -> None:
    turns = Turns()

    def work() -> None:
        while time.thread_time() < 0.1:
            pass

    with turns.turn(visitor="a"):
        burner = threading.Thread(target=work)
        burner.start()
        burner.join(PATIENCE)
    assert turns._done["a"] < 0.1


def test_a_visitor_may_begin_so_many_answers_that_others_can_begin_as_well() -> None:
    visits, held = Visits(), []
    visits.turns.max_begun = 4
    visits.turns._done = {"hog": 0.0, "other": 0.0}
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        for _ in range(6):
            place = Turn("hog", lambda before: None, False)
            place.has_begun = visits.turns._best([place]) is place
            visits.turns._line.append(place)  # type: ignore[arg-type]
            held.append(place.has_begun)
        assert held == [True, True, False, False, False, False]
        other = Turn("other", lambda before: None, False)
        assert visits.turns._best([other]) is other


def test_those_who_may_not_begin_yet_do_not_hold_back_those_who_have_begun() -> None:
    visits, least = Visits(), []
    visits.turns.max_begun = 1

    def come() -> None:
        with visits.turns.turn(visitor="new"):
            least.append(visits.turns._least)

    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("long", "long", seconds=1.0, rounds=3)
        visits.threads.append(threading.Thread(target=come))
        visits.threads[-1].start()
        assert visits.line.queued.acquire(timeout=PATIENCE)
    assert visits.join() == ["long", "long", "long"]
    assert least == [3.0]  # whoever comes now is not before those who have had as much


def test_one_who_has_gone_leaves_the_line() -> None:
    visits, gone = Visits(), threading.Event()
    with visits.turns.turn():
        assert visits.line.queued.acquire(timeout=PATIENCE)
        visits.queue("a", "a", is_gone=gone.is_set)
        gone.set()
        visits.threads[0].join(PATIENCE)
        assert len(visits.turns) == 1
    assert visits.join() == []


def test_the_accounts_of_many_visitors_are_bounded() -> None:
    now = [0.0]
    turns = Turns(work=lambda: now[0])
    for i in range(3 * MAX_VISITORS):
        with turns.turn(visitor=str(i)):
            now[0] += 0.1
    assert len(turns._done) <= MAX_VISITORS + 1
