"""Imports point down the layers; the checker reads source text, so that it can be shown to bite."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "osd_hf"

# A module, or a subpackage as a whole, and its layer. Within a layer imports may go sideways, never in a circle.
LAYERS = {
    # words
    "records": 0,
    "errors": 0,
    "masking": 0,
    "provenance": 0,
    "outputs": 0,
    "forks": 0,
    "disk": 0,
    # mathematics, and what is set
    "losses": 1,
    "metrics": 1,
    "gate": 1,
    "cost": 1,
    "tally": 1,
    "estimates": 1,
    "trace_faults": 1,
    "pacing": 1,
    "config": 1,
    # what is kept, and what any draft makes of it
    "store": 2,
    "buffers": 2,
    "shards": 2,
    "tables": 2,
    "forcing": 2,
    "replay": 2,
    "origins": 2,
    # touching transformers, the bundled pair, streams of prompts
    "wrappers": 1,
    "reachable": 1,
    "restoring": 0,
    "arguments": 3,
    "capture": 3,
    "draft_forward": 3,
    "drafting": 3,
    "hook": 3,
    "guards": 3,
    "processors": 3,
    "vocab": 3,
    "recording": 3,
    "bundled": 3,
    "prompts": 3,
    "completions": 3,
    "completion_client": 3,
    "request_log": 3,
    "following": 3,
    "loading": 3,
    "visibility": 3,
    # who learns, when, and how it goes on later
    "snapshots": 4,
    "optimizers": 4,
    "updater": 4,
    "adapters": 4,
    "publishing": 4,
    "upkeep": 4,
    "schedule": 4,
    "copies": 4,
    "drafts": 4,
    "learner": 4,
    "routing": 4,
    "tracking": 4,
    "session": 4,
    "offline": 4,
    "offline_data": 4,
    "offline_eval": 4,
    "offline_loss": 4,
    "offline_models": 4,
    "offline_sampling": 4,
    # what users call
    "assistant": 5,
    "evaluation": 5,
    "evaluate": 5,
    "cards": 5,
    "hub": 5,
    "engines": 5,
    "collecting": 5,
    "versions": 5,
    "store_learning": 5,
    "simulate": 5,
    "serving": 5,
    "display": 5,
    "plots": 5,
    "timing": 5,
    "controlled": 5,
    "benchmark": 5,
    "benchmark_report": 5,
    # the public names, which commands may use and never the other way round
    "__init__": 6,
    # commands
    "quickstart": 7,
    "shared_flags": 7,
    "commands": 7,
    "collect_command": 7,
    "learn_command": 7,
    "bench_command": 7,
    "distill_command": 7,
    "app_command": 7,
    "push_command": 7,
    "cli": 7,
    "__main__": 7,
}

# Third-party packages that only the module named may import, inside functions too.
CONFINED = {"trl": "offline", "matplotlib": "plots", "gradio": None}

# Where a first-party import may wait inside a function: the public names that are imported when first asked for.
LAZY = {"__init__"}


def violations(
    sources: Mapping[str, str],
    layers: Mapping[str, int] = LAYERS,
    confined: Mapping[str, str | None] = CONFINED,
    lazy: set[str] = LAZY,
) -> list[str]:
    """
    What breaks the rules of the house.

    Args:
        sources (`Mapping[str, str]`):
            Source text by module name within the package, `"bundled.prompts"` for a module of a subpackage and
            `"bundled.__init__"` for the subpackage itself.
        layers (`Mapping[str, int]`, *optional*, defaults to `LAYERS`):
            Layer by first part of the module name.
        confined (`Mapping[str, str | None]`, *optional*, defaults to `CONFINED`):
            The one module that may import a third-party package, or `None` for no module.
        lazy (`set[str]`, *optional*, defaults to `LAZY`):
            Modules that may import first-party modules inside functions.

    Returns:
        `list[str]`: one line per violation, sorted.
    """
    found = []
    edges: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        unit = name.split(".")[0]
        if unit not in layers:
            found.append(f"{name} has no layer")
            continue
        for imported, line, in_function in _imports(ast.parse(source), name):
            top, _, rest = imported.partition(".")
            where = f"{name}:{line}"
            if top in confined and unit != confined[top]:
                found.append(f"{where} imports {top}")
            if top != "osd_hf":
                continue
            module = _module(rest, sources)
            other = module.split(".")[0]
            if in_function and unit not in lazy:
                found.append(f"{where} imports osd_hf.{rest} inside a function")
            if layers.get(other, 0) > layers[unit]:
                found.append(f"{where} imports {other}, which lies above")
            # `from . import x` within a subpackage names its `__init__`, and is no import of what stands there.
            elif not in_function and module not in (name, f"{unit}.__init__"):
                edges[name].add(module)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        found.append("circle: " + " <- ".join(error.args[1]))
    return sorted(found)


def _imports(tree: ast.Module, name: str) -> Iterator[tuple[str, int, bool]]:
    """Absolute dotted names that are imported: `from a import b` gives `a.b`; with line and whether in a function."""
    parents = ["osd_hf", *name.split(".")[:-1]]

    def walk(node: ast.AST, in_function: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child.lineno, inside
            elif isinstance(child, ast.ImportFrom):
                base = parents[: len(parents) + 1 - child.level] if child.level else []
                prefix = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    yield f"{prefix}.{alias.name}", child.lineno, inside
            elif (
                isinstance(child, ast.Call)
                and ast.unparse(child.func) in ("importlib.import_module", "import_module", "__import__")
                and child.args
                and isinstance(child.args[0], ast.Constant)
            ):
                yield str(child.args[0].value), child.lineno, inside
            yield from walk(child, inside)

    yield from walk(tree, False)


def _module(dotted: str, sources: Mapping[str, str]) -> str:
    """The module that a dotted name within the package lies in, its longest prefix that is a module."""
    parts = dotted.split(".") if dotted else []
    for end in range(len(parts), 0, -1):
        for module in (".".join(parts[:end]), ".".join([*parts[:end], "__init__"])):
            if module in sources:
                return module
    return "__init__"


def package_sources() -> dict[str, str]:
    """Source text of the package by module name, as `violations` takes it."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text() for path in paths}


