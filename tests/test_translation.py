"""Drafts with another tokenizer: what they read and learn is the target's text, and the answers are the target's."""

import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_lossless import transitions_fit
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from osd_hf import (
    AcceptanceStats,
    ConfigError,
    OnlineAssistant,
    OnlineConfig,
    Trace,
    Translation,
    UnsupportedGenerationError,
    VocabularyMismatchError,
    benchmark,
    record_traces,
    replay,
    simulate,
)
from osd_hf.cli.run import RunSettings, run_command
from osd_hf.evaluation.benchmark import System
from osd_hf.learning.faults import Readable
from osd_hf.trace import misshapen
from osd_hf.translation import whole_text

SPECIAL = ["<pad>", "<s>", "</s>"]
TEXT = (
    "Grüße an alle: the naïve café sells 12.50 € of crêpes, doesn't it?\n\n  def run(self): return self.running\n"
    "東京の天気は良い 😀😃 and the runner was running, running to the river; Привет, мир! "
)
LETTERS = "abcdeü 😀東\n.1"
ids_of_text = st.text(st.sampled_from(LETTERS + "runigthe "), min_size=1, max_size=24)


def trained(size: int, *, byte_level: bool, of: str = TEXT, special: list[str] = SPECIAL) -> Any:
    """A BPE of bytes, or of words behind a mark for the space with bytes for what it does not know."""
    backend = Tokenizer(BPE(byte_fallback=not byte_level))
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        strip = decoders.Strip(" ", 1, 0)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        backend.decoder, alphabet = decoders.Sequence(parts), list("▁")
        special = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator([of] * 4, BpeTrainer(vocab_size=size, initial_alphabet=alphabet,
                                                     special_tokens=special, show_progress=False))  # fmt: skip
    if not byte_level:  # the trainer takes tokens of bytes for special ones
        written = json.loads(backend.to_str())
        written["added_tokens"] = [token for token in written["added_tokens"] if "0x" not in token["content"]]
        backend = Tokenizer.from_str(json.dumps(written))
    parts = zip(("pad", "bos", "eos"), SPECIAL, strict=True)
    named = {f"{part}_token": name for part, name in parts if name in special}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


WORDS = TEXT.split("\n")
TOKENIZERS = {
    "target": trained(330, byte_level=True),
    "bytes": trained(300, byte_level=True, of=WORDS[0] + TEXT[::-1], special=["</s>", "<|user|>", "<s>"]),
    "marks": trained(400, byte_level=False, of=TEXT.replace("running", "nning")),
}
PAIRS = [("target", "bytes"), ("target", "marks"), ("marks", "target"), ("target", "target")]
every_pair = pytest.mark.parametrize(("ours", "theirs"), PAIRS)


def translation(ours: str, theirs: str) -> Translation:
    both = TOKENIZERS[ours], TOKENIZERS[theirs]
    return Translation(*both, *(len(tokenizer) for tokenizer in both))


TRANSLATIONS = {pair: translation(*pair) for pair in PAIRS}


def in_bytes(tokenizer: str, ids: Any) -> bytes:
    pieces = TRANSLATIONS[next(p for p in PAIRS if p[0] == tokenizer)].ours if tokenizer != "bytes" else None
    pieces = pieces or TRANSLATIONS["target", "bytes"].theirs
    return b"".join(pieces.pieces[token] for token in ids)


# --- text -----------------------------------------------------------------------------------------------------------


@every_pair
@given(text=ids_of_text)
@example(text="  ")  # token by token: the first is no text, and the second is the first that is
def test_the_draft_reads_the_text_whatever_the_target_cuts_it_into(ours: str, theirs: str, text: str) -> None:
    made = TRANSLATIONS[ours, theirs]
    ids = TOKENIZERS[ours](text, add_special_tokens=False)["input_ids"]
    at_once, step = made.read(ids), None
    for token in ids:
        step = made.read([token], step)
        assert step is not None
    assert at_once is not None
    lost = text[1:] if ours == "marks" and text.startswith(" ") else text
    assert at_once.ids == step.ids == TOKENIZERS[theirs](lost, add_special_tokens=False)["input_ids"]
    if "marks" not in (ours, theirs) or not text.startswith(" "):  # which it loses by itself
        assert TOKENIZERS[theirs].decode(at_once.ids) == text
    assert at_once.cut == b""


