"""Measure the code (modules, lines, imports) and the modules that a request enters.

    python recipes/house.py                        # the working tree
    python recipes/house.py --ref HEAD~5           # a commit and the working tree
    python recipes/house.py --requests             # also the modules that a greedy and a sampled request enter

Measured are the modules of `osd_hf` without `bundled/`, and of `app`: lines of code, docstrings, and imports, the
longest modules and functions, imports between sub-packages, and the longest chain of imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDERS = {"osd_hf": "osd_hf", "osd_hf_app": "app"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def docstring_lines(node: ast.AST) -> set[int]:
    """Return the line numbers of the docstrings in a tree."""
    found: set[int] = set()
    for each in ast.walk(node):
        if isinstance(each, DEFINITIONS) and ast.get_docstring(each, clean=False) is not None:
            found.update(range(each.body[0].lineno, (each.body[0].end_lineno or 0) + 1))
    return found


def code_lines(source: list[str], node: ast.AST, first: int, last: int) -> int:
    """Return the lines that are not blank, comments, or docstrings."""
    left_out = docstring_lines(node)
    lines = ((number, source[number - 1].strip()) for number in range(first, last + 1))
    return sum(bool(text) and not text.startswith("#") and number not in left_out for number, text in lines)


def measure(root: Path, package: str) -> dict[str, Any]:
    """Measure a package in a folder of `root`."""
    folder = root / FOLDERS[package]
    sources = {
        ".".join([package, *path.relative_to(folder).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path.read_text()
        for path in sorted(folder.rglob("*.py"))
        if "bundled" not in path.parts
    }
    trees = {name: ast.parse(text) for name, text in sources.items()}
    code, functions, imports, edges = {}, [], 0, Counter()
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, tree in trees.items():
        lines = sources[name].splitlines()
        code[name] = code_lines(lines, tree, 1, len(lines))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = code_lines(lines, node, node.lineno, node.end_lineno or node.lineno)
                functions.append((size, f"{name}.{node.name}"))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imports += (node.end_lineno or node.lineno) - node.lineno + 1
                for imported in imported_modules(node, sources):
                    graph[name].add(imported)
                    ends = [part_of(each, package) for each in (name, imported)]
                    if ends[0] != ends[1]:
                        edges[" -> ".join(ends)] += 1
    graph = {name: those - {package} for name, those in graph.items() if name != package}
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[below] for below in graph.get(name, ())), default=0)
    lengths = {name: len(text.splitlines()) for name, text in sources.items()}
    named = [name for name, text in sources.items() if len(ast.parse(text).body) > 1]
    return {
        "modules": len(named),
        "lines": sum(lengths.values()),
        "code_lines": sum(code.values()),
        "docstring_lines": sum(len(docstring_lines(tree)) for tree in trees.values()),
        "import_lines": imports,
        "longest_modules": [f"{name} {lengths[name]} ({code[name]} of code)" for name in longest(lengths)],
        "longest_functions": [f"{name} {size}" for size, name in sorted(functions, reverse=True)[:5]],
        "functions_over_60": sum(size > 60 for size, _ in functions),
        "imports_between_parts": sum(edges.values()),
        "pairs_of_parts": len(edges),
        "floors": max(floors.values(), default=0),
    }


def longest(lengths: dict[str, int]) -> list[str]:
    return sorted(lengths, key=lambda name: -lengths[name])[:5]


def part_of(module: str, package: str) -> str:
    """Return the sub-package of a module; a top module is its own part."""
    return module.removeprefix(f"{package}.").split(".")[0]


def imported_modules(node: ast.Import | ast.ImportFrom, known: dict[str, str]) -> set[str]:
    """Return the modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & known.keys()
    parent = node.module or ""
    children = {f"{parent}.{alias.name}" for alias in node.names} & known.keys()
    return children or {parent} & known.keys()


def entered(call: Any) -> list[str]:
    """Return the modules of `osd_hf` that a call enters, in order, once per change of module. What follows a request
    (its statistics, and learning) is not followed."""
    way: list[str] = []
    after: list[FrameType] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and frame.f_code.co_name == "take_in_finished":
            after.append(frame)
        elif event == "return" and after and frame is after[-1]:
            after.pop()
        elif event == "call" and not after and name.startswith("osd_hf.") and (not way or way[-1] != name):
            way.append(name)

    before = sys.getprofile()
    threading.setprofile(None)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return way


def requests() -> dict[str, Any]:
    """Return the modules that a greedy and a sampled request of the bundled pair enter."""
    import torch

    from osd_hf import OnlineAssistant, OnlineConfig
    from osd_hf.bundled import bundled_prompts, load_bundled

    target, draft, tokenizer = load_bundled()
    turn = [{"role": "user", "content": bundled_prompts("sql", 1)[0].prompt}]
    ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    found = {}
    with OnlineAssistant(
        target, draft, tokenizer, OnlineConfig(num_assistant_tokens=5, update_strategy="manual")
    ) as assistant:
        for kind, settings in (("greedy", {"do_sample": False}), ("sampled", {"do_sample": True})):

            def call(settings: dict[str, Any] = settings) -> None:
                assistant.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, **settings)

            call()  # what only the first request does is not its way
            way = entered(call)
            found[kind] = {
                "modules": list(dict.fromkeys(way)),
                "distinct": len(set(way)),
                "changes": len(way),
                "entries_into_the_assistant": way.count("osd_hf.assistant"),
            }
    return found


def followed(root: Path) -> dict[str, Any]:
    """Run [`requests`] with the package in `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    command = [sys.executable, __file__, "--follow"]
    return dict(json.loads(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ref", help="a commit to put beside the working tree")
    parser.add_argument("--requests", action="store_true", help="also follow requests through the modules")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        print(json.dumps(requests()))
        return
    from common import write_report

    report: dict[str, Any] = {"now": {package: measure(ROOT, package) for package in FOLDERS}}
    if args.ref:
        archive = subprocess.run(
            ["git", "archive", args.ref, "osd_hf", "app"], cwd=ROOT, check=True, capture_output=True
        )
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
            report[args.ref] = {package: measure(Path(folder), package) for package in FOLDERS}
            if args.requests:
                report[args.ref]["requests"] = followed(Path(folder))
    if args.requests:
        report["now"]["requests"] = followed(ROOT)
    for side, packages in report.items():
        print(side)
        for package, figures in packages.items():
            print(f"  {package}")
            for name, value in figures.items():
                shown = "\n".join(f"      {each}" for each in value) if isinstance(value, list) else f"      {value}"
                print(f"    {name}\n{shown}" if isinstance(value, list) else f"    {name:24}{value}")
    print(f"wrote {write_report('house', report)}")


if __name__ == "__main__":
    main()
