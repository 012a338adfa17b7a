"""Habits of the whole package, held by reading its text."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
from huggingface_hub.cli.extensions import _get_executable_name

from osd_hf.config import OnlineConfig

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "osd_hf").rglob("*.py"))

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Code, docs and reports; `.ci/run` alone may know where the lab pair lies beside a clone. The subject of two tests is
# such paths.
PATTERNS = """
*.md *.toml *.txt *.cff Makefile .github/**/*.md .github/**/*.yml
docs/**/*.md docs/*.py skills/**/*.md osd_hf/**/*.py osd_hf/**/*.md tests/**/*.py
recipes/**/*.py recipes/**/*.md recipes/**/*.json
""".split()
TEXTS = sorted(
    {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    - {ROOT / "tests/test_package.py", ROOT / "tests/test_provenance.py"}
)
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:work|tmp|root|home|opt|mnt|private|Users)/\w|file:///\w",
    "an address of packages": r"(?:extra-)?index-url|find-links",
    "a number without its tracker": r"(?i)\bissue\s+#?\d+",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", [field.name for field in fields(OnlineConfig)])
def test_a_setting_is_read_by_some_module(name):
    read = re.compile(rf"config\.{name}\b")
    assert any(read.search(path.read_text()) for path in MODULES if path.name != "config.py")


def test_no_module_imports_another_one_inside_a_function():
    for path in MODULES:
        tree = ast.parse(path.read_text())
        inside = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = [n for f in inside for n in ast.walk(f) if isinstance(n, ast.Import | ast.ImportFrom)]
        names = [n.module if isinstance(n, ast.ImportFrom) else alias.name for n in found for alias in n.names]
        own = [name for name in names if name is None or name.split(".")[0] in ("osd_hf", "osd_hf_app")]
        assert own == [], relative(path)


def test_a_module_says_its_job_in_one_line():
    for path in MODULES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"no docstring in {relative(path)}"
        first, *rest = docstring.splitlines()
        assert first.endswith("."), relative(path)
        assert not rest or rest[0] == "", relative(path)


def test_texts_hold_nothing_that_only_one_machine_knows():
    texts = {path: path.read_text() for path in TEXTS}
    found = [
        (relative(path), what, match.group())
        for path, text in texts.items()
        for what, rule in FORBIDDEN.items()
        for match in re.finditer(rule, text)
    ]
    assert found == []


def test_what_is_imported_is_declared():
    requirements = [*PROJECT["dependencies"], *EXTRAS["distill"], *EXTRAS["serve"]]
    names = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}
    names = {{"pyyaml": "yaml"}.get(name, name) for name in names}
    imported = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).split(".")[0])
    assert imported - names - set(sys.stdlib_module_names) - {"osd_hf", "vllm"} == set()  # which loads that module


def test_dependencies_have_lower_and_upper_bounds():
    requirements = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    unbounded = [r for r in requirements if not r.startswith("osd-hf[") and not re.search(r">=[\d.]+,<\d", r)]
    assert unbounded == []


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    requirements = [*PROJECT["dependencies"], *sum(PROJECT["optional-dependencies"].values(), [])]
    assert {re.split(r"[^\w-]", r)[0] for r in requirements if not r.startswith("osd-hf[")} <= pins
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines if line and not line.startswith("#"))


def release(version):
    return [int(part) for part in re.sub(r"(\.0)+$", "", version).split(".")]


def test_the_lowest_versions_are_those_that_the_tests_run_on():
    pins = {}
    for name in ("constraints.txt", "constraints-lowest.txt"):
        lines = (ROOT / name).read_text().splitlines()
        pins |= dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    bounds = {}
    for requirement in [*PROJECT["dependencies"], *extras["distill"], *extras["language"], *extras["app"]]:
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        bounds[name] = release(lowest)
    assert bounds.pop("torch") <= release(pins["torch"])  # CONTRIBUTING.md says how its lowest was tested
    assert {name: release(pins[name]) for name in bounds} == bounds


def test_the_command_is_an_extension_of_hf_too():
    """`hf extensions install` looks for a script of this name in what it has installed."""
    assert PROJECT["scripts"][_get_executable_name("osd").removesuffix(".exe")] == PROJECT["scripts"]["osd-hf"]


def test_the_changelog_knows_the_version():
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    try:
        assert metadata.version("osd-hf") == PROJECT["version"]
    except metadata.PackageNotFoundError:
        pytest.skip("osd-hf is not installed here")