@given(text=ids_of_text, cut=st.integers(0, 60))
def test_characters_that_are_not_whole_wait(text: str, cut: int) -> None:
    made, raw = TRANSLATIONS["target", "bytes"], text.encode()[:cut]
    reading = made.read([made.ours.ids[bytes([byte])] for byte in raw])
    assert reading is not None
    assert in_bytes("bytes", reading.ids) + reading.cut == raw
    assert raw[: whole_text(raw)].decode() == raw.decode(errors="ignore")


@given(raw=st.binary(max_size=12))
def test_bytes_that_are_no_text_are_read_byte_by_byte(raw: bytes) -> None:
    encoded = TRANSLATIONS["target", "bytes"].theirs.encode(raw)
    assert encoded is not None
    assert in_bytes("bytes", encoded.ids) == raw
    assert sum(encoded.lengths) == len(raw)


def test_special_tokens_are_those_of_the_same_name_or_part() -> None:
    made = TRANSLATIONS["target", "bytes"]
    ours, theirs = (TOKENIZERS[name].convert_tokens_to_ids for name in ("target", "bytes"))
    assert made.marks == {ours("<s>"): theirs("<s>"), ours("</s>"): theirs("</s>")}
    prompt = TOKENIZERS["target"]("<s>Grüße</s>")["input_ids"]
    reading = made.read(prompt)
    assert reading is not None
    assert reading.ids == TOKENIZERS["bytes"]("<s>Grüße</s>")["input_ids"]
    other = trained(300, byte_level=True, special=["<|end|>", "<|begin|>"])
    other.eos_token, other.bos_token = "<|end|>", "<|begin|>"
    named = Translation(TOKENIZERS["target"], other, 330, len(other))
    assert named.marks == {1: other.bos_token_id, 2: other.eos_token_id}
    other.bos_token = "<|end|>"  # as GPT-2's, which is both
    assert Translation(TOKENIZERS["target"], other, 330, len(other)).marks == {2: other.eos_token_id}
    assert Translation(other, TOKENIZERS["target"], len(other), 330).marks == {other.eos_token_id: 2}


# --- rows -----------------------------------------------------------------------------------------------------------


def recorded(ids: Any, prompt: Any, size: int, kept: int, seed: int = 0) -> Trace:
    """An answer with rows that are random but for the token that was emitted, which is the likeliest."""
    draw, count = np.random.default_rng(seed), len(ids)
    logits = draw.normal(size=(count, size)) * 2
    logits[np.arange(count), ids] = logits.max(axis=1) + draw.random(count)
    order = np.argsort(-logits, axis=1)[:, :kept]
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    top = np.take_along_axis(logits, order, axis=1)
    mass = np.take_along_axis(probs, order, axis=1).sum(axis=1)
    is_whole = kept >= size
    if is_whole:
        top, order = logits - logits.max(axis=1, keepdims=True), order[:, :0]
    return Trace(
        prompt_ids=np.array(prompt, np.int32), completion_ids=np.array(ids, np.int32), rounds=(),
        top_logits=(top - top.max(axis=1, keepdims=True)).astype(np.float16), top_ids=order.astype(np.uint16),
        tail_logprob=np.full(count, -np.inf, np.float32) if is_whole else np.log1p(-mass).astype(np.float32),
        vocab_size=size,
    )  # fmt: skip


