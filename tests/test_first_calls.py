"""What somebody who knows transformers types first: models by their ids, a chat, a look at what came of it."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    TextStreamer,
    pipeline,
)
from waiting import LONG

from osd_hf import AcceptanceStats, OnlineAssistant, OnlineConfig
from osd_hf import models as pairs
from osd_hf.errors import ConfigError, LearnerError
from osd_hf.evaluation.compare import evaluate
from osd_hf.learning.gate import GateDecision

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}{% if shout is defined %}{{ shout }}{% endif %}"
)
# As Qwen2.5-Instruct publishes them.
PUBLISHED = {
    "bos_token_id": 0, "pad_token_id": 0, "do_sample": True, "eos_token_id": [65, 2], "repetition_penalty": 1.05,
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip
MANUAL = OnlineConfig(update_strategy="manual", steps_per_update=1, gate=False, optimizer="adamw", learning_rate=3e-3)


def qwen(vocab_size: int, hidden_size: int, layers: int, *, tied: bool, seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=tied,
        initializer_range=0.3, bos_token_id=0, eos_token_id=65, pad_token_id=0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def chatting(template: str | None = TEMPLATE) -> Any:
    """A tokenizer with the tokens of a chat template, 64 and 65."""
    tokenizer = models.tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft of Qwen2.5-Instruct's shapes in small: padded otherwise, settings as published."""
    folder = tmp_path_factory.mktemp("Qwen")
    sizes: dict[str, Any] = {
        "7B": {"vocab_size": 72, "hidden_size": 32, "layers": 2, "tied": False, "seed": 0},
        "0.5B": {"vocab_size": 68, "hidden_size": 16, "layers": 1, "tied": True, "seed": 1},
    }
    for name, size in sizes.items():
        qwen(**size).save_pretrained(folder / name)
        chatting().save_pretrained(folder / name)
        (folder / name / "generation_config.json").write_text(json.dumps(PUBLISHED))
    return folder


