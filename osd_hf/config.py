"""The settings of drafting and online learning that users choose."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from osd_hf.errors import ConfigError, first_line
from osd_hf.losses import DIVERGENCES

CONFIG_NAME = "online_config.json"
REPLAY_NUM_ASSISTANT_TOKENS = 5  # drafted per round when versions are compared, unless the number is fixed


def setting(default: Any, help: str) -> Any:
    """Return a dataclass field with the help text of its command-line flag."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class OnlineConfig:
    """
    Configure how an assistant drafts and learns. [`OnlineConfig.paper`] is the rule of arXiv 2310.07177.

    Args:
        num_assistant_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            Candidate tokens per round. `"auto"` chooses their number and source by measured acceptance and costs. A
            number is a fixed k, all from the draft. `None` keeps the draft's own generation config.
        candidates (`str`, *optional*, defaults to `"both"`):
            Sources of candidates with `"auto"`: `"draft"`, `"text"` (what followed the last tokens) or `"both"`.
        text_scope (`str`, *optional*, defaults to `"owner"`):
            Text that is searched in addition to the request's own prompt and answer: `"request"` (none), `"owner"`
            (earlier requests of the same owner) or `"domain"` (also earlier answers of the domain to any owner). The
            text stays in memory. Requests with `learn=False` are not kept.
        compile_draft (`bool` or `"auto"`, *optional*, defaults to `"auto"`):
            Run the draft over a static cache: captured as CUDA graphs with compiled layers on CUDA devices, compiled
            elsewhere, up to a minute for each doubling of the longest sequence. `"auto"` captures or compiles on
            accelerators and does nothing on a CPU.
        compile_target (`bool` or `"auto"`, *optional*, defaults to `"auto"`):
            Run the target over a static cache: captured as CUDA graphs with compiled layers on CUDA devices, compiled
            elsewhere, about 20 seconds for each doubling of the longest sequence. Where that is impossible, the target
            runs eagerly and a warning is logged. `"auto"` captures on CUDA devices and does nothing elsewhere.
        divergence (`str`, *optional*, defaults to `"forward_kl"`): A key of `osd_hf.losses.DIVERGENCES`.
        learn_from (`str`, *optional*, defaults to `"verified"`):
            `"verified"`: every emitted position; `"corrections"`: positions where the target rejected a token.
        num_logprobs (`int`, *optional*, defaults to 64):
            Target log-probabilities stored per position. `None` stores whole rows.
        update_strategy (`str`, *optional*, defaults to `"spread"`):
            `"spread"`: a part of an update after each answer, in the caller's thread; `"interval"`: the whole update
            after every `update_interval` requests; `"idle"`: in a thread, between requests; `"manual"`: only in
            [`~OnlineAssistant.update`].
        update_interval (`int`, *optional*, defaults to 8):
            Requests between two updates. With a gate, updates become rarer once they no longer pay.
        steps_per_update (`int`, *optional*, defaults to 9), batch_size (`int`, *optional*, defaults to 16):
            Optimizer steps per update, and the maximum number of requests in the batch of one step.
        replay_fraction (`float`, *optional*, defaults to 0.75), buffer_size (`int`, *optional*, defaults to 2048):
            Share of a batch that comes from the replay buffer instead of the newest requests, and its size.
        learning_rate (`float`, *optional*, defaults to 3e-3): Constant learning rate.
        learner_device (`str`, *optional*):
            Device of the fp32 master copy, the optimizer and all learning, such as `"cuda:1"`. By default the device
            of the draft.
        optimizer (`str`, *optional*, defaults to `"muon"`):
            `"muon"`: Muon for weight matrices inside the layers and AdamW for the rest; `"adamw"`: AdamW for all.
        weight_average (`float`, *optional*, defaults to 0.98):
            Decay of the exponential moving average of the weights that serves; 0 serves the weights of the last step.
        gate (`bool`, *optional*, defaults to `True`):
            Serve a version only if held-back requests show that it is accepted as much, and roll it back if not.
        seed (`int`, *optional*, defaults to 0): Seed of the replay samples.

    Raises:
        ConfigError: A value is outside its range.
    """

    num_assistant_tokens: int | Literal["auto"] | None = setting(
        "auto", "candidate tokens per round (k); auto = by acceptance and costs, none = the draft's own setting"
    )
    candidates: Literal["both", "draft", "text"] = setting("both", "sources of candidates with k = auto")
    text_scope: Literal["request", "owner", "domain"] = setting(
        "owner", "earlier text that is searched for candidates: none, the owner's, or all answers of the domain"
    )
    compile_draft: bool | Literal["auto"] = setting("auto", "compile the draft's forward; auto = on accelerators")
    compile_target: bool | Literal["auto"] = setting("auto", "static target; auto = captured on CUDA devices")
    divergence: str = setting("forward_kl", "loss between target and draft: " + ", ".join(DIVERGENCES))
    learn_from: Literal["verified", "corrections"] = setting("verified", "positions to learn from")
    num_logprobs: int | None = setting(64, "target log-probabilities stored per position; none = whole rows")
    update_strategy: Literal["spread", "interval", "idle", "manual"] = setting(
        "spread", "when updates run: in parts after answers, whole, between requests, or on demand"
    )
    update_interval: int = setting(8, "requests between two updates")
    steps_per_update: int = setting(9, "optimizer steps per update")
    batch_size: int = setting(16, "maximum number of requests in the batch of one step")
    replay_fraction: float = setting(0.75, "share of a batch that comes from the replay buffer")
    buffer_size: int = setting(2048, "requests in the replay buffer")
    learning_rate: float = setting(3e-3, "constant learning rate")
    learner_device: str | None = setting(None, "device that learns, such as cpu or cuda:1; none = the draft's")
    optimizer: Literal["muon", "adamw"] = setting("muon", "muon (with AdamW for embeddings and head) or adamw")
    weight_average: float = setting(0.98, "decay of the averaged weights that serve; 0 = the last step's weights")
    gate: bool = setting(True, "serve a version only if held-back requests show that it is as good")
    seed: int = setting(0, "seed of the replay samples")

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        def is_int(value: Any, minimum: int = 1) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= minimum

        for name in (f.name for f in fields(self) if f.type == "float"):
            value = getattr(self, name)
            must(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        for name in ("update_interval", "steps_per_update", "batch_size", "buffer_size"):
            must(name, is_int(getattr(self, name)), "an integer of at least 1")
        choices = {n: get_args(hint) for n, hint in get_type_hints(type(self)).items() if get_origin(hint) is Literal}
        for name, allowed in {**choices, "divergence": tuple(DIVERGENCES)}.items():
            must(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        must("gate", isinstance(self.gate, bool), "True or False")
        for name in ("compile_draft", "compile_target"):
            value = getattr(self, name)
            must(name, value == "auto" or isinstance(value, bool), 'True, False, or "auto"')
        k, kept = self.num_assistant_tokens, self.num_logprobs
        must("num_assistant_tokens", k in (None, "auto") or is_int(k), 'an integer of at least 1, "auto", or None')
        must("num_logprobs", kept is None or is_int(kept), "an integer of at least 1, or None")
        must("learning_rate", 0 < self.learning_rate < float("inf"), "a positive number")
        must("replay_fraction", 0 <= self.replay_fraction <= 1, "between 0 and 1")
        must("weight_average", 0 <= self.weight_average < 1, "at least 0 and below 1")
        must("seed", is_int(self.seed, 0), "an integer of at least 0")
        if k == "auto" and self.learn_from == "corrections":
            raise ConfigError(
                '`learn_from="corrections"` needs a fixed `num_assistant_tokens`, got "auto". With "auto" the target '
                'may answer without a draft, so nothing would be corrected. Use `learn_from="verified"`.'
            )

    @classmethod
    def paper(cls, **changes: Any) -> OnlineConfig:
        """
        Return the paper's rule: k = 5, one AdamW step on the last 8 requests, corrections only, forward KL, learning
        rate 1e-4, no replay, no average, no gate.

        Args:
            changes (`Any`, *optional*): Fields to set otherwise.
        """
        rule = cls(
            num_assistant_tokens=5,
            divergence="forward_kl",
            learn_from="corrections",
            update_strategy="interval",
            update_interval=8,
            steps_per_update=1,
            batch_size=8,
            replay_fraction=0.0,
            optimizer="adamw",
            learning_rate=1e-4,
            weight_average=0.0,
            gate=False,
        )
        return replace(rule, **changes)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], **changes: Any) -> OnlineConfig:
        """Load the configuration of a folder or Hub repository, with `changes`. Raises ConfigError if it has none."""
        from transformers.utils import cached_file  # takes a second

        try:
            saved = json.loads(Path(cached_file(str(name), CONFIG_NAME)).read_text())
            return cls(**{**saved, **changes})
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"No {CONFIG_NAME} can be read from {name}: {first_line(error)}.") from error

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write the configuration to `online_config.json` in a folder, which is created if missing."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / CONFIG_NAME).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @property
    def reads_text(self) -> bool:
        """Whether requests may take candidates from earlier text."""
        return self.num_assistant_tokens == "auto" and self.candidates != "draft"

    @property
    def unused(self) -> list[str]:
        """Names of changed fields that have no effect with the others."""
        plain, is_auto = OnlineConfig(), self.num_assistant_tokens == "auto"
        used = {"candidates": is_auto, "text_scope": self.reads_text}
        return [name for name, is_used in used.items() if not is_used and getattr(self, name) != getattr(plain, name)]

    @property
    def compared_k(self) -> int | None:
        """Tokens drafted per round in replay and comparisons: the served number, or 5 with `"auto"`."""
        k = self.num_assistant_tokens
        return REPLAY_NUM_ASSISTANT_TOKENS if k == "auto" else k

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ready for JSON."""
        return asdict(self)
