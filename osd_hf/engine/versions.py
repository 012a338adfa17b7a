"""Versions of a draft in a folder, each written whole before anybody can find it, and a pointer to the newest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osd_hf.errors import ConfigError, StateError
from osd_hf.utils.disk import hold_lock, sync_folder, sync_tree
from osd_hf.utils.report import make_folder, write_report

__all__ = ["FACTS", "LATEST", "VersionFolder", "latest_version"]

LATEST = "latest"
FACTS = "version.json"
LEAST_KEPT = 2  # the newest, and the one that an engine may be loading just now
LOCK = ".publisher.lock"
VERSION = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(rf"\.(v\d{{6,}}|{LATEST})-[0-9a-f]+\.tmp")  # names that nobody else gives


def latest_version(path: Path) -> Path | None:
    """Folder of the version that the pointer in a folder of versions names; `None` where there is none."""
    link = path / LATEST
    return link.resolve() if link.exists() else None


class VersionFolder:
    """
    Published versions `v000001`, `v000002`, ... and a symbolic link `latest` to the newest. A reader finds whole
    versions only: each is written under a hidden name, synced and renamed, and the link is replaced after that. Other
    files in the folder stay as they are: a version of ours is known by its `version.json`.

    Args:
        path (`Path`):
            Folder of the versions, made where it is missing.
        keep (`int`, *optional*, defaults to 5):
            Newest versions kept, at least 2.

    Raises:
        ConfigError: it cannot be written, another process publishes there, or `latest` is something else there.
    """

    def __init__(self, path: Path, *, keep: int = 5) -> None:
        if keep < LEAST_KEPT:
            raise ConfigError(f"At least {LEAST_KEPT} versions are kept, as one may just be read, got {keep}.")
        self.path, self.keep = path.expanduser().absolute(), keep
        make_folder(self.path)
        try:
            self._lock = hold_lock(
                self.path / LOCK,
                f"Another process publishes to {path}, or its file system has no locks. Choose another folder, or "
                "stop that process.",
            )
        except OSError as error:
            raise ConfigError(f"The folder {path} cannot be written to: {error.strerror}.") from error
        pointer = self.path / LATEST
        if os.path.lexists(pointer) and not pointer.is_symlink():
            self.close()
            raise ConfigError(f"{pointer} is no pointer to a version. Choose another folder, or move it away.")
        for entry in list(self.path.iterdir()):
            if UNFINISHED.fullmatch(entry.name):  # of a publisher that was killed
                _remove(entry)
        # A publisher may have been killed before the pointer followed; one that somebody set back stays.
        *_, before, newest = (0, 0, *self._numbers())
        if newest and self._pointed in (0, before):
            with contextlib.suppress(OSError):
                self._point(newest)

    def publish(self, write: Callable[[Path], object], facts: dict[str, Any]) -> Path:
        """
        Publish the next version, which `write` writes into a folder that does not exist yet, and return its folder.
        The facts are kept beside it in `version.json`, with its number.

        Raises:
            StateError: it cannot be written; the versions before it, and the pointer, stay as they are.
        """
        number = self.number + 1
        while os.path.lexists(self._folder(number)):  # somebody else's
            number += 1
        unfinished = self._hidden(f"v{number:06d}")
        try:
            write(unfinished)
            unfinished.mkdir(exist_ok=True)
            write_report(unfinished / FACTS, {"version": number, **facts})
            sync_tree(unfinished)
            os.replace(unfinished, self._folder(number))
            with contextlib.suppress(OSError):  # before the pointer names it; what is amiss is told below
                sync_folder(self.path)
            try:
                self._point(number)
            except BaseException:
                if self._pointed != number:  # nobody is ever told of it
                    _remove(self._folder(number))
                raise
        except Exception as error:  # safetensors and tokenizers report a full disk as errors of many kinds
            raise StateError(f"Version {number} cannot be written to {self.path}: {error}.") from error
        finally:
            _remove(unfinished)
        for old in filter(self._is_ours, self._numbers()[: -self.keep]):
            with contextlib.suppress(OSError):  # by its name nobody finds half of it
                os.replace(self._folder(old), gone := self._hidden(f"v{old:06d}"))
                _remove(gone)
        return self._folder(number)

    def _hidden(self, name: str) -> Path:
        return self.path / f".{name}-{secrets.token_hex(4)}.tmp"

    def _point(self, number: int) -> None:
        link = self._hidden(LATEST)
        try:
            os.symlink(self._folder(number).name, link, target_is_directory=True)
            os.replace(link, self.path / LATEST)
            sync_folder(self.path)
        finally:
            _remove(link)

    def _folder(self, number: int) -> Path:
        return self.path / f"v{number:06d}"

    @property
    def number(self) -> int:
        """Number of the newest version; 0 where there is none."""
        return max(self._numbers(), default=0)

    @property
    def latest(self) -> Path | None:
        """Folder of the version that the pointer names; `None` where there is none."""
        return latest_version(self.path)

    @property
    def _pointed(self) -> int:
        """Number of the version that the pointer names; 0 where it names none."""
        with contextlib.suppress(OSError):
            name = VERSION.fullmatch(os.readlink(self.path / LATEST))
            if name is not None and int(name[1]) in self._numbers():
                return int(name[1])
        return 0

    def _numbers(self) -> list[int]:
        names = (VERSION.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name is not None and (self.path / name[0] / FACTS).is_file())

    def _is_ours(self, number: int) -> bool:
        """Whether a version was published here, and is no folder of somebody else's by such a name."""
        try:
            return bool(json.loads((self._folder(number) / FACTS).read_text())["version"] == number)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def close(self) -> None:
        """Let another process publish here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
