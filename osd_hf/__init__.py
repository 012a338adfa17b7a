"""Assistant models that learn while they serve: online speculative decoding for transformers."""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osd_hf.acceptance import AcceptanceStats
    from osd_hf.assistant import OnlineAssistant
    from osd_hf.config import OnlineConfig
    from osd_hf.decoding.hook import capture_traces
    from osd_hf.distillation.make_draft import make_draft
    from osd_hf.distillation.trainer import DistillConfig, distill
    from osd_hf.draft_head import DraftHead as DraftHead
    from osd_hf.evaluation.benchmark import benchmark
    from osd_hf.evaluation.compare import compare
    from osd_hf.logits_processors import ReplayedProcessor
    from osd_hf.replay import replay
    from osd_hf.rollouts import RolloutAssistant
    from osd_hf.router import LabelRouter, LanguageRouter, Router, TopicRouter
    from osd_hf.simulate import simulate
    from osd_hf.speedup import best_k, expected_block_efficiency, expected_speedup
    from osd_hf.store.store import CorrectionStore
    from osd_hf.trace import DraftRound as DraftRound
    from osd_hf.trace import Trace

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "CorrectionStore",
    "DistillConfig",
    "LabelRouter",
    "LanguageRouter",
    "OnlineAssistant",
    "OnlineConfig",
    "ReplayedProcessor",
    "RolloutAssistant",
    "Router",
    "TopicRouter",
    "Trace",
    "benchmark",
    "best_k",
    "capture_traces",
    "compare",
    "distill",
    "expected_block_efficiency",
    "expected_speedup",
    "make_draft",
    "replay",
    "simulate",
]

# The names of each module. It is imported when one of them is first used, so that `import osd_hf` does not load torch.
_NAMES = {
    "acceptance": ["AcceptanceStats"],
    "assistant": ["OnlineAssistant"],
    "config": ["OnlineConfig"],
    "decoding.hook": ["capture_traces"],
    "distillation.make_draft": ["make_draft"],
    "distillation.trainer": ["DistillConfig", "distill"],
    "draft_head": ["DraftHead"],
    "evaluation.benchmark": ["benchmark"],
    "evaluation.compare": ["compare"],
    "logits_processors": ["ReplayedProcessor"],
    "replay": ["replay"],
    "rollouts": ["RolloutAssistant"],
    "router": ["LabelRouter", "LanguageRouter", "Router", "TopicRouter"],
    "simulate": ["simulate"],
    "speedup": ["best_k", "expected_block_efficiency", "expected_speedup"],
    "store.store": ["CorrectionStore"],
    "trace": ["DraftRound", "Trace"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


class _Package(types.ModuleType):
    """Keeps `osd_hf.replay` and `osd_hf.simulate` functions: an import of their modules would replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_shadowing_module = name in _MODULES and isinstance(value, types.ModuleType)
        super().__setattr__(name, getattr(value, name) if is_shadowing_module else value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
