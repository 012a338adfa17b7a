"""Starts the app as a user does, in a process of its own, and waits until it serves."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 180.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def app_server(folder: Path, *flags: str) -> Iterator[str]:
    """The address of an app with these flags, whose page saves into the folder."""
    command = [sys.executable, "-m", "osd_hf.cli", "app", "--port", str(free_port()), "--output-dir", str(folder)]
    environment = {**os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        said, deadline = [], time.monotonic() + START_SECONDS
        while not (said and " serves " in said[-1]):
            ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
            line = process.stdout.readline() if ready else ""
            assert line, f"the app did not start: {''.join(said)}"
            said.append(line)
        yield said[-1].split()[0]
    finally:
        process.terminate()
        process.communicate()
