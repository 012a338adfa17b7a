"""A learner on disk: everything that lets a session go on where it stood, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from osd_hf.errors import StateError
from osd_hf.learner import Learner
from osd_hf.store import table_to_traces, traces_to_table

__all__ = ["has_session", "load_session", "save_session"]

FORMAT = 2
POINTER = "CURRENT"


def save_session(
    directory: Path, learner: Learner, facts: dict[str, Any], router: dict[str, Any] | None = None
) -> None:
    """
    Write a learner and what else belongs to its session. A folder of its own is written first, then a pointer to it
    is replaced, so that a kill at any moment leaves the old state or the new one.

    Args:
        directory (`Path`):
            Made where it is missing.
        learner (`Learner`):
            Not at work.
        facts (`dict[str, Any]`):
            Ready for JSON.
        router (`dict[str, Any]`, *optional*):
            State of a router, of plain values and tensors.

    Raises:
        StateError: the folder cannot be written; an earlier state in it stays whole.
    """
    name = f"state-{uuid.uuid4().hex[:12]}"
    folder, pointer = directory / name, directory / f".{POINTER}-{name}"
    try:
        folder.mkdir(parents=True)
        lessons = []
        for number, lesson in enumerate(learner.lesson_states()):
            groups = lesson.pop("traces")
            # They lie behind one another; their numbers tell them apart.
            lesson["counts"] = {group: len(traces) for group, traces in groups.items()}
            table = traces_to_table([trace for traces in groups.values() for trace in traces])
            pq.write_table(table, folder / f"requests-{number:03d}.parquet")
            torch.save(lesson.pop("updater"), folder / f"learner-{number:03d}.pt")
            lessons.append(lesson)
        torch.save({"drafts": learner.drafts.state_dict(), "router": router}, folder / "drafts.pt")
        session = {"format": FORMAT, "lessons": lessons, "facts": facts}
        (folder / "session.json").write_text(json.dumps(session))
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        pointer.write_text(name)
        with pointer.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(pointer, directory / POINTER)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            pointer.unlink()
        raise StateError(
            f"The session cannot be saved to {directory}: {error}. Free or choose another folder."
        ) from error
    for old in directory.glob("state-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def has_session(directory: Path) -> bool:
    """Whether a state was saved there to its end."""
    return (directory / POINTER).is_file()


def load_session(
    directory: Path, learner: Learner, router: Any = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """
    Bring a learner, and a router where there is one, to a saved state; both or neither.

    Returns:
        `tuple[dict[str, Any], dict[str, Any] | None]`: the facts that were saved with it, and the router's state.

    Raises:
        StateError: nothing readable there, or the state of another draft.
    """
    pointer = directory / POINTER
    if not has_session(directory):
        raise StateError(f"There is no saved session in {directory}. Save one with `save_state` first.")
    try:
        folder = directory / pointer.read_text().strip()
        session: dict[str, Any] = json.loads((folder / "session.json").read_text())
        if session["format"] != FORMAT:
            raise StateError(
                f"The session in {directory} has format {session['format']}, this version reads {FORMAT}. Read it "
                "with the version that wrote it."
            )
        lessons = session["lessons"]
        for number, lesson in enumerate(lessons):
            traces = table_to_traces(pq.read_table(folder / f"requests-{number:03d}.parquet"))
            lesson["traces"] = {
                group: [traces.pop(0) for _ in range(count)] for group, count in lesson.pop("counts").items()
            }
            lesson["updater"] = torch.load(folder / f"learner-{number:03d}.pt", weights_only=True)
        drafts = torch.load(folder / "drafts.pt", weights_only=True)
        before = None if router is None or drafts["router"] is None else router.state_dict()
        if before is not None:
            router.load_state_dict(drafts["router"])
        try:
            learner.load_states(drafts["drafts"], lessons)
        except BaseException:
            if before is not None:
                router.load_state_dict(before)
            raise
        return session["facts"], drafts["router"]
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, RuntimeError, pickle.UnpicklingError,
            pa.ArrowException) as error:  # fmt: skip
        if isinstance(error, StateError):
            raise
        raise StateError(f"The session in {directory} cannot be read: {error}. Restore it from a copy.") from error
