"""Processes of their own for what a test cannot do in its own: forks of one that has imported the package and the app,
as importing takes longer than most of what they do."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from waiting import LONG

_PRELOADED = ["osd_hf_app.launch", "osd_hf.cli.app", "osd_hf.cli.learn", "osd_hf.cli.run",
              "transformers.models.llama.modeling_llama"]  # fmt: skip


def process_for(work: Callable[..., object], *args: Any) -> Any:
    """A process that will do this; it ends with this one."""
    context: Any = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    )
    context.set_forkserver_preload(_PRELOADED)
    return context.Process(target=work, args=args, daemon=True)


def say_into(*descriptors: int) -> None:
    """Let standard output and error of this process be those files."""
    for own, descriptor in zip((1, 2), descriptors, strict=True):
        os.dup2(descriptor, own)


def _run(code: str | Path, arguments: list[str], environment: Mapping[str, str], folder: str) -> None:
    with open(f"{folder}/out", "wb") as out, open(f"{folder}/err", "wb") as err:
        say_into(out.fileno(), err.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(code) if isinstance(code, Path) else "-c", *arguments]
    if isinstance(code, Path):
        sys.path.insert(0, str(code.parent))
        runpy.run_path(str(code), run_name="__main__")
    else:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})


def run_python(
    code: str | Path, *arguments: str, environment: Mapping[str, str] = os.environ, timeout: float = LONG
) -> subprocess.CompletedProcess[str]:
    """Run a script, or the file of one, as `subprocess.run` would by a fresh interpreter with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        own = {**environment, "OMP_NUM_THREADS": "1"}
        process = process_for(_run, code, list(arguments), own, folder)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(sys.argv, timeout)
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)
