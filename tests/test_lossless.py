"""The answers are the target's own: token by token when greedy, in distribution when sampled. The checks are shown to
fail for a loop that accepts what it should not."""

import copy
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import models
import numpy as np
import pytest
import torch
from scipy import stats

from osd_hf import OnlineAssistant, OnlineConfig

TIE = 1e-4  # a difference of the top two logits below this may be broken otherwise

# Without the gate each update changes the draft.
FAST = OnlineConfig(
    num_assistant_tokens=5, update_strategy="interval", update_interval=2, steps_per_update=2, optimizer="adamw",
    learning_rate=3e-3, gate=False,
)  # fmt: skip
EACH = replace(FAST, update_interval=1, steps_per_update=1)
FROZEN = OnlineConfig(num_assistant_tokens=5, update_strategy="manual")

Request = tuple[torch.Tensor, dict[str, Any]]

# Settings, and what a forward of the draft takes, if that of the target takes 1: measured, it would be another number
# in each run.
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "lean": ({}, None),
    "auto": ({"num_assistant_tokens": "auto", "candidates": "draft"}, 0.1),
    "auto, losing": ({"num_assistant_tokens": "auto"}, 3.0),
    "both": ({"num_assistant_tokens": "auto"}, 0.1),
    "text": ({"num_assistant_tokens": "auto", "candidates": "text"}, 0.1),
}
every_way = pytest.mark.parametrize("way", WAYS)
# A draft that is always right, and one that is not.
every_way_to_stop = pytest.mark.parametrize(("way", "noise"), [*((way, 0.05) for way in WAYS), ("lean", 0.0)])


def assistant_of(target: Any, draft: Any, way: str, config: OnlineConfig, tokenizer: Any = None) -> OnlineAssistant:
    settings, draft_seconds = WAYS[way]
    assistant = OnlineAssistant(target, draft, tokenizer, replace(config, **settings))
    if assistant.drafting is not None and draft_seconds is not None:
        assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: draft_seconds})
    return assistant


# --- the checks -----------------------------------------------------------------------------------------------------


