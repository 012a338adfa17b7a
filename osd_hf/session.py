"""A learner on disk: everything that lets a session go on where it stood, written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from osd_hf.errors import StateError
from osd_hf.store import table_to_traces, traces_to_table
from osd_hf.updater import Updater

__all__ = ["load_session", "save_session"]

FORMAT = 1
POINTER = "CURRENT"


def save_session(directory: Path, updater: Updater, facts: dict[str, Any]) -> None:
    """
    Write a learner and what else belongs to its session. A folder of its own is written first, then a pointer to it
    is replaced, so that a kill at any moment leaves the old state or the new one.

    Raises:
        StateError: the folder cannot be written; an earlier state in it stays whole.
    """
    name = f"state-{uuid.uuid4().hex[:12]}"
    folder = directory / name
    try:
        folder.mkdir(parents=True)
        torch.save(updater.state_dict(), folder / "learner.pt")
        # Those not yet learned from come last; their number tells them from the replay buffer.
        new = list(updater.new)
        pq.write_table(traces_to_table([*updater.buffer, *new]), folder / "requests.parquet")
        session = {"format": FORMAT, "new_requests": len(new), **facts}
        (folder / "session.json").write_text(json.dumps(session))
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        pointer = directory / f".{POINTER}-{name}"
        pointer.write_text(name)
        os.replace(pointer, directory / POINTER)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(folder, ignore_errors=True)
        raise StateError(
            f"The session cannot be saved to {directory}: {error}. Free or choose another folder."
        ) from error
    for old in directory.glob("state-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


def load_session(directory: Path, updater: Updater) -> dict[str, Any]:
    """
    Bring a learner to a saved state.

    Returns:
        `dict[str, Any]`: the facts that were saved with it.

    Raises:
        StateError: nothing readable there, or the state of another draft.
    """
    pointer = directory / POINTER
    if not pointer.is_file():
        raise StateError(f"There is no saved session in {directory}. Save one with `save_state` first.")
    try:
        folder = directory / pointer.read_text().strip()
        session: dict[str, Any] = json.loads((folder / "session.json").read_text())
        if session["format"] != FORMAT:
            raise StateError(
                f"The session in {directory} has format {session['format']}, this version reads {FORMAT}. Read it "
                "with the version that wrote it."
            )
        traces = table_to_traces(pq.read_table(folder / "requests.parquet"))
        state = torch.load(folder / "learner.pt", weights_only=True)
    except (OSError, EOFError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"The session in {directory} cannot be read: {error}. Restore it from a copy.") from error
    updater.check_traces(traces)
    updater.load_state_dict(state)
    learned = len(traces) - int(session["new_requests"])
    updater.buffer.clear()
    updater.buffer.extend(traces[:learned])
    updater.new.clear()
    updater.new.extend(traces[learned:])
    return session
