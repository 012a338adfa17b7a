"""Draft heads: one decoder layer that reads tokens and hidden states of its target."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from osd_hf.errors import ConfigError, UnsupportedModelError, first_line
from osd_hf.head_checkpoints import (
    HEAD_TYPE,
    head_settings,
    num_assistant_tokens,
    our_name,
    read_config,
    read_weights,
    speculators_config,
    their_name,
)
from osd_hf.models import (
    SHARED_SETTING,
    config_value,
    model_masks,
    output_head,
    set_fixed_k,
    unwrap,
    vocab_size_of,
)
from osd_hf.trace import Trace, bare_trace
from osd_hf.utils.context import neutral_context

DEPTH_WEIGHT = 0.8  # of a drafted token in the loss, relative to the one before
ABSENT = 20.0  # a token that an output head lacks has this much less log-mass than all others together
TRAINED_DEPTHS = {"mtp": 2, "eagle3": 3}  # tokens of a round that the loss unrolls, by layout
FIRST_ROUND_TOKENS = 64  # at the end of the prompt, which are read in the first round
STATE_EPS = 1e-6
STATE_SCALE = 5.0  # of states that a new head reads, relative to embeddings, by their root mean squares
MAX_KEPT_BYTES = 256 << 20  # of the states of all traces; those of the oldest are dropped, and recomputed when needed

_kept: WeakKeyDictionary[Trace, tuple[list[int], Tensor]] = WeakKeyDictionary()  # layers and states, oldest first
_lock = threading.Lock()


# --- hidden states of the target -------------------------------------------------------------------------------------


def half(states: Tensor) -> Tensor:
    """Return states in half precision: bfloat16 stays, everything else becomes float16."""
    if states.dtype == torch.bfloat16:
        return states
    limit = torch.finfo(torch.float16).max
    return states.clamp(-limit, limit).half()


def keep_states(trace: Trace, states: Tensor, layers: Sequence[int]) -> None:
    """Keep the states of these layers at all tokens of a trace but the last, `(tokens - 1, width)`, in half precision,
    in place of those of other layers. They are never written to disk."""
    with _lock:
        _kept.pop(trace, None)
        _kept[trace] = list(layers), states
        total = sum(kept.nbytes for _, kept in _kept.values())
        for oldest in list(_kept.keys()):
            if total <= MAX_KEPT_BYTES or oldest is trace:
                break
            total -= _kept.pop(oldest)[1].nbytes


class StateSource:
    """The target whose states a head reads. It is not copied with the head, and not kept alive by it."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self._target = ref(target)
        self.layers = list(layers)  # of `hidden_states`, of which the last is behind the last norm
        self.has_first_round = True  # without states; an engine reads the prompt before it drafts

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def target(self) -> PreTrainedModel:
        """The target; raises RuntimeError if it no longer exists."""
        if (target := self.living) is None:
            raise RuntimeError("The target of the draft head no longer exists. Keep a reference to it.")
        return target

    @property
    def living(self) -> PreTrainedModel | None:
        """The target; `None` if it no longer exists."""
        return self._target()

    def of(self, traces: Sequence[Trace]) -> list[Tensor]:
        """Return the states of all tokens of each trace but the last, `(tokens - 1, width)`, in half precision: those
        that were kept, or else recomputed by a forward of the target over the stored text."""
        with _lock:
            found = [_kept.get(trace, (None, None)) for trace in traces]
        return [
            states if states is not None and layers == self.layers else self._computed(trace)
            for trace, (layers, states) in zip(traces, found, strict=True)
        ]

    @neutral_context()
    def _computed(self, trace: Trace) -> Tensor:
        target = self.target
        ids = [*trace.prompt_ids.tolist(), *trace.completion_ids.tolist()][:-1]
        with torch.inference_mode(False), torch.no_grad():  # in this order: the former enables gradients
            outputs = target.get_decoder()(
                input_ids=torch.tensor([ids], device=target.device), use_cache=False,
                output_hidden_states=self.layers, return_dict=True,
            )  # fmt: skip
            states = joined(outputs.hidden_states, self.layers)[0]
        keep_states(trace, states, self.layers)
        return states


