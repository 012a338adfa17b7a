"""Kill processes that save sessions or write to a store; print what was found as JSON.

python tests/killed_savers.py FOLDER 200        # saves of two savers, killed at random moments while a reader loads
python tests/killed_savers.py FOLDER session 1  # one saver, killed at each operation on files; with 3, at every third
python tests/killed_savers.py FOLDER store 1    # one writer of a store
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from osd_hf.errors import StateError
from osd_hf.learning.session import STATE, UNFINISHED, has_session, load_session, save_session
from osd_hf.store.store import CorrectionStore
from osd_hf.trace import bare_trace

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"}
# What a user may have in the folder of a session.
OWN = ("state-best/weights.pt", "state-0/notes.txt", "drafts/mine.txt", ".state-notes.tmp", "state-1.bak", "state-abc")


def session(number: int) -> dict[str, Any]:
    """The state of a learner of two drafts that have learned a number."""

    def lesson(domain: str) -> dict[str, Any]:
        return {"domain": domain, "traces": {"pending": []}, "updater": {"weights": torch.full((64,), number)}}

    return {"drafts": {"weights": torch.full((64,), number)}, "requests": [lesson("a"), lesson("b")], "decisions": []}


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


def start(folder: Path, first: int, seconds: float) -> tuple[int, int]:
    """Begin a saver of the sessions from a number on, which a timer kills so long after its first save; returns its
    process and a pipe of the numbers that it saved."""
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for number in itertools.count(first):
                save_session(folder, session(number), {"number": number})
                os.write(end, f"{number} ".encode())
                if number == first:
                    signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process without a handler
        finally:
            os._exit(1)
    os.close(end)
    return child, begin


def at_random(folder: Path, saves: int) -> dict[str, Any]:
    folder.mkdir(parents=True)
    mine, moments, stop = put_own(folder), random.Random(0), threading.Event()
    save_session(folder, session(0), {"number": 0})
    failures: list[str] = []

    def read() -> None:
        while not stop.is_set():
            try:
                loaded(folder)
            except StateError as error:
                failures.append(f"read: {error}")

    done, there = 0, 0
    for life in itertools.count(1):
        firsts = (20_000 * life, 20_000 * life + 10_000)
        # Before the reader: a fork wants no threads.
        children = [start(folder, first, moments.uniform(1e-3, 0.2)) for first in firsts]
        stop.clear()
        reader = threading.Thread(target=read)
        reader.start()
        expected = {there}
        for (child, begin), first in zip(children, firsts, strict=True):
            if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                failures.append("a saver failed")
            with open(begin, "rb") as pipe:
                saved = list(map(int, pipe.read().split()))
            done += len(saved)
            expected = (expected - {there} if saved else expected) | {
                max(saved, default=first - 1) + i for i in (0, 1)
            }
        stop.set()
        reader.join()
        there = loaded(folder)
        if there not in expected:
            failures.append(f"stale: {there}, not one of {expected}")
        if done >= saves:
            break
    save_session(folder, session(1), {"number": 1})
    return {"failures": failures, "own": own(folder) == mine, "left": len(states(folder)), "last": loaded(folder)}


def kill_at(operation: int) -> None:
    """Let this process kill itself before its operation on files of this number; `fsync` counts as two."""
    seen = 0

    def step(event: str, _: Any = None) -> None:
        nonlocal seen
        seen += event in OPERATIONS
        if seen == operation and event in OPERATIONS:  # killing is an event, too
            os.kill(os.getpid(), signal.SIGKILL)

    whole = os.fsync

    def fsync(descriptor: int) -> None:
        step("open")
        whole(descriptor)
        step("open")

    sys.addaudithook(step)
    os.fsync = fsync  # type: ignore[assignment]


def survives(operation: int, work: Callable[[], object]) -> bool:
    """Whether a child ends its work before it is killed."""
    child = os.fork()
    if child == 0:
        try:
            kill_at(operation)
            work()
        finally:
            os._exit(0)
    return not os.WIFSIGNALED(os.waitpid(child, 0)[1])


def sessions(folder: Path, stride: int) -> list[dict[str, Any]]:
    """A saver killed before its first operation, its second, ...: with a session in the folder, and without one."""
    found = []
    for is_first in (True, False):
        for operation in range(1, 500, stride):
            place = folder / f"{is_first}-{operation}"
            place.mkdir(parents=True)
            mine = put_own(place)
            if not is_first:
                save_session(place, session(1), {"number": 1})
            if survives(operation, lambda place=place: save_session(place, session(2), {"number": 2})):  # type: ignore[misc]
                break
            there = None if is_first and not has_session(place) else loaded(place)
            save_session(place, session(3), {"number": 3})
            kept = (loaded(place), own(place) == mine, len(states(place)) - 1)
            found.append({"first": is_first, "there": there, "after": kept})
    return found


def numbers(folder: Path) -> list[int]:
    return [trace.draft_version for trace in CorrectionStore(folder)]


def write(folder: Path, *some: int) -> None:
    for number in some:
        with CorrectionStore(folder) as store:
            store.append(replace(bare_trace([1], [number], 9), draft_version=number, created_at_seconds=number))


def stores(folder: Path, stride: int) -> list[dict[str, Any]]:
    """A writer killed before its first operation, its second, ...; an hour later another one writes."""
    found = []
    for operation in range(1, 500, stride):
        place = folder / str(operation)
        write(place, 0)
        if survives(operation, lambda place=place: write(place, 1, 2)):  # type: ignore[misc]
            break
        there = numbers(place)
        for path in [*place.iterdir(), *place.glob("*/.*.tmp")]:
            os.utime(path, (0, 0))
        write(place, 9)
        write(place, 10)  # folders are deleted after their files
        unfinished = list(place.glob("*/.*.tmp"))
        found.append({"there": there, "after": (numbers(place) == [*there, 9, 10], len(unfinished))})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, what, *stride = sys.argv[1:]
    works: dict[str, Any] = {"session": sessions, "store": stores}
    print(json.dumps(works[what](Path(where), int(*stride)) if stride else at_random(Path(where), int(what))))
