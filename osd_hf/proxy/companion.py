"""Run a command in a separate process, next to the proxy, and restart it when it fails."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Companion"]

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0  # before a restart
STOP_SECONDS = 60.0  # to save a session

logger = logging.getLogger(__name__)


class Companion:
    """
    A command that is restarted when it fails.

    The pause before a restart doubles each time, from a second up to five minutes. A run that is longer than five
    minutes resets it.

    Args:
        name (`str`): Name for the log.
        command (`Sequence[str]`): The command and its arguments.
        start (`Callable`, *optional*, defaults to `subprocess.Popen`): Starts the command.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Returns the time in seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        start: Callable[[Sequence[str]], Any] = subprocess.Popen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._command = command
        self._start = start
        self._clock = clock
        self._process: Any = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"osd_hf-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            start, code = self._clock(), None
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
            if self._clock() - start > MAX_PAUSE_SECONDS:
                pause = MIN_PAUSE_SECONDS
            logger.warning("%s ended with code %s; it is started again in %.0f s.", self._name, code, pause)
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

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
