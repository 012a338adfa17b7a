"""Time and disks of tests: how long a test waits for what should come, a clock that a test sets, a full disk."""

from __future__ import annotations

import errno
import os
from typing import Any

LONG = 600  # seconds. Decides nothing: it only ends a test that would hang, on the slowest machine that we think of.


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
