"""Processes of their own for what a test cannot do in its own: forks of one that has imported the package and the app,
as importing takes longer than most of what they do."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from waiting import LONG


def process_for(work: Callable[..., object], *args: Any) -> Any:
    """A process that will do this; it ends with this one."""
    context: Any = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    )
    context.set_forkserver_preload(["preloaded"])
    if context.get_start_method() == "forkserver":  # looked for where any new interpreter would
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
            multiprocessing.forkserver.ensure_running()
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


def _run_module(name: str, arguments: list[str], environment: Mapping[str, str], output: Connection, log: str) -> None:
    with open(log, "ab") as errors:
        say_into(output.fileno(), errors.fileno())
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [name, *arguments]
    sys.modules.pop(name, None)  # imported before, which runpy would warn of
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class ModuleProcess:
    """What `subprocess.Popen` returns for `[sys.executable, "-m", ...]`, as far as a server is started and ended by
    it: standard output can be read line by line, standard error goes to a named file."""

    def __init__(
        self, command: Sequence[str], *, stdout: int, stderr: TextIO, text: bool, env: Mapping[str, str]
    ) -> None:
        interpreter, flag, module, *arguments = command
        assert (interpreter, flag, stdout, text) == (sys.executable, "-m", subprocess.PIPE, True)
        output, its_output = multiprocessing.Pipe(duplex=False)
        self._process = process_for(_run_module, module, arguments, dict(env), its_output, stderr.name)
        self._process.daemon = False  # or it could have no process of its own
        self._process.start()
        its_output.close()
        self.pid: int = self._process.pid
        self.stdout = os.fdopen(os.dup(output.fileno()))
        output.close()

    def poll(self) -> int | None:
        """Its exit code; `None` while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def communicate(self) -> None:
        """Wait until it has ended."""
        self._process.join()
        self.stdout.close()
