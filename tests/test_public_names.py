"""What users may import, and what importing it must not bring in."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import osd_hf

PUBLIC_NAMES = {
    # what learns while it serves
    "OnlineAssistant",
    "OnlineConfig",
    "UpdateReport",
    "GateDecision",
    # drafts per domain, and who gets which
    "DomainDrafts",
    "Router",
    "RoutedPrompt",
    "LabelRouter",
    "CallableRouter",
    "LanguageRouter",
    "TopicRouter",
    # what was seen of the traffic
    "capture_traces",
    "record_traces",
    "Trace",
    "DraftRound",
    "EmittedToken",
    "emitted_tokens",
    "CorrectionStore",
    # what a draft scores, or would score
    "AcceptanceStats",
    "replay",
    "simulate",
    "SimulationReport",
    # the paper's cost model
    "expected_block_efficiency",
    "expected_speedup",
    "best_k",
    # learning offline
    "distill",
    "DistillConfig",
    # logits processors with a memory
    "ReplayedProcessor",
    # putting a pair together
    "align_vocab",
    # errors
    "OSDError",
    "CaptureError",
    "ConfigError",
    "DataError",
    "HubError",
    "ServerError",
    "LearnerError",
    "StateError",
    "StoreError",
    "UnsupportedGenerationError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
}

# Looked for in a fresh interpreter. What transformers brings in by itself is its own affair.
LAZY = {"distill", "DistillConfig"}  # imported when first asked for
HEAVY = ("trl", "gradio", "matplotlib", "rich", "click", "typer")


def test_the_public_names_are_these():
    assert set(osd_hf.__all__) == PUBLIC_NAMES
    assert len(osd_hf.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_a_public_name_imports_and_is_documented(name):
    value = getattr(osd_hf, name)
    # A dataclass without a docstring gets its signature as one.
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")
    assert name in dir(osd_hf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        osd_hf.no_such_name  # noqa: B018


def test_errors_share_a_root_and_are_what_a_caller_would_catch():
    leaves = [value for name in PUBLIC_NAMES if name.endswith("Error") and (value := getattr(osd_hf, name))]
    for leaf in leaves:
        assert issubclass(leaf, osd_hf.OSDError)
        assert leaf is osd_hf.OSDError or issubclass(leaf, ValueError | RuntimeError)


def imported_by(statement: str) -> set[str]:
    """Top-level packages of `HEAVY` in `sys.modules` after a statement in a fresh interpreter."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_is_light():
    baseline = imported_by("from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin")
    everything = f"import osd_hf\nfor name in set(osd_hf.__all__) - {LAZY!r}: getattr(osd_hf, name)"
    assert imported_by(everything) - baseline == set()


def test_lazy_names_bring_in_what_they_need():
    assert "trl" in imported_by("import osd_hf; osd_hf.distill")


def test_a_missing_extra_names_the_pip_command():
    code = "import sys; sys.modules['trl'] = None\nimport osd_hf; osd_hf.distill"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert "pip install 'osd-hf[distill]'" in done.stderr
