"""What outlasts a crash, a kill and a fork: files written whole and in private, locks between processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from osd_hf.errors import ConfigError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "FileLock", "hold_lock", "in_child", "is_open_to_others", "lock_file", "make_private_folder", "new_private_file",
    "open_privately", "renewing", "sync_folder", "sync_tree", "wait_for_lock", "write_whole",
]  # fmt: skip

LOOK_SECONDS = 0.02  # between two looks at a lock that another process holds
QUIET_SECONDS = 1.0  # of waiting for a lock before the log says so
NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # what file systems say that sync no folders

logger = logging.getLogger(__name__)
T = TypeVar("T")

# --- forks ----------------------------------------------------------------------------------------------------------

_living: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def in_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew` with `owner`, which is held weakly, in each child that this process forks, before anything else
    there. The child has one thread; what others were in the middle of stays half done."""
    _living[owner] = renew


def renewing(**kinds: Callable[[], Any]) -> Callable[[Any], None]:
    """A function that makes these attributes of an object anew, such as `_lock=threading.Lock`. The old values stay
    as they are, so that a block that the forking thread is in ends as it began."""

    def renew(owner: Any) -> None:
        for name, kind in kinds.items():
            setattr(owner, name, kind())

    return renew


def _renew_all() -> None:
    for owner, renew in list(_living.items()):
        renew(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)

# --- files ----------------------------------------------------------------------------------------------------------


def make_private_folder(folder: Path) -> None:
    """Make a folder that only its owner enters, whatever the umask is. One that exists stays as it is; missing parents
    are made for everybody to enter, and for nobody else to write."""
    missing = [folder, *folder.parents]
    while missing and missing[-1].is_dir():
        missing.pop()
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700 if path == folder else 0o755)
            sync_folder(path.parent)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")


def open_privately(path: Any, flags: int) -> int:
    """An opener for `open`: the file is its owner's alone before anything is written to it, whatever the umask is."""
    descriptor = os.open(path, flags, 0o600)
    if sys.platform != "win32" and flags & os.O_CREAT:
        with contextlib.suppress(PermissionError):  # another user's
            os.fchmod(descriptor, 0o600)
    return descriptor


def new_private_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file to write that only its owner reads; on the disk when the block ends."""
    return _synced(open(path, "wb", opener=open_privately))


@contextlib.contextmanager
def _synced(file: BinaryIO) -> Iterator[BinaryIO]:
    with file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: Any, *, private: bool = True) -> None:
    """Write bytes to a file so that readers see all of them or none, after a crash too. Only its owner reads the file,
    unless `private=False`."""
    temporary = path.with_name(f".{path.stem.lstrip('.')}-{secrets.token_hex(4)}.tmp")
    try:
        with _synced(open(temporary, "wb", opener=open_privately if private else None)) as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Let what was made, renamed or deleted in a folder outlast a loss of power, where its system can promise that."""
    if sys.platform == "win32":
        return
    try:
        folder = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be entered, or written, and not read
        return
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(folder)


def sync_tree(folder: Path) -> None:
    """Let all files of a folder, and of those in it, outlast a loss of power."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as handle:
                os.fsync(handle.fileno())
        else:
            sync_folder(path)
    sync_folder(folder)


def is_open_to_others(path: Path) -> bool:
    """Whether users other than its owner may read a file, or enter a folder."""
    return sys.platform != "win32" and bool(path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO))


# --- locks ----------------------------------------------------------------------------------------------------------


class FileLock:
    """A lock between processes, held until it is closed or its process dies, however it dies. A forked child does not
    hold it. The descriptor is that of the open file, locked."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._is_open, self._owner = True, os.getpid()
        in_child(self, FileLock._leave_to_parent)

    def close(self) -> None:
        """Release the lock; a second time does nothing."""
        # A child that forked a moment ago may have the file open still; what it does must not end its parent's lock.
        if self._is_open and sys.platform != "win32" and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self._leave_to_parent()

    def _leave_to_parent(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.descriptor)


def _locked(path: Path, *, create: bool, wait: bool) -> FileLock | None:
    """A lock on that file, `None` where its system has none; raises BlockingIOError for one that is held."""
    if sys.platform == "win32":
        return None
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return FileLock(descriptor)


def lock_file(path: Path, *, wait: bool) -> FileLock | None:
    """A lock on that file. `None` where another process holds it, or where the system has no such locks: then no
    writer is ever taken for dead."""
    with contextlib.suppress(BlockingIOError):
        return _locked(path, create=wait, wait=wait)
    return None


def hold_lock(path: Path, refusal: str) -> FileLock | None:
    """
    A lock on a file that is made where it is missing and that one process may hold; `None` on Windows.

    Raises:
        ConfigError: another process holds it, or the file system has no locks; its message is `refusal`.
        OSError: the file cannot be made.
    """
    path.touch(0o600)
    lock = lock_file(path, wait=False)
    if lock is None and os.name == "posix":
        raise ConfigError(refusal)
    return lock


def wait_for_lock(
    path: Path, seconds: float, *, clock: Callable[[], float] = time.monotonic,
    rest: Callable[[float], None] = time.sleep,
) -> FileLock | None:  # fmt: skip
    """
    A lock on that file, made where it is missing, as soon as nobody else holds it; `None` where the system has no such
    locks. A wait that takes longer than a moment is logged.

    Raises:
        TimeoutError: another process held it all the time. A dead process holds none; a stopped one does.
        OSError: the file cannot be made.
    """
    begun, is_told = clock(), False
    while True:
        try:
            return _locked(path, create=True, wait=False)
        except BlockingIOError:
            waited = clock() - begun
            if waited > seconds:
                raise TimeoutError(f"another process holds {path}") from None
            if waited > QUIET_SECONDS and not is_told:
                is_told = True
                logger.warning("Waiting for another process that holds %s, up to %.0f s.", path, seconds)
            rest(LOOK_SECONDS)
