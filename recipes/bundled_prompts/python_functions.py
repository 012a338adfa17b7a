"""Requests for a small Python function with one or two examples, answered by the function."""

import ast
import builtins
import random
from collections.abc import Callable
from typing import Any

from bundled_prompts.example import Example
from bundled_prompts.python_lists import Task
from bundled_prompts.python_tasks import KINDS

_BUILTINS = (
    "abs all any bool dict enumerate float int len list map max min range reversed round set sorted str sum tuple zip"
)
_ALLOWED = {name: getattr(builtins, name) for name in _BUILTINS.split()}


def _load(source: str) -> dict[str, Any]:
    """Run a module that may only define functions with the allowed builtins.

    Raises:
        ValueError: if it does more than that, or has a loop without a bound.
    """
    tree = ast.parse(source)
    if not tree.body or not all(isinstance(node, ast.FunctionDef) for node in tree.body):
        raise ValueError("expected nothing but function definitions")
    for node in ast.walk(tree):
        if isinstance(node, (ast.While, ast.Import, ast.ImportFrom, ast.Global, ast.Pow)):
            raise ValueError(f"{type(node).__name__} is not allowed")
        names = [getattr(node, field, "") for field in ("attr", "id")]
        if any(str(name).startswith("__") for name in names):
            raise ValueError("names with two underscores are not allowed")
    namespace: dict[str, Any] = {"__builtins__": _ALLOWED}
    exec(compile(tree, "<answer>", "exec"), namespace)
    return namespace


def _inputs(task: Task, rng: random.Random, n: int) -> list[tuple[Any, ...]]:
    """Return `n` argument tuples, the first two with different results if possible."""
    namespace = _load("\n".join([f"def f({', '.join(task.parameters)}):", *("    " + line for line in task.body)]))
    found = [task.inputs(rng)]
    for _ in range(8):
        other = task.inputs(rng)
        if namespace["f"](*other) != namespace["f"](*found[0]):
            found.append(other)
            break
    while len(found) < n:
        found.append(task.inputs(rng))
    return found


def make(rng: random.Random, wanted: Callable[[str], bool]) -> Example | None:
    """Draw one request, or `None` if its content is not `wanted`."""
    task = rng.choice(KINDS)(rng)
    name = rng.choice(task.names)
    if rng.random() < 0.1:
        name = rng.choice(("solve", "compute", "process", "helper", "func", "run"))
    signature = f"{name}({', '.join(task.parameters)})"
    content = f"{signature} {task.returns}"
    if not wanted(content):
        return None
    returns = task.returns.removesuffix(", using a loop")
    answer = "\n".join([f"def {signature}:", f'    """Return {returns}."""', *("    " + line for line in task.body)])
    function = _load(answer)[name]
    inputs = _inputs(task, rng, 6)
    shown = inputs[: rng.randint(1, 2)]
    examples = [f"{name}({', '.join(map(repr, arguments))}) -> {function(*arguments)!r}" for arguments in shown]
    request = rng.choice(
        (
            f"Write a Python function {signature} that returns {task.returns}.",
            f"Write {signature} in Python. It returns {task.returns}.",
            f"I need a function {signature} which gives back {task.returns}.",
            f"Please implement {signature}: it should return {task.returns}.",
            f"def {signature}: return {task.returns}.",
        )
    )
    prompt = request + "\n" + "\n".join(examples)
    tests = tuple(f"{arguments!r}" for arguments in inputs)
    return Example("python", prompt, answer, content, (name, *tests))


def check(example: Example, answer: str) -> bool:
    """Return whether the answer gives the correct results on the examples in the prompt and on hidden ones."""
    name, *tests = example.key
    reference = _load(example.answer)[name]
    try:
        function = _load(answer.strip())[name]
        for test in tests:
            expected, got = reference(*ast.literal_eval(test)), function(*ast.literal_eval(test))
            if type(got) is not type(expected) or got != expected:
                return False
    # Whatever a stranger's code raises, it is wrong.
    except Exception:  # noqa: BLE001
        return False
    return True
