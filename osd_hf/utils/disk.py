"""Files that are written completely and privately, and locks between processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock
from filelock import FileLock

from osd_hf.errors import ConfigError

NO_SYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # of file systems that cannot sync folders
NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)  # of file systems without locks

logger = logging.getLogger(__name__)


def make_private_folder(folder: Path) -> None:
    """Create a folder that only its owner can enter, with missing parents that everyone can enter. An existing folder
    is not changed."""
    for path in (*reversed(folder.parents), folder):
        if not path.is_dir():
            path.mkdir(0o700 if path == folder else 0o755, exist_ok=True)
            sync_folder(path.parent)


def open_privately(path: Any, flags: int) -> int:
    """Open a file, as the `opener` of `open`, that only its owner can read from the beginning."""
    descriptor = os.open(path, flags, 0o600)
    if sys.platform != "win32" and flags & os.O_CREAT:
        with contextlib.suppress(PermissionError):  # the file of another user
            os.fchmod(descriptor, 0o600)
    return descriptor


@contextlib.contextmanager
def new_file(path: Path, *, private: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing and sync it at the end of the block. Only its owner can read a `private` file."""
    with open(path, "wb", opener=open_privately if private else None) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: Any, *, private: bool = True) -> None:
    """Write bytes to a file so that readers see all of them or none, even after a crash. Only the owner can read the
    file, unless `private=False`."""
    temporary = path.with_name(f".{path.stem.lstrip('.')}-{secrets.token_hex(4)}.tmp")
    try:
        with new_file(temporary, private=private) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make created, renamed, and deleted entries of a folder survive a loss of power, if the system supports this."""
    if sys.platform == "win32":
        return
    try:
        folder = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be entered or written, but not read
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC_ERRORS:
            raise
    finally:
        os.close(folder)


def sync_tree(folder: Path) -> None:
    """Make all files below a folder survive a loss of power."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def wait_for_lock(path: Path, seconds: float) -> FileLock:
    """Acquire a lock between processes, which ends with `release()` in any thread or with the process. It is not
    acquired (see `is_locked`) if the file system has no locks. Raises TimeoutError if another process holds the lock
    for this time, and OSError if the file cannot be created."""
    lock = FileLock(path, mode=0o600, thread_local=False)
    try:
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=0.0)
            return lock
        if seconds:
            logger.warning("Waiting up to %.0f s for another process that holds %s.", seconds, path)
        lock.acquire(timeout=seconds)
    except filelock.Timeout:
        raise TimeoutError(f"another process holds {path}") from None
    except OSError as error:
        if error.errno not in NO_LOCK_ERRORS:
            raise
    return lock


def hold_lock(path: Path, refusal: str, *, is_needed: bool = True) -> FileLock:
    """Acquire a lock without waiting; raises ConfigError with the text `refusal` if another process holds it or, if it
    `is_needed`, the file system has no locks."""
    with contextlib.suppress(TimeoutError):
        lock = wait_for_lock(path, 0.0)
        if lock.is_locked or not is_needed:
            return lock
    raise ConfigError(refusal)
