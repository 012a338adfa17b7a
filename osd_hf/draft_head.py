"""Draft heads: one decoder layer that reads the hidden states of its target beside the tokens."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from safetensors.torch import load_file, save_file
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

from osd_hf.errors import ConfigError, UnsupportedModelError
from osd_hf.models import model_masks, output_head
from osd_hf.trace import Trace
from osd_hf.utils.context import neutral_context

DEPTH_WEIGHT = 0.8  # of a drafted token in the loss, relative to the one before
ABSENT = 20.0  # a token that an output head lacks has this much less log-mass than all others together
TRAINED_DEPTH = 3  # tokens of a round that the loss unrolls
MAX_KEPT_BYTES = 256 << 20  # of the states of all traces; those of the oldest are dropped, and recomputed when needed

_kept: WeakKeyDictionary[Trace, Tensor] = WeakKeyDictionary()  # oldest first
_lock = threading.Lock()


# --- hidden states of the target -------------------------------------------------------------------------------------


def half(states: Tensor) -> Tensor:
    """Return states in half precision: bfloat16 stays, everything else becomes float16."""
    if states.dtype == torch.bfloat16:
        return states
    limit = torch.finfo(torch.float16).max
    return states.clamp(-limit, limit).half()


def keep_states(trace: Trace, states: Tensor) -> None:
    """Keep the states of all tokens of a trace but the last, `(tokens - 1, width)`, in half precision. They are never
    written to disk."""
    with _lock:
        _kept[trace] = states
        total = sum(kept.nbytes for kept in _kept.values())
        for oldest in list(_kept.keys()):
            if total <= MAX_KEPT_BYTES or oldest is trace:
                break
            total -= _kept.pop(oldest).nbytes


class StateSource:
    """The target whose states a head reads. It is not copied with the head, and not kept alive by it."""

    def __init__(self, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self._target = ref(target)
        self.layers = list(layers)  # of `hidden_states`, of which the last is behind the last norm

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @property
    def target(self) -> PreTrainedModel:
        """The target; raises RuntimeError if it no longer exists."""
        if (target := self._target()) is None:
            raise RuntimeError("The target of the draft head no longer exists. Keep a reference to it.")
        return target

    def of(self, traces: Sequence[Trace]) -> list[Tensor]:
        """Return the states of all tokens of each trace but the last, `(tokens - 1, width)`, in half precision: those
        that were kept, or else recomputed by a forward of the target over the stored text."""
        with _lock:
            found = [_kept.get(trace) for trace in traces]
        return [self._computed(t) if s is None else s for t, s in zip(traces, found, strict=True)]

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
        keep_states(trace, states)
        return states


def joined(hidden_states: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Return the states of these layers of one forward side by side, in half precision: `(rows, tokens, width)`."""
    return half(torch.cat([hidden_states[i] for i in layers], -1))


