"""Tiny models with random weights and a seed, drafts that are sometimes right, and stubs that follow a script."""

from __future__ import annotations

import copy
import functools
import string
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    DynamicCache,
    FalconConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GenerationMixin,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    StoppingCriteria,
    T5Config,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from osd_hf import OnlineAssistant, OnlineConfig, Trace, capture_traces
from osd_hf.learning.updater import Updater

VOCAB = 64
WINDOW = 8  # of the sliding models; answers in tests are longer

_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_LLAMA = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, _LLAMA),
    "qwen3": (Qwen3Config, {**_LLAMA, "head_dim": 8}),
    "mistral": (MistralConfig, {**_LLAMA, "sliding_window": WINDOW}),
    "gemma3": (Gemma3TextConfig, {
        **_LLAMA, "head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    }),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "opt": (OPTConfig, {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "t5": (T5Config, {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
    }),
    "bart": (BartConfig, {
        "d_model": 32, "max_position_embeddings": 256, "decoder_start_token_id": 2, "forced_eos_token_id": None,
        "encoder_layers": 2, "encoder_ffn_dim": 48, "encoder_attention_heads": 4,
        "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
    }),
    # Further ones, for tests of what depends on how a model counts positions.
    "qwen2": (Qwen2Config, _LLAMA),
    "gpt_neox": (GPTNeoXConfig, _LLAMA),
    "phi": (PhiConfig, _LLAMA),
    "mixtral": (MixtralConfig, {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": (GemmaConfig, {**_LLAMA, "head_dim": 8}),
    "falcon": (FalconConfig, {**_LLAMA, "alibi": False, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "bloom": (BloomConfig, {**_LLAMA, "n_head": 4, "n_layer": 1}),
    "gpt_neo": (GPTNeoConfig, {
        **_LLAMA, "num_layers": 2, "num_heads": 4, "window_size": WINDOW,
        "attention_types": [[["global", "local"], 1]],
    }),
}  # fmt: skip
ARCHITECTURES = ("llama", "qwen3", "mistral", "gemma3", "gpt2", "opt", "t5", "bart")
# What makes a model of one layer, which takes half the time, for tests that are not about layers. "gemma3" keeps one
# layer of each kind, and "t5" both, as with one it says the same token at each step.
SHALLOW: dict[str, dict[str, int]] = {
    **dict.fromkeys(ARCHITECTURES, {"num_hidden_layers": 1}),
    "gemma3": {}, "t5": {}, "gpt2": {"n_layer": 1}, "bart": {"encoder_layers": 1, "decoder_layers": 1},
}  # fmt: skip
DECODER_ONLY = tuple(name for name in ARCHITECTURES if name not in ("t5", "bart"))


def build(architecture: str = "llama", seed: int = 0, *, vocab_size: int = VOCAB, **changes: Any) -> Any:
    """A target. Weights are much larger than a fresh model's: its argmax is clear, and changes from token to token."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind, own = _CONFIGS[architecture]
        config = kind(**{**own, **_IDS, "vocab_size": vocab_size, **changes})
        auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = auto.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    # What the encoder says is the same at each step: too loud, it drowns the tokens of the answer.
                    quiet, loud = "EncDecAttention" in name, architecture == "bart" and "shared" in name
                    scale = 0.3 if quiet else 5.0 if loud else 1.5
                    parameter.normal_(0, scale / parameter.shape[-1] ** 0.5)
    return without_end(model)


def without_end(model: Any) -> Any:
    """Let nothing end the model's answers."""
    settings = model.generation_config
    settings.eos_token_id = settings.forced_eos_token_id = None
    settings.bos_token_id, settings.pad_token_id = 1, 0
    return model.eval()


def loud(model: Any, seed: int = 0) -> Any:
    """Give a model large weights: its argmax is clear, and changes from token to token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5, generator=generator)
            elif not parameter.isfinite().all():  # left as it was allocated
                parameter.fill_(0.1)
    return without_end(model)


def draft_of(target: Any, noise: float = 0.06, seed: int = 1, k: int = 5) -> Any:
    """A copy of the target with noise on its weights: right now and then. Drafts `k` tokens a round, threshold 0."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                scale = noise * parameter.std()
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return fixed_k(draft, k)


class _DoubleNorm:
    """A norm of root mean squares that stays in double precision, where transformers' go by single precision."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        norm: Any = self
        weight = 1 + norm.weight if hasattr(norm, "eps") else norm.weight  # Gemma's, which names it so
        squares = states.pow(2).mean(-1, keepdim=True)
        return states * torch.rsqrt(squares + (norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)) * weight


def double(model: Any) -> Any:
    """The model in double precision throughout: what rounds otherwise on another machine differs by 1e-15 then, and
    what is wrong by as much as ever."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        cls = type(module)
        if cls.__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.__class__ = type(cls.__name__, (_DoubleNorm, cls), {})
    return model


def rounding(*sizes: int, magnitude: float = 1.0) -> float:
    """A bound of what the order of summing changes in single precision, where nothing but single precision will do:
    `n * eps * magnitude` for a sum of n terms that are at most so large, added up over the sums in a row."""
    return sum(sizes) * float(torch.finfo(torch.float32).eps) * magnitude


def fixed_k(draft: Any, k: int = 5) -> Any:
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def pair(
    architecture: str = "llama", seed: int = 0, *, noise: float = 0.06, k: int = 5, **changes: Any
) -> tuple[Any, Any]:
    target = build(architecture, seed, **changes)
    return target, draft_of(target, noise, k=k)


def assistant_of(target: Any, draft: Any, **settings: Any) -> OnlineAssistant:
    """An assistant with five drafted tokens, updates by hand, and no gate, unless `settings` say otherwise."""
    fixed = {"num_assistant_tokens": 5, "update_strategy": "manual", "gate": False}
    return OnlineAssistant(target, draft, config=OnlineConfig(**{**fixed, **settings}))


def greedy(ids: torch.Tensor, **settings: Any) -> dict[str, Any]:
    """Arguments of `generate` for twenty greedy tokens, unless `settings` say otherwise."""
    return {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 20, **settings}


def alone(target: Any, ids: torch.Tensor, **settings: Any) -> Any:
    return target.generate(ids, **greedy(ids, **settings))


def answered(assistant: OnlineAssistant, ids: torch.Tensor, **settings: Any) -> tuple[Any, Trace]:
    """What `generate` returned, and the trace of the request."""
    traces: list[Trace] = []
    with capture_traces(assistant.target, traces.append):
        output = assistant.generate(ids, **greedy(ids, **settings))
    (trace,) = traces
    return output, trace


def recorded(target: Any, draft: Any, number: int, *, domain: str | None = None, **settings: Any) -> list[Trace]:
    """The traces of so many requests, with eight log-probs a position."""
    traces: list[Trace] = []
    with capture_traces(target, traces.append, num_logprobs=8, domain=domain):
        for ids in prompts(number):
            target.generate(ids, assistant_model=draft, **greedy(ids, **settings))
    return traces


def observe(updater: Updater, trace: Trace) -> None:
    """Let an updater without a learner learn from a request, if it can."""
    if updater.set_aside.accepts(trace):
        updater.requests.set_target_version(trace.target)
        updater.requests.pending.append(trace)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def prompt(length: int = 6, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    """Ids of shape `(1, length)`, special ones left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (1, length), generator=generator)


def prompts(number: int, vocab_size: int = VOCAB) -> list[torch.Tensor]:
    return [prompt(3 + i % 5, seed=100 + i, vocab_size=vocab_size) for i in range(number)]


def noted_loading(patch: Any) -> dict[str, dict[str, Any]]:
    """What causal models are loaded with from now on, by the names of their folders; none is quantized."""
    given: dict[str, dict[str, Any]] = {}
    load = AutoModelForCausalLM.from_pretrained

    def loading(source: str, **how: Any) -> Any:
        given[Path(source).name] = how
        return load(source, **{name: value for name, value in how.items() if name != "quantization_config"})

    patch.setattr(AutoModelForCausalLM, "from_pretrained", loading)
    return given


# --- stubs ----------------------------------------------------------------------------------------------------------


class TableConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "osd_hf_table"

    def __init__(self, vocab_size: int = 16, positions: int = 128, **kwargs: Any) -> None:
        self.vocab_size = vocab_size
        self.positions = positions
        self.num_hidden_layers = 1
        super().__init__(**kwargs)


class TableModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """Logits looked up by position and by the token before: `by_position[t] + by_token[ids[t]]`."""

    config_class = TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self.by_position = torch.nn.Parameter(torch.zeros(config.positions, config.vocab_size))
        self.by_token = torch.nn.Parameter(torch.zeros(config.vocab_size, config.vocab_size))
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        pass

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        batch, length = input_ids.shape
        if attention_mask is not None and attention_mask.ndim == 4:  # of rows that go on independently
            assert position_ids is not None
            positions = position_ids
        elif attention_mask is None:
            seen = 0 if past_key_values is None else past_key_values.get_seq_length()
            positions = torch.arange(seen, seen + length).expand(batch, -1)
        else:
            positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]
        if use_cache:
            past_key_values = DynamicCache() if past_key_values is None else past_key_values
            nothing = torch.zeros(batch, 1, length, 1)
            past_key_values.update(nothing, nothing, 0)
        logits = self.by_position[positions] + self.by_token[input_ids]
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


def scripted(tokens: Sequence[int], prompt_tokens: int, *, vocab_size: int = 16, k: int = 5) -> TableModel:
    """A model that answers a prompt of `prompt_tokens` tokens with `tokens`, whatever it is fed."""
    model = TableModel(TableConfig(vocab_size=vocab_size, positions=prompt_tokens + len(tokens) + 32)).eval()
    with torch.no_grad():
        for i, token in enumerate(tokens):
            model.by_position[prompt_tokens - 1 + i, token] = 10.0
    return fixed_k(model, k)


def bigram(seed: int, *, vocab_size: int = 5, sharpness: float = 1.0, k: int = 5) -> TableModel:
    """A model whose next token hangs on the last one only: its distribution over answers is known."""
    model = TableModel(TableConfig(vocab_size=vocab_size, positions=4096)).eval()
    with torch.no_grad():
        model.by_token.copy_(
            sharpness * torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
        )
    return fixed_k(model, k)


def tokenizer(vocab_size: int = VOCAB, characters: str = string.ascii_letters + string.digits) -> Any:
    """One token a character, behind three special tokens."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *characters][:vocab_size])}
    backend = Tokenizer(BPE(vocab, []))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for part in output if isinstance(output, tuple | list) else [output]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return output


class Streamer:
    """Keeps the chunks that are put, and calls a function with their number after each."""

    def __init__(self, then: Callable[[int], object] = lambda count: None) -> None:
        self.chunks: list[list[int]] = []
        self.then = then
        self.has_ended = False

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk]

    def put(self, value: torch.Tensor) -> None:
        assert not self.has_ended
        self.chunks.append(value.flatten().tolist())
        self.then(len(self.chunks))

    def end(self) -> None:
        self.has_ended = True


class EndsWith(StoppingCriteria):  # type: ignore[misc]
    """Ends each row at one of these tokens; counts the lengths at which it was asked."""

    is_stateless = True  # except for the counts

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens = torch.tensor(sorted(tokens))
        self.calls: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls.append(input_ids.shape[1])
        return torch.isin(input_ids[:, -1], self.tokens)


class ForwardCounter:
    """Counts the forwards of models, so that a test can say that none ran."""

    def __init__(self, *models: Any) -> None:
        self.count = 0
        self._handles = [m.register_forward_pre_hook(self._seen) for m in models]

    def _seen(self, *_: Any) -> None:
        self.count += 1

    def __enter__(self) -> ForwardCounter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()


class ForwardTime:
    """A clock on which only forwards take time: in seconds, `model: seconds of each`."""

    def __init__(self, seconds: dict[Any, float]) -> None:
        self.now = 0.0
        for model, each in seconds.items():
            model.register_forward_pre_hook(functools.partial(self._pass, each))

    def _pass(self, seconds: float, *_: Any) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now

    def __deepcopy__(self, memo: Any) -> ForwardTime:
        return self  # a copy of a model takes its time on the same clock
