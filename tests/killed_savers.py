"""Kill two processes that save sessions to one folder at random moments while a reader loads; print JSON.

python tests/killed_savers.py FOLDER 200    # saves, at least, of both together
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from osd_hf.errors import StateError
from osd_hf.learning.session import STATE, UNFINISHED, load_session, save_session

# What a user may have in the folder of a session.
OWN = ("state-best/weights.pt", "state-0/notes.txt", "drafts/mine.txt", ".state-notes.tmp", "state-1.bak", "state-abc")


def session(number: int) -> dict[str, Any]:
    """The state of a learner of two drafts that have learned a number."""

    def lesson(domain: str) -> dict[str, Any]:
        return {"domain": domain, "traces": {"pending": []}, "updater": {"weights": torch.full((64,), number)}}

    return {"drafts": {"weights": torch.full((64,), number)}, "requests": [lesson("a"), lesson("b")]}


def loaded(folder: Path) -> int:
    """The number that a session has learned; raises StateError where it is not one, whole."""
    found: list[torch.Tensor] = []

    def load(state: dict[str, Any]) -> None:
        found.extend([state["drafts"]["weights"], *(lesson["updater"]["weights"] for lesson in state["requests"])])

    facts = load_session(folder, SimpleNamespace(load_state_dict=load))  # type: ignore[arg-type]
    number = int(facts["number"])
    if len(found) != 3 or not all(torch.equal(weights, torch.full((64,), number)) for weights in found):
        raise StateError(f"mixed: {number} and {[int(weights[0]) for weights in found]}")
    return number


def put_own(folder: Path) -> dict[str, bytes]:
    for name in OWN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine, {name}")
    return own(folder)


def own(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in OWN if (folder / name).exists()}


def states(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if STATE.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)]


def save_on(folder: Path, out: int, first: int) -> None:
    number = first
    while True:
        begun = time.monotonic_ns()
        os.write(out, f"{number} {begun} 0\n".encode())
        save_session(folder, session(number), {"number": number})
        os.write(out, f"{number} {begun} {time.monotonic_ns()}\n".encode())
        number += 1


def start(folder: Path, first: int) -> tuple[int, int]:
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begin)
        try:
            save_on(folder, end, first)
        except BaseException as error:  # noqa: BLE001
            os.write(end, f"failed {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(end)
    return child, begin


def at_random(folder: Path, saves: int) -> dict[str, Any]:
    folder.mkdir(parents=True)
    mine, moments = put_own(folder), random.Random(0)
    save_session(folder, session(0), {"number": 0})
    # number -> when its saving began, and when it ended or its saver was dead; whether it had ended
    history: dict[int, tuple[int, int, bool]] = {0: (0, time.monotonic_ns(), True)}
    reads: list[tuple[int, int, int]] = []
    failures: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            began = time.monotonic_ns()
            try:
                number = loaded(folder)
                reads.append((began, time.monotonic_ns(), number))
            except StateError as error:
                failures.append(f"read: {error}")

    done, kills, first = 0, 0, 1
    while done < saves:
        stop.clear()
        # Before the reader: a fork wants no threads.
        children = [start(folder, first + side * 10_000) for side in range(2)]
        first += 20_000
        reader = threading.Thread(target=read)
        reader.start()
        said = {begin: b"" for _, begin in children}
        wanted = moments.randrange(2, 12)
        end_at = time.monotonic() + 300
        while sum(text.count(b"\n") for text in said.values()) < wanted and time.monotonic() < end_at:
            for begin in select.select(list(said), [], [], 1)[0]:
                said[begin] += os.read(begin, 1 << 16)
        time.sleep(moments.uniform(0, 0.01))
        for child, begin in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            dead = time.monotonic_ns()
            while part := os.read(begin, 1 << 16):
                said[begin] += part
            os.close(begin)
            kills += 1
            for line in said[begin].decode().splitlines():
                if line.startswith("failed"):
                    failures.append(line)
                    continue
                number, begun, ended = map(int, line.split())
                history[number] = (begun, ended or dead, bool(ended))
                done += bool(ended)
        stop.set()
        reader.join()
        try:
            began = time.monotonic_ns()
            number = loaded(folder)
            reads.append((began, time.monotonic_ns(), number))
        except StateError as error:
            failures.append(f"after the kills: {error}")
    save_session(folder, session(first), {"number": first})
    stale = [
        number
        for began, read, number in reads
        if history[number][0] > read
        or any(begun > history[number][1] and ended < began and whole for begun, ended, whole in history.values())
    ]
    left = states(folder)
    return {
        "saves": done, "kills": kills, "reads": len(reads), "states_read": len({n for _, _, n in reads}),
        "failures": failures[:10], "num_failures": len(failures), "stale": stale, "own": own(folder) == mine,
        "states_left": len(left), "last": loaded(folder) == first,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(at_random(Path(sys.argv[1]), int(sys.argv[2]))))