def joined(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the states of these layers of one forward side by side, in half precision: `(rows, tokens, width)`."""
    return half(torch.cat([hidden_states[i] for i in layers], -1))


# --- the head --------------------------------------------------------------------------------------------------------


@neutral_context()
@torch.no_grad()
def state_scale(model: PreTrainedModel) -> float:
    """Return the root mean square of states that a new head reads with the embeddings of this model. States are
    often much larger than embeddings, so that the first optimizer steps would change what a head computes too much."""
    ids = torch.tensor(sample_ids(model, 256), device=model.device)
    return STATE_SCALE * float(model.get_input_embeddings()(ids).float().square().mean().sqrt())


def sample_ids(model: PreTrainedModel, count: int) -> list[int]:
    """Return token ids all over the vocabulary, in ascending order."""
    size = min(vocab_size_of(model), len(model.get_input_embeddings().weight))
    return [i * (size - 1) // (count - 1) for i in range(count)]


class DraftHeadConfig(PreTrainedConfig):
    """
    Configuration of a [`DraftHead`].

    Args:
        text_config (`dict` or `PreTrainedConfig`): Configuration of a language model of the target's family with the
            layers of the head.
        state_layers (`list[int]`): Which hidden states of the target are read, as numbered by `output_hidden_states`;
            -1 is the state behind the last norm.
        state_size (`int`): Width of one of them.
        layout (`str`): `"mtp"` or `"eagle3"`; see [`DraftHead`].
        has_input_norms (`bool`): `"mtp"` only: whether embedding and state are normalized, as in built-in layers.
        state_scale (`float`, *optional*): `"mtp"` only: root mean square to which states are scaled; by default they
            are left as they are.
        draft_vocab_size (`int`, *optional*): `"eagle3"` only: rows of the output head; by default the vocabulary's.
        norm_before_residual, norm_before_fc, fc_norm, norm_output (`bool`): `"eagle3"` only: where a checkpoint
            normalizes the state that is added to the layer's output, all states together, each of them, and the state
            behind a drafted token.
        target_name (`str`, *optional*), target_architectures (`list[str]`): Source and class of the target.
    """

    model_type = HEAD_TYPE
    sub_configs = {"text_config": AutoConfig}

    def __init__(
        self,
        text_config: Any = None,
        state_layers: Sequence[int] = (-1,),
        state_size: int | None = None,
        layout: str = "mtp",
        has_input_norms: bool = False,
        state_scale: float | None = None,
        draft_vocab_size: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        target_name: str | None = None,
        target_architectures: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config
        self.state_layers = list(state_layers)
        self.state_size = state_size
        self.layout = layout
        self.has_input_norms = has_input_norms
        self.state_scale = state_scale
        self.draft_vocab_size = draft_vocab_size
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.target_name = target_name
        self.target_architectures = list(target_architectures)
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, without the folder of the target."""
        found: dict[str, Any] = super().to_dict()
        (found.get("text_config") or {}).pop("_name_or_path", None)
        return found


class _Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads embedding and state side by side, `(rows, tokens, 2 * hidden)`."""

    def __init__(self, layer: Any, width: int, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * width, old.out_features, bias=old.bias is not None))
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.norm_before_residual = norm_before_residual

    def forward(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        embeddings, states = hidden_states.chunk(2, -1)
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embeddings), normed], -1)
        hidden: Tensor = (normed if self.norm_before_residual else states) + self.self_attn(read, **inputs)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DraftHead(PreTrainedModel):
    """
    A draft that reads hidden states of its target. At each token it reads the embedding and the target's state of the
    token before; at drafted tokens, for which the target has no state yet, its own output in place of it.

    - `"mtp"`: a projection mixes embedding and state, and layers of the target's family read the result. A head made
      by [`~DraftHead.from_draft`] starts as exactly that draft: its projection begins with `[identity | 0]`. Built-in
      MTP layers of a target have this layout, too.
    - `"eagle3"` (arXiv 2503.01840): three states are projected to one; the attention of one layer reads embedding and
      state side by side; the output head may have a vocabulary of its own. It is saved as a checkpoint of the
      `speculators` package, which vLLM serves (`"method": "eagle3"`), without the embeddings that are the target's.

    Heads are not called by transformers' loop: they draft inside of [`OnlineAssistant`].
    """

    config_class = DraftHeadConfig
    config: DraftHeadConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flash_attn = True

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__(config)
        text = config.text_config
        inner = AutoModelForCausalLM.from_config(text)
        self.model = inner.get_decoder()
        self.lm_head = inner.get_output_embeddings()
        width, size = text.hidden_size, config.state_size or text.hidden_size
        count = len(config.state_layers)
        self.state_proj: Any = None
        self.state_norm: Any = None  # of all states together
        self.state_norms: Any = None  # of each state
        self.norm: Any = None
        self.input_proj: Any = None
        self.embed_norm: Any = None
        if count * size != width or self.is_eagle3:
            self.state_proj = nn.Linear(count * size, width, bias=False)
        if self.is_eagle3:
            self._become_eagle3(config, count, size)
        else:
            self.input_proj = nn.Linear(2 * width, width, bias=False)
        if config.has_input_norms:
            self.embed_norm, self.hidden_norm = (copy.deepcopy(self.model.norm) for _ in range(2))
        if not hasattr(self, "d2t"):
            self.d2t = None
        self.source: StateSource | None = None
        self.generation_config = GenerationConfig()
        self.register_load_state_dict_pre_hook(_rename)  # trainers load their checkpoints of a head by it
        self.post_init()

    @property
    def is_eagle3(self) -> bool:
        return self.config.layout == "eagle3"

    @property
    def state_width(self) -> int:
        """Number of values of all states of a token."""
        return len(self.config.state_layers) * (self.config.state_size or 0)

    @property
    def first(self) -> int:
        """The first token that is read. EAGLE-3 and built-in layers leave out the one before which there is no
        state."""
        return int(self.is_eagle3 or self.config.has_input_norms)

    def _become_eagle3(self, config: DraftHeadConfig, num_states: int, size: int) -> None:
        """Give the layer a second input, and the head its own vocabulary."""
        text = config.text_config
        self.norm, self.model.norm = self.model.norm, nn.Identity()  # its input takes the place of states
        norm = type(self.norm)
        if config.norm_before_fc:
            self.state_norm = norm(num_states * size, eps=text.rms_norm_eps)
        if config.fc_norm:
            self.state_norms = nn.ModuleList(norm(size, eps=text.rms_norm_eps) for _ in range(num_states))
        self.model.layers[0] = _Eagle3Layer(self.model.layers[0], text.hidden_size, config.norm_before_residual)
        rows = config.draft_vocab_size or text.vocab_size
        self.lm_head = nn.Linear(text.hidden_size, rows, bias=False)
        if rows != text.vocab_size:
            self.register_buffer("d2t", torch.zeros(rows, dtype=torch.long))  # token - row
            self.register_buffer("t2d", torch.zeros(text.vocab_size, dtype=torch.bool))

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, from those of the head's. Other tokens get hardly any mass, and no
        gradient."""
        if self.d2t is None:
            return logits
        rest = (logits.float().logsumexp(-1, keepdim=True) - ABSENT).to(logits)
        whole = rest.expand(*logits.shape[:-1], self.config.text_config.vocab_size)
        return whole.index_copy(-1, torch.arange(len(self.d2t), device=logits.device) + self.d2t, logits)

    def _init_weights(self, module: Any) -> None:
        if self.is_eagle3:
            super()._init_weights(module)
        elif module is self.input_proj:
            width = module.out_features
            with torch.no_grad():
                module.weight.zero_()
                module.weight[:, :width] = torch.eye(width).to(module.weight)
        elif module is self.state_proj:
            with torch.no_grad():  # the last state
                module.weight.zero_()
                rows, columns = module.weight.shape
                least = min(rows, columns)
                module.weight[:least, columns - least :] = torch.eye(least).to(module.weight)

    @classmethod
    def from_draft(cls, draft: PreTrainedModel, target: PreTrainedModel, state_layers: Sequence[int] = (-1,)) -> Any:
        """Return a head that drafts as this decoder-only language model until it learns. Embeddings and output head
        share memory with the draft's."""
        if draft.config.is_encoder_decoder:
            raise UnsupportedModelError("A draft head needs a decoder-only target, got an encoder-decoder.")
        config = DraftHeadConfig(draft.config, state_layers, target.config.get_text_config(decoder=True).hidden_size)
        config.state_scale = state_scale(draft)
        for name, value in vars(draft.config).items():
            if name.startswith("osd_hf_"):
                setattr(config, name, value)
        with torch.inference_mode(False), torch.device("meta"):
            head = cls(config)
        head.model, head.lm_head = draft.get_decoder(), draft.get_output_embeddings()
        with torch.inference_mode(False):
            for name in ("input_proj", "state_proj"):
                if (part := getattr(head, name)) is not None:
                    setattr(head, name, part.to_empty(device=draft.device).to(draft.dtype))
                    head._init_weights(getattr(head, name))
        head.generation_config = draft.generation_config
        found: DraftHead = head.bind(target).eval()
        return found

    def bind(self, target: PreTrainedModel) -> DraftHead:
        """Read the states of this target from now on; raises UnsupportedModelError if it has no such states."""
        text = target.config.get_text_config(decoder=True)
        if target.config.is_encoder_decoder or text.hidden_size != self.config.state_size:
            raise UnsupportedModelError(
                f"The draft head reads states with {self.config.state_size} values, {type(target).__name__} has "
                f"{text.hidden_size}. Use a head of this target."
            )
        count = text.num_hidden_layers
        if any(not -1 <= i <= count for i in self.config.state_layers):
            raise UnsupportedModelError(
                f"The head reads the states {self.config.state_layers}, {type(target).__name__} has 0 to {count}."
            )
        name = config_value(target.config, "name_or_path")
        if name and not Path(name).exists():  # the path of a folder is nobody else's business
            self.config.target_name = name
        self.config.target_architectures = [type(target).__name__]
        self.source = StateSource(target, self.config.state_layers)
        own, theirs = (model.get_input_embeddings().weight for model in (self, target))
        is_alike = own.device == theirs.device and own.dtype == theirs.dtype
        setattr(self.config, SHARED_SETTING, is_alike and torch.equal(own, theirs))
        return self

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def set_input_embeddings(self, value: Any) -> None:
        self.model.set_input_embeddings(value)

    def set_output_embeddings(self, value: Any) -> None:
        self.lm_head = value

    def get_decoder(self, *args: Any, **kwargs: Any) -> Any:
        return self.model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ConfigError: a head needs its target."""
        raise ConfigError("A draft head cannot generate without its target. Use `OnlineAssistant(target, head)`.")

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Save the head: in the layout `"eagle3"` as a checkpoint of the `speculators` package, otherwise as a model
        folder with embeddings and output head. Takes the arguments of `PreTrainedModel.save_pretrained`, of which
        `"eagle3"` uses `state_dict` and `is_main_process`."""
        given = kwargs.pop("state_dict", None)
        state = {name: weight.detach() for name, weight in (given or self.state_dict()).items()}
        if self.is_eagle3:
            if kwargs.get("is_main_process", True):
                _save_eagle3(self, state, Path(save_directory))
            return
        ends = {weight.data_ptr() for name, weight in state.items() if name != "lm_head.weight"}
        if "lm_head.weight" in state and state["lm_head.weight"].data_ptr() in ends:  # tied, and loaded as two tensors
            state["lm_head.weight"] = state["lm_head.weight"].clone()
        super().save_pretrained(save_directory, state_dict=state, **kwargs)
        self.generation_config.save_pretrained(save_directory)

    _supports_logits_to_keep = generate  # transformers' assisted generation calls it first

    # --- forwards ----------------------------------------------------------------------------------------------------

    @property
    def _reads(self) -> torch.dtype:
        """Dtype of the first weight that reads states. Embeddings of the target may have another one."""
        dtype: torch.dtype = (self.input_proj if self.state_proj is None else self.state_proj).weight.dtype
        return dtype

    def reduced(self, states: Tensor) -> Tensor:
        """Return the target's states, `(rows, tokens, width)`, as the head reads them, `(rows, tokens, hidden)`."""
        states = states.to(self.device, self._reads)
        states = states if self.state_norm is None else self.state_norm(states)
        if self.state_norms is not None:
            parts = states.chunk(len(self.state_norms), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.state_norms, parts, strict=True)], -1)
        if self.state_proj is None:
            return states
        reduced: Tensor = self.state_proj(self._scaled(states, len(self.config.state_layers)))
        return reduced

    def _scaled(self, states: Tensor, count: int = 1) -> Tensor:
        """Scale each of `count` states side by side to the configured root mean square."""
        if (scale := self.config.state_scale) is None:
            return states
        parts = states.reshape(*states.shape[:-1], count, -1)
        return scale * torch.nn.functional.rms_norm(parts, parts.shape[-1:], eps=STATE_EPS).flatten(-2)

    def outputs(self, ids: Tensor, states: Tensor, **inputs: Any) -> Tensor:
        """Return the outputs of the layers at tokens, `(rows, tokens, hidden)`. They take the place of the
        target's states behind drafted tokens. `states` are reduced ones of the tokens before."""
        embeddings = self.get_input_embeddings()(ids).to(states.dtype)
        if self.embed_norm is not None:
            embeddings, states = self.embed_norm(embeddings), self.hidden_norm(states)
        states = self._scaled(states)
        mixed = torch.cat([embeddings, states], -1)
        mixed = mixed if self.input_proj is None else self.input_proj(mixed)
        hidden: Tensor = self.model(inputs_embeds=mixed, return_dict=True, **inputs).last_hidden_state
        return self.norm(hidden) if self.config.norm_output else hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the output head."""
        return hidden if self.norm is None or self.config.norm_output else self.norm(hidden)

    def forward(
        self, input_ids: Tensor, states: Tensor, at: Tensor | None = None, **inputs: Any
    ) -> CausalLMOutputWithPast:
        """Return the logits behind tokens, `(rows, tokens, vocab)`, or behind one token of each row, `at`, int64,
        `(rows,)`; and their states in `hidden_states`. `states` are reduced ones, `(rows, tokens, hidden)`."""
        inputs.pop("return_dict", None)
        hidden = self.outputs(input_ids, states, **inputs)
        if at is not None:
            hidden = hidden[torch.arange(len(hidden), device=hidden.device), at][:, None]
        return CausalLMOutputWithPast(
            logits=output_head(self)(self.normed(hidden)),
            past_key_values=inputs.get("past_key_values"),
            hidden_states=(hidden,),
        )

    def unrolled(self, traces: Sequence[Trace], depth: int) -> list[tuple[Tensor, Tensor]]:
        """Return, for the first `depth` tokens of a round, the inputs of the output head where a round could begin,
        with the true tokens as input: `(positions, hidden)`, and int64, `(positions,)`, the places of the predicted
        tokens among the completion tokens of all traces, one trace after the other. Attention is that of drafting: a
        drafted token sees the verified tokens up to where its round begins, and the drafted ones of its own round. The
        first round of an answer reads the end of the prompt, and zeros in place of states. Where gradients are
        enabled, about a third of the prompts are read so instead, at no cost."""
        if (source := self.source) is None:
            raise ConfigError("The draft head does not know its target. Call `head.bind(target)` first.")
        kept, learns = source.of(traces), torch.is_grad_enabled()
        if source.has_first_round and learns:
            for i, t in enumerate(traces):
                if zlib.crc32(t.completion_ids.tobytes()) % 3 == 0:
                    kept[i] = kept[i].clone()
                    kept[i][: len(t.prompt_ids) - 1] = 0
        parts = self._rounds(traces, depth, kept)
        if source.has_first_round and not learns:
            ends = [(t.prompt_ids[-FIRST_ROUND_TOKENS:], t.completion_ids[:depth], t.vocab_size) for t in traces]
            first = self._rounds([bare_trace(*end) for end in ends], depth, [states[:0] for states in kept])
            pairs = (zip(*both, strict=True) for both in zip(first, parts, strict=True))
            parts = [[torch.cat([begin[:1], rest[1:]]) for begin, rest in pair] for pair in pairs]
        limits, found = np.cumsum([0, *map(len, traces)]), []
        for j, rows in enumerate(parts):
            places = np.concatenate([np.arange(first + j, end) for first, end in itertools.pairwise(limits)])
            found.append((self.normed(torch.cat(rows)), torch.from_numpy(places).to(self.device)))
        return found

    def _rounds(self, traces: Sequence[Trace], depth: int, kept: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the states behind each of the first tokens of a round, for each trace, `(positions, hidden)`. States
        of the target that are missing at the end of `kept` are zeros."""
        device = self.device
        prompt, width = max(len(t.prompt_ids) for t in traces), max(len(t) for t in traces)
        total = prompt + width - 1
        ids = np.zeros((len(traces), prompt + width), np.int64)
        padding = [prompt - len(t.prompt_ids) for t in traces]
        for row, pad, t in zip(ids, padding, traces, strict=True):
            row[pad : pad + len(t.prompt_ids)] = t.prompt_ids
            row[prompt : prompt + len(t)] = t.completion_ids
        tokens = torch.from_numpy(ids).to(device)
        before = torch.stack([
            torch.nn.functional.pad(states.to(device, self._reads), (0, 0, pad + 1, total - pad - 1 - len(states)))
            for pad, states in zip(padding, kept, strict=True)  # cut, if they are longer; autocast stacks no float16
        ])  # fmt: skip
        pads = torch.tensor(padding, device=device)[:, None]
        columns = torch.arange(total, device=device)
        is_real = columns >= pads + self.first
        places = (columns - pads - self.first).clamp(min=0)
        mask = (columns[:, None] >= columns)[None] & is_real[:, None] | torch.eye(total, device=device).bool()
        cache, distance = DynamicCache(), columns[:, None] - columns
        states = self.outputs(
            tokens[:, :total], self.reduced(before), attention_mask=model_masks(self, mask[:, None], distance),
            position_ids=places, past_key_values=cache, use_cache=True,
        )[:, prompt - 1 :]  # fmt: skip
        begins = torch.arange(width, device=device)
        mask, distance = mask[:, prompt - 1 :], distance[prompt - 1 :]
        diagonal = torch.eye(width, device=device).bool()
        found = []
        for j in range(depth):
            if j:
                mask = torch.cat([mask, diagonal.expand(len(traces), -1, -1)], -1)
                distance = torch.cat([distance + 1, begins[:, None] - begins], -1)
                drafted = tokens[:, (prompt - 1 + j + begins).clamp(max=tokens.shape[1] - 1)]
                states = self.outputs(
                    drafted, states, attention_mask=model_masks(self, mask[:, None], distance),
                    position_ids=places[:, prompt - 1 :] + j, past_key_values=cache, use_cache=True,
                )  # fmt: skip
            found.append([states[i, : max(len(t) - j, 0)] for i, t in enumerate(traces)])
        return found


