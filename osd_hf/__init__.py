"""Assistant models that learn while they serve: online speculative decoding for transformers."""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osd_hf.acceptance import AcceptanceStats
    from osd_hf.assistant import OnlineAssistant
    from osd_hf.capture.hook import capture_traces, record_traces, rescore
    from osd_hf.config import OnlineConfig
    from osd_hf.distillation.trainer import DistillConfig, DistillTrainer, distill
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
    from osd_hf.evaluation.benchmark import benchmark
    from osd_hf.evaluation.compare import compare
    from osd_hf.evaluation.evaluate import evaluate
    from osd_hf.learning.drafts import DomainDrafts
    from osd_hf.learning.gate import GateDecision
    from osd_hf.learning.updater import UpdateReport
    from osd_hf.logits_processors import ReplayedProcessor
    from osd_hf.making import make_draft
    from osd_hf.models import align_vocab
    from osd_hf.replay import EmittedToken, emitted_tokens, replay
    from osd_hf.rollouts import RolloutAssistant
    from osd_hf.router import CallableRouter, LabelRouter, LanguageRouter, RoutedPrompt, Router, TopicRouter
    from osd_hf.simulate import SimulationReport, simulate
    from osd_hf.speedup import best_k, expected_block_efficiency, expected_speedup
    from osd_hf.store.store import CorrectionStore
    from osd_hf.target_version import fingerprint
    from osd_hf.trace import DraftRound, Trace

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "CallableRouter",
    "CaptureError",
    "ConfigError",
    "CorrectionStore",
    "DataError",
    "DistillConfig",
    "DistillTrainer",
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
    "RolloutAssistant",
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
    "benchmark",
    "best_k",
    "capture_traces",
    "compare",
    "distill",
    "emitted_tokens",
    "evaluate",
    "expected_block_efficiency",
    "expected_speedup",
    "fingerprint",
    "make_draft",
    "record_traces",
    "replay",
    "rescore",
    "simulate",
]


# Where the public names live. A module is imported when a name of it is first asked for: what shows a help, or catches
# an error, loads no torch.
_HOMES = {
    "assistant": "OnlineAssistant",
    "evaluation.benchmark": "benchmark",
    "capture.hook": "capture_traces record_traces rescore",
    "evaluation.compare": "compare",
    "config": "OnlineConfig",
    "errors": "CaptureError ConfigError DataError HubError LearnerError OSDError "
    "ServerError StateError StoreError UnsupportedGenerationError UnsupportedModelError VocabularyMismatchError",
    "evaluation.evaluate": "evaluate",
    "target_version": "fingerprint",
    "learning.drafts": "DomainDrafts",
    "learning.gate": "GateDecision",
    "learning.updater": "UpdateReport",
    "logits_processors": "ReplayedProcessor",
    "making": "make_draft",
    "acceptance": "AcceptanceStats",
    "speedup": "best_k expected_block_efficiency expected_speedup",
    "models": "align_vocab",
    "replay": "EmittedToken emitted_tokens replay",
    "rollouts": "RolloutAssistant",
    "router": "CallableRouter LabelRouter LanguageRouter RoutedPrompt Router TopicRouter",
    "simulate": "SimulationReport simulate",
    "store.store": "CorrectionStore",
    "trace": "DraftRound Trace",
    "distillation.trainer": "DistillConfig DistillTrainer distill",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


class _Package(types.ModuleType):
    """Python sets a module here under its name once it is imported. `replay` and `simulate` stay the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        hides_a_function = name in _HOME_OF and isinstance(value, types.ModuleType)
        super().__setattr__(name, getattr(value, name) if hides_a_function else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
