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


def _run_command(command: Sequence[str], environment: Mapping[str, str], output: Connection, log: str) -> None:
    with open(log, "ab") as errors:
        say_into(output.fileno(), errors.fileno())
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    match command:
        case ["-m", name, *arguments]:
            sys.argv = [name, *arguments]
            sys.modules.pop(name, None)  # imported before, which runpy would warn of
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case [file, *_]:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(file).parent))
            runpy.run_path(file, run_name="__main__")


class ModuleProcess:
    """What `subprocess.Popen` returns for a command of `sys.executable`. Standard output can be read, and standard
    error goes to a named file."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int,
        text: bool,
        stderr: TextIO | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        interpreter, *rest = map(str, command)
        assert (interpreter, stdout, text) == (sys.executable, subprocess.PIPE, True)
        output, its_output = multiprocessing.Pipe(duplex=False)
        log, environment = os.devnull if stderr is None else stderr.name, dict(os.environ if env is None else env)
        self._process = process_for(_run_command, rest, environment, its_output, log)
        self._process.daemon = False  # or it could have no process of its own
        self._process.start()
        its_output.close()
        self.pid: int = self._process.pid
        self.stdout = os.fdopen(os.dup(output.fileno()))
        output.close()

    @property
    def returncode(self) -> int | None:
        """Its exit code; `None` while it runs."""
        return self._process.exitcode  # type: ignore[no-any-return]

    def poll(self) -> int | None:
        """Its exit code; `None` while it runs."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        self._process.join(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait until it has ended; return the rest of its standard output."""
        with self.stdout:
            said = self.stdout.read()
        self.wait(timeout)
        return said, None


def run_python(
    code: str | Path, *arguments: str, environment: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run a script, or the file of one, as `subprocess.run` would by a fresh interpreter with one thread."""
    what = [str(code)] if isinstance(code, Path) else ["-c", code]
    own = {**environment, "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("r") as log:
        process = ModuleProcess(
            [sys.executable, *what, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=own
        )
        out, _ = process.communicate()
        return subprocess.CompletedProcess(list(arguments), process.returncode, out, log.read())