# --- files -----------------------------------------------------------------------------------------------------------


def load_head(
    source: str | os.PathLike[str], target: PreTrainedModel, *, dtype: Any = None, device: Any = None, **location: Any
) -> DraftHead:
    """Load a head for a target, from a folder or a Hub repository: one saved here, or an EAGLE-3 checkpoint of the
    `speculators` package or of SpecForge. Embeddings that a checkpoint lacks are the target's. By default dtype
    and device are the target's; `location` are arguments of `from_pretrained` that locate files. Raises
    UnsupportedModelError for a checkpoint with other weights, or of another target."""
    target = unwrap(target)
    dtype = target.dtype if dtype in (None, "auto") else dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    saved = read_config(source, **location)
    if saved.get("model_type") == DraftHeadConfig.model_type:
        head: Any = DraftHead.from_pretrained(source, dtype=dtype, **location)
        with contextlib.suppress(OSError):
            head.generation_config = GenerationConfig.from_pretrained(source, **location)
    else:
        head = _eagle3_head(source, saved, target, dtype, location)
    found: DraftHead = head.to(device or target.device, dtype).bind(target).eval()
    return found


def _eagle3_head(
    source: str | os.PathLike[str],
    saved: Mapping[str, Any],
    target: PreTrainedModel,
    dtype: torch.dtype,
    location: Mapping[str, Any],
) -> DraftHead:
    text = target.config.get_text_config(decoder=True)
    try:
        config = DraftHeadConfig(**head_settings(saved, text))
        config.text_config.dtype = dtype
        with torch.inference_mode(False):
            head: DraftHead = DraftHead(config).to(dtype)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"The head {os.fspath(source)!r} cannot be read: {first_line(error)}.") from error
    for name in (name for name in saved if name.startswith("osd_hf_")):
        setattr(config, name, saved[name])
    read = read_weights(source, **location).items()
    weights = {ours: weight for name, weight in read if (ours := our_name(name)) is not None}
    embeddings, own = "model.embed_tokens.weight", weights.get("model.embed_tokens.weight")
    theirs = target.get_input_embeddings().weight.detach()
    if own is None or (own.shape == theirs.shape and torch.equal(own.to(theirs), theirs)):
        weights[embeddings] = theirs
    if head.d2t is None:  # a mapping of all tokens to themselves
        weights = {name: weight for name, weight in weights.items() if name not in ("d2t", "t2d")}
    sizes = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
    misfits = [
        f"{name} {tuple(w.shape)} instead of {sizes[name]}"
        for name, w in weights.items() if name in sizes and tuple(w.shape) != sizes[name]
    ]  # fmt: skip
    missing = [name for name in sizes if name not in weights and name != "t2d"]
    unexpected = [name for name in weights if name not in sizes]
    if misfits or missing or unexpected:
        raise UnsupportedModelError(
            f"The head {os.fspath(source)!r} does not fit EAGLE-3 for {type(target).__name__}: missing "
            f"{_named(missing)}, unexpected {_named(unexpected)}, of another size {misfits[:3]}."
        )
    head.load_state_dict(weights, strict=False)
    if head.d2t is not None:
        head.t2d.zero_()[torch.arange(len(head.d2t)) + head.d2t] = True
    set_fixed_k(head.generation_config, num_assistant_tokens(saved) or head.generation_config.num_assistant_tokens)
    return head


