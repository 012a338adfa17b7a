"""Routers select the domain draft for a prompt: by label, function, language, or topics found in the traffic."""

from __future__ import annotations

import importlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from osd_hf.errors import ConfigError, StateError, UnsupportedModelError
from osd_hf.models import unwrap
from osd_hf.utils.context import Seeded

Vectors = NDArray[np.float32]

# Languages
TURN_TOKENS = 256  # of the user's turn that are read
MIN_INSIDE = 0.2  # total probability of the requested languages
MIN_CONFIDENCE = 0.6  # probability of the language among the requested ones
ROLE = re.compile(r"^\s*(system|developer|user|human|assistant|model|tool)\s*(\n|$)", re.IGNORECASE)
TAG = re.compile(r"<[^<>\n]{1,40}>")

# Topics. The values were chosen with `recipes/routing.py`.
PROMPT_TOKENS = 1024  # read of each prompt; of a longer one half from each end
FIRST_PROMPTS = 16  # that get no name
MIN_PREFIX_TOKENS = 16  # of a shared beginning that counts as a system prompt
MEMORY = 64  # newest prompts kept per topic
CHECK_EVERY = 8  # prompts of a topic between two attempts to split it
MIN_TOPIC_PROMPTS = 6
MIN_SEPARATION = 5.0  # of two topics, in standard deviations along the line between their centroids
MAX_DEVIATIONS = 3.5  # of a prompt's distance to the centroid from the usual distances of the topic
MAX_POSITION = 0.45  # of a prompt between the nearest centroid (0) and the second nearest (1)


@dataclass(eq=False)
class RoutedPrompt:
    """A prompt for a router: token ids `(tokens,)` without padding, int32 or int64."""

    ids: NDArray[np.integer[Any]]
    tokenizer: Any = None  # for routers that read text
    learn: bool = field(default=True, kw_only=True)  # with `False` a router keeps nothing of the prompt

    @cached_property
    def text(self) -> str:
        """The prompt, decoded without special tokens; raises ConfigError without a tokenizer."""
        return self.decode(self.ids)

    def decode(self, ids: NDArray[np.integer[Any]]) -> str:
        """Decode a part of the prompt without special tokens."""
        if self.tokenizer is None:
            raise ConfigError("This router reads the prompt's text: pass a tokenizer to the assistant.")
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


class Router(ABC):
    """Select the domain of a prompt. May be called from several threads."""

    @abstractmethod
    def route(self, prompt: RoutedPrompt) -> str | None:
        """Return the name of the domain; `None` if it is unknown or ambiguous, so that the base draft serves."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the router has learned as plain Python and tensors, for `torch.save`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; raises StateError for the state of another kind of router."""
        if state:
            raise StateError(f"A {type(self).__name__} learns nothing, got a state with {', '.join(map(str, state))}.")


class LabelRouter(Router):
    """Use only the labels that the caller passes as `domain=`."""

    def route(self, prompt: RoutedPrompt) -> str | None:
        return None


@dataclass
class CallableRouter(Router):
    """Route by a function of the prompt's text that returns the name of a domain or `None`."""

    function: Callable[[str], str | None]

    def route(self, prompt: RoutedPrompt) -> str | None:
        name: Any = self.function(prompt.text)
        if name is not None and not (isinstance(name, str) and name):
            raise ConfigError(f"A router's function must return a name or None, got {name!r} of {self.function!r}.")
        return name


def as_router(router: Router | Callable[[str], str | None] | None) -> Router | None:
    """Convert a function to a router; raises ConfigError for anything but a router, a function, or `None`."""
    if router is None or isinstance(router, Router):
        return router
    if callable(router) and not isinstance(router, type):
        return CallableRouter(router)
    raise ConfigError(f"`router` must be a router, a function of the prompt's text, or None, got {router!r}.")


