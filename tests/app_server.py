"""Starts the app in a process of its own, and waits until it serves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from held_app import serve
from processes import process_for
from waiting import LONG


def free_port() -> int:
    """A port that nobody listens on now."""
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def app_server(folder: Path, *flags: str, **config: Any) -> Iterator[str]:
    """The address of an app with these flags, whose page saves into the folder; `config` are settings of the draft
    that learns in place of the app's own."""
    environment = {
        **os.environ, "GRADIO_ANALYTICS_ENABLED": "False", "OMP_NUM_THREADS": "1",
        # From there on the first free one is taken: between the look and the start another test may have come.
        "GRADIO_SERVER_PORT": str(free_port()),
    }  # fmt: skip
    output, its_output = multiprocessing.Pipe(duplex=False)
    saved = [] if "--public" in flags else ["--output-dir", str(folder)]
    process = process_for(serve, its_output, environment, [*saved, *flags], config)
    process.start()
    its_output.close()
    said: list[str] = []
    watchdog = threading.Timer(LONG, process.kill)
    watchdog.start()
    try:
        with open(output.fileno(), closefd=False) as lines:
            while not (said and " serves " in said[-1]):
                line = lines.readline()
                assert line, f"the app did not start: {''.join(said)}"
                said.append(line)
            watchdog.cancel()
            yield said[-1].split()[0]
    finally:
        watchdog.cancel()
        process.terminate()
        process.join()
        output.close()
