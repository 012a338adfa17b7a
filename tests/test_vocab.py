from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from osd_hf import OnlineAssistant, OnlineConfig
from osd_hf.errors import VocabularyMismatchError
from osd_hf.models import align_vocab, check_tokenizers

reads_a_deprecated_name = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft does


def padded(vocab_size: int, **changes: Any) -> Any:
    return models.build(vocab_size=vocab_size, **changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("target_size", "draft_size"), [(72, 66), (66, 72), (66, 66)])
def test_a_draft_gets_the_targets_vocabulary_size(target_size: int, draft_size: int, tied: bool) -> None:
    tokenizer = models.tokenizer(64)
    target = padded(target_size)
    draft = padded(draft_size, tie_word_embeddings=tied)
    given = {name: p.clone() for name, p in draft.named_parameters()}
    aligned = align_vocab(draft, target, tokenizer)
    assert aligned.config.vocab_size == target_size
    assert draft.config.vocab_size == draft_size
    assert all(torch.equal(given[name], p) for name, p in draft.named_parameters())
    ids = models.prompt(vocab_size=64)
    both = min(target_size, draft_size)
    with torch.no_grad():
        # A product of another width may be summed in another order.
        ours, theirs = (models.double(model)(ids).logits[..., :both] for model in (aligned, draft))
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    assert not aligned.training


def test_tokenizers_are_found_where_the_models_came_from(tmp_path: Any) -> None:
    sizes = {"target": 72, "draft": 66, "foreign": 66}
    for name, size in sizes.items():
        padded(size).save_pretrained(tmp_path / name)
        characters = {"characters": "zyxwvutsrqponm"} if name == "foreign" else {}
        models.tokenizer(**characters).save_pretrained(tmp_path / name)
    loaded = {name: type(padded(66)).from_pretrained(tmp_path / name) for name in sizes}
    assert align_vocab(loaded["draft"], loaded["target"]).config.vocab_size == 72
    with pytest.raises(VocabularyMismatchError, match="differ in"):
        align_vocab(loaded["foreign"], loaded["target"])


@pytest.mark.parametrize("make", [align_vocab, lambda draft, target: OnlineAssistant(target, draft)])
def test_unknown_tokenizers_are_asked_for(make: Any) -> None:
    with pytest.raises(VocabularyMismatchError, match=r"72 tokens, the draft 66.*Pass `tokenizer=`"):
        make(padded(66), padded(72))


@pytest.mark.parametrize(("target_size", "draft_size"), [(72, 60), (60, 72)])
def test_more_than_padding_is_refused(target_size: int, draft_size: int) -> None:
    with pytest.raises(VocabularyMismatchError, match="ids up to 63"):
        align_vocab(padded(draft_size), padded(target_size), models.tokenizer(64))


def chatting() -> Any:
    """The tokenizer with tokens of a chat template, 64 and 65."""
    tokenizer = models.tokenizer(64)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


@reads_a_deprecated_name
@pytest.mark.parametrize(
    ("target_size", "draft_size", "adapter"), [(72, 66, True), (66, 72, False), (72, 64, False), (66, 80, True)]
)
def test_an_assistant_serves_a_draft_of_another_size(
    target_size: int, draft_size: int, adapter: bool, tmp_path: Any
) -> None:
    target, draft = padded(target_size), models.fixed_k(padded(draft_size, seed=1))
    given = {name: p.clone() for name, p in draft.named_parameters()}
    if adapter:
        draft = get_peft_model(draft, LoraConfig(r=2, target_modules=["q_proj"]))
    config = OnlineConfig(update_strategy="manual", gate=False, num_assistant_tokens=3)
    torch.manual_seed(5)
    assistant = OnlineAssistant(target, draft, chatting(), config)
    assert torch.initial_seed() == 5
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))  # nobody drew meanwhile
    assert draft.config.vocab_size == draft_size
    ids = torch.tensor([[64, 7, 65, 12]])  # what the draft may have had no row for
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    for _ in range(2):
        assert torch.equal(assistant.generate(ids, **settings), target.generate(ids, **settings))
        assistant.update()
    assert assistant.stats.drafted
    plain = draft.get_base_model() if adapter else draft
    now = {name.replace(".base_layer", ""): p for name, p in plain.named_parameters() if "lora_" not in name}
    assert all(torch.equal(given[name], p) for name, p in now.items())
    assistant.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.vocab_size == target_size
    assert torch.equal(target.generate(ids, assistant_model=again, **settings), target.generate(ids, **settings))


def test_a_session_goes_on_with_rows_that_were_added(tmp_path: Any) -> None:
    def assistant(seed: int) -> OnlineAssistant:
        torch.manual_seed(seed)
        return OnlineAssistant(padded(72), padded(66), models.tokenizer(64), OnlineConfig(update_strategy="manual"))

    rows = [assistant(seed).serving_draft().get_input_embeddings().weight.detach() for seed in range(2)]
    assert torch.equal(*rows)
    assert float((rows[0][66:] - rows[0][:66].mean(0)).abs().max()) < 1e-3
    assistant(0).save_state(tmp_path)
    assistant(1).load_state(tmp_path)


def test_tokenizers_may_differ_in_added_tokens_alone(tmp_path: Any) -> None:
    target, draft = padded(72), models.fixed_k(padded(64))
    for name, model, tokenizer in (("t", target, chatting()), ("d", draft, models.tokenizer(64))):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    assistant = OnlineAssistant(tmp_path / "t", tmp_path / "d")
    assert assistant.draft.config.vocab_size == 72
    assert assistant.tokenizer.get_vocab()["<|im_end|>"] == 65
    check_tokenizers(models.tokenizer(64), chatting())
    foreign = models.tokenizer(64, characters="zyxwvutsrqponm")
    foreign.add_tokens(["<|im_start|>"], special_tokens=True)
    with pytest.raises(VocabularyMismatchError, match="differ in 61 tokens"):
        check_tokenizers(chatting(), foreign)


@reads_a_deprecated_name
def test_an_adapter_on_what_would_be_resized_is_refused() -> None:
    draft = get_peft_model(padded(66), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(VocabularyMismatchError, match="Merge the adapter"):
        OnlineAssistant(padded(72), draft, models.tokenizer(64))
