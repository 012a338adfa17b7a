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


def _begin(environment: Mapping[str, str], arguments: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = arguments


def _run_file(path: Path) -> None:
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _run(code: str | Path, arguments: list[str], environment: Mapping[str, str], folder: str) -> None:
    with open(f"{folder}/out", "wb") as out, open(f"{folder}/err", "wb") as err:
        say_into(out.fileno(), err.fileno())
    _begin(environment, [str(code) if isinstance(code, Path) else "-c", *arguments])
    if isinstance(code, Path):
        _run_file(code)
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


def _run_command(command: Sequence[str], environment: Mapping[str, str], output: Connection, log: str) -> None:
    with open(log, "ab") as errors:
        say_into(output.fileno(), errors.fileno())
    output.close()
    flag, name, *arguments = command if command[0] == "-m" else ("", *command)
    _begin(environment, [name, *arguments])
    if not flag:
        _run_file(Path(name))
        return
    sys.modules.pop(name, None)  # imported before, which runpy would warn of
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class ModuleProcess:
    """What `subprocess.Popen` returns for `[sys.executable, "-m", MODULE, ...]` or `[sys.executable, FILE, ...]`:
    standard output can be read, standard error goes to a named file."""

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
