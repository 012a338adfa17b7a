"""Past text: what an index proposes, against a search by hand; whose text is proposed to whom; and rounds that take
their candidates from it."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

from osd_hf import AcceptanceStats, OnlineAssistant, Trace, replay
from osd_hf.decoding.text import (
    BYTES_PER_TOKEN,
    MAX_MATCH_TOKENS,
    MAX_PLACES,
    SEPARATOR,
    EarlierText,
    Guess,
    TextIndex,
)
from osd_hf.errors import ConfigError
from osd_hf.replay import emitted_tokens


def found_by_hand(text: Sequence[int], tail: Sequence[int]) -> Guess | None:
    """The first guess, by looking at every place."""
    places = []
    for end in range(1, len(text)):  # a token follows
        length = 0
        while length < min(MAX_MATCH_TOKENS, len(tail), end) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        if length:
            places.append((length, end))
    if not places:
        return None
    longest = max(length for length, _ in places)
    # Endings of 8, 4, 2 and 1 tokens lead to places, the newest of which are looked at.
    order = max(n for n in (1, 2, 4, 8) if n <= longest)
    near = [p for p in reversed(places) if p[0] >= order][:MAX_PLACES]
    longest = max(length for length, _ in near)
    ends = [end for length, end in near if length == longest]
    votes = Counter(text[end] for end in ends)
    del votes[SEPARATOR]
    if not votes:
        return None
    token = max(votes, key=lambda t: (votes[t], max(end for end in ends if text[end] == t)))
    return Guess(token, 0, longest, votes[token], len(ends))


tokens = st.lists(st.integers(0, 3), max_size=60)


@settings(max_examples=300)
@given(st.lists(tokens, min_size=1, max_size=4), tokens.filter(bool))
def test_a_guess_is_what_follows_the_longest_match_most_often(texts: list[list[int]], tail: list[int]) -> None:
    index, text = TextIndex(4096), list[int]()
    for i, part in enumerate(texts):
        if i:
            index.extend([SEPARATOR])
            text.append(SEPARATOR)
        index.extend(part)
        text += part
    assert len(index) == len(text)
    assert next(index.guesses(tail), None) == found_by_hand(text, tail)


@settings(max_examples=100)
@given(
    st.sampled_from(["request", "owner", "domain"]),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=30)), max_size=30
    ),
)
def test_no_token_of_an_owner_is_proposed_to_another(scope: str, requests: list[tuple[int, str, list[int]]]) -> None:
    """Each owner speaks in tokens of its own; answers are told from prompts as well."""
    earlier = EarlierText(scope, 1 << 20)
    spoken: set[tuple[int, str, str]] = set()

    def said(owner: int, domain: str, what: str, token: int) -> int:
        return 1000 * owner + 100 * "ab".index(domain) + 50 * (what == "answer") + token

    for owner, domain, text in requests:
        prompt = [said(owner, domain, "prompt", t) for t in text]
        answer = [said(owner, domain, "answer", t) for t in text]
        for known in range(4):  # whatever the request is like
            for index in earlier.of(str(owner), domain):
                for tail in ([said(known, d, w, t)] for d in "ab" for w in ("prompt", "answer") for t in range(10)):
                    for guess in index.guesses(tail):
                        whose, rest = divmod(guess.token, 1000)
                        is_shared = scope == "domain" and rest // 100 == "ab".index(domain) and rest % 100 >= 50
                        assert scope != "request"
                        assert whose == owner or is_shared
        earlier.add(str(owner), domain, prompt, answer)
        spoken.add((owner, domain, scope))


def test_earlier_text_stays_within_its_bytes_and_the_longest_unused_goes() -> None:
    earlier = EarlierText("owner", 40 * 256 * BYTES_PER_TOKEN)
    for owner in range(60):  # each takes as much
        earlier.add(str(owner), None, [owner] * 100, [])
        assert earlier.of("0", None)  # used all the time
        assert earlier.nbytes <= earlier.max_bytes
    assert [bool(earlier.of(str(owner), None)) for owner in (0, 1, 58, 59)] == [True, False, True, True]
    one = EarlierText("owner", 600 * BYTES_PER_TOKEN)
    for _ in range(20):
        one.add(None, None, range(100), range(100))
        assert one.nbytes <= one.max_bytes


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    """Return an assistant for which past text is free, and a forward of the draft is not."""
    assistant = models.assistant_of(target, draft, **{"num_assistant_tokens": "auto", **settings})
    if assistant.drafting is not None:
        assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 0.3})
    return assistant


def text_assistant(noise: float = 0.06, **settings: Any) -> OnlineAssistant:
    """Return an assistant that proposes past text alone and has measured its costs."""
    assistant = assistant_of(*models.pair(num_hidden_layers=1, noise=noise), candidates="text", **settings)
    for seed in range(3):
        asked(assistant, models.prompt(4, seed=100 + seed).repeat(1, 4), learn=False)
    return assistant


def asked(assistant: OnlineAssistant, ids: torch.Tensor, **settings: Any) -> tuple[list[int], Trace]:
    output, trace = models.answered(assistant, ids, **{"max_new_tokens": 24, **settings})
    return output[0].tolist(), trace


@pytest.mark.parametrize("architecture", models.ARCHITECTURES)
def test_answers_are_the_targets_wherever_candidates_come_from(architecture: str) -> None:
    target = models.build(architecture, **models.SHALLOW[architecture])
    target, draft = models.double(target), models.double(models.draft_of(target, noise=0.05))
    assistant = assistant_of(target, draft)
    for seed, more in enumerate(({}, {"repetition_penalty": 1.3}, {"eos_token_id": [5, 9]})):
        ids = models.prompt(12, seed=seed)
        alone = models.alone(target, ids, max_new_tokens=24, **more)[0].tolist()
        for _ in range(2):  # the second time, the answer is known
            ours, trace = asked(assistant, ids, **more)
            assert ours == alone
            assert sum(r.num_emitted for r in trace.rounds) == len(trace)
    stats = assistant.stats
    assert stats.text_examined > 0
    assert stats.examined > 0
    assert stats.accepted + stats.text_accepted + stats.target_forwards >= stats.emitted


def test_a_trace_tells_the_sources_apart() -> None:
    target, draft = models.pair(noise=0.05, num_hidden_layers=1)
    assistant = assistant_of(target, draft)
    ids = models.prompt(12)
    asked(assistant, ids)
    assistant.reset_stats()
    _, trace = asked(assistant, ids)  # the same again: its answer is known
    stats = AcceptanceStats.from_trace(trace)
    assert stats == assistant.stats
    assert stats.text_accepted > 10
    proposed = sum(r.num_drafted for r in trace.rounds)
    assert stats.drafted + stats.text_drafted == proposed
    by_hand = [sum(r.text_counts[i] for r in trace.rounds) for i in range(3)]
    assert by_hand == [stats.text_drafted, stats.text_examined, stats.text_accepted]
    assert 0 < stats.text_alpha <= 1
    sources = Counter(t.source for t in emitted_tokens(trace, assistant.draft) if t.origin == "accepted")
    assert sources["text"] == stats.text_accepted
    assert sources["draft"] == stats.accepted
    assert AcceptanceStats.from_dict(stats.to_dict()) == stats
    # What any draft makes of the request is another matter.
    fixed = assistant_of(target, draft, num_assistant_tokens=4)
    _, by_draft = asked(fixed, ids)
    assert replay(draft, [trace], 4) == replay(draft, [by_draft], 4) == fixed.stats


def spoken(assistant: OnlineAssistant, **settings: Any) -> bool:
    """Whether the very first tokens of an answer, which nothing in its prompt tells, come from past text."""
    _, trace = asked(assistant, models.prompt(12), **settings)
    return trace.rounds[0].text_counts[2] >= 2


def test_nothing_is_kept_of_what_is_not_learned_from() -> None:
    assistant = text_assistant()
    assert not spoken(assistant, learn=False)
    assert not spoken(assistant, learn=False)
    assert not spoken(assistant)
    assert spoken(assistant)


def test_the_text_of_an_owner_is_proposed_to_no_other() -> None:
    assistant = text_assistant()
    assert not spoken(assistant, owner="a")
    assert not spoken(assistant, owner="b")
    assert not spoken(assistant)
    assert spoken(assistant, owner="a")
    with assistant.attached(owner="c"):
        ids = models.prompt(12)
        models.alone(assistant.target, ids, assistant_model=assistant.draft, max_new_tokens=24)
    assert spoken(assistant, owner="c")


def test_answers_of_a_domain_are_shared_where_that_is_asked_for() -> None:
    assistant = text_assistant(text_scope="domain")
    assert not spoken(assistant, owner="a", domain="x")
    assert not spoken(assistant, owner="b", domain="y")
    assert spoken(assistant, owner="c", domain="x") == spoken(assistant, owner="d", domain="x")
    alone = text_assistant(text_scope="request")
    assert not spoken(alone)
    assert not spoken(alone)
    with pytest.raises(ConfigError, match="text_scope"):
        alone.remember([1, 2, 3])


def test_text_that_is_to_be_remembered_is_proposed() -> None:
    assistant = text_assistant()
    answer = models.alone(assistant.target, models.prompt(12), max_new_tokens=24)[0]
    assistant.remember(answer, owner="a")
    assert not spoken(assistant, owner="b", learn=False)
    assert spoken(assistant, owner="a", learn=False)


def test_what_an_owner_said_is_forgotten_where_that_is_asked_for() -> None:
    assistant = text_assistant()
    asked(assistant, models.prompt(12), owner="a")
    assistant.forget("b")
    assert spoken(assistant, owner="a")
    assistant.forget("a")
    assert not spoken(assistant, owner="a")


@pytest.mark.parametrize("wrong", [[1, 2, -1], [1, models.VOCAB]])
def test_tokens_that_the_target_has_not_are_not_remembered(wrong: list[int]) -> None:
    assistant = text_assistant()
    with pytest.raises(ConfigError, match=f"from 0 to {models.VOCAB - 1}"):
        assistant.remember(wrong)
    for without in ({"candidates": "draft"}, {"num_assistant_tokens": 3}):
        with pytest.raises(ConfigError, match="Earlier text is kept with"):
            assistant_of(*models.pair(num_hidden_layers=1), **without).remember([1, 2])


def test_a_trace_holds_nothing_that_was_proposed_from_elsewhere_in_vain() -> None:
    assistant = text_assistant()
    ids = models.prompt(12)
    secret = list(range(40, 60))
    for token in range(models.VOCAB):
        assistant.remember([token, *secret])
    _, trace = asked(assistant, ids, max_new_tokens=12)
    assert sum(r.text_counts[1] - r.text_counts[2] for r in trace.rounds) > 0
    for r in trace.rounds:
        if r.from_text is not None:
            assert (r.drafted_ids[r.num_accepted :][r.from_text[r.num_accepted :]] == -1).all()
    corrected = [t for t in emitted_tokens(trace, assistant.draft) if t.origin == "corrected" and t.source == "text"]
    assert corrected
    assert all(token.drafted_id is None and token.drafted_prob is None for token in corrected)


class Strict(LogitsProcessor):
    """Allows what an automaton does, and fails behind anything else, as those of grammars do."""

    is_stateless = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[0, 12:].tolist()
        assert all((a + 1) % 8 == b for a, b in itertools.pairwise(answer)), answer
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, (answer[-1] + 1) % 8 if answer else 3] = 0.0
        return scores + allowed


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_that_bear_no_token_they_forbid_are_asked_about_none(do_sample: bool) -> None:
    assistant = text_assistant()
    assistant.remember([3, 9, 4, 9, 5, 9, 3, 3, 3])
    for _ in range(2):
        ours, trace = asked(
            assistant, models.prompt(12), logits_processor=LogitsProcessorList([Strict()]), do_sample=do_sample,
            max_new_tokens=10,
        )  # fmt: skip
        assert ours[12:] == [(3 + i) % 8 for i in range(10)]
        assert AcceptanceStats.from_trace(trace).text_drafted == 0
    ids = models.prompt(12)
    allowed = assistant.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=do_sample, max_new_tokens=10,
        prefix_allowed_tokens_fn=lambda _, said: [(int(said[-1]) + 1) % 8] if len(said) > 12 else [3],
    )  # fmt: skip
    assert allowed[0, 12:].tolist() == ours[12:]