@pytest.fixture
def hub(repos: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folders as repos of the Hub, of which a file is in the local cache once it was fetched."""
    fetched: set[str] = set()
    load = AutoTokenizer.from_pretrained

    def tokenizer(source: str, *, local_files_only: bool = False, **_: Any) -> Any:
        if local_files_only and source not in fetched:
            raise OSError("not in the cache")
        fetched.add(source)
        return load(source)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.chdir(repos.parent)
    yield Path(repos.name)


def answer(generate: Any, tokenizer: Any, text: str = "abc", **settings: Any) -> list[int]:
    encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(3)
    return generate(**encoded, **{"max_new_tokens": 12, **settings})[0].tolist()  # type: ignore[no-any-return]


# --- models by their ids --------------------------------------------------------------------------------------------


def test_a_pair_of_the_hub_is_served_by_its_names_alone(hub: Path) -> None:
    assistant = OnlineAssistant(f"{hub}/7B", f"{hub}/0.5B")
    assert assistant.draft.config.vocab_size == assistant.target.config.vocab_size == 72
    assert assistant.target.generation_config.repetition_penalty == 1.05
    for settings in ({"do_sample": False}, {"top_k": 1}):  # the published penalty, with and without sampling
        alone = answer(assistant.target.generate, assistant.tokenizer, **settings)
        assert answer(assistant.generate, assistant.tokenizer, **settings) == alone
        assert len(set(alone)) > 3
    assert len(answer(assistant.generate, assistant.tokenizer)) > 3  # sampled as published
    assert assistant.stats.drafted


def test_how_models_are_loaded_is_said_as_to_from_pretrained(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = models.noted_loading(monkeypatch)
    quantization: Any = object()
    assistant = OnlineAssistant(
        repos / "7B", repos / "0.5B", config=MANUAL, dtype=torch.float64, device="cpu", attn_implementation="eager",
        quantization_config=quantization,
    )  # fmt: skip
    both = {"dtype": torch.float64, "attn_implementation": "eager"}
    assert given == {"7B": {**both, "device_map": "cpu", "quantization_config": quantization}, "0.5B": both}
    assert assistant.draft.dtype == assistant.target.dtype == torch.float64
    assert {model.config._attn_implementation for model in (assistant.draft, assistant.target)} == {"eager"}
    OnlineAssistant(repos / "7B", repos / "0.5B", torch_dtype="float64", device="cpu")
    assert [how["dtype"] for how in given.values()] == ["float64", "float64"]


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"model": "cpu", "lm_head": "disk"}])
def test_a_target_with_a_device_map_is_served(repos: Path, tmp_path: Path, device_map: Any) -> None:
    how = {"device_map": device_map, "offload_folder": str(tmp_path)}
    assistant = OnlineAssistant(repos / "7B", repos / "0.5B", config=MANUAL, **how)
    has_hooks = [any(hasattr(m, "_hf_hook") for m in model.modules()) for model in (assistant.target, assistant.draft)]
    assert has_hooks == [isinstance(device_map, dict), False]
    settings = {"do_sample": False}
    alone = answer(assistant.target.generate, assistant.tokenizer, **settings)
    assert answer(assistant.generate, assistant.tokenizer, **settings) == alone
    assistant.update()
    assert answer(assistant.generate, assistant.tokenizer, **settings) == alone


@pytest.mark.filterwarnings("ignore")  # of packages that this one only uses where they are
@pytest.mark.parametrize(("name", "package"), [("int8", "torchao"), ("4bit", "bitsandbytes")])
def test_a_quantized_target_is_served_and_learned_from(repos: Path, tmp_path: Path, name: Any, package: str) -> None:
    pytest.importorskip(package)
    qwen(72, 64, 2, tied=False, seed=0).save_pretrained(tmp_path)  # four bits are packed by 64
    chatting().save_pretrained(tmp_path)
    how = {"dtype": torch.float32, "quantization_config": pairs.quantization_config(name, "float32")}
    assistant = OnlineAssistant(tmp_path, repos / "0.5B", config=MANUAL, device="cpu", **how)
    kinds = {type(p).__name__ for model in (assistant.target, assistant.draft) for p in model.parameters()}
    assert len(kinds) == 2  # the target's matrices are of another class than a draft's
    settings = {"do_sample": False}
    alone = answer(assistant.target.generate, assistant.tokenizer, **settings)
    before = {name: value.clone() for name, value in assistant.draft.state_dict().items()}
    assert answer(assistant.generate, assistant.tokenizer, **settings) == alone
    assistant.update()
    assert assistant.version == 1
    assert not all(torch.equal(value, before[name]) for name, value in assistant.draft.state_dict().items())
    assert answer(assistant.generate, assistant.tokenizer, **settings) == alone


def test_a_tokenizer_is_fetched_as_its_model_is(repos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    load = AutoTokenizer.from_pretrained

    def tokenizer(source: str, **how: Any) -> Any:
        asked.append(how)
        return load(source)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    how = {"token": "x", "trust_remote_code": True}
    OnlineAssistant(repos / "7B", repos / "0.5B", config=MANUAL, device="cpu", **how)
    assert asked and all(given == how for given in asked)
    asked.clear()
    pairs.find_tokenizer(AutoModelForCausalLM.from_pretrained(repos / "7B"))  # of which nothing was said
    assert asked == [{"local_files_only": True, "trust_remote_code": False}]


# --- a chat, a pipeline ---------------------------------------------------------------------------------------------


@pytest.fixture
def assistant(repos: Path) -> OnlineAssistant:
    return OnlineAssistant(repos / "7B", repos / "0.5B", config=MANUAL)


def test_a_chat_is_answered_in_text(assistant: OnlineAssistant, capsys: Any) -> None:
    messages = [{"role": "user", "content": "abc"}]
    tokenizer, settings = assistant.tokenizer, {"do_sample": False, "max_new_tokens": 9}
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    alone = assistant.target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    expected = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
    assert assistant.chat(messages, **settings) == assistant.chat("abc", **settings) == expected
    assert assistant.chat("abc", return_dict_in_generate=True, **settings) == expected
    assert assistant.chat("abc", streamer=TextStreamer(tokenizer, skip_prompt=True), **settings) == expected
    assert expected in capsys.readouterr().out
    seen: list[Any] = []
    assistant.chat("abc", chat_template_kwargs={"shout": "xyz"}, on_trace=seen.append, **settings)
    assert tokenizer.decode(seen[0].prompt_ids).endswith("assistantxyz")
    assert assistant.stats.num_requests == 5


def test_a_last_message_of_the_assistant_is_continued(assistant: OnlineAssistant) -> None:
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
    tokenizer, settings = assistant.tokenizer, {"do_sample": False, "max_new_tokens": 9}

    def asked(*args: Any, **kwargs: Any) -> tuple[str, str]:
        seen: list[Any] = []
        text = assistant.chat(*args, on_trace=seen.append, **kwargs, **settings)
        return tokenizer.decode(seen[0].prompt_ids), text

    def prompt(continued: bool, turns: Any = messages) -> str:
        how = {"continue_final_message": continued, "add_generation_prompt": not continued}
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **how))

    pipe = pipeline("text-generation", model=assistant.target, tokenizer=tokenizer)
    answers = pipe(messages, return_full_text=True, **settings)[0]["generated_text"]
    expected = prompt(True), answers[-1]["content"].removeprefix("de")
    assert expected[0].endswith("de")
    assert asked(messages) == asked(messages, continue_final_message=True) == expected
    assert asked(messages, continue_final_message=False)[0] == prompt(False)
    assert asked(messages[:1])[0] == prompt(False, messages[:1])
    assert asked(messages[:1], continue_final_message=True)[0] == prompt(True, messages[:1])


def test_a_chat_has_room_for_an_answer(assistant: OnlineAssistant, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []

    def generate(input_ids: torch.Tensor, *, max_new_tokens: int | None = None, **_: Any) -> torch.Tensor:
        asked.append(max_new_tokens)
        return input_ids

    monkeypatch.setattr(assistant, "generate", generate)
    assistant.chat("abc")
    assistant.chat("abc", max_new_tokens=7)
    assistant.chat("abc", generation_config=GenerationConfig(max_new_tokens=3))
    assistant.target.generation_config.max_new_tokens = 5
    assistant.chat("abc")
    assert asked == [256, 7, None, None]


def test_without_a_template_there_is_no_chat() -> None:
    target, draft = models.pair()
    for tokenizer, words in ((models.tokenizer(), "has no chat template"), (None, "No tokenizer was found")):
        with pytest.raises(ConfigError, match=f"{words}.*`tokenizer=`"):
            OnlineAssistant(target, draft, tokenizer).chat("abc")


def test_a_pipeline_is_assisted_and_learned_from(assistant: OnlineAssistant) -> None:
    settings = {"do_sample": False, "max_new_tokens": 9}
    alone = pipeline("text-generation", model=assistant.target, tokenizer=assistant.tokenizer)
    pipe = pipeline(
        "text-generation", model=assistant.target, tokenizer=assistant.tokenizer, assistant_model=assistant.draft
    )
    chat = [{"role": "user", "content": "abc"}]
    with assistant.attached():
        assert pipe(chat, **settings) == alone(chat, **settings)
        assistant.update()
        assert pipe(chat, **settings) == alone(chat, **settings)
    assert (assistant.version, assistant.stats.num_requests) == (1, 2)


# --- what came of it ------------------------------------------------------------------------------------------------


def test_the_speed_and_what_it_is_beside_the_target_alone() -> None:
    target, draft = models.pair(num_hidden_layers=1)
    config = replace(MANUAL, num_assistant_tokens="auto", candidates="draft")
    assistant = OnlineAssistant(target, draft, config=config)
    clock = assistant.drafting.clock = models.ForwardTime({target: 1.0, assistant.draft: 0.125})
    assert assistant.stats.tokens_per_second is assistant.stats.speedup is None
    models.answered(assistant, models.prompts(1)[0], max_new_tokens=40)  # costs become known
    assistant.reset_stats()
    began, before = clock(), assistant.learning_seconds
    for ids in models.prompts(6):
        models.answered(assistant, ids, max_new_tokens=40)
    stats, seconds, tokens = assistant.stats, clock() - began, 6 * 40
    # A token of the target alone takes a second, and the prompt brings the first.
    assert (stats.tokens_per_second, stats.speedup) == pytest.approx((tokens / seconds, tokens / seconds), rel=1e-3)
    assert stats.speedup_with_learning == stats.speedup > 1
    shown = f"{stats.speedup:.2f} times the speed of the target alone, {stats.speedup:.2f} with the time of learning, "
    assert shown + f"{stats.tokens_per_second:.1f} tokens per second" in repr(stats)
    assert stats.to_dict()["speedup"] == stats.speedup == pytest.approx((stats + stats).speedup)
    assistant.update()
    learned = assistant.learning_seconds - before
    _, seconds, alone, _ = assistant.stats.timed
    assert assistant.stats.speedup_with_learning == pytest.approx(alone / (seconds + learned))


def test_an_assistant_tells_its_state(assistant: OnlineAssistant) -> None:
    assert "7B" in repr(assistant) and "0.5B" in repr(assistant)
    assert repr(assistant).endswith("version=0, manual updates)\n  0 requests served")
    assert "<svg" not in assistant._repr_html_()
    assistant.pause()
    answer(assistant.generate, assistant.tokenizer, do_sample=False)
    assert "version=0, paused)\n  1." in repr(assistant)
    page = assistant._repr_html_()
    assert page.startswith("<pre>OnlineAssistant(") and page.endswith("</svg>\n")
    assistant.close()
    assert ", closed)" in repr(assistant)


def test_stats_are_drawn() -> None:
    """Text takes the easy tokens, so that the acceptance of the draft falls while each forward gives more tokens."""
    counts = [{"examined": 4, "accepted": 3 - i % 4, "target_forwards": 2, "emitted": 4 + i} for i in range(12)]
    stats = sum((AcceptanceStats.from_counts(**each) for each in counts), AcceptanceStats())
    (axes,) = stats.plot(window=4).axes
    (curve,) = axes.lines
    assert curve.get_xdata().tolist() == list(range(1, 13))
    assert curve.get_ydata()[-1] == pytest.approx((12 + 13 + 14 + 15) / 8)
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("tokens per target forward", "request (each point: the last 4)")


def test_the_learned_and_the_original_draft_are_drawn_and_named_by_replay(tmp_path: Path) -> None:
    target, draft = models.pair()
    config = OnlineConfig(update_strategy="manual", gate=True, steps_per_update=40, learning_rate=3e-3)
    assistant = OnlineAssistant(target, draft, models.tokenizer(), config)
    for i in range(24):
        answer(assistant.generate, assistant.tokenizer, do_sample=False, max_new_tokens=16 + i % 2)
        if i in (15, 19):
            assistant.update()
    replayed = assistant.stats.replayed()
    assert replayed["learned"]["block_efficiency"] > replayed["original"]["block_efficiency"] >= 1
    assert f"the original draft alone, replayed on {len(assistant.stats.curves['original'])} requests: " in repr(
        assistant.stats
    )
    curves = assistant.stats.curves
    assert curves["learned"][:, 0].tolist() == curves["original"][:, 0].tolist() != []
    upper, *lower = assistant.stats.plot().axes
    names = ["served", "learned draft alone, replayed", "original draft alone, replayed"]
    assert [text.get_text() for text in upper.get_legend().get_texts()] == names
    assert [axes.get_ylabel() for axes in lower] == ["speed-up"] * bool(curves["speedup"][:, 2:].any())
    # The curves of a loaded session continue behind the requests that it has served.
    assistant.save_state(tmp_path)
    again = OnlineAssistant(target, draft, models.tokenizer(), config)
    again.load_state(tmp_path)
    for i in range(4):
        answer(again.generate, again.tokenizer, do_sample=False, max_new_tokens=16 + i % 2)
    again.update()
    later = again.stats
    assert later.num_requests == 28
    assert later.curves["learned"][:, 0].min() > 24
    assert len(later.curves["speedup"]) == 0 or later.curves["speedup"][:, 0].min() > 24
    assistant.reset_stats()
    assert assistant.stats.replayed() == {} and not len(assistant.stats.curves["speedup"])


def test_drafts_are_evaluated_on_texts() -> None:
    target, draft = models.pair()
    target.generation_config.repetition_penalty = PUBLISHED["repetition_penalty"]
    texts = ["abc", "xyz"]
    found = evaluate(target, draft, target, models.tokenizer(), texts)
    assert [prompt.text for prompt in found.dataset.prompts] == texts
    assert found.scores.totals["before"].alpha < found.scores.totals["after"].alpha == 1
    with pytest.raises(ConfigError, match="got one text. Put it into a list"):
        evaluate(target, draft, target, models.tokenizer(), "abc")


# --- who wants to hear of updates -----------------------------------------------------------------------------------


def requests(assistant: OnlineAssistant, number: int) -> list[list[int]]:
    return [
        assistant.generate(ids, **models.greedy(ids, max_new_tokens=6))[0].tolist() for ids in models.prompts(number)
    ]


@pytest.mark.parametrize("strategy", ["interval", "spread", "idle", "manual"])
def test_each_decision_is_told(strategy: Any, tmp_path: Path) -> None:
    told: list[GateDecision] = []
    heard = threading.Event()

    def hear(decision: GateDecision) -> None:
        assistant.save_state(tmp_path)  # which needs what learning holds
        requests(assistant, 1)
        told.append(decision)
        heard.set()

    config = replace(MANUAL, num_assistant_tokens=3, update_strategy=strategy, update_interval=4)
    assistant = OnlineAssistant(*models.pair(num_hidden_layers=1), config=config, on_update=hear)
    requests(assistant, 5)
    if strategy == "manual":
        assistant.update()
    elif strategy != "idle":
        requests(assistant, 4)
    assert heard.wait(LONG)
    assistant.close()
    assert tuple(told) == assistant.decisions[: len(told)]
    assert told[0].outcome == "promoted"


def test_who_fails_on_an_update_costs_no_answer_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(decision: GateDecision) -> None:
        raise RuntimeError("nobody listens")

    config = replace(MANUAL, num_assistant_tokens=3, update_strategy="interval", update_interval=2)
    pair = models.pair(num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        assistant = OnlineAssistant(*pair, config=config, on_update=fail)
        answers = requests(assistant, 6)
    assert answers == requests(OnlineAssistant(*pair, config=config), 6)
    assert assistant.version == 3
    assert caplog.text.count("`on_update` failed") == 1
    with pytest.raises(LearnerError, match="nobody listens"):
        assistant.close()
