"""Assistant models that learn while they serve: online speculative decoding for transformers."""

from typing import TYPE_CHECKING, Any

from osd_hf.assistant import OnlineAssistant
from osd_hf.config import OnlineConfig
from osd_hf.cost import best_k, expected_block_efficiency, expected_speedup
from osd_hf.drafts import DomainDrafts
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
from osd_hf.gate import GateDecision
from osd_hf.hook import capture_traces
from osd_hf.metrics import AcceptanceStats
from osd_hf.origins import EmittedToken, emitted_tokens
from osd_hf.processors import ReplayedProcessor
from osd_hf.recording import record_traces
from osd_hf.records import DraftRound, Trace
from osd_hf.replay import replay
from osd_hf.routing import CallableRouter, LabelRouter, LanguageRouter, RoutedPrompt, Router, TopicRouter
from osd_hf.simulate import SimulationReport, simulate
from osd_hf.store import CorrectionStore
from osd_hf.updater import UpdateReport
from osd_hf.vocab import align_vocab

if TYPE_CHECKING:
    from osd_hf.offline import DistillConfig, distill

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
    from osd_hf import offline  # imports trl, which takes seconds and is an extra

    return getattr(offline, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
