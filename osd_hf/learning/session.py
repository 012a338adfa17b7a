"""A learner on disk: everything that lets a session go on where it stood, written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from osd_hf.errors import StateError
from osd_hf.learning.learner import Learner
from osd_hf.learning.weights import learning_context
from osd_hf.store.arrow import table_to_traces, traces_to_table
from osd_hf.utils.disk import (
    make_private_folder,
    new_private_file,
    open_privately,
    sync_folder,
    wait_for_lock,
    write_whole,
)

__all__ = ["FolderBusyError", "check_pointer", "has_session", "load_session", "save_session"]

FORMAT = 6
UPDATES_BETWEEN_SAVES = 8  # of a session that saves itself
POINTER = "CURRENT"
LOCK, NOTE = ".CURRENT.lock", ".CURRENT.unfinished"
STATE = re.compile(r"state-[0-9a-f]{12,32}")
UNFINISHED_POINTER = re.compile(r"\.CURRENT-[0-9a-f]{8}\.tmp")
PATIENCE_SECONDS = 300.0  # with another process that saves to the same folder
ATTEMPTS = 5  # at reading while others save, before they have to wait


class FolderBusyError(StateError):
    """Another process was saving there all the time."""


def save_session(
    directory: Path, learner: dict[str, Any], facts: dict[str, Any], router: dict[str, Any] | None = None, *,
    patience_seconds: float | None = None,
) -> None:  # fmt: skip
    """
    Write the state of a learner that is not at work, and what else belongs to its session. A folder of its own is
    written first, then a pointer to it is replaced, so that a kill or a loss of power at any moment leaves the old
    state or the new one. Processes that save to one folder do so in turn, and the last one stays. What is written is
    its owner's alone to read, and nothing that this function did not write is deleted.

    Args:
        learner (`dict[str, Any]`), router (`dict[str, Any]`, *optional*):
            Their states, by [`~Learner.state_dict`] and [`~Router.state_dict`].
        facts (`dict[str, Any]`): Ready for JSON.
        patience_seconds (`float`, *optional*):
            How long to wait for another process that saves there; some minutes by default.

    Raises:
        FolderBusyError: another process was saving there all the time.
        StateError: the folder cannot be written; an earlier state in it stays whole.
    """
    name = f"state-{uuid.uuid4().hex}"
    folder = directory / name
    with contextlib.ExitStack() as stack:
        try:
            make_private_folder(directory)
            lock = wait_for_lock(directory / LOCK, PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
            stack.callback(lock.release)
            try:
                old = _pointed(directory)
                _note_unfinished(directory, name, old)
                _write(folder, learner, facts, router)
                sync_folder(directory)
                write_whole(directory / POINTER, name.encode())
            except BaseException:
                with contextlib.suppress(OSError):
                    if _pointed(directory) != name:  # otherwise it broke after the pointer was moved
                        shutil.rmtree(folder, ignore_errors=True)
                raise
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            is_busy = isinstance(error, TimeoutError)
            raise (FolderBusyError if is_busy else StateError)(
                f"The session cannot be saved to {directory}: {error}. Free or choose another folder."
            ) from error
        _delete(directory, old)
        if old is None or not (directory / old).exists():
            with contextlib.suppress(OSError):  # the new state is no longer unfinished
                (directory / NOTE).unlink()


def _write(folder: Path, learner: dict[str, Any], facts: dict[str, Any], router: dict[str, Any] | None) -> None:
    """All of a state, on the disk for good."""
    os.mkdir(folder, 0o700)
    lessons = [dict(lesson) for lesson in learner["lessons"]]
    for number, lesson in enumerate(lessons):
        groups = lesson.pop("traces")
        # They lie one after another; their numbers tell them apart.
        lesson["counts"] = {group: len(traces) for group, traces in groups.items()}
        table = traces_to_table([trace for traces in groups.values() for trace in traces])
        with new_private_file(folder / f"requests-{number:03d}.parquet") as file:
            pq.write_table(table, file)
        with new_private_file(folder / f"learner-{number:03d}.pt") as file:
            torch.save(lesson.pop("updater"), file)
    with new_private_file(folder / "drafts.pt") as file:
        torch.save({"drafts": learner["drafts"], "router": router}, file)
    with new_private_file(folder / "session.json") as file:
        file.write(json.dumps({"format": FORMAT, "lessons": lessons, "facts": facts}).encode())
    sync_folder(folder)


def _note_unfinished(directory: Path, name: str, old: str | None) -> None:
    """Note, before a state is written, that it will replace the old one. States that a killed process has noted are
    deleted; nothing else in the folder is."""
    with contextlib.suppress(FileNotFoundError):
        for noted in (directory / NOTE).read_text(errors="replace").split():
            if noted != old:
                _delete(directory, noted)
    with open(directory / NOTE, "w", opener=open_privately) as note:
        note.write(f"{name} {old or ''}")
    for file in directory.iterdir():
        if UNFINISHED_POINTER.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _delete(directory: Path, name: str | None) -> None:
    if name is not None and STATE.fullmatch(name):
        shutil.rmtree(directory / name, ignore_errors=True)


def _pointed(directory: Path) -> str | None:
    """Name of the state that stands; `None` where there is none."""
    try:
        return (directory / POINTER).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def has_session(directory: Path) -> bool:
    """Whether a state was saved there to its end."""
    return (directory / POINTER).is_file()


def check_pointer(directory: Path) -> None:
    """Raises StateError where a state was saved to its end and nothing points to it: its pointer was lost, as with a
    copy that left it out. One that a killed process was about to point to for the first time is none."""
    if has_session(directory):
        return
    try:
        begun = (directory / NOTE).read_text(errors="replace").split()
    except OSError:
        begun = []
    # A second name is that of a state that stood.
    unfinished = begun[0] if len(begun) == 1 else None
    states = [path.parent for path in directory.glob("state-*/session.json") if path.parent.name != unfinished]
    if states:
        newest = max(states, key=lambda state: state.stat().st_mtime).name
        raise StateError(
            f"The session in {directory} has lost its pointer. Write the name of a state, such as {newest}, to "
            f"{directory / POINTER} to go on from it, or move {directory} away to begin anew."
        )


@learning_context()  # what is loaded in inference mode could not learn
def load_session(directory: Path, learner: Learner, router: Any = None) -> dict[str, Any]:
    """
    Bring a learner, and a router where there is one, to a saved state; both or neither.

    Returns:
        `dict[str, Any]`: the facts that were saved with it.

    Raises:
        StateError: nothing readable there, or the state of another draft.
    """
    if not has_session(directory):
        raise StateError(f"There is no saved session in {directory}. Save one with `save_state` first.")
    try:
        state = _read(directory)
        before = None if router is None or state["router"] is None else router.state_dict()
        if before is not None:
            router.load_state_dict(state["router"])
        try:
            learner.load_state_dict(state)
        except BaseException:
            if before is not None:
                router.load_state_dict(before)
            raise
        facts: dict[str, Any] = state["facts"]
        return facts
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, RuntimeError, pickle.UnpicklingError,
            pa.ArrowException) as error:  # fmt: skip
        if isinstance(error, StateError):
            raise
        raise StateError(f"The session in {directory} cannot be read: {error}. Restore it from a copy.") from error


def _read(directory: Path) -> dict[str, Any]:
    """What was saved last. A process that saves meanwhile deletes the state that is being read: then the next one is
    read; a reader that is slower than all savers makes them wait."""
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count():
            name = (directory / POINTER).read_text().strip()
            try:
                return _read_state(directory, directory / name)
            except Exception:
                if (directory / POINTER).read_text().strip() == name:
                    raise
            if attempt == ATTEMPTS:
                with contextlib.suppress(OSError):  # a folder that may only be read
                    stack.callback(wait_for_lock(directory / LOCK, PATIENCE_SECONDS).release)
        raise AssertionError


def _read_state(directory: Path, folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "session.json").read_text())
    if state["format"] != FORMAT:
        raise StateError(
            f"The session in {directory} has format {state['format']}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    for number, lesson in enumerate(state["lessons"]):
        traces = table_to_traces(pq.read_table(folder / f"requests-{number:03d}.parquet"))
        lesson["traces"] = {
            group: [traces.pop(0) for _ in range(count)] for group, count in lesson.pop("counts").items()
        }
        lesson["updater"] = torch.load(folder / f"learner-{number:03d}.pt", map_location="cpu", weights_only=True)
    # Whoever takes it puts it where it is needed: the device that it was on may not be there.
    return {**state, **torch.load(folder / "drafts.pt", map_location="cpu", weights_only=True)}