# --- the head --------------------------------------------------------------------------------------------------------


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
        draft_vocab_size (`int`, *optional*): `"eagle3"` only: rows of the output head; by default the vocabulary's.
        norm_before_residual, norm_before_fc (`bool`): `"eagle3"` only: the norms that a checkpoint has.
    """

    model_type = "osd_hf_head"
    sub_configs = {"text_config": AutoConfig}

    def __init__(
        self,
        text_config: Any = None,
        state_layers: Sequence[int] = (-1,),
        state_size: int | None = None,
        layout: str = "mtp",
        draft_vocab_size: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config
        self.state_layers = list(state_layers)
        self.state_size = state_size
        self.layout = layout
        self.draft_vocab_size = draft_vocab_size
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        super().__init__(**kwargs)


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
      by [`~DraftHead.from_draft`] starts as exactly that draft: its projection begins with `[identity | 0]`.
    - `"eagle3"` (arXiv 2503.01840): three states are projected to one; the attention of one layer reads embedding and
      state side by side; the output head may have a vocabulary of its own. Checkpoints are those of the `speculators`
      package.

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
        self.state_norm: Any = None
        self.norm: Any = None
        self.input_proj: Any = None
        if count * size != width or self.is_eagle3:
            self.state_proj = nn.Linear(count * size, width, bias=False)
        if self.is_eagle3:
            self._become_eagle3(config, count * size)
        else:
            self.input_proj = nn.Linear(2 * width, width, bias=False)
        if not hasattr(self, "d2t"):
            self.d2t = None
        self.source: StateSource | None = None
        self.generation_config = GenerationConfig()
        self.post_init()

    @property
    def is_eagle3(self) -> bool:
        return self.config.layout == "eagle3"

    @property
    def first(self) -> int:
        """The first token that is read. EAGLE-3 leaves out the one before which there is no state."""
        return int(self.is_eagle3)

    def _become_eagle3(self, config: DraftHeadConfig, num_states: int) -> None:
        """Give the layer a second input, and the head its own vocabulary."""
        text = config.text_config
        self.norm, self.model.norm = self.model.norm, nn.Identity()  # its input takes the place of states
        if config.norm_before_fc:
            self.state_norm = type(self.norm)(num_states, eps=text.rms_norm_eps)
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
        self.source = StateSource(target, self.config.state_layers)
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

    # --- forwards ----------------------------------------------------------------------------------------------------

    def reduced(self, states: Tensor) -> Tensor:
        """Return the target's states, `(rows, tokens, width)`, as the head reads them, `(rows, tokens, hidden)`."""
        states = states.to(device=self.device, dtype=self.dtype)
        states = states if self.state_norm is None else self.state_norm(states)
        reduced: Tensor = states if self.state_proj is None else self.state_proj(states)
        return reduced

    def outputs(self, ids: Tensor, states: Tensor, **inputs: Any) -> Tensor:
        """Return the outputs of the layers at tokens, `(rows, tokens, hidden)`. They take the place of the
        target's states behind drafted tokens. `states` are reduced ones of the tokens before."""
        embeddings = self.get_input_embeddings()(ids).to(states.dtype)
        mixed = torch.cat([embeddings, states], -1)
        mixed = mixed if self.input_proj is None else self.input_proj(mixed)
        hidden: Tensor = self.model(inputs_embeds=mixed, return_dict=True, **inputs).last_hidden_state
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the inputs of the output head."""
        return hidden if self.norm is None else self.norm(hidden)

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
        drafted token sees the verified tokens up to where its round begins, and the drafted ones of its own round."""
        if self.source is None:
            raise ConfigError("The draft head does not know its target. Call `head.bind(target)` first.")
        device = self.device
        prompt, width = max(len(t.prompt_ids) for t in traces), max(len(t) for t in traces)
        total = prompt + width - 1
        ids = np.zeros((len(traces), prompt + width), np.int64)
        padding = [prompt - len(t.prompt_ids) for t in traces]
        for row, pad, t in zip(ids, padding, traces, strict=True):
            row[pad : pad + len(t.prompt_ids)] = t.prompt_ids
            row[prompt : prompt + len(t)] = t.completion_ids
        tokens = torch.from_numpy(ids).to(device)
        kept = self.source.of(traces)
        before = torch.stack([
            torch.nn.functional.pad(states, (0, 0, pad + 1, total - pad - 1 - len(states)))  # cut, if it is longer
            for pad, states in zip(padding, kept, strict=True)
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
        lengths = [len(t) for t in traces]
        firsts = np.cumsum([0, *lengths[:-1]])
        begins = torch.arange(width, device=device)
        mask, distance, diagonal = (
            mask[:, prompt - 1 :],
            distance[prompt - 1 :],
            torch.eye(width, device=device).bool(),
        )
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
            rows = [states[i, : max(n - j, 0)] for i, n in enumerate(lengths)]
            at = [np.arange(first + j, first + n) for first, n in zip(firsts, lengths, strict=True)]
            found.append((self.normed(torch.cat(rows)), torch.from_numpy(np.concatenate(at)).to(device)))
        return found


# --- EAGLE-3 checkpoints ---------------------------------------------------------------------------------------------


def is_eagle3(folder: Path) -> bool:
    """Whether a folder has an EAGLE-3 checkpoint."""
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return saved.get("speculators_model_type") == "eagle3" or "LlamaForCausalLMEagle3" in saved.get(
        "architectures", ()
    )


def eagle3_head(folder: Path, target: PreTrainedModel, **kwargs: Any) -> DraftHead:
    """Load an EAGLE-3 checkpoint of the `speculators` package, or of SpecForge (`midlayer.*`), for a target.
    Embeddings that it lacks are the target's. Raises UnsupportedModelError for one with other weights."""
    saved = json.loads((folder / "config.json").read_text())
    is_flat = "transformer_layer_config" not in saved
    layer = dict(saved if is_flat else saved["transformer_layer_config"])
    text = AutoConfig.for_model(layer.pop("model_type", "llama"), **{**layer, "num_hidden_layers": 1})
    target_text = target.config.get_text_config(decoder=True)
    if not is_flat or "draft_vocab_size" in saved:
        text.vocab_size = target_text.vocab_size
    count = target_text.num_hidden_layers
    ids = saved.get("eagle_aux_hidden_state_layer_ids") or [2, count // 2, count - 3]
    config = DraftHeadConfig(
        text, ids, saved.get("target_hidden_size") or target_text.hidden_size, "eagle3", saved.get("draft_vocab_size"),
        bool(saved.get("norm_before_residual", False)), bool(saved.get("norm_before_fc", False)),
    )  # fmt: skip
    head = DraftHead(config)
    weights = {ours: w for part in sorted(folder.glob("*.safetensors")) for name, w in load_file(part).items()
               if (ours := _our_name(name)) is not None}  # fmt: skip
    weights.setdefault("model.embed_tokens.weight", target.get_input_embeddings().weight.detach())
    missing, unexpected = head.load_state_dict(weights, strict=False)
    missing = [name for name in missing if name != "t2d"]
    if missing or unexpected:
        raise UnsupportedModelError(
            f"The head in {folder} has other weights than EAGLE-3: missing {missing[:3]}, unexpected {unexpected[:3]}."
        )
    found: DraftHead = head.to(target.device, target.dtype).bind(target).eval()
    return found


_THEIR_NAMES = (("fc.", "state_proj."), ("input_norm.", "state_norm."), ("layers.0.", "model.layers.0."),
                ("midlayer.", "model.layers.0."), ("embed_tokens.", "model.embed_tokens."))  # fmt: skip


def _our_name(name: str) -> str | None:
    """Return our name of a weight in a checkpoint; `None` for those of the target."""
    if name.startswith("verifier_"):
        return None
    return next((ours + name[len(theirs) :] for theirs, ours in _THEIR_NAMES if name.startswith(theirs)), name)


def save_eagle3(head: DraftHead, folder: Path, target_name: str, architectures: Sequence[str], k: int) -> None:
    """Save an EAGLE-3 head as a checkpoint of the `speculators` package, which vLLM serves (`"method": "eagle3"`).
    Embeddings are left out, because they are the target's."""
    config, text = head.config, head.config.text_config
    method = {"proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target_name, "architectures": list(architectures)}
    saved = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.3.0",
        "draft_vocab_size": config.draft_vocab_size or text.vocab_size, "target_hidden_size": config.state_size,
        "norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc,
        "eagle_aux_hidden_state_layer_ids": config.state_layers, "tie_word_embeddings": False,
        "transformer_layer_config": text.to_dict(),
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
                               "proposal_methods": [method], "verifier": verifier},
    }  # fmt: skip
    weights = {}
    for name, weight in head.state_dict().items():
        theirs = next((t + name[len(o) :] for t, o in _THEIR_NAMES if name.startswith(o)), name)
        if not theirs.startswith("embed_tokens."):
            weights[theirs] = weight.contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(saved, indent=1) + "\n")


AutoConfig.register(DraftHeadConfig.model_type, DraftHeadConfig)
AutoModelForCausalLM.register(DraftHeadConfig, DraftHead)
