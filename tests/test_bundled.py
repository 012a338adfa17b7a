"""The bundled models and prompts, and the recipe that makes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from osd_hf import bundled
from osd_hf.bundled import DOMAINS, bundled_prompts, load_bundled

FOLDER = Path(bundled.__file__).parent
RECIPES = FOLDER.parents[1] / "recipes"
sys.path.append(str(RECIPES))

from bundled_prompts import check_answer, first_examples, shipped_lines  # noqa: E402


@pytest.fixture(scope="module")
def pair():
    return load_bundled()


def encode(tokenizer, prompt):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_are_distinct_and_begin_alike(domain):
    some = bundled_prompts(domain, 250, seed=1)
    assert bundled_prompts(domain, 10, seed=1) == some[:10]
    assert len({example.prompt for example in some}) == 250
    assert {example.domain for example in some} == {domain}
    assert not {e.prompt for e in some} & {e.prompt for e in bundled_prompts(domain, 250)}
    assert len({e.prompt for e in bundled_prompts(domain, 1000, seed=123)}) == 1000
    assert bundled_prompts(domain, 0) == []


def test_the_shipped_prompts_are_those_of_the_recipe():
    assert shipped_lines() == (FOLDER / "prompts.jsonl").read_text().splitlines()


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_problem_is_in_both_splits(domain):
    served = {example.content for example in first_examples(domain, 500)}
    examples = first_examples(domain, 1600, split="train")
    assert not served & {example.content for example in examples}
    assert len({example.answer for example in examples}) > 1200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domain": "poetry", "n": 1}, "domain must be one of"),
        ({"domain": "sql", "n": -1}, "n must be"),
        ({"domain": "sql", "n": 1.5}, "n must be"),
        ({"domain": "sql", "n": 1001}, "from 0 to 1000"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bundled_prompts(**arguments)


def test_committed_models_fit_together(pair):
    target, draft, tokenizer = pair
    assert target.config.vocab_size == draft.config.vocab_size == len(tokenizer)
    assert {p.dtype for p in [*target.parameters(), *draft.parameters()]} == {torch.float32}
    assert not target.training
    assert not draft.training
    size = sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors") if path.parent.name != "smollm2_draft")
    assert size <= 20e6
    assert (FOLDER / "target" / "tokenizer.json").read_text() == (FOLDER / "draft" / "tokenizer.json").read_text()
    for model in (target, draft):
        settings = model.generation_config
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (1, 2, 0)
    settings = draft.generation_config
    assert settings.num_assistant_tokens == 5
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0.0


def test_tokenizer_keeps_text_and_splits_digits(pair):
    tokenizer = pair[2]
    for domain in DOMAINS:
        for example in bundled_prompts(domain, 50):
            assert tokenizer.decode(tokenizer(example.answer)["input_ids"]) == example.answer
    assert all(sum(c.isdigit() for c in token) <= 1 for token in tokenizer.get_vocab())
    ids = encode(tokenizer, "hi")["input_ids"][0].tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


@pytest.mark.parametrize("domain", DOMAINS)
def test_committed_target_answers_rightly(pair, domain):
    target, _, tokenizer = pair
    right = 0
    examples = first_examples(domain, 10, seed=7)
    turns = [[{"role": "user", "content": example.prompt}] for example in examples]
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
        tokenizer_kwargs={"padding_side": "left"},
    )  # fmt: skip
    out = target.generate(**inputs, max_new_tokens=128, do_sample=False)
    for example, answer in zip(examples, out[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        assert tokenizer.eos_token_id in answer
        right += check_answer(example, tokenizer.decode(answer, skip_special_tokens=True))
    assert right >= 8


def test_recorded_scores_are_what_the_readme_promises():
    made = json.loads((FOLDER / "made.json").read_text())
    for row in made["score"]["domains"].values():
        assert row["score"] >= 0.9
        assert 0.2 <= row["alpha"] < 0.5
        assert row["alpha_tuned"] >= row["alpha"] + 0.2


@pytest.mark.slow
def test_recipe_makes_a_pair_in_two_steps(tmp_path):
    flags = ["--max-steps", "2", "--prompts", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(RECIPES / "bundled_pair.py"), *flags], check=True, capture_output=True)
    assert {"target", "grow", "draft", "score"} <= json.loads((tmp_path / "made.json").read_text()).keys()
    assert (tmp_path / "draft" / "model.safetensors").exists()