class LanguageRouter(Router):
    """
    Route by the language (ISO 639-1 code) of the first 256 tokens of the user's last turn. Needs "osd-hf[language]".

    Args:
        languages (`Iterable[str]`, *optional*):
            Codes of the domains; by default all known ones. Prompts in other languages get the base draft.

    Raises:
        ConfigError: the language identifier is not installed, or a code is unknown.
    """

    def __init__(self, languages: Iterable[str] | None = None) -> None:
        try:
            langid = importlib.import_module("py3langid.langid")
        except ImportError as error:
            raise ConfigError('Routing by language needs py3langid: pip install "osd-hf[language]".') from error
        self._identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
        known = {label for label in self._identifier.labels if len(label) == 2}
        codes = known if languages is None else {languages} if isinstance(languages, str) else set(languages)
        if not codes or codes - known:
            raise ConfigError(f"`languages` must be among {' '.join(sorted(known))}, got {languages!r}.")
        self.languages = frozenset(codes)

    def route(self, prompt: RoutedPrompt) -> str | None:
        if not (text := self._last_turn(prompt)):
            return None
        ranked = [(p, label) for label, p in self._identifier.rank(text) if label in self.languages]
        inside = sum(p for p, _ in ranked)
        best, label = max(ranked)
        # Short texts give related languages some probability, so `best` is compared with the requested ones only.
        return str(label) if inside >= MIN_INSIDE and best >= MIN_CONFIDENCE * inside else None

    def _last_turn(self, prompt: RoutedPrompt) -> str:
        """Return the last text between special tokens of the chat template, without role names."""
        added = getattr(prompt.tokenizer, "added_tokens_decoder", {})
        special = np.isin(prompt.ids, [i for i, token in added.items() if token.special])
        ends = [-1, *np.flatnonzero(special).tolist(), len(prompt.ids)]
        for start, end in zip(ends[-2::-1], ends[:0:-1], strict=True):
            if end > start + 1:
                text = prompt.decode(prompt.ids[start + 1 : min(end, start + 1 + TURN_TOKENS)])
                if text := TAG.sub(" ", ROLE.sub("", text)).strip():
                    return text
        return ""


