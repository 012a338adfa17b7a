"""Which logits processors and stopping criteria are served, which are refused, and how one with a memory is served."""

import functools
import itertools
import logging
import operator
import random
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from osd_hf import OnlineAssistant, OnlineConfig, ReplayedProcessor, UnsupportedGenerationError, capture_traces
from osd_hf.capture import guards
from osd_hf.capture.guards import check_criteria, check_processors
from osd_hf.capture.object_state import Reachable as look_through

IDS = models.prompt()
FROZEN = OnlineConfig(num_assistant_tokens=5, update_strategy="manual")

# --- processors that remember ---------------------------------------------------------------------------------------


class Pushing(LogitsProcessor):  # type: ignore[misc]
    """Prefers another token at each call, as `count` says."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        pushed = scores.clone()
        pushed[:, 3 + self.count() % 5] += 30.0
        return pushed

    def count(self) -> int:
        raise NotImplementedError


class Attribute(Pushing):
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class Locked(Attribute):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def count(self) -> int:
        with self.lock:
            return super().count()


class Nested(Pushing):
    def __init__(self) -> None:
        self.a = types.SimpleNamespace(b=types.SimpleNamespace(n=0))

    def count(self) -> int:
        self.a.b.n += 1
        return int(self.a.b.n)


class InLists(Pushing):
    def __init__(self) -> None:
        self.data: dict[str, Any] = {"rows": [[0], ({"n": [0]},)], "of": object()}

    def count(self) -> int:
        self.data["rows"][1][0]["n"][0] += 1
        return int(self.data["rows"][1][0]["n"][0])


class Slots(Pushing):
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class HeldSlots(Pushing):
    def __init__(self) -> None:
        self.inner = Slots()

    def count(self) -> int:
        return self.inner.count()


class OfClass(Pushing):
    calls = 0

    def count(self) -> int:
        type(self).calls += 1
        return type(self).calls


class InTensor(Pushing):
    def __init__(self) -> None:
        self.calls = torch.zeros(1, dtype=torch.long)

    def count(self) -> int:
        self.calls += 1
        return int(self.calls)


class InLargeTensor(Pushing):
    def __init__(self) -> None:
        self.calls = torch.zeros(1 << 19)

    def count(self) -> int:
        self.calls[17] += 1
        return int(self.calls[17])


class InArray(Pushing):
    def __init__(self) -> None:
        self.calls = np.zeros(4, np.int64)

    def count(self) -> int:
        self.calls[2] += 1
        return int(self.calls[2])


class Drawing(Pushing):
    def __init__(self) -> None:
        self.rng = random.Random(3)

    def count(self) -> int:
        return self.rng.randrange(5)


class DrawingTensors(Pushing):
    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(3)

    def count(self) -> int:
        return int(torch.randint(5, (1,), generator=self.rng))


class Iterating(Pushing):
    def __init__(self) -> None:
        self.numbers = itertools.count()

    def count(self) -> int:
        return next(self.numbers)


class Generating(Pushing):
    def __init__(self) -> None:
        self.numbers = (n for n in range(10_000))

    def count(self) -> int:
        return next(self.numbers)


class LastToken(LogitsProcessor):  # type: ignore[misc]
    """Forbids the token that ended the sequence of the call before."""

    def __init__(self) -> None:
        self.last = 3

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.last] = -torch.inf
        self.last = int(input_ids[0, -1])
        return scores


class FirstCalls(LogitsProcessor):  # type: ignore[misc]
    """Counts down, and then does nothing any more."""

    def __init__(self) -> None:
        self.left = 2

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left = max(0, self.left - 1)
        if self.left == 1:
            scores[:, 7] += 30.0
        return scores


CALLS = [0]
CALLED = 0


def by_global_list(batch: int, ids: torch.Tensor) -> list[int]:
    CALLS[0] += 1
    return [3 + CALLS[0] % 5]


def by_global_name(batch: int, ids: torch.Tensor) -> list[int]:
    global CALLED
    CALLED += 1
    return [3 + CALLED % 5]


def helper() -> int:
    CALLS[0] += 1
    return CALLS[0]


def by_helper(batch: int, ids: torch.Tensor) -> list[int]:
    return [3 + helper() % 5]


def in_default(batch: int, ids: torch.Tensor, calls: list[int] = [0]) -> list[int]:  # noqa: B006
    calls[0] += 1
    return [3 + calls[0] % 5]


def in_own_attribute(batch: int, ids: torch.Tensor) -> list[int]:
    in_own_attribute.calls += 1  # type: ignore[attr-defined]
    return [3 + in_own_attribute.calls % 5]  # type: ignore[attr-defined]


in_own_attribute.calls = 0  # type: ignore[attr-defined]


def in_a_cell() -> Callable[..., list[int]]:
    calls = 0

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        nonlocal calls
        calls += 1
        return [3 + calls % 5]

    return allowed


def in_a_partial() -> Callable[..., list[int]]:
    def allowed(calls: dict[str, int], batch: int, ids: torch.Tensor) -> list[int]:
        calls["n"] += 1
        return [3 + calls["n"] % 5]

    return functools.partial(allowed, {"n": 0})


def in_a_method() -> Callable[..., list[int]]:
    counter = Attribute()

    class Allowing:
        def __init__(self) -> None:
            self.counter = counter

        def allowed(self, batch: int, ids: torch.Tensor) -> list[int]:
            return [3 + self.counter.count() % 5]

    return Allowing().allowed


def wrapped() -> Callable[..., list[int]]:
    return torch.no_grad()(in_a_cell())  # type: ignore[no-any-return, no-untyped-call]


REMEMBERING: dict[str, Callable[[], Any]] = {
    cls.__name__: cls
    for cls in (Attribute, Locked, Nested, InLists, Slots, HeldSlots, OfClass, InTensor, InLargeTensor, InArray,
                Drawing, DrawingTensors, Iterating, Generating, LastToken, FirstCalls)
}  # fmt: skip
REMEMBERING |= {
    "a partial": lambda: functools.partial(lambda calls, ids, scores: calls.append(1) or scores.roll(len(calls)), []),
}
REMEMBERING_FUNCTIONS: dict[str, Callable[[], Any]] = {
    **{f.__name__: (lambda f=f: f) for f in (by_global_list, by_global_name, by_helper, in_default, in_own_attribute)},
    **{f.__name__: f for f in (in_a_cell, in_a_partial, in_a_method, wrapped)},
}


# --- processors that do not -----------------------------------------------------------------------------------------


class Fixed(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, token: int = 5) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.token] = -torch.inf
        return scores


class Table(LogitsProcessor):  # type: ignore[misc]
    """Tables that are built when first asked for, and kept by device."""

    log = logging.getLogger(__name__)

    def __init__(self) -> None:
        self.tables: dict[str, torch.Tensor] = {}
        self.large = torch.ones(1 << 20)
        self.tokenizer = models.tokenizer()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.log.debug("asked about %d tokens", input_ids.shape[1])
        if str(scores.device) not in self.tables:
            self.tables[str(scores.device)] = torch.linspace(0, 3, scores.shape[-1])
        text = self.tokenizer.decode(input_ids[0])
        return scores + self.tables[str(scores.device)] * (len(text) % 3) * self.large[0]


class Scratch(LogitsProcessor):  # type: ignore[misc]
    """A buffer that each call writes anew, with the same."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mask = torch.zeros(200_000)
        self.mask[: scores.shape[-1] // 2] = 1.0
        return scores + self.mask[: scores.shape[-1]]


class Network(LogitsProcessor):  # type: ignore[misc]
    def __init__(self) -> None:
        self.net = torch.nn.Sequential(torch.nn.Linear(1, models.VOCAB), torch.nn.Tanh())
        torch.nn.init.constant_(self.net[0].weight, 0.3)
        torch.nn.init.constant_(self.net[0].bias, 0.1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.net((input_ids[:, -1:] % 7).float())


@functools.lru_cache(64)
def remainder(token: int) -> list[int]:
    return [t for t in range(3, models.VOCAB) if t % 3 == token % 3]


def cached(batch: int, ids: torch.Tensor) -> list[int]:
    return remainder(int(ids[-1]))


def trie() -> Callable[..., list[int]]:
    tree: dict[int, Any] = {}
    for word in itertools.product(range(3, 9), range(9, 15), range(15, 18)):
        node = tree
        for token in word:
            node = node.setdefault(token, {})

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        node = tree
        for token in ids[IDS.shape[1] :].tolist():
            node = node[token] or tree  # KeyError for what no answer holds
        return list(node or tree)

    return allowed


STATELESS: dict[str, Callable[[], Any]] = {cls.__name__: cls for cls in (Fixed, Table, Scratch, Network)} | {
    "a function": lambda: lambda ids, scores: scores.roll(1, -1) if int(ids[0, -1]) % 2 else scores,
}
STATELESS_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "cached": lambda: cached,
    "trie": trie,
    "lambda": lambda: lambda batch, ids: range(3, 20 + len(ids) % 7),
    "numpy": lambda: functools.partial(lambda table, batch, ids: table[len(ids) % 3], np.arange(60).reshape(3, 20)),
}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return models.pair()


def settings(kind: str, thing: Any) -> dict[str, Any]:
    return {"prefix_allowed_tokens_fn": thing} if kind == "function" else {"logits_processor": [thing]}


def answer(generate: Callable[..., Any], **kwargs: Any) -> list[int]:
    kwargs = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(IDS), **kwargs}
    return generate(IDS, **kwargs)[0, IDS.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("processor", name) for name in REMEMBERING), *(("function", name) for name in REMEMBERING_FUNCTIONS)],
)
def test_what_may_remember_is_refused_before_any_work_and_left_as_it_was(
    kind: str, name: str, pair: tuple[Any, Any]
) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    thing = (REMEMBERING if kind == "processor" else REMEMBERING_FUNCTIONS)[name]()
    opaque = name in ("Locked", "Iterating", "Generating")
    before = None if opaque else look_through(thing)
    with models.ForwardCounter(target, assistant.draft) as forwards:
        with pytest.raises(UnsupportedGenerationError, match="ReplayedProcessor"):
            answer(assistant.generate, **settings(kind, thing))
        with capture_traces(target, print), pytest.raises(UnsupportedGenerationError, match="ReplayedProcessor"):
            answer(target.generate, assistant_model=draft, **settings(kind, thing))
        assert forwards.count == 0
    assert opaque or name == "InLargeTensor" or look_through(thing) == before
    if name == "Locked":
        assert thing.calls == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("processor", name) for name in STATELESS), *(("function", name) for name in STATELESS_FUNCTIONS)],
)
def test_what_forgets_is_served(kind: str, name: str, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    thing = (STATELESS if kind == "processor" else STATELESS_FUNCTIONS)[name]()
    alone = answer(target.generate, **settings(kind, thing))
    for _ in range(2):
        assert answer(assistant.generate, **settings(kind, thing)) == alone


def test_what_is_refused_is_named(pair: tuple[Any, Any]) -> None:
    for thing, words in (
        (Locked(), r"Locked may keep state.*_thread.lock at `\.lock`.*is_stateless"),
        (Iterating(), r"Iterating may keep state.*itertools.count at `\.numbers`"),
        (Nested(), "Nested keeps state"),
        (PrefixConstrainedLogitsProcessor(by_helper, 1), "`prefix_allowed_tokens_fn=by_helper` keeps state"),
        (lambda ids, scores: scores + missing, "cannot be asked.*missing"),  # type: ignore[name-defined]  # noqa: F821
    ):
        with pytest.raises(UnsupportedGenerationError, match=words):
            check_processors([thing], IDS, models.VOCAB)


class Trusted(Locked):
    is_stateless = True

    def count(self) -> int:
        with self.lock:
            return 2


def test_what_says_that_it_forgets_is_believed(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate, logits_processor=[Trusted()])
    assert answer(assistant.generate, logits_processor=[Trusted()]) == alone
    lock = threading.Lock()

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        with lock:
            return [3, 4, 5]

    with pytest.raises(UnsupportedGenerationError, match="_thread.lock"):
        answer(assistant.generate, prefix_allowed_tokens_fn=allowed)
    allowed.is_stateless = True  # type: ignore[attr-defined]
    alone = answer(target.generate, prefix_allowed_tokens_fn=allowed)
    assert answer(assistant.generate, prefix_allowed_tokens_fn=allowed) == alone


class AfterToken(LogitsProcessor):  # type: ignore[misc]
    """Changes its mind for good where it sees a token that it waits for, as what bounds a chain of thought does."""

    def __init__(self, waits_for: Any) -> None:
        self.waits_for = waits_for
        self.has_seen = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = int(input_ids[0, -1])
        self.has_seen |= last in self.waits_for if isinstance(self.waits_for, list) else last == self.waits_for
        pushed = scores.clone()
        pushed[:, 7] += 30.0 * self.has_seen
        return pushed


class AfterConstant(AfterToken):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.has_seen |= bool(input_ids[0, -1] == 41)
        return scores


@pytest.mark.parametrize("thing", [AfterToken(43), AfterToken([3, 44]), AfterConstant(None)])
def test_a_memory_that_waits_for_a_token_is_refused_before_any_work(thing: Any, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    with models.ForwardCounter(target, assistant.draft) as forwards:
        with pytest.raises(UnsupportedGenerationError, match="keeps state"):
            answer(assistant.generate, logits_processor=[thing])
        assert forwards.count == 0
    assert not thing.has_seen


class Late(Pushing):
    """Remembers from the sixth token of an answer on, further than anything is tried out."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += input_ids.shape[1] > self.prompt + 5
        pushed = scores.clone()
        if self.calls:
            pushed[:, 3 + self.calls % 5] += 30.0
        return pushed


@pytest.mark.parametrize("has_cache", [False, True])
def test_a_memory_that_shows_late_costs_time_and_no_token(
    has_cache: bool, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)

    def asked(generate: Callable[..., Any]) -> tuple[list[int], Any, int]:
        late = Late(IDS.shape[1])
        cache = None
        if has_cache:
            cache = DynamicCache(config=target.config)
            target(IDS[:, :-3], past_key_values=cache, use_cache=True)
        tokens = answer(generate, past_key_values=cache, logits_processor=[late])
        return tokens, None if cache is None else cache.get_seq_length(), late.calls

    alone = asked(target.generate)
    assert asked(assistant.generate) == alone
    assert "answers alone" in caplog.text
    assert assistant.stats.num_requests == 0


def test_a_processor_that_does_not_bear_a_drafted_token_costs_no_answer(
    pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    alone = answer(target.generate)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:  # one answer, and no way on from anything else
        emitted = ids[IDS.shape[1] :].tolist()
        return list(range(models.VOCAB)) if emitted == alone[: len(emitted)] else []

    assert answer(target.generate, prefix_allowed_tokens_fn=allowed) == alone
    assert answer(assistant.generate, prefix_allowed_tokens_fn=allowed) == alone
    assert "answers alone" in caplog.text
    with pytest.raises(ValueError, match="empty"):  # as the target alone
        answer(assistant.generate, prefix_allowed_tokens_fn=lambda batch, ids: [] if len(ids) > 9 else [5, 6])


class Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends an answer where somebody else says so."""

    def __init__(self) -> None:
        self.is_stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.is_stopped)


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_its_caller_ends_has_ended(streams: bool, pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    stop, seen = Stop(), []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.append(value)
            stop.is_stopped = len(seen) > 2  # the prompt, and two rounds

        def end(self) -> None:
            pass

    class Ending(LogitsProcessor):  # type: ignore[misc]
        is_stateless = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stop.is_stopped |= input_ids.shape[1] > IDS.shape[1] + 6
            return scores

    how: dict[str, Any] = {"streamer": Streamer()} if streams else {"logits_processor": [Ending()]}
    told = answer(assistant.generate, max_new_tokens=48, stopping_criteria=StoppingCriteriaList([stop]), **how)
    assert stop.is_stopped
    assert 0 < len(told) < 48
    assert told == answer(target.generate, max_new_tokens=48)[: len(told)]


def test_a_sampled_answer_that_cannot_be_vouched_for_is_refused(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    with pytest.raises(UnsupportedGenerationError, match="Late keeps state"):
        answer(assistant.generate, logits_processor=[Late(IDS.shape[1])], do_sample=True)


def test_what_was_tried_out_is_put_back_as_it_was(pair: tuple[Any, Any]) -> None:
    class Building(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.tables: dict[str, Any] = {"a": np.arange(2), "b": bytearray(b"xy"), "c": [np.float32(1)]}

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.tables.setdefault("d", np.ones(3))
            return scores

    thing = Building()
    before = dict(thing.tables)
    check_processors([thing], IDS, models.VOCAB)
    assert thing.tables.keys() == before.keys()
    assert all(thing.tables[name] is value for name, value in before.items())
    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    assert answer(assistant.generate, logits_processor=[thing]) == answer(target.generate)


@pytest.mark.parametrize("imports", ["outside", "inside"])
def test_what_a_module_keeps_is_looked_through(imports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("counting_module")
    module.calls = [0]
    monkeypatch.setitem(sys.modules, "counting_module", module)
    source = "def allowed(batch, ids):\n    counting_module.calls[0] += 1\n    return [3, 4, 5]\n"
    line = "import counting_module\n"
    if imports == "inside":
        source = source.replace("    counting_module.calls", f"    {line}    counting_module.calls")
    scope: dict[str, Any] = {"__name__": "a_users_module"}
    exec((line if imports == "outside" else "") + source, scope)
    with pytest.raises(UnsupportedGenerationError, match="keeps state"):
        check_processors([PrefixConstrainedLogitsProcessor(scope["allowed"], 1)], IDS, models.VOCAB)
    assert module.calls == [0]


def test_names_that_are_made_in_a_module_while_it_is_tried_out_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("counting_module")
    monkeypatch.setitem(sys.modules, "counting_module", module)
    scope: dict[str, Any] = {"__name__": "a_users_module", "counting_module": module}
    exec(
        "def allowed(batch, ids):\n"
        "    counting_module.calls = getattr(counting_module, 'calls', 0) + 1\n"
        "    return [3, 4, 5]\n",
        scope,
    )
    with pytest.raises(UnsupportedGenerationError, match="keeps state"):
        check_processors([PrefixConstrainedLogitsProcessor(scope["allowed"], 1)], IDS, models.VOCAB)
    assert not hasattr(module, "calls")


def test_functions_of_numpy_and_getters_are_no_memory() -> None:
    first, where = operator.itemgetter(0), np.where

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [int(np.exp(0.0)) + 2, int(where(True, 4, 5)), first([5])]

    check_processors([PrefixConstrainedLogitsProcessor(allowed, 1)], IDS, models.VOCAB)


def test_a_request_tries_out_once(pair: tuple[Any, Any]) -> None:
    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [3, 4, 5]

    class Counted(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    target, draft = pair
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    tried = []
    with pytest.MonkeyPatch.context() as patch:
        real = guards._try_out
        patch.setattr(guards, "_try_out", lambda *args: tried.append(args[0]) or real(*args))
        answer(assistant.generate, logits_processor=[Counted()], prefix_allowed_tokens_fn=allowed)
    assert len(tried) == 2


def test_what_was_shown_of_an_answer_that_cannot_be_vouched_for_is_not_passed_off_as_one(
    pair: tuple[Any, Any],
) -> None:
    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            pass

    target, draft = pair
    late = Late(IDS.shape[1])
    assistant = OnlineAssistant(target, draft, config=FROZEN)
    with pytest.raises(UnsupportedGenerationError, match="Late keeps state"):
        answer(assistant.generate, logits_processor=[late], streamer=Streamer())
    assert late.calls == 0


@pytest.mark.parametrize("name", ["Nested", "Slots", "InLists", "OfClass"])
def test_criteria_that_remember_are_refused(name: str) -> None:
    inner = REMEMBERING[name]()

    class Stopping(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([inner.count() > 100])

    with pytest.raises(UnsupportedGenerationError, match="stopping criterion Stopping keeps state"):
        check_criteria(StoppingCriteriaList([Stopping()]), IDS, models.VOCAB)


def test_criteria_that_hold_what_cannot_be_looked_through_are_refused_unless_they_say_so() -> None:
    class Pressed(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.event = threading.Event()

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([self.event.is_set()])

    criterion: Any = Pressed()
    with pytest.raises(UnsupportedGenerationError, match=r"Pressed may keep state.*lock.*is_stateless"):
        check_criteria([criterion], IDS, models.VOCAB)
    criterion.is_stateless = True
    check_criteria([criterion], IDS, models.VOCAB)


# --- the opt-in -----------------------------------------------------------------------------------------------------


class Matcher(LogitsProcessor):  # type: ignore[misc]
    """A small grammar with a memory: each token is to be the sum of the tokens before it, or one of four beside."""

    made: list["Matcher"] = []

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sums: list[int] = []
        Matcher.made.append(self)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with self.lock:
            if self.sums:
                token = int(input_ids[0, -1])
                assert token in self.allowed() or token == 2, "no token of the grammar"
                self.sums.append(self.sums[-1] * 5 + token)
            else:
                self.sums.append(0)
        masked = torch.full_like(scores, -torch.inf)
        masked[:, self.allowed()] = scores[:, self.allowed()]
        return masked

    def allowed(self) -> list[int]:
        return [2, *(3 + (self.sums[-1] + 7 * i) % (models.VOCAB - 3) for i in range(6))]

    def take_back(self, calls: int) -> None:
        del self.sums[-calls:]
        assert self.sums


def opted_in(takes_back: bool) -> ReplayedProcessor:
    return ReplayedProcessor(Matcher, Matcher.take_back if takes_back else None)


@functools.cache
def answered_with_a_memory() -> list[tuple[torch.Tensor, dict[str, Any], list[list[int]]]]:
    """Prompts, settings, and what the target alone answers."""
    target, found = models.build(), []
    for ids in models.prompts(4):
        for eos in (None, 2):
            kwargs = {"max_new_tokens": 24, "attention_mask": torch.ones_like(ids), "eos_token_id": eos}
            alone = target.generate(ids, logits_processor=[Matcher()], do_sample=False, **kwargs)
            found.append((ids, kwargs, alone.tolist()))
    return found


@pytest.mark.parametrize("takes_back", [True, False])
@pytest.mark.parametrize("drafting", ["lean", "stock"])
def test_a_processor_with_a_memory_is_served_exactly_while_the_draft_learns(drafting: Any, takes_back: bool) -> None:
    target, draft = models.pair(noise=0.2)
    config = OnlineConfig(
        num_assistant_tokens=5,
        update_strategy="interval",
        drafting=drafting,
        update_interval=2,
        steps_per_update=2,
        learning_rate=3e-3,
        gate=False,
    )
    assistant = OnlineAssistant(target, draft, config=config)
    processor = opted_in(takes_back)
    for ids, kwargs, alone in answered_with_a_memory():
        ours = assistant.generate(ids, logits_processor=[processor], do_sample=False, **kwargs)
        assert ours.tolist() == alone
    assert 0.1 < assistant.stats.alpha < 0.95
    assert assistant.version >= 3


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_processor_with_a_memory_serves_the_target_alone_too(takes_back: bool, pair: tuple[Any, Any]) -> None:
    processor = opted_in(takes_back)
    for _ in range(2):
        assert answer(pair[0].generate, logits_processor=[processor]) == answer(
            pair[0].generate, logits_processor=[Matcher()]
        )


def test_taking_back_spares_making_processors_anew(pair: tuple[Any, Any]) -> None:
    assistant = OnlineAssistant(*pair, config=FROZEN)
    made = {}
    for takes_back in (True, False):
        Matcher.made.clear()
        answer(assistant.generate, logits_processor=[opted_in(takes_back)])
        made[takes_back] = len(Matcher.made)
    assert made[True] <= 3 < made[False]


def test_requests_at_once_share_no_memory(pair: tuple[Any, Any]) -> None:
    processor = opted_in(True)
    one, other = processor.begin(6), processor.begin(6)
    scores = torch.zeros(1, models.VOCAB)
    longer = torch.cat([IDS, torch.tensor([[3]])], dim=1)
    expected = Matcher()
    first, second = expected(IDS, scores), expected(longer, scores)
    assert torch.equal(one(IDS, scores), first)
    assert torch.equal(other(IDS, scores), first)
    assert torch.equal(one(longer, scores), second)
    assert torch.equal(other(longer, scores), second)
    assert torch.equal(one(IDS, scores), first)


def test_a_processor_that_fails_begins_anew(pair: tuple[Any, Any]) -> None:
    processor, scores = opted_in(True), torch.zeros(1, models.VOCAB)
    expected = Matcher()(IDS, scores)
    processor(IDS, scores)
    wrong = next(t for t in range(3, models.VOCAB) if t not in Matcher.made[-1].allowed())
    with pytest.raises(AssertionError, match="no token of the grammar"):
        processor(torch.cat([IDS, torch.tensor([[wrong]])], dim=1), scores)
    assert torch.equal(processor(IDS, scores), expected)


@pytest.mark.parametrize("drafting", ["lean", "stock"])
def test_rows_that_sampling_verifies_with_are_the_targets_own(drafting: Any) -> None:
    # p of each drafted token, as the loop had it, against a pass of the target alone over the answer.
    target, draft = models.pair(noise=0.2)
    assistant = OnlineAssistant(target, draft, config=replace(FROZEN, drafting=drafting))
    kwargs = {"do_sample": True, "temperature": 1.4, "top_k": 4, "max_new_tokens": 20}
    processor = opted_in(True)
    for number in range(4):
        torch.manual_seed(number)
        output = assistant.generate(
            IDS, logits_processor=[processor], output_scores=True, return_dict_in_generate=True,
            attention_mask=torch.ones_like(IDS), **kwargs,
        )  # fmt: skip
        matcher, rows = Matcher(), output.scores
        with torch.no_grad():
            logits = target(output.sequences).logits[:, IDS.shape[1] - 1 : -1].float()
        for i, row in enumerate(rows):
            plain = matcher(output.sequences[:, : IDS.shape[1] + i], logits[:, i]) / 1.4
            plain = plain.masked_fill(plain < plain.topk(4).values[..., -1:], -torch.inf)
            assert torch.equal(row.isfinite(), plain.isfinite())
            assert torch.allclose(row.softmax(-1).double(), plain.softmax(-1).double(), rtol=1e-3, atol=1e-4)
