"""What a user can set of online learning."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from osd_hf.errors import ConfigError, first_line, nearest
from osd_hf.losses import DIVERGENCES
from osd_hf.utils.report import read_config

CHOICES: dict[str, tuple[str, ...]] = {
    "drafting": ("lean", "stock"),
    "divergence": tuple(DIVERGENCES),
    "learn_from": ("verified", "corrections"),
    "candidates": ("both", "draft", "text"),
    "text_scope": ("request", "owner", "domain"),
    "draft_vocabulary": ("auto", "full"),
    "update_strategy": ("spread", "interval", "idle", "manual"),
    "optimizer": ("muon", "adamw"),
    "mixed_precision": ("auto", "no", "bf16"),
}
COUNTS = ("update_interval", "steps_per_update", "batch_size", "buffer_size", "autosave_interval", "max_drafts",
          "text_bytes")  # fmt: skip


def setting(default: Any, help: str) -> Any:
    """A field of a configuration, with what the help of its flag says."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class OnlineConfig:
    """
    How an assistant drafts and learns. The defaults were chosen by experiment (`recipes/frontier.py`);
    [`OnlineConfig.paper`] is the rule of arXiv 2310.07177.

    Args:
        num_assistant_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`):
            `"auto"` decides by measured acceptance and costs, token by token, how many candidates a round has and
            which source they come from, see [`~OnlineAssistant.drafting_plan`]. A number is k, tokens drafted per
            round, all by the draft, at threshold 0 and a constant schedule: for figures that are compared. `None`
            leaves the draft's own generation config as it is. With stock drafting, `"auto"` is 5.
        candidates (`str`, *optional*, defaults to `"both"`):
            Where `"auto"` takes candidates from: `"draft"`, `"text"` (what followed the last tokens where they stood
            before) or `"both"`.
        text_scope (`str`, *optional*, defaults to `"owner"`):
            The text that is looked up besides a request's own prompt and answer: `"request"`: none; `"owner"`:
            prompts and answers of earlier requests of the same owner ([`~OnlineAssistant.generate`]; those without
            one are taken for one owner's); `"domain"`: also what all owners were answered in the domain. It is kept
            as token ids in memory, nothing of requests with `learn=False`, and no trace holds what was proposed from
            it in vain.
        text_bytes (`int`, *optional*, defaults to 67108864):
            Most bytes of that text and its index; 36 a token.
        draft_vocabulary (`str`, *optional*, defaults to `"auto"`):
            With `num_assistant_tokens="auto"`, the tokens that a draft chooses among: `"auto"`: those that the target
            emits in the domain, where its vocabulary has at least 16,384 tokens, once 2,048, 8,192 or 32,768 of them
            cost at most 0.005 of acceptance, by what came that they lack and how often the draft had such tokens right
            (looked at every 8 requests, on at least 256 emitted tokens). The other rows of the draft's head are not
            computed. It follows traffic, changes no weight, and takes a copy of the rows in use. `"full"`: all.
        drafting (`str`, *optional*, defaults to `"lean"`):
            `"lean"`: by the draft's own forward; `"stock"`: by transformers' candidate generator, the reference.
        compile_draft (`bool` or `"auto"`, *optional*, defaults to `"auto"`):
            On an accelerator, starting the kernels of an eager forward takes longer than what they compute. `"auto"`:
            where the draft lies on a CUDA device, they are captured as graphs, over static caches, which takes a
            tenth of a second; on other accelerators as `True`. `True`, also on a CPU: the forward is compiled,
            which makes a token faster still. Compiling takes from some seconds to a minute, by the size of the draft
            (less where the compiler's own cache has it already), at the first request, for each doubling of the
            longest sequence ([`~OnlineAssistant.warm_up`] does it before), and once more for each size of draft
            vocabulary. `False`: eager forwards. What a sequence has beyond 8,192 tokens is drafted eagerly. Where it
            cannot be done, the log says so and the draft runs eagerly.
        compile_target (`bool`, *optional*, defaults to `False`):
            Compile the target's verification of drafts over a static cache: once, for any number of drafted tokens,
            for each doubling of the longest sequence; it takes some 20 seconds each, less where the compiler's own
            cache has it already. Answers are the target's as before, up to ties as elsewhere. Where it cannot be done
            (encoder-decoders, sliding windows, offloaded weights), the log says so; requests with a padded prompt, a
            cache of an earlier turn or hidden states to be returned are verified eagerly.
        divergence (`str`, *optional*, defaults to `"forward_kl"`):
            What an update lowers between the target's and the draft's distribution; a key of
            `osd_hf.losses.DIVERGENCES`.
        learn_from (`str`, *optional*, defaults to `"verified"`):
            `"verified"`: every emitted position; `"corrections"`: only where the target corrected the draft.
        num_logprobs (`int`, *optional*, defaults to 64):
            Target entries kept per position (K); `None` keeps whole rows. Of a vocabulary of 16,384 tokens or more,
            2,048 that are drawn anew for each batch stand in the loss for those that none of its rows keeps.
        update_strategy (`str`, *optional*, defaults to `"spread"`):
            `"spread"`: an update for every `update_interval` requests, cut into parts that are done after the answers
            to as many requests (after more, once learning is at its least), so that none waits for a whole update. An
            answer waits for its parts, however many, while each takes no longer than the answer itself did, times
            `max_duty_cycle`, or a second. A part that takes longer (an optimizer step of a draft of hundreds of
            millions of weights takes seconds on a CPU) stops where it is, as with `"idle"`, and goes on after the next
            answers, each of which waits only so long in all, until a whole update has had no such part;
            `"interval"`: the same updates, whole, after the answer that completes the interval;
            `"idle"`: the same by a thread of their own, which computes only while no request is running, and stops
            for one that arrives also in the middle of a step, between two layers (on an accelerator not in a
            backward); what that forward holds in memory stays there meanwhile, beside the request;
            `"manual"`: only when `update` is called.
        update_interval (`int`, *optional*, defaults to 8):
            Requests (of one draft, where domains have their own) between two updates.
        min_effort (`float`, *optional*, defaults to 0.0625):
            With a gate, updates come less often once acceptance no longer rises, or its rise saves less time than it
            takes: after up to `update_interval` divided by this many requests, or more, as updates take about 3% of
            what serving takes by then; as often as before again when traffic changes. 1 does all of them.
        max_effort (`float`, *optional*, defaults to 1.0):
            At first, and again when traffic changes, updates come after `update_interval` divided by this many
            requests: 2 learns sooner, at twice the cost.
        steps_per_update (`int`, *optional*, defaults to 9): Optimizer steps of an update.
        batch_size (`int`, *optional*, defaults to 16): Requests in the batch of one step, at most.
        batch_positions (`int`, *optional*, defaults to 480):
            Positions of answers in the batch of one step, about: fewer requests than `batch_size` where answers are
            long. `None` takes `batch_size` requests, however long their answers are.
        max_learn_tokens (`int`, *optional*, defaults to 2048):
            Tokens of prompt and answer of one request that are learned from, at least 2: memory grows with them. Of
            longer ones the whole answer stays, and the end of the prompt; of an answer that alone is longer, its
            beginning, after a quarter of the tokens for the prompt. The input of an encoder keeps its beginning. The
            gate compares whole requests. `None` takes what 2 GiB above the models allow, as every number does at most.
        replay_fraction (`float`, *optional*, defaults to 0.75):
            Share of a batch drawn from the replay buffer; the rest are the newest requests. Where these are fewer,
            the buffer fills up; where the buffer is empty, the batch is smaller.
        buffer_size (`int`, *optional*, defaults to 2048):
            Requests in the replay buffer of one draft: a uniform sample of what each domain has had; where all do not
            fit, the domain with the most gives way.
        target_lag (`int`, *optional*, defaults to 0):
            Versions of the target before the one that answers now whose requests are learned from still, for a target
            that is another one every few requests ([`RolloutAssistant`]). Versions of the draft are judged by requests
            of the newest one, where there are enough. With 0, a change of the target begins anew.
        optimizer (`str`, *optional*, defaults to `"muon"`):
            `"muon"`: Muon for the weight matrices inside the layers, AdamW for the rest; `"adamw"`: AdamW for all.
        learning_rate (`float`, *optional*, defaults to 3e-3):
            Constant; Muon's steps are scaled to the size of AdamW's, and one rate serves both.
        learner_device (`str`, *optional*):
            Where the draft's fp32 master, its optimizer and averages are, and every step of learning: a device as
            torch names it, such as `"cpu"` or `"cuda:1"`. A new version is cast and copied to where the draft serves;
            there it is tried by the gate, as what will serve. `None` is the device that the draft serves on.
        mixed_precision (`str`, *optional*, defaults to `"auto"`):
            What forwards and backwards of learning compute in, by autocast; master and optimizer states are in fp32
            in any case. `"bf16"`, `"no"` (fp32), or `"auto"`: bf16 for a draft that serves in half precision, on an
            accelerator that has it, and for a wide one on a CPU that multiplies matrices faster in it, which is timed
            once in a process. Muon's iterations are in bf16 on accelerators, and on such a CPU unless this is `"no"`.
            Settings of Accelerate are not looked at.
        max_grad_norm (`float`, *optional*, defaults to 1.0): Gradients are clipped to this norm.
        weight_average (`float`, *optional*, defaults to 0.98):
            What serves is the exponential average of the learned weights over steps, with this decay; 0 serves the
            last step's. An average allows a high rate without its noise.
        gate (`bool`, *optional*, defaults to `True`):
            A new version serves only if, replayed on the newest held-back requests (every fourth; they are learned
            from later), it is accepted as well as the one that serves; a version whose served acceptance then falls
            is rolled back.
        max_duty_cycle (`float`, *optional*, defaults to 1.0):
            Share of the time that learning may take: after work of s seconds it rests for `s * (1 / share - 1)`, and
            with `"spread"` an answer that took s seconds waits for `share * s`, but not less than a second, for each
            part of it.
        micro_step_seconds (`float`, *optional*, defaults to 0.02):
            `"idle"` only: as many requests are learned from at once as take about so long. An arriving request waits
            for no more than a layer of such a forward or backward, some millions of weights of another step, or one
            product with the embeddings; on an accelerator for a whole backward.
        autosave_interval (`int`, *optional*, defaults to 8):
            Updates between two saves of the session, of an assistant that is given a folder for them.
        max_drafts (`int`, *optional*, defaults to 32):
            Domains that get a draft of their own; further ones are served by the base draft.
        max_draft_bytes (`int`, *optional*):
            Bytes of the drafts per domain that are held ready to serve (at least one is); the longest unused goes,
            and is made again when it is needed. `None` holds all.
        seed (`int`, *optional*, defaults to 0): Seeds the replay samples.

    Raises:
        ConfigError: a value outside its range; names field, rule and value.
    """

    num_assistant_tokens: int | Literal["auto"] | None = setting(
        "auto", "tokens drafted per round (k); auto = by acceptance and costs, none = the draft's own setting"
    )
    candidates: Literal["both", "draft", "text"] = setting("both", "where proposals come from, with k = auto")
    text_scope: Literal["request", "owner", "domain"] = setting(
        "owner", "past text that is looked up: the request's own, its owner's, or all answers of the domain"
    )
    text_bytes: int = setting(1 << 26, "bytes of past text and its index, at most")
    draft_vocabulary: Literal["auto", "full"] = setting("auto", "tokens of the draft's head; auto = those in use")
    drafting: Literal["lean", "stock"] = setting("lean", "what generates candidates; stock = transformers' generator")
    compile_draft: bool | Literal["auto"] = setting(
        "auto", "compile the draft's forward (lean drafting); auto = on accelerators, as graphs of its kernels"
    )
    compile_target: bool = setting(False, "compile the target's verification of drafts")
    divergence: str = setting("forward_kl", "loss between target and draft: " + ", ".join(DIVERGENCES))
    learn_from: Literal["verified", "corrections"] = setting("verified", "positions learned from")
    num_logprobs: int | None = setting(64, "target entries kept per position; none = whole rows")
    update_strategy: Literal["spread", "interval", "idle", "manual"] = setting(
        "spread", "when updates run: a part after each answer, whole, between answers, or when asked"
    )
    update_interval: int = setting(8, "requests between two updates")
    min_effort: float = setting(0.0625, "share of the updates done once acceptance no longer rises; 1 = all, always")
    max_effort: float = setting(1.0, "share of the updates done while acceptance rises; 2 = twice as many")
    steps_per_update: int = setting(9, "optimizer steps of an update")
    batch_size: int = setting(16, "requests in the batch of one step")
    batch_positions: int | None = setting(480, "positions of answers in the batch of one step; none = any")
    max_learn_tokens: int | None = setting(2048, "tokens of a request that are learned from; none = what fits")
    replay_fraction: float = setting(0.75, "share of a batch drawn from the replay buffer")
    buffer_size: int = setting(2048, "requests in the replay buffer")
    target_lag: int = setting(0, "earlier versions of the target whose requests are learned from still")
    optimizer: Literal["muon", "adamw"] = setting(
        "muon", "what takes the steps; muon = for the matrices inside the layers, and AdamW for the rest"
    )
    learning_rate: float = setting(3e-3, "learning rate of the optimizer, constant")
    learner_device: str | None = setting(None, "device that learns, such as cpu or cuda:1; none = the draft's")
    mixed_precision: Literal["auto", "no", "bf16"] = setting(
        "auto", "precision of learning; auto = bf16 for half-precision drafts where that is faster"
    )
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm")
    weight_average: float = setting(0.98, "decay of the averaged weights that serve; 0 = the last step's")
    gate: bool = setting(True, "a version serves only if it does as well on held-back requests")
    max_duty_cycle: float = setting(1.0, "share of the time that learning may take at most")
    micro_step_seconds: float = setting(0.02, "seconds, about, that idle learning takes at once")
    autosave_interval: int = setting(8, "updates between two saves of the session, where it is saved")
    max_drafts: int = setting(32, "drafts per domain that learn at most; further domains take the base draft")
    max_draft_bytes: int | None = setting(None, "bytes of drafts per domain that are held ready; none = all")
    seed: int = setting(0, "seed of the replay samples")

    def __post_init__(self) -> None:
        def must(name: str, holds: bool, rule: str) -> None:
            if not holds:
                raise ConfigError(f"`{name}` must be {rule}, got {getattr(self, name)!r}.")

        def is_int(value: Any, least: int = 1) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        for name in (f.name for f in fields(self) if f.type == "float"):
            value = getattr(self, name)
            must(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        for name in COUNTS:
            must(name, is_int(getattr(self, name)), "an integer of at least 1")
        for name, choices in CHOICES.items():
            must(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        for name in ("compile_target", "gate"):
            must(name, isinstance(getattr(self, name), bool), "True or False")
        compiles = self.compile_draft
        must("compile_draft", compiles == "auto" or isinstance(compiles, bool), 'True, False, or "auto"')
        for name in ("learning_rate", "max_grad_norm", "micro_step_seconds"):
            must(name, 0 < getattr(self, name) < float("inf"), "a positive number")
        k, width, size = self.num_assistant_tokens, self.num_logprobs, self.max_draft_bytes
        must("num_assistant_tokens", k in (None, "auto") or is_int(k), 'an integer of at least 1, "auto", or None')
        must("num_logprobs", width is None or is_int(width), "an integer of at least 1, or None")
        most = self.batch_positions
        must("batch_positions", most is None or is_int(most), "an integer of at least 1, or None")
        longest = self.max_learn_tokens
        must("max_learn_tokens", longest is None or is_int(longest, 2), "an integer of at least 2, or None")
        must("max_draft_bytes", size is None or is_int(size), "a positive integer, or None")
        must("replay_fraction", 0 <= self.replay_fraction <= 1, "between 0 and 1")
        must("weight_average", 0 <= self.weight_average < 1, "at least 0 and below 1")
        must("min_effort", 0 < self.min_effort <= 1, "above 0 and at most 1")
        must("max_effort", 1 <= self.max_effort < float("inf"), "a number of at least 1")
        must("max_duty_cycle", 0 < self.max_duty_cycle <= 1, "above 0 and at most 1")
        must("learner_device", _is_device(self.learner_device), 'a device as torch names it, such as "cpu", or None')
        for name in ("target_lag", "seed"):
            must(name, is_int(getattr(self, name), 0), "an integer of at least 0")
        if self.drafting == "stock" and compiles is True:
            raise ConfigError('`compile_draft=True` needs `drafting="lean"`, got "stock".')
        if k == "auto" and self.drafting == "lean" and self.learn_from == "corrections":
            raise ConfigError(
                '`learn_from="corrections"` needs a fixed `num_assistant_tokens`, got "auto", which leaves the target '
                'alone while drafting does not pay: nothing is corrected then. Use `learn_from="verified"`.'
            )

    @classmethod
    def paper(cls, **changes: Any) -> OnlineConfig:
        """
        The paper's rule: k = 5, one step of AdamW on the last 8 requests, corrections only, forward KL, learning rate
        1e-4, no replay, no average, no gate.

        Args:
            changes (`Any`, *optional*): Fields to set otherwise.
        """
        rule: dict[str, Any] = {
            "num_assistant_tokens": 5, "divergence": "forward_kl", "learn_from": "corrections",
            "update_strategy": "interval", "update_interval": 8, "steps_per_update": 1, "batch_size": 8,
            "batch_positions": None,
            "replay_fraction": 0.0, "optimizer": "adamw", "learning_rate": 1e-4, "weight_average": 0.0, "gate": False,
        }  # fmt: skip
        return cls(**{**rule, **changes})

    @property
    def reads_text(self) -> bool:
        """Whether requests may take candidates from past text."""
        return self.num_assistant_tokens == "auto" and self.drafting == "lean" and self.candidates != "draft"

    @property
    def compared_k(self) -> int | None:
        """Tokens drafted per round in what is replayed and compared: those that are served, 5 with `"auto"`."""
        return 5 if self.num_assistant_tokens == "auto" else self.num_assistant_tokens

    def to_dict(self) -> dict[str, Any]:
        """Field by field, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OnlineConfig:
        """The configuration of these fields, others as by default; raises ConfigError for a name that is none, or a
        value of another type or outside its range."""
        known = [f.name for f in fields(cls)]
        if unknown := [name for name in settings if name not in known]:
            raise ConfigError(f"`{unknown[0]}` is no setting of OnlineConfig.{nearest(str(unknown[0]), known)}")
        return cls(**settings)

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write all fields to a JSON file, which [`~OnlineConfig.from_file`] reads."""
        Path(json_file_path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_yaml_file(self, yaml_file_path: str | os.PathLike[str]) -> None:
        """The same as YAML."""
        Path(yaml_file_path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> OnlineConfig:
        """
        The configuration in a JSON or YAML file, by its suffix (`.json`, `.yaml`, `.yml`); fields that it leaves out
        are as by default.

        Raises:
            ConfigError: the file cannot be read, holds no names with values, a name that is no field (the message has
                the nearest one), or a value outside its range.
        """
        path = Path(path)
        if path.suffix not in (".json", ".yaml", ".yml"):
            raise ConfigError(f"The configuration {str(path)!r} must end in .json, .yaml or .yml.")
        read = read_config(path)
        # YAML takes a written `no` for false, and 1e-3 for a text.
        if read.get("mixed_precision") is False:
            read["mixed_precision"] = "no"
        numbers = {f.name for f in fields(cls) if f.type == "float"}
        try:
            read |= {name: float(v) for name, v in read.items() if name in numbers and isinstance(v, str)}
        except ValueError as error:
            raise ConfigError(f"The configuration {str(path)!r} cannot be read: {first_line(error)}.") from error
        return cls.from_dict(read)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> OnlineConfig:
        """[`~OnlineConfig.from_file`], by the name that configurations of transformers have for it."""
        return cls.from_file(json_file)


def _is_device(name: Any) -> bool:
    """Whether it is `None` or the name of a device, which this machine need not have."""
    try:
        return name is None or (isinstance(name, str) and bool(torch.device(name)))
    except RuntimeError:
        return False
