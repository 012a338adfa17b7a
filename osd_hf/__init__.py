"""Assistant models that learn while they serve: online speculative decoding for transformers."""

from typing import TYPE_CHECKING, Any

from osd_hf.assistant import OnlineAssistant
from osd_hf.capture.hook import capture_traces
from osd_hf.capture.processors import ReplayedProcessor
from osd_hf.capture.recording import record_traces
from osd_hf.config import OnlineConfig
from osd_hf.errors import (
    CaptureError,
    ConfigError,
    DataError,
    HubError,
    LearnerError,
    OSDError,
    ServerError,
    StateError,
    StoreError,
    UnsupportedGenerationError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from osd_hf.learning.drafts import DomainDrafts
from osd_hf.learning.gate import GateDecision
from osd_hf.learning.updater import UpdateReport
from osd_hf.metrics import AcceptanceStats, best_k, expected_block_efficiency, expected_speedup
from osd_hf.pair import align_vocab
from osd_hf.replay import EmittedToken, emitted_tokens, replay
from osd_hf.routing import CallableRouter, LabelRouter, LanguageRouter, RoutedPrompt, Router, TopicRouter
from osd_hf.simulate import SimulationReport, simulate
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import DraftRound, Trace

if TYPE_CHECKING:
    from osd_hf.distillation.trainer import DistillConfig, distill

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "CallableRouter",
    "CaptureError",
    "ConfigError",
    "CorrectionStore",
    "DataError",
    "DistillConfig",
    "DomainDrafts",
    "DraftRound",
    "EmittedToken",
    "GateDecision",
    "HubError",
    "LabelRouter",
    "LanguageRouter",
    "LearnerError",
    "OSDError",
    "ServerError",
    "OnlineAssistant",
    "OnlineConfig",
    "ReplayedProcessor",
    "RoutedPrompt",
    "Router",
    "SimulationReport",
    "StateError",
    "StoreError",
    "TopicRouter",
    "Trace",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "UpdateReport",
    "VocabularyMismatchError",
    "align_vocab",
    "best_k",
    "capture_traces",
    "distill",
    "emitted_tokens",
    "expected_block_efficiency",
    "expected_speedup",
    "record_traces",
    "replay",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in ("DistillConfig", "distill"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from osd_hf.distillation import trainer as offline

    return getattr(offline, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