class TopicRouter(Router):
    """
    Find topics in the traffic without labels, and name them `topic-1`, `topic-2`, ...

    A prompt is represented by the mean of the target's input embeddings over its distinct tokens, without the part
    that all embeddings share (arXiv 1702.01417), scaled to length 1. It gets the topic with the nearest centroid, or
    `None` if it is among the first 16, between two topics, or far from all. A topic consists of its newest prompts. If
    they form two clusters, the one with the oldest prompt keeps the name and the other becomes a new topic, up to
    `max_topics`. A topic that returns gets its old name.

    Args:
        target (`PreTrainedModel`):
            Its input embeddings are used; may be compiled or have an adapter. Only their weight is kept.
        max_topics (`int`, *optional*, defaults to 8): Maximum number of topics, at least 1.

    Raises:
        ConfigError: `max_topics` is out of range.
        UnsupportedModelError: the target has no table of input embeddings.
    """

    def __init__(self, target: Any, *, max_topics: int = 8) -> None:
        if not isinstance(max_topics, int) or isinstance(max_topics, bool) or max_topics < 1:
            raise ConfigError(f"`max_topics` must be an integer of at least 1, got {max_topics!r}.")
        self.max_topics = max_topics
        try:
            weight = unwrap(target).get_input_embeddings().weight.detach()
        except (AttributeError, NotImplementedError) as error:
            raise UnsupportedModelError(f"{type(target).__name__} has no input embeddings.") from error
        if weight.is_meta or not weight.is_floating_point():
            raise UnsupportedModelError(f"Embeddings must be loaded floats, got {weight.dtype} on {weight.device}.")
        self._weight: torch.Tensor = weight
        self._mean, self._common = _shared_part(self._weight)
        self._lock = threading.Lock()
        self._topics: list[_Topic] = []
        self._seen = 0
        self._prefix: NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def topics(self) -> list[str]:
        """Names of the topics."""
        return [topic.name for topic in self._topics]

    def route(self, prompt: RoutedPrompt) -> str | None:
        if not len(prompt.ids):
            return None
        with self._lock:
            vector = self._vector(self._without_prefix(np.asarray(prompt.ids, np.int64), prompt.learn))
            return None if vector is None else self._assign(vector, prompt.learn)

    def _without_prefix(self, ids: NDArray[np.int64], learn: bool) -> NDArray[np.int64]:
        """Remove the system prompt that the first prompts share. Later prompts do not change it, so that vectors stay
        comparable."""
        if self._seen == 0 and learn:
            self._prefix = ids[:PROMPT_TOKENS].copy()
        n = min(len(ids), len(self._prefix))
        shared = int(np.append(ids[:n] == self._prefix[:n], False).argmin())
        if 0 < self._seen < FIRST_PROMPTS and learn:
            self._prefix = self._prefix[:shared]
        return ids[shared:] if self._seen > 0 and MIN_PREFIX_TOKENS <= shared < len(ids) else ids

    @torch.no_grad()
    def _vector(self, ids: NDArray[np.int64]) -> Vectors | None:
        if len(ids) > PROMPT_TOKENS:
            ids = np.concatenate([ids[: PROMPT_TOKENS // 2], ids[-PROMPT_TOKENS // 2 :]])
        ids = np.unique(ids)  # repetitions depend more on the length of a prompt than on its topic
        ids = ids[(ids >= 0) & (ids < len(self._weight))]
        rows = self._weight[torch.from_numpy(ids).to(self._weight.device)].float()
        centered = rows.mean(0).cpu().numpy() - self._mean
        vector = centered - (self._common @ centered) @ self._common
        length = np.linalg.norm(vector)
        return np.asarray(vector / length, np.float32) if 0 < length < np.inf else None

    def _assign(self, vector: Vectors, learn: bool) -> str | None:
        self._seen += learn
        if not self._topics:
            if learn:
                self._topics.append(_Topic("topic-1", vector[None]))
            return None
        # Half the negative squared distances, up to a term that all have in common.
        scores = np.array([c @ vector - c @ c / 2 for c in (topic.centroid for topic in self._topics)])
        order = np.argsort(-scores, kind="stable")
        nearest = self._topics[order[0]]
        clear = near = nearest.is_near(vector)
        if near and len(order) > 1:
            between = self._topics[order[1]].centroid - nearest.centroid
            clear = 0.5 - (scores[order[0]] - scores[order[1]]) / max(between @ between, 1e-12) <= MAX_POSITION
        if not learn:
            return nearest.name if clear and self._seen > FIRST_PROMPTS else None
        full = len(self._topics) == self.max_topics
        if near or not full or self._seen <= FIRST_PROMPTS:  # a distant prompt may be the first of a new topic
            nearest.add(vector)
        if not full and nearest.unchecked >= CHECK_EVERY:
            nearest.unchecked = 0
            if (part := nearest.second_cluster()) is not None:
                self._topics.append(_Topic(f"topic-{len(self._topics) + 1}", nearest.vectors[part]))
                nearest.replace(nearest.vectors[~part])
        return nearest.name if clear and self._seen > FIRST_PROMPTS else None

    def state_dict(self) -> dict[str, Any]:
        """Return the topics with the vectors of their newest prompts, and the shared beginning of the prompts."""
        with self._lock:
            return {
                "router": "topics",
                "names": self.topics,
                "unchecked": [topic.unchecked for topic in self._topics],
                "vectors": [torch.from_numpy(topic.vectors.copy()) for topic in self._topics],
                "seen": self._seen,
                "prefix": torch.from_numpy(self._prefix.copy()),
                "mean_embedding": torch.from_numpy(self._mean.copy()),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; raises StateError for that of another kind of router or another target, or with more
        than `max_topics` topics."""
        if state.get("router") != "topics":
            raise StateError(f"Not the state of a TopicRouter: it has {', '.join(map(str, state)) or 'nothing'}.")
        mean = state["mean_embedding"].numpy()
        # The tolerance allows for a target in another precision.
        if mean.shape != self._mean.shape or np.linalg.norm(mean - self._mean) > 0.05 * np.linalg.norm(self._mean):
            raise StateError("The topics were found with another target: its embeddings differ.")
        if len(state["names"]) > self.max_topics:
            raise StateError(f"{len(state['names'])} topics were saved, `max_topics` is {self.max_topics}.")
        with self._lock:
            saved = zip(state["names"], state["vectors"], state["unchecked"], strict=True)
            self._topics = [_Topic(name, vectors.numpy().copy(), unchecked) for name, vectors, unchecked in saved]
            self._prefix = state["prefix"].numpy().copy()
            self._seen = state["seen"]


class _Topic:
    """The newest prompts that were nearest to one topic."""

    def __init__(self, name: str, vectors: Vectors, unchecked: int = 0) -> None:
        self.name = name
        self.unchecked = unchecked
        self.replace(vectors)

    def replace(self, vectors: Vectors) -> None:
        self.vectors = vectors
        self.centroid: Vectors = vectors.mean(0)

    def add(self, vector: Vectors) -> None:
        self.replace(np.concatenate([self.vectors[-MEMORY + 1 :], vector[None]]))
        self.unchecked += 1

    def is_near(self, vector: Vectors) -> bool:
        """Return whether the distance to the centroid is usual for this topic."""
        n = len(self.vectors)
        if n < MIN_TOPIC_PROMPTS:
            return False
        distances = ((self.vectors - self.centroid) ** 2).sum(1) * (n / (n - 1)) ** 2  # to the mean of the others
        limit = distances.mean() + MAX_DEVIATIONS * distances.std() + 1e-6
        return bool(((vector - self.centroid) ** 2).sum() <= limit)

    def second_cluster(self) -> NDArray[np.bool_] | None:
        """Return a mask `(prompts,)` of a second cluster without the oldest prompt; `None` if there is only one."""
        n = len(self.vectors)
        gram = (self.vectors @ self.vectors.T).astype(np.float64)
        centered = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
        axes = np.linalg.eigh(centered)[1]
        # Start from the directions with the largest variance, and from the newest prompts.
        starts = (axes[:, -1] > 0, axes[:, -2] > 0, np.arange(n) >= n - CHECK_EVERY)
        parts = [part for start in starts if (part := _two_means(gram, start)) is not None]
        separation, best = max(((_separation(gram, part), i) for i, part in enumerate(parts)), default=(0.0, 0))
        if separation < MIN_SEPARATION:
            return None
        return ~parts[best] if parts[best][0] else parts[best]


def _two_means(gram: NDArray[np.float64], part: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Run 2-means on inner products `(n, n)` from a first partition `(n,)`; `None` if a cluster gets too small."""
    for _ in range(10):
        weights = np.stack([part / max(part.sum(), 1), ~part / max((~part).sum(), 1)])
        products = weights @ gram
        scores = products - (products * weights).sum(1, keepdims=True) / 2
        part = scores[0] > scores[1]
        if min(part.sum(), (~part).sum()) < MIN_TOPIC_PROMPTS:
            return None
    return part


def _separation(gram: NDArray[np.float64], part: NDArray[np.bool_]) -> float:
    """Return the distance between two clusters `(n,)` of unit vectors with inner products `(n, n)`, along the line
    between their centroids, in standard deviations within a cluster. Each vector is projected with centroids that do
    not contain it: otherwise any cloud in many dimensions seems to have two clusters."""
    a, b, own = part.astype(float), (~part).astype(float), np.diag(gram)
    to_a, to_b, in_a, in_b = gram @ a, gram @ b, a.sum() - a, b.sum() - b
    # Squared norms and inner product of the two centroids without the vector itself.
    aa = (a @ to_a - a * (2 * to_a - own)) / in_a**2
    bb = (b @ to_b - b * (2 * to_b - own)) / in_b**2
    ab = (a @ to_b - a * to_b - b * to_a) / (in_a * in_b)
    # Bounded below: the distances of equal prompts are rounding errors.
    apart = np.maximum(aa + bb - 2 * ab, 1e-3)
    positions = ((to_a - a * own) / in_a - (to_b - b * own) / in_b - ab + bb) / apart
    of_a, of_b = positions[part], positions[~part]
    spread = np.sqrt((of_a.var() * len(of_a) + of_b.var() * len(of_b)) / len(part))
    return float((of_a.mean() - of_b.mean()) / max(spread, 0.01))


def _shared_part(weight: torch.Tensor) -> tuple[Vectors, Vectors]:
    """Return the mean `(d,)` of a sample of the embeddings and its first d / 100 principal directions
    `(directions, d)`, orthonormal. They encode the frequency of a token rather than its meaning."""
    rows = torch.linspace(0, len(weight) - 1, min(len(weight), 2048), dtype=torch.float32, device="cpu").long()
    sample = weight[rows.to(weight.device)].float().cpu()
    number = min(-(-sample.shape[1] // 100), sample.shape[1] - 1, len(sample))
    with Seeded(0):  # a full decomposition takes a minute for large models
        directions = torch.pca_lowrank(sample, min(number + 8, *sample.shape), niter=8)[2]
    return sample.mean(0).numpy(), np.ascontiguousarray(directions[:, :number].T.numpy())