def greedy(ids: torch.Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    return {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24, **settings}


def answers_alone(target: Any, requests: list[Request]) -> list[Any]:
    """What the target answers by itself, with scores."""
    return [
        target.generate(ids, output_scores=True, return_dict_in_generate=True, **greedy(ids, settings))
        for ids, settings in requests
    ]


def greedy_divergences(
    target: Any, generate: Callable[..., Any], requests: list[Request], answers: list[Any] | None = None
) -> tuple[list[str], int]:
    """Answers that are not the target's own, but for ties; and the number of these ties. `answers` are those of the
    target alone, where it has been asked."""
    wrong, ties = [], 0
    answers = answers_alone(target, requests) if answers is None else answers
    for number, ((ids, settings), alone) in enumerate(zip(requests, answers, strict=True)):
        assisted = generate(ids, **greedy(ids, settings))
        start = alone.sequences.shape[1] - len(alone.scores)
        ours, theirs = assisted[0, start:], alone.sequences[0, start:]
        both = min(len(ours), len(theirs))
        differs = (ours[:both] != theirs[:both]).nonzero()
        if len(differs) == 0 and len(ours) == len(theirs):
            continue
        first = int(differs[0]) if len(differs) else both - 1
        top = alone.scores[first][0].topk(2).values
        if len(differs) and float(top[0] - top[1]) < TIE:
            ties += 1
        else:
            wrong.append(f"request {number}, token {first}: {ours.tolist()} instead of {theirs.tolist()}")
    return wrong, ties


def goodness_of_fit(counts: Counter[Any], probabilities: dict[Any, float]) -> float:
    """p-value of the chi-square test; outcomes that are expected fewer than five times make one class."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    common = [key for key, p in probabilities.items() if p * total >= 5]
    observed = [counts[key] for key in common]
    expected = [probabilities[key] * total for key in common]
    if total - sum(expected) > 1e-6 * total:
        observed.append(total - sum(observed))
        expected.append(total - sum(expected))
    elif sum(observed) < total:
        return 0.0  # what cannot be
    return float(stats.chisquare(observed, expected).pvalue)


def fits(counts: Counter[Any], probabilities: dict[Any, float], views: list[Callable[[Any], Any]]) -> float:
    """p-value over whole answers and over what each of `views` makes of them, for as many tests. Most answers are so
    rare that they make one class: departures are seen in parts of them with fewer answers."""

    def seen(view: Callable[[Any], Any]) -> float:
        observed: Counter[Any] = Counter()
        expected: dict[Any, float] = {}
        for answer, number in counts.items():
            observed[view(answer)] += number
        for answer, probability in probabilities.items():
            expected[view(answer)] = expected.get(view(answer), 0.0) + probability
        return goodness_of_fit(observed, expected)

    views = [lambda answer: answer, *views]
    return min(len(views) * min(map(seen, views)), 1.0)


def transitions_fit(answers: list[list[int]], table: np.ndarray[Any, Any]) -> float:
    """p-value that each token of the answers was drawn from the row of `table` of the token before it."""
    counts = np.zeros_like(table)
    for answer in answers:
        for before, after in itertools.pairwise(answer):
            counts[before, after] += 1
    expected = counts.sum(axis=1, keepdims=True) * table
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, table.size - len(table)))


# --- greedy ---------------------------------------------------------------------------------------------------------


def requests_of(target: Any) -> list[Request]:
    """Plain requests, and one each that is padded, penalized, ended by EOS, and cut."""
    ids, long = models.prompts(4), {"max_new_tokens": 2 * models.WINDOW}
    requests: list[Request] = [(x, long) for x in ids[:3]]
    answer = target.generate(ids[0], **greedy(ids[0], long))
    requests.append((ids[0], {**long, "eos_token_id": int(answer[0, -9])}))
    requests.append((ids[1], {**long, "repetition_penalty": 1.4}))
    requests.append((ids[2], {"max_new_tokens": 7, "no_repeat_ngram_size": 2}))
    if not target.config.is_encoder_decoder:
        padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids[3]], dim=1)
        requests.append((padded, {**long, "attention_mask": (torch.arange(padded.shape[1]) >= 5).long()[None]}))
    return requests


@functools.cache
def asked(architecture: str) -> tuple[Any, list[Request], list[Any]]:
    """A target, requests, and what it answers alone."""
    target = models.build(architecture, **models.SHALLOW[architecture])
    requests = requests_of(target)
    return target, requests, answers_alone(target, requests)


@pytest.mark.parametrize(
    ("architecture", "way"),
    [*itertools.product(models.ARCHITECTURES, ["lean"]),
     *itertools.product(["llama", "gemma3", "t5"], ["auto"]), *itertools.product(["gemma3", "t5"], ["auto, losing"])],
)  # fmt: skip
def test_greedy_answers_are_the_targets_while_the_draft_learns(architecture: str, way: str) -> None:
    alone, requests, answers = asked(architecture)
    target, draft = copy.deepcopy(alone), models.draft_of(alone, noise=0.08)
    assistant = assistant_of(target, draft, way, EACH)
    wrong, ties = greedy_divergences(target, assistant.generate, requests, answers)
    assert wrong == []
    assert ties <= 1
    assert assistant.version >= 5
    assert 0 < assistant.stats.alpha < 1
    assert any(not torch.equal(a, b) for a, b in zip(assistant.draft.parameters(), draft.parameters(), strict=True))


@functools.cache
def asked_in_turns(architecture: str) -> tuple[Any, list[Request], list[Any]]:
    """A target, requests that go on from its answers, and what it answers alone."""
    target, context = models.build(architecture, **models.SHALLOW[architecture]), models.prompt(4)
    requests: list[Request] = []
    answers: list[Any] = []
    for number in range(4):
        requests.append((context, {"max_new_tokens": 9}))
        answers += answers_alone(target, requests[-1:])
        context = torch.cat([answers[-1].sequences, models.prompt(3, seed=number)], dim=1)
    return target, requests, answers


@pytest.mark.parametrize(
    ("architecture", "way"),
    [*itertools.product(["llama", "mistral", "gemma3", "gpt2"], ["lean"]),
     *itertools.product(["llama", "gemma3"], ["auto", "auto, losing"])],
)  # fmt: skip
def test_greedy_answers_are_the_targets_across_turns(architecture: str, way: str) -> None:
    alone, requests, answers = asked_in_turns(architecture)
    target, draft = copy.deepcopy(alone), models.draft_of(alone, noise=0.08)
    assistant = assistant_of(target, draft, way, FAST)
    kept: dict[str, Any] = {}

    def turn(ids: torch.Tensor, **settings: Any) -> Any:
        output = assistant.generate(ids, return_dict_in_generate=True, **settings, **kept)
        kept["past_key_values"] = output.past_key_values
        return output.sequences

    for number in range(4):
        wrong, _ = greedy_divergences(target, turn, requests[number : number + 1], answers[number : number + 1])
        assert wrong == [], f"turn {number}"
    assert assistant.version == 2


@functools.cache
def asked_to_stop(how: str) -> tuple[Any, list[Request], list[Any], int]:
    """Requests that end at their third, fourth or eighth token, and the number of tokens of their answers."""
    target, tokenizer, requests = models.build("qwen3", num_hidden_layers=1), models.tokenizer(), list[Request]()
    for ids in models.prompts(6):
        tokens = target.generate(ids, **greedy(ids, {"max_new_tokens": 8}))[0, ids.shape[1] :].tolist()
        requests.append((ids, {
            "criterion": {"stopping_criteria": [models.EndsWith(tokens[2:3])]},
            "stop strings": {"stop_strings": tokenizer.convert_ids_to_tokens(tokens[3:4]), "tokenizer": tokenizer},
            "eos": {"eos_token_id": tokens[7]},
        }[how]))  # fmt: skip
    answers = answers_alone(target, requests)
    return target, requests, answers, sum(len(answer.scores) for answer in answers)


@pytest.mark.parametrize("how", ["criterion", "stop strings", "eos"])
@every_way_to_stop
def test_an_answer_stops_at_its_token(noise: float, way: str, how: str) -> None:
    alone, requests, answers, tokens = asked_to_stop(how)
    target, draft = copy.deepcopy(alone), models.draft_of(alone, noise)
    assistant = assistant_of(target, draft, way, FAST, models.tokenizer())
    assert greedy_divergences(target, assistant.generate, requests, answers) == ([], 0)
    assert assistant.stats.emitted == tokens <= 8 * 6


# --- sampled --------------------------------------------------------------------------------------------------------

VOCAB = 6
NEW = 3
SETTINGS = {"do_sample": True, "temperature": 1.3, "top_k": 5, "top_p": 1.0}
LEARNS = replace(FAST, update_interval=10, num_assistant_tokens=2)


def answer_distribution(target: Any, ids: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The exact probability of each answer of `NEW` tokens under `SETTINGS`, enumerated."""
    answers = list(itertools.product(range(VOCAB), repeat=NEW))
    full = torch.cat([ids.expand(len(answers), -1), torch.tensor(answers)], dim=1)
    with torch.no_grad():
        logits = target(full).logits[:, ids.shape[1] - 1 : -1].double() / SETTINGS["temperature"]
    lowest = logits.topk(int(SETTINGS["top_k"])).values[..., -1:]
    logprobs = logits.masked_fill(logits < lowest, -torch.inf).log_softmax(-1)
    joint = logprobs.gather(-1, torch.tensor(answers)[..., None])[..., 0].sum(-1).exp()
    return dict(zip(answers, joint.tolist(), strict=True))


def small_pair() -> tuple[Any, Any]:
    target = models.build("llama", 3, vocab_size=VOCAB, num_hidden_layers=1)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.5)
    return target, models.draft_of(target, noise=1.5)


