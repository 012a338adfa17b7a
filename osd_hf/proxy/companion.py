"""Run a command in a separate process, next to the proxy, and restart it when it fails."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Companion"]

RESTART_SECONDS = 30.0  # before a restart
STOP_SECONDS = 60.0  # to save a session

logger = logging.getLogger(__name__)


class Companion:
    """
    A command that is restarted half a minute after it fails.

    Args:
        name (`str`): Name for the log.
        command (`Sequence[str]`): The command and its arguments.
        start (`Callable`, *optional*, defaults to `subprocess.Popen`): Starts the command.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, start: Callable[[Sequence[str]], Any] = subprocess.Popen
    ) -> None:
        self._name = name
        self._command = command
        self._start = start
        self._process: Any = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"osd_hf-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            code = None
            try:
                with self._lock:
                    if self._stopping.is_set():
                        return
                    self._process = self._start(self._command)
                code = self._process.wait()
            except OSError as error:
                logger.warning("%s cannot be started: %s.", self._name, error.strerror)
            if code == 0 or self._stopping.is_set():
                return
            logger.warning("%s ended with code %s; it is started again in %.0f s.", self._name, code, RESTART_SECONDS)
            if self._stopping.wait(RESTART_SECONDS):
                return

    def stop(self) -> None:
        """Terminate the command and wait until it has ended; kill it after a minute."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    process.kill()
        self._thread.join()
