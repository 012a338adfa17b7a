"""Save and load the state of a learner, so that a session continues where it ended."""

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

FORMAT = 8
UPDATES_BETWEEN_SAVES = 8  # of an assistant with `autosave`
POINTER = "CURRENT"
LOCK, NOTE = ".CURRENT.lock", ".CURRENT.unfinished"
STATE = re.compile(r"state-[0-9a-f]{12,32}")
UNFINISHED_POINTER = re.compile(r"\.CURRENT-[0-9a-f]{8}\.tmp")
PATIENCE_SECONDS = 300.0  # to wait for another process that saves to the same folder
MAX_READ_ATTEMPTS = 5  # while others save, before they have to wait


class FolderBusyError(StateError):
    """Raised when another process was saving to the folder all the time."""


def save_session(
    directory: Path,
    learner: dict[str, Any],
    facts: dict[str, Any],
    router: dict[str, Any] | None = None,
    *,
    patience_seconds: float | None = None,
) -> None:
    """
    Save the state of a learner that is not working.

    A new folder is written first, then a pointer to it is replaced, so that a kill or a power failure leaves the old
    state or the new one. Processes that save to one folder take turns. Only the owner can read the files. Files that
    this function did not write are never deleted.

    Args:
        directory (`Path`): The folder of the session.
        learner (`dict[str, Any]`), router (`dict[str, Any]`, *optional*):
            States, from [`~Learner.state_dict`] and [`~Router.state_dict`].
        facts (`dict[str, Any]`): Anything else, ready for JSON.
        patience_seconds (`float`, *optional*): How long to wait for another process that saves; 300 by default.

    Raises:
        StateError: The folder cannot be written (FolderBusyError: others save). An earlier state in it stays intact.
    """
    name = f"state-{uuid.uuid4().hex}"
    folder = directory / name
    with contextlib.ExitStack() as stack:
        try:
            make_private_folder(directory)
            lock = wait_for_lock(directory / LOCK, PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
            stack.callback(lock.release)
            try:
                old = _current_state(directory)
                _note_unfinished(directory, name, old)
                _write(folder, learner, facts, router)
                sync_folder(directory)
                write_whole(directory / POINTER, name.encode())
            except BaseException:
                with contextlib.suppress(OSError):
                    if _current_state(directory) != name:  # otherwise the pointer was replaced before the error
                        shutil.rmtree(folder, ignore_errors=True)
                raise
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            is_busy = isinstance(error, TimeoutError)
            raise (FolderBusyError if is_busy else StateError)(
                f"The session cannot be saved to {directory}: {error}. Free or choose another folder."
            ) from error
        _delete(directory, old)
        if old is None or not (directory / old).exists():
            with contextlib.suppress(OSError):  # the new state is complete
                (directory / NOTE).unlink()


def _write(folder: Path, learner: dict[str, Any], facts: dict[str, Any], router: dict[str, Any] | None) -> None:
    """Write all files of a state and sync them."""
    os.mkdir(folder, 0o700)
    states = [dict(state) for state in learner["requests"]]
    for number, state in enumerate(states):
        groups = state.pop("traces")
        # The groups are stored one after another, with their sizes.
        state["counts"] = {group: len(traces) for group, traces in groups.items()}
        table = traces_to_table([trace for traces in groups.values() for trace in traces])
        with new_private_file(folder / f"requests-{number:03d}.parquet") as file:
            pq.write_table(table, file)
        with new_private_file(folder / f"learner-{number:03d}.pt") as file:
            torch.save(state.pop("updater"), file)
    with new_private_file(folder / "drafts.pt") as file:
        torch.save({"drafts": learner["drafts"], "router": router}, file)
    with new_private_file(folder / "session.json") as file:
        file.write(json.dumps({"format": FORMAT, "requests": states, "facts": facts}).encode())
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


def _current_state(directory: Path) -> str | None:
    """Return the name of the current state, or `None`."""
    try:
        return (directory / POINTER).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def has_session(directory: Path) -> bool:
    """Whether the folder has a complete state."""
    return (directory / POINTER).is_file()


def check_pointer(directory: Path) -> None:
    """Raise StateError if the folder has a complete state but no pointer to it, as after an incomplete copy."""
    if has_session(directory):
        return
    try:
        names = (directory / NOTE).read_text(errors="replace").split()
    except OSError:
        names = []
    # A single name is an unfinished first state. A second name would be a complete state before it.
    unfinished = names[0] if len(names) == 1 else None
    states = [path.parent for path in directory.glob("state-*/session.json") if path.parent.name != unfinished]
    if states:
        newest = max(states, key=lambda state: state.stat().st_mtime).name
        raise StateError(
            f"The session in {directory} has lost its pointer. Write the name of a state, such as {newest}, to "
            f"{directory / POINTER} to continue with it, or move {directory} to start a new session."
        )


@learning_context()  # tensors loaded in inference mode could not learn
def load_session(directory: Path, learner: Learner, router: Any = None) -> dict[str, Any]:
    """
    Load a saved state into a learner and, if there is one, a router; both or neither.

    Returns:
        `dict[str, Any]`: The facts that were saved with it.

    Raises:
        StateError: No readable state, or the state of another draft.
    """
    if not has_session(directory):
        raise StateError(f"There is no saved session in {directory}. Save one with `save_state` first.")
    try:
        state = _read(directory)
        before = None if router is None or state["router"] is None else router.state_dict()
        if router is not None and before is not None:
            router.load_state_dict(state["router"])
        try:
            learner.load_state_dict(state)
        except BaseException:
            if router is not None and before is not None:
                router.load_state_dict(before)
            raise
        facts: dict[str, Any] = state["facts"]
        return facts
    except StateError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        RuntimeError,
        pickle.UnpicklingError,
        pa.ArrowException,
    ) as error:
        raise StateError(f"The session in {directory} cannot be read: {error}. Restore it from a copy.") from error


def _read(directory: Path) -> dict[str, Any]:
    """Read the newest state. If another process replaces and deletes it, the next one is read; after some attempts,
    savers have to wait."""
    with contextlib.ExitStack() as stack:
        for attempt in itertools.count():
            name = (directory / POINTER).read_text().strip()
            try:
                return _read_state(directory, directory / name)
            except Exception:
                if (directory / POINTER).read_text().strip() == name:
                    raise
            if attempt == MAX_READ_ATTEMPTS:
                with contextlib.suppress(OSError):  # the folder may be read-only
                    stack.callback(wait_for_lock(directory / LOCK, PATIENCE_SECONDS).release)
        raise AssertionError


def _read_state(directory: Path, folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "session.json").read_text())
    if state["format"] != FORMAT:
        raise StateError(
            f"The session in {directory} has format {state['format']}, this version reads {FORMAT}. Read it with the "
            "version that wrote it."
        )
    for number, saved in enumerate(state["requests"]):
        traces = table_to_traces(pq.read_table(folder / f"requests-{number:03d}.parquet"))
        saved["traces"] = {
            group: [traces.pop(0) for _ in range(count)] for group, count in saved.pop("counts").items()
        }
        saved["updater"] = torch.load(folder / f"learner-{number:03d}.pt", map_location="cpu", weights_only=True)
    # Loaded to the CPU: the device that it was saved from may not exist.
    return {**state, **torch.load(folder / "drafts.pt", map_location="cpu", weights_only=True)}
