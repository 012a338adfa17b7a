"""Save and load the state of a learner, so that a session continues where it ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from osd_hf.errors import StateError
from osd_hf.learning.learner import Learner
from osd_hf.learning.weights import learning_context
from osd_hf.store.folder import table_to_traces, traces_to_table
from osd_hf.utils.disk import make_private_folder, new_file, sync_folder, wait_for_lock

FORMAT = 11
UPDATES_BETWEEN_SAVES = 8  # of an assistant with `autosave`
LOCK = ".state.lock"
STATE = re.compile(r"state-\d{8}")
UNFINISHED = re.compile(r"\.state-[0-9a-f]{8}\.tmp")
PATIENCE_SECONDS = 300.0  # to wait for another process that saves to the same folder


def save_session(
    directory: Path,
    learner: dict[str, Any],
    facts: dict[str, Any],
    router: dict[str, Any] | None = None,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Save the state of a learner that is not working. It is written to a hidden folder, which then gets the next
    number, so that a kill or a power failure leaves the old state or the new one. Processes that save to one folder
    take turns, and wait for `patience_seconds`. Only the owner can read the files, and other files are never deleted.
    `facts` are ready for JSON. Raises StateError if the folder cannot be written, or others save all the time."""
    unfinished = directory / f".state-{secrets.token_hex(4)}.tmp"
    with contextlib.ExitStack() as stack:
        try:
            make_private_folder(directory)
            lock = wait_for_lock(directory / LOCK, patience_seconds)
            stack.callback(lock.release)
            for killed in directory.iterdir():
                if UNFINISHED.fullmatch(killed.name):
                    shutil.rmtree(killed, ignore_errors=True)
            try:
                _write(unfinished, learner, facts, router)
                old = _states(directory)
                number = int(old[-1].name.removeprefix("state-")) + 1 if old else 1
                unfinished.rename(directory / f"state-{number:08d}")
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            sync_folder(directory)  # before the old state is deleted
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
            raise StateError(
                f"The session cannot be saved to {directory}: {error}. Free or choose another folder."
            ) from error
        for state in old:
            shutil.rmtree(state, ignore_errors=True)


def _write(folder: Path, learner: dict[str, Any], facts: dict[str, Any], router: dict[str, Any] | None) -> None:
    """Write all files of a state and sync them."""
    os.mkdir(folder, 0o700)
    states = [dict(state) for state in learner["requests"]]
    updaters = [state.pop("updater") for state in states]
    for number, state in enumerate(states):
        groups = state.pop("traces")
        # The groups are stored one after another, with their sizes.
        state["counts"] = {group: len(traces) for group, traces in groups.items()}
        table = traces_to_table([trace for traces in groups.values() for trace in traces])
        with new_file(folder / f"requests-{number:03d}.parquet") as file:
            pq.write_table(table, file)
    with new_file(folder / "drafts.pt") as file:
        torch.save({"drafts": learner["drafts"], "updaters": updaters, "router": router}, file)
    with new_file(folder / "session.json") as file:
        session = {"format": FORMAT, "requests": states, "decisions": learner["decisions"], "facts": facts}
        file.write(json.dumps(session).encode())
    sync_folder(folder)


def _states(directory: Path) -> list[Path]:
    """Return the folders of complete states, oldest first."""
    return sorted(path for path in directory.glob("state-*") if STATE.fullmatch(path.name))


def has_session(directory: Path) -> bool:
    """Whether the folder has a complete state."""
    return bool(_states(directory))


@learning_context()  # tensors loaded in inference mode could not learn
def load_session(directory: Path, learner: Learner, router: Any = None) -> dict[str, Any]:
    """Load a saved state into a learner and, if there is one, a router; both or neither. Returns the facts that were
    saved with it. Raises StateError if there is no readable state, or it is one of another draft."""
    if not has_session(directory):
        raise StateError(f"There is no saved session in {directory}. Save one with `save_state` first.")
    try:
        state = _read(directory)
        has_router = router is not None and state["router"] is not None
        before = router.state_dict() if has_router else None
        try:
            if has_router:
                router.load_state_dict(state["router"])
            learner.load_state_dict(state)
        except BaseException:
            if has_router:
                router.load_state_dict(before)
            raise
        facts: dict[str, Any] = state["facts"]
        return facts
    except StateError:
        raise
    except Exception as error:  # whatever damaged files raise
        raise StateError(f"The session in {directory} cannot be read: {error}. Restore it from a copy.") from error


def _read(directory: Path) -> dict[str, Any]:
    """Read the newest state, again if another process has replaced and deleted it."""
    while True:
        newest = _states(directory)[-1]
        try:
            return _read_state(newest)
        except Exception:
            if _states(directory)[-1:] == [newest]:
                raise


def _read_state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "session.json").read_text())
    if state["format"] != FORMAT:
        raise StateError(
            f"The session in {folder.parent} has format {state['format']}, this version reads {FORMAT}. Read it with "
            "the version that wrote it."
        )
    # Loaded to the CPU: the device that it was saved from may not exist.
    tensors = torch.load(folder / "drafts.pt", map_location="cpu", weights_only=True)
    for number, saved in enumerate(state["requests"]):
        traces = iter(table_to_traces(pq.read_table(folder / f"requests-{number:03d}.parquet")))
        saved["traces"] = {group: list(islice(traces, count)) for group, count in saved.pop("counts").items()}
        saved["updater"] = tensors["updaters"][number]
    return {**state, **tensors}