PAIRS = [operator.itemgetter(*places) for places in itertools.combinations(range(NEW), 2)]


def sampled_answers(model: Any, ids: torch.Tensor, number: int) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(number):
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, **SETTINGS)
        counts[tuple(output[0, -NEW:].tolist())] += 1
    return counts


def test_sampled_answers_have_the_targets_distribution_while_the_draft_learns() -> None:
    target, draft = small_pair()
    assistant = OnlineAssistant(target, draft, config=LEARNS)
    ids = models.prompt(3, vocab_size=VOCAB)
    counts = sampled_answers(assistant, ids, 250)
    p_value = fits(counts, answer_distribution(target, ids), PAIRS)
    assert p_value > 1e-3
    assert assistant.version == 25
    assert 0.2 < assistant.stats.alpha < 0.95


@every_way
def test_each_token_of_long_answers_is_drawn_as_the_target_draws_it(way: str) -> None:
    target, draft = models.bigram(0), models.bigram(1)
    config = replace(FAST, update_interval=1, steps_per_update=8, learning_rate=0.3, num_logprobs=None)
    assistant = assistant_of(target, draft, way, config)
    table = target.by_token.detach().double().softmax(-1).numpy()
    how = models.greedy(torch.ones(1, 1), do_sample=True, top_k=0, max_new_tokens=125)
    answers = [assistant.generate(torch.tensor([[start]]), **how)[0].tolist() for start in range(4)]
    p_value = transitions_fit(answers, table)
    plan = assistant.drafting_plan(do_sample=True)
    assert p_value > 1e-3
    # Drafts of all versions take their time on the test's clock, so each run draws the same tokens.
    assert plan is None or plan.plain_seconds == pytest.approx(1.0, rel=0.05)
    learned, given = (torch.softmax(m.by_token.detach(), -1) for m in (assistant.draft, draft))
    assert float((learned - torch.tensor(table)).abs().sum()) < 0.8 * float((given - torch.tensor(table)).abs().sum())


STOPS = {0, 1}


