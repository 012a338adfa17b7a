from typing import Any

import models
import pytest
import torch

from osd_hf import OnlineAssistant, VocabularyMismatchError, align_vocab


def padded(vocab_size: int, **changes: Any) -> Any:
    return models.build(vocab_size=vocab_size, **changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("target_size", "draft_size"), [(72, 66), (66, 72), (66, 66)])
def test_a_draft_gets_the_targets_vocabulary_size(target_size: int, draft_size: int, tied: bool) -> None:
    tokenizer = models.tokenizer(64)
    target = padded(target_size)
    draft = models.fixed_k(padded(draft_size, tie_word_embeddings=tied))
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
    assistant = OnlineAssistant(target, aligned)
    answer = assistant.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    alone = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert torch.equal(answer, alone)


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


def test_unknown_tokenizers_are_asked_for() -> None:
    with pytest.raises(VocabularyMismatchError, match="Pass `tokenizer=`"):
        align_vocab(padded(66), padded(72))


@pytest.mark.parametrize(("target_size", "draft_size"), [(72, 60), (60, 72)])
def test_more_than_padding_is_refused(target_size: int, draft_size: int) -> None:
    with pytest.raises(VocabularyMismatchError, match="ids up to 63"):
        align_vocab(padded(draft_size), padded(target_size), models.tokenizer(64))
