"""The public names, and what importing them loads."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import osd_hf
from osd_hf import errors

PUBLIC_NAMES = set(
    """
    OnlineAssistant OnlineConfig
    make_draft distill DistillConfig
    capture_traces Trace CorrectionStore
    AcceptanceStats replay simulate
    expected_speedup expected_block_efficiency best_k
    Router LabelRouter LanguageRouter TopicRouter
    RolloutAssistant ReplayedProcessor
    compare benchmark
    """.split()
)
NEED_TRL = {"distill", "DistillConfig"}
HEAVY = ("torch", "transformers", "trl", "gradio", "matplotlib", "rich", "click", "typer")


def test_the_public_names_are_these():
    assert sorted(osd_hf.__all__) == sorted(PUBLIC_NAMES)
    assert osd_hf.DraftRound.__name__ == "DraftRound"  # importable, but not in `__all__`


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_a_public_name_imports_and_is_documented(name):
    value = getattr(osd_hf, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # the signature that a dataclass without a docstring gets
    assert name in dir(osd_hf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        osd_hf.no_such_name  # noqa: B018


def test_errors_share_a_root_and_are_what_a_caller_would_catch():
    leaves = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
    assert len(leaves) > 10
    for leaf in leaves:
        assert issubclass(leaf, errors.OSDError)
        assert leaf is errors.OSDError or issubclass(leaf, ValueError | RuntimeError)


# Prints the heavy packages that are loaded after each step, in one interpreter.
STEPS = """
import gc, json, sys
gc.disable()  # saves time: the imports make much garbage
heavy, need_trl = json.loads(sys.argv[1])
loaded = {}
def note(step):
    loaded[step] = [name for name in heavy if sys.modules.get(name) is not None]
import osd_hf
note("osd_hf")
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin
note("transformers")
import osd_hf.replay, osd_hf.simulate
loaded["callable"] = callable(osd_hf.replay) and callable(osd_hf.simulate)
for name in set(osd_hf.__all__) - set(need_trl):
    getattr(osd_hf, name)
note("everything")
sys.modules["trl"] = None
try:
    osd_hf.distill
except ImportError as error:
    loaded["error"] = str(error)
del sys.modules["trl"]
osd_hf.distill
note("distill")
print(json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def fresh():
    """The output of `STEPS` in a new interpreter."""
    arguments = json.dumps([HEAVY, sorted(NEED_TRL)])
    done = subprocess.run([sys.executable, "-c", STEPS, arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_is_light_and_loads_packages_when_they_are_needed(fresh):
    assert fresh["osd_hf"] == []
    assert set(fresh["everything"]) - set(fresh["transformers"]) == set()
    assert "trl" not in fresh["everything"]
    assert "trl" in fresh["distill"]


def test_functions_are_not_replaced_by_the_modules_of_their_names(fresh):
    assert fresh["callable"]


def test_a_missing_extra_names_the_pip_command(fresh):
    assert "pip install 'osd-hf[distill]'" in fresh["error"]