def stopping_pair() -> tuple[Any, Any]:
    """The draft overrates the tokens behind which answers end."""
    target, draft = models.bigram(0, sharpness=0.5), models.bigram(0, sharpness=0.5)
    with torch.no_grad():
        draft.by_token[:, sorted(STOPS)] += 1.2
    return target, draft


def stopped_distribution(target: Any, start: int) -> dict[tuple[int, ...], float]:
    """The exact probability of each answer of at most `NEW` tokens that ends behind one of `STOPS`."""
    table = target.by_token.detach().double().softmax(-1)
    answers = {(): 1.0}
    for _ in range(NEW):
        grown = {}
        for answer, probability in answers.items():
            if answer and answer[-1] in STOPS:
                grown[answer] = probability
                continue
            for token, p in enumerate(table[answer[-1] if answer else start].tolist()):
                grown[(*answer, token)] = probability * p
        answers = grown
    return answers


def end_of(answer: tuple[int, ...]) -> tuple[int, bool]:
    return len(answer), answer[-1] in STOPS


def stopped_answers(assistant: OnlineAssistant, start: int, number: int) -> Counter[tuple[int, ...]]:
    ids = torch.tensor([[start]])
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    return Counter(
        tuple(assistant.generate(ids, stopping_criteria=[models.EndsWith(STOPS)], **settings)[0, 1:].tolist())
        for _ in range(number)
    )


@every_way
def test_a_criterion_leaves_sampled_answers_their_distribution(way: str) -> None:
    target, draft = stopping_pair()
    assistant = assistant_of(target, draft, way, FROZEN)
    p_value = fits(stopped_answers(assistant, 2, 250), stopped_distribution(target, 2), [end_of])
    assert p_value > 1e-3


# --- loops that are not lossless ------------------------------------------------------------------------------------


def test_the_checks_fail_for_a_loop_that_accepts_every_candidate() -> None:
    """Such a loop answers as its draft does."""
    for architecture in ("llama", "t5"):
        target, requests, answers = asked(architecture)
        wrong, _ = greedy_divergences(target, models.draft_of(target, noise=0.12).generate, requests, answers)
        assert len(wrong) > len(requests) / 3
    target, draft = small_pair()
    ids = models.prompt(3, vocab_size=VOCAB)
    assert fits(sampled_answers(draft, ids, 200), answer_distribution(target, ids), PAIRS) < 1e-6


@pytest.mark.parametrize(("leniency", "least", "most"), [(1.0, 1e-3, 1.0), (4.0, 0.0, 1e-6)])
def test_the_check_of_long_answers_fails_for_a_loop_that_accepts_too_readily(
    leniency: float, least: float, most: float
) -> None:
    p, q = (models.bigram(seed).by_token.detach().softmax(-1) for seed in (0, 1))
    answers = []
    for start in range(4):
        answer = [start]
        while len(answer) <= 50:
            before, token = answer[-1], int(torch.multinomial(q[answer[-1]], 1))
            if torch.rand(()) > leniency * p[before, token] / q[before, token]:
                token = int(torch.multinomial((p[before] - q[before]).clamp(min=0), 1))
            answer.append(token)
        answers.append(answer)
    assert least <= transitions_fit(answers, p.double().numpy()) <= most


def breaking_down(value: float, every: int) -> Any:
    """A draft whose rows hold `value` at every so many positions."""
    draft = models.bigram(0)

    def spoil(module: Any, inputs: Any, outputs: Any) -> Any:
        if outputs.past_key_values.get_seq_length() % every == 0:
            outputs.logits[..., slice(None) if value < 0 else 3] = value
        return outputs

    draft.register_forward_hook(spoil)
    return draft


@pytest.mark.parametrize(("value", "every"), [(torch.nan, 1), (torch.nan, 3), (torch.inf, 3), (-torch.inf, 3)])
def test_rows_of_a_draft_that_are_no_distribution_end_the_draft_and_not_the_answer(value: float, every: int) -> None:
    target = models.bigram(0)
    assistant = OnlineAssistant(target, breaking_down(value, every), config=FROZEN)
    answers = []
    for start in range(4):
        ids = torch.tensor([[start, start]])
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
        assert torch.equal(assistant.generate(ids, **kwargs), target.generate(ids, **kwargs))
        kwargs |= {"do_sample": True, "top_k": 0, "max_new_tokens": 60}
        answers.append(assistant.generate(ids, **kwargs)[0, 1:].tolist())
    assert transitions_fit(answers, target.by_token.detach().double().softmax(-1).numpy()) > 1e-3
    assert (assistant.stats.drafted == 0) == (every == 1)
    assert every == 1 or assistant.stats.alpha > 0.9