@every_pair
@pytest.mark.parametrize("kept", [8, 1000])
@settings(max_examples=25)
@given(text=ids_of_text, garbage=st.lists(st.integers(0, 299), max_size=4), seed=st.integers(0, 9))
def test_rows_give_each_token_the_probability_of_its_bytes(
    ours: str, theirs: str, kept: int, text: str, garbage: list[int], seed: int
) -> None:
    made, size = TRANSLATIONS[ours, theirs], len(TOKENIZERS[ours])
    ids = [*TOKENIZERS[ours](text, add_special_tokens=False)["input_ids"], *garbage, 2]
    trace = recorded(ids, [1, 5], size, min(kept, size), seed)
    found = made(trace)
    own = found.trace
    assert misshapen(own) is None
    probs = np.exp(own.kept_logprobs().astype(np.float64))
    np.testing.assert_allclose(probs.sum(axis=1) + np.exp(own.tail_logprob), 1, atol=1e-3)
    assert (np.diff(np.sort(own.top_ids, axis=1)) > 0).all()
    assert own.top_ids.max() < len(TOKENIZERS[theirs])
    # Each row is that of the target where both tokens have one place in the text, and the token itself elsewhere.
    ends = np.cumsum([1 if token in made.marks else len(made.piece(token)) for token in ids])
    places = {
        (end - length, end): i for i, (end, length) in enumerate(zip(ends, np.diff(ends, prepend=0), strict=True))
    }
    end, target_probs = 0, np.exp(trace.kept_logprobs().astype(np.float64))
    for row, token in enumerate(own.completion_ids.tolist()):
        begin, end = end, end + (1 if token in made.marks_back else len(made.theirs.pieces[token]))
        given_ids = own.top_ids[row][probs[row] > 0].tolist()
        if not found.has_row[row]:
            assert given_ids == [token]
            continue
        i = places[begin, end]
        assert made.same[ids[i]] == token
        known = range(size) if trace.top_ids.shape[1] == 0 else trace.top_ids[i].tolist()
        by_bytes = {int(made.same[t]): p for t, p in zip(known, target_probs[i], strict=True) if made.same[t] >= 0}
        for one, p in zip(own.top_ids[row].tolist(), probs[row], strict=True):
            assert p == 0 or p == pytest.approx(by_bytes[one], abs=2e-3)
    assert end == ends[-1]
    if ours == theirs and not garbage:
        np.testing.assert_array_equal(own.completion_ids, ids)
        assert found.has_row.all()


def test_the_simplest_request_can_be_read_and_one_without_an_answer_cannot() -> None:
    made = TRANSLATIONS["target", "bytes"]
    trace = recorded([5, 6], [1], 330, 8)
    readable = Readable.by(models.build(vocab_size=300, num_hidden_layers=1), made)
    assert readable.fault(readable.simplest(trace)) is None
    assert readable.fault(recorded([], [1], 330, 8)) == "with text that the draft's tokenizer cannot spell"


def test_a_token_is_right_where_all_that_it_is_made_of_is() -> None:
    made = TRANSLATIONS["target", "bytes"]
    ids = TOKENIZERS["target"](TEXT, add_special_tokens=False)["input_ids"]
    trace = recorded(ids, [1], 330, 8)
    found = made(trace)
    assert not found.has_row.all()
    assert found.has_row.any()
    right = found.trace.completion_ids.copy()
    np.testing.assert_array_equal(found.back(right, trace.completion_ids), ids)
    for wrong in range(len(right)):
        predicted = right.copy()
        predicted[wrong] += 1
        begin, end = (len(in_bytes("bytes", right[:i])) for i in (wrong, wrong + 1))
        told = found.back(predicted, trace.completion_ids)
        for i in range(len(ids)):
            overlaps = len(in_bytes("target", ids[:i])) < end and begin < len(in_bytes("target", ids[: i + 1]))
            assert told[i] == (-1 if overlaps else ids[i])


# --- serving --------------------------------------------------------------------------------------------------------


def saying(name: str, text: str, prompt: str) -> Any:
    """A model that says a text behind a prompt, in its tokenizer's own tokens, and ends."""
    tokens, before = (
        TOKENIZERS[name](part, add_special_tokens=False)["input_ids"] for part in (prompt + text, prompt)
    )
    assert tokens[: len(before)] == before
    end = TOKENIZERS[name].eos_token_id
    return models.scripted([*tokens[len(before) :], end], len(before), vocab_size=len(TOKENIZERS[name]))


def asked(text: str, **settings: Any) -> dict[str, Any]:
    ids = TOKENIZERS["target"](text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 200}
    return {**given, "eos_token_id": 2, **settings}


MANUAL = OnlineConfig(num_assistant_tokens=5, update_strategy="manual")


def pair_of(target: Any, draft: Any, theirs: str, config: OnlineConfig = MANUAL, ours: str = "target") -> Any:
    return OnlineAssistant(
        target, draft, TOKENIZERS[ours], config, assistant_tokenizer=TOKENIZERS[theirs]
    )  # fmt: skip