def _named(weights: Sequence[str]) -> str:
    return ", ".join(map(their_name, weights[:3])) or "none"


def _rename(head: DraftHead, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Give the weights of a checkpoint our names."""
    if head.is_eagle3:
        for name in [name for name in state if name.startswith(prefix)]:
            ours = our_name(name.removeprefix(prefix))
            if ours is not None and prefix + ours != name:
                state[prefix + ours] = state.pop(name)


def _save_eagle3(head: DraftHead, state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a checkpoint of the `speculators` package. Embeddings that are the target's are left out."""
    config = head.config
    config.text_config.dtype = head.dtype
    k = head.generation_config.num_assistant_tokens or 3
    saved = speculators_config(config, config.target_name, config.target_architectures, k)
    saved |= {name: value for name, value in vars(config).items() if name.startswith("osd_hf_")}
    weights = {their_name(name): weight.clone().contiguous() for name, weight in state.items()}
    own = weights.get("embed_tokens.weight")
    target = None if head.source is None else head.source.living
    if own is not None and target is not None and getattr(config, SHARED_SETTING, False):
        theirs = target.get_input_embeddings().weight
        if own.shape == theirs.shape and torch.equal(own.to(theirs), theirs):
            del weights["embed_tokens.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")


AutoConfig.register(DraftHeadConfig.model_type, DraftHeadConfig)
AutoModelForCausalLM.register(DraftHeadConfig, DraftHead)