def test_the_package_keeps_its_layers():
    assert violations(package_sources()) == []


CLEAN = {
    "errors": "import math",
    "losses": "from osd_hf.errors import ConfigError\nimport torch",
    "config": "from osd_hf import losses",
    "assistant": "from . import config\nfrom .errors import OSDError",
    "bundled.__init__": "from .prompts import DOMAINS",
    "bundled.prompts": "from . import sql\nfrom ..errors import DataError",
    "bundled.sql": "import re",
    "__init__": "def __getattr__(name):\n    from osd_hf import assistant\n    return assistant",
}


def test_a_clean_package_has_no_violations():
    assert violations(CLEAN) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"errors": "from osd_hf.assistant import OnlineAssistant"}, "errors:1 imports assistant, which lies above"),
        ({"errors": "import osd_hf.assistant"}, "errors:1 imports assistant, which lies above"),
        ({"errors": "from osd_hf import assistant"}, "errors:1 imports assistant, which lies above"),
        ({"errors": "from .assistant import OnlineAssistant"}, "errors:1 imports assistant, which lies above"),
        ({"errors": "from osd_hf import OnlineAssistant"}, "errors:1 imports __init__, which lies above"),
        ({"errors": "import osd_hf"}, "errors:1 imports __init__, which lies above"),
        ({"bundled.sql": "from ..assistant import x"}, "bundled.sql:1 imports assistant, which lies above"),
        ({"losses": "from osd_hf.bundled import DOMAINS"}, "losses:1 imports bundled, which lies above"),
        (
            {"assistant": "def f():\n    from osd_hf.losses import x"},
            "assistant:2 imports osd_hf.losses.x inside a function",
        ),
        (
            {"assistant": "import importlib\ndef f():\n    importlib.import_module('osd_hf.losses')"},
            "assistant:3 imports osd_hf.losses inside a function",
        ),
        ({"losses": "import osd_hf.config"}, "circle: "),
        ({"bundled.sql": "from .prompts import DOMAINS"}, "circle: "),
        ({"assistant": "from trl.trainer import x"}, "assistant:1 imports trl"),
        ({"assistant": "def f():\n    import gradio as gr"}, "assistant:2 imports gradio"),
        ({"scratch": "import math"}, "scratch has no layer"),
    ],
)
def test_a_violation_is_found(changed, expected):
    found = violations({**CLEAN, **changed})
    assert len(found) == 1, found
    assert found[0].startswith(expected)


def test_the_confined_module_may_import_its_package():
    assert violations({"offline": "import trl"}, layers={"offline": 4}) == []