@pytest.mark.parametrize("theirs", ["bytes", "marks"])
def test_a_draft_that_says_the_same_text_is_always_right(theirs: str) -> None:
    prompt, text = "def run:", " " + TEXT
    target, draft = saying("target", text, prompt), saying(theirs, text, prompt)
    assistant = pair_of(target, draft, theirs)
    traces: list[Trace] = []
    request = asked(prompt)
    output = assistant.generate(**request, on_trace=traces.append)
    assert torch.equal(output, target.generate(**request))
    assert TOKENIZERS["target"].decode(output[0]) == prompt + text + "</s>"
    # Its words are others than the target's where only spaces end them.
    assert assistant.stats.alpha >= {"bytes": 1.0, "marks": 0.98}[theirs]
    assert assistant.stats.block_efficiency > 5
    replayed = replay(draft, traces, 5, translation=assistant.translation)
    assert (replayed.alpha, replayed.emitted) == (1, len(traces[0]))


def test_a_draft_goes_on_in_the_middle_of_a_word_and_of_a_character() -> None:
    """The target's tokens end where none of the draft's does."""
    made = TRANSLATIONS["target", "bytes"]
    raw = "the runner 😀 and the river".encode()
    ids = [made.ours.ids[bytes([byte])] for byte in raw]  # a target that says each byte by itself
    target = models.scripted(ids, 1, vocab_size=330)
    draft = models.scripted(TOKENIZERS["bytes"](raw.decode())["input_ids"], 1, vocab_size=300)
    assistant = pair_of(target, draft, "bytes", OnlineConfig(num_assistant_tokens=1, update_strategy="manual"))
    request = {"input_ids": torch.tensor([[1]]), "attention_mask": torch.ones(1, 1), "max_new_tokens": len(ids)}
    output = assistant.generate(**request, do_sample=False)
    assert output[0, 1:].tolist() == ids
    assert assistant.stats.emitted == len(ids)
    # What it says is cut otherwise than what the target says: where both agree, it goes on from within.
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize(
    ("ours", "theirs", "changes"),
    [("target", "bytes", {}), ("target", "marks", {}), ("marks", "target", {}),
     ("target", "bytes", {"num_assistant_tokens": "auto"}),
     ("target", "bytes", {"num_assistant_tokens": "auto", "candidates": "text"})],
)  # fmt: skip
def test_greedy_answers_are_the_targets_while_the_draft_learns(
    ours: str, theirs: str, changes: dict[str, Any]
) -> None:
    sizes = len(TOKENIZERS[ours]), len(TOKENIZERS[theirs])
    target, draft = (
        models.build(vocab_size=sizes[0], num_hidden_layers=1),
        models.build("qwen3", 1, vocab_size=sizes[1]),
    )
    config = OnlineConfig(
        **{"num_assistant_tokens": 4, **changes}, update_strategy="interval", update_interval=1, steps_per_update=1,
        gate=False,
    )  # fmt: skip
    assistant = pair_of(target, draft, theirs, config, ours)
    for prompt in ("Grüße an", "東京 😀", "the running ", "<s>a\n\n"):
        ids = TOKENIZERS[ours](prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
        assert torch.equal(assistant.generate(ids, **how), target.generate(ids, **how))
    assert assistant.version == 4
    assert assistant.learning_error is None


@pytest.mark.parametrize("architecture", ["gemma3", "mistral"])
def test_windows_are_read_again_where_the_text_is_cut_otherwise(architecture: str) -> None:
    prompt = "def run:"
    target, draft = (
        saying("target", " " + TEXT, prompt),
        models.build(architecture, vocab_size=300, num_hidden_layers=2),
    )
    assistant = pair_of(target, draft, "bytes")
    request = asked(prompt)
    assert torch.equal(assistant.generate(**request), target.generate(**request))


def test_learning_raises_acceptance() -> None:
    """A target whose next token is known by the last one, and a draft that knows nothing."""
    target = models.bigram(3, vocab_size=330, sharpness=4.0)
    with torch.no_grad():
        target.by_token[:, :3] = -50.0
    draft = models.bigram(1, vocab_size=300, sharpness=0.1)
    prompts = [[5 + i] for i in range(24)]
    traces = list(record_traces(target, prompts, max_new_tokens=12))
    made = TRANSLATIONS["target", "bytes"]
    config = OnlineConfig(
        num_assistant_tokens=5, update_strategy="interval", update_interval=4, steps_per_update=8, optimizer="adamw",
        learning_rate=0.3, weight_average=0.0, gate=False,
    )  # fmt: skip
    run = simulate(draft, traces, config, translation=made)
    before, after = (replay(model, traces, 5, translation=made) for model in (draft, run.draft))
    assert before.alpha < 0.1
    assert after.alpha > 0.4
    assistant = pair_of(target, models.fixed_k(run.draft), "bytes")
    for prompt in prompts[:6]:
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
        assert torch.equal(assistant.generate(ids, **how), target.generate(ids, **how))
    assert assistant.stats.alpha > 0.3


def letters(characters: str, merges: list[tuple[str, str]]) -> Any:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *characters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(BPE(vocab, merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_sampled_answers_have_the_targets_distribution() -> None:
    ours, theirs = letters("abcd", []), letters("dcba", [("a", "b"), ("d", "c")])
    target, draft = models.bigram(2, vocab_size=7, sharpness=1.5), models.bigram(5, vocab_size=9, sharpness=1.5)
    with torch.no_grad():
        target.by_token[:, :3] = -60.0
        draft.by_token[:, :3] = -60.0
    assistant = OnlineAssistant(target, draft, ours, MANUAL, assistant_tokenizer=theirs)
    answers = []
    for number in range(4):
        ids = torch.tensor([[3 + number % 4]])
        output = assistant.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=300
        )
        answers.append([token - 3 for token in output[0].tolist()])
    table = target.by_token.detach()[3:, 3:].softmax(-1).double().numpy()
    assert 0.1 < assistant.stats.alpha < 0.9
    assert transitions_fit(answers, table) > 1e-3


# --- the assistant --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and a draft with a tokenizer of its own, on disk."""
    folder = tmp_path_factory.mktemp("pair")
    for name, tokenizer, seed in (("target", "target", 0), ("draft", "bytes", 1)):
        made = models.build(seed=seed, vocab_size=len(TOKENIZERS[tokenizer]), num_hidden_layers=1)
        made.save_pretrained(folder / name)
        TOKENIZERS[tokenizer].save_pretrained(folder / name)
    return {name: folder / name for name in ("target", "draft")}


def test_pairs_are_known_by_their_folders(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assistant = OnlineAssistant(folders["target"], folders["draft"], config=MANUAL)
    assert [r.getMessage() for r in caplog.records if "tokenizer of its own" in r.getMessage()] != []
    assert assistant.draft.config.vocab_size == 300
    request = asked("the river", max_new_tokens=8)
    alone = assistant.target.generate(**request)
    for _ in range(2):
        assert torch.equal(assistant.generate(**request), alone)
        assistant.update()
    with assistant.attached():
        tokenizers = {"tokenizer": TOKENIZERS["target"], "assistant_tokenizer": TOKENIZERS["bytes"]}
        assert torch.equal(assistant.target.generate(**request, assistant_model=assistant.draft, **tokenizers), alone)
    assert assistant.stats.num_requests == 3
    assistant.save_state(tmp_path / "session")
    assistant.save_pretrained(tmp_path / "draft")
    again = OnlineAssistant(folders["target"], tmp_path / "draft", config=MANUAL)
    assert again.assistant_tokenizer.get_vocab() == TOKENIZERS["bytes"].get_vocab()
    again.load_state(tmp_path / "session")
    assert again.stats.num_requests == 3


def test_batches_are_decoded_without_it(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    assistant = OnlineAssistant(folders["target"], folders["draft"], config=MANUAL)
    ids = torch.tensor([[0, 7, 8], [5, 6, 9]])
    request = {"attention_mask": (ids > 0).long(), "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(assistant.generate(ids, **request), assistant.target.generate(ids, **request))
    assert "decoded without a draft: the draft has a tokenizer of its own" in caplog.text


def test_what_cannot_be_served_is_refused(folders: dict[str, Path]) -> None:
    for field, value in (("drafting", "stock"), ("compile_draft", True), ("learn_from", "corrections")):
        with pytest.raises(ConfigError, match=f"`{field}="):
            OnlineAssistant(
                folders["target"], folders["draft"], config=OnlineConfig(num_assistant_tokens=5, **{field: value})
            )
    assistant = OnlineAssistant(folders["target"], folders["draft"], config=MANUAL)
    with pytest.raises(UnsupportedGenerationError, match="assistant_tokenizer"):
        assistant.generate(**asked("a"), assistant_tokenizer=TOKENIZERS["bytes"])
    both = {"tokenizer": TOKENIZERS["target"], "assistant_tokenizer": TOKENIZERS["bytes"]}
    with pytest.raises(VocabularyMismatchError, match="encoder-decoder"):
        OnlineAssistant(models.build("t5", vocab_size=330), models.build("t5", vocab_size=300), **both)
    spaces = letters("ab", [])
    spaces.backend_tokenizer.decoder = decoders.WordPiece()
    target = models.build(vocab_size=330)
    with pytest.raises(VocabularyMismatchError, match="the decoder WordPiece does not tell"):
        OnlineAssistant(target, models.build(vocab_size=5), TOKENIZERS["target"], assistant_tokenizer=spaces)
    with pytest.raises(VocabularyMismatchError, match="Pass `tokenizer=`"):
        OnlineAssistant(target, models.build(vocab_size=300), assistant_tokenizer=TOKENIZERS["bytes"])


def test_text_that_the_draft_cannot_spell_costs_no_answer() -> None:
    target, draft = models.build(vocab_size=330), models.build(vocab_size=6)
    config = OnlineConfig(num_assistant_tokens=3, update_strategy="interval", update_interval=1)
    assistant = OnlineAssistant(target, draft, TOKENIZERS["target"], config, assistant_tokenizer=letters("abc", []))
    for prompt in ("abc", "xyz"):
        request = asked(prompt, max_new_tokens=6)
        assert torch.equal(assistant.generate(**request), target.generate(**request))
    assert assistant.learning_error is None


def test_a_draft_without_room_for_the_text_is_replayed_as_one_that_says_nothing() -> None:
    target = models.build(vocab_size=330)
    trace = next(iter(record_traces(target, [TOKENIZERS["target"]("the river")["input_ids"]], max_new_tokens=6)))
    needed = len(TRANSLATIONS["target", "bytes"](trace).trace.prompt_ids) + 6
    for positions, drafts in ((needed + 40, True), (needed - 3, False)):
        draft = models.build("gpt2", vocab_size=300, n_positions=positions)
        stats = replay(draft, [trace], 2, translation=TRANSLATIONS["target", "bytes"])
        assert (stats.drafted > 0, stats.emitted) == (drafts, len(trace))


def test_commands_serve_and_compare_it(folders: dict[str, Path], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"the river {i}"}) for i in range(3)))
    config = OnlineConfig(num_assistant_tokens=3, update_interval=2)
    asked_for = RunSettings(
        target=str(folders["target"]), draft=str(folders["draft"]), prompts=str(prompts), column="prompt",
        max_new_tokens=4, output_dir=tmp_path / "run", config=config, dtype="float32", device="cpu",
    )  # fmt: skip
    assert run_command(asked_for) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert "tokenizer of its own" in report["frozen_is"]
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run/draft")
    assert saved.get_vocab() == TOKENIZERS["bytes"].get_vocab()


def test_the_benchmark_compares_it_with_transformers(folders: dict[str, Path]) -> None:
    assistant = OnlineAssistant(folders["target"], folders["draft"], config=MANUAL)
    draft, systems = assistant.draft, [System("alone", "alone")]
    systems += [System("stock", "stock", draft, 3), System("lean", "lean", draft, 3)]
    asked_for = {"words": [TOKENIZERS["target"]("the river")["input_ids"]]}
    report = benchmark(
        assistant.target, systems, asked_for, max_new_tokens=6, watched_requests=1, tokenizer=TOKENIZERS["target"],
        assistant_tokenizer=TOKENIZERS["bytes"],
    )  # fmt: skip
    assert [report.answers_of(system.name)[0].outcome for system in systems] == ["identical"] * 3
    assert isinstance(report.stats_of("lean"), AcceptanceStats)
