"""Starts the app in a process of its own, and waits until it serves."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from waiting import LONG


def free_port() -> int:
    """A port that nobody listens on now."""
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def app_server(folder: Path, *flags: str) -> Iterator[str]:
    """The address of an app with these flags, whose page saves into the folder."""
    command = [sys.executable, str(Path(__file__).with_name("held_app.py")), "--output-dir", str(folder)]
    environment = {
        **os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
        # From there on the first free one is taken: between the look and the start another test may have come.
        "GRADIO_SERVER_PORT": str(free_port()),
    }  # fmt: skip
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    said: list[str] = []
    watchdog = threading.Timer(LONG, process.kill)
    watchdog.start()
    try:
        while not (said and " serves " in said[-1]):
            line = process.stdout.readline()
            assert line, f"the app did not start: {''.join(said)}"
            said.append(line)
        watchdog.cancel()
        yield said[-1].split()[0]
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate()
