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
    "RolloutAssistant",
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
    # which version of the target it is of
    "fingerprint",
    "rescore",
    # what a draft scores, or would score
    "AcceptanceStats",
    "replay",
    "simulate",
    "SimulationReport",
    "evaluate",
    "compare",
    "benchmark",
    # the paper's cost model
    "expected_block_efficiency",
    "expected_speedup",
    "best_k",
    # learning offline
    "distill",
    "DistillConfig",
    "DistillTrainer",
    # logits processors with a memory
    "ReplayedProcessor",
    # putting a pair together
    "align_vocab",
    "make_draft",
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
LAZY = {"distill", "DistillConfig", "DistillTrainer"}  # imported when first asked for
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


def test_the_package_alone_brings_in_neither_torch_nor_transformers():
    code = "import sys, osd_hf; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# One interpreter, and what of the heavy ones it has loaded after each step: the same as one interpreter a step, as
# nothing is ever unloaded. Without trl first, which then comes.
STEPS = """
import gc, json, sys
gc.disable()  # it would look through what is imported again and again
heavy, lazy = json.loads(sys.argv[1])
told = {}
def tell(step):
    told[step] = [name for name in heavy if sys.modules.get(name) is not None]
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin
tell("transformers")
import osd_hf
for name in set(osd_hf.__all__) - set(lazy):
    getattr(osd_hf, name)
tell("everything")
sys.modules["trl"] = None
try:
    osd_hf.distill
except ImportError as error:
    told["error"] = str(error)
del sys.modules["trl"]
osd_hf.distill
tell("distill")
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def fresh():
    """What `STEPS` tells in an interpreter of its own."""
    arguments = json.dumps([HEAVY, sorted(LAZY)])
    done = subprocess.run([sys.executable, "-c", STEPS, arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_is_light(fresh):
    assert set(fresh["everything"]) - set(fresh["transformers"]) == set()


def test_lazy_names_bring_in_what_they_need(fresh):
    assert "trl" not in fresh["everything"]
    assert "trl" in fresh["distill"]


def test_a_missing_extra_names_the_pip_command(fresh):
    assert "pip install 'osd-hf[distill]'" in fresh["error"]
