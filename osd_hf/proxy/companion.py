"""A command that runs beside a server, as a process of its own, so that what it computes delays no request."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Companion"]

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 300.0  # seconds until it is started again
END_SECONDS = 60.0  # to save what it has, when it is told to end

logger = logging.getLogger(__name__)


class Companion:
    """
    A command that is started again when it fails: after a second, and after twice as long each time, up to five
    minutes; once it has run for longer than that, after a second again.

    Args:
        name (`str`), command (`Sequence[str]`): Its name for the log, and its arguments.
        start (`Callable`, *optional*, defaults to `subprocess.Popen`): Starts it.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`): Seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        start: Callable[[Sequence[str]], Any] = subprocess.Popen,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._command, self._start, self._clock = name, command, start, clock
        self._process: Any = None
        self._stopping, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"osd_hf-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            began, code = self._clock(), None
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
            if self._clock() - began > MAX_PAUSE_SECONDS:
                pause = MIN_PAUSE_SECONDS
            logger.warning("%s ended with code %s; it is started again in %.0f s.", self._name, code, pause)
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def stop(self) -> None:
        """End it, and wait until it has saved what it has; after a minute it is killed."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    process.kill()
        self._thread.join()
