"""Published draft versions: complete folders and a link to the newest one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from osd_hf.engines.vllm_reload import weights_digest
from osd_hf.errors import ConfigError, StateError, first_line
from osd_hf.learning.gate import GateDecision
from osd_hf.utils.disk import hold_lock, sync_folder, sync_tree
from osd_hf.utils.report import make_folder, write_report

LATEST = "latest"
FACTS = "version.json"
REJECTED = "REJECTED.json"
JOURNAL, PLOT = "deploy.jsonl", "learning.png"  # files next to the versions
MIN_KEPT = 2  # the newest version, and the one that an engine may be loading
LOCK = ".publisher.lock"
VERSION = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(rf"\.(v\d{{6,}}|{LATEST})-[0-9a-f]+\.tmp")
RESERVED = re.compile(rf"{VERSION.pattern}|{LATEST}|{re.escape(JOURNAL)}|{re.escape(PLOT)}", re.IGNORECASE)
MAX_NAME_BYTES = 200


class PublishedVersion(NamedTuple):
    """The number, the folder, and the weights digest of a published version."""

    number: int
    path: Path
    digest: str


def folder_name(domain: str) -> str | None:
    """Return the name of a domain's folder, or `None` if it would be too long. Special characters become `%` and their
    code, also the first letter of a name that versions use."""
    name = quote(domain, safe="") or "%"
    if name.startswith(".") or RESERVED.fullmatch(name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name if len(name) <= MAX_NAME_BYTES else None


class VersionFolder:
    """Versions `v000001`, `v000002`, ... and a symbolic link `latest` to the newest one. The newest `keep` are kept.
    Each version is written to a hidden folder, synced, and renamed; then the link is replaced. `v000000` is the
    original draft, for rollbacks. Other files in the folder stay unchanged. Methods may be called from any thread.
    Raises ConfigError if the folder cannot be written, another process publishes there, or `latest` is not a link."""

    def __init__(self, path: Path, *, keep: int = 5) -> None:
        if keep < MIN_KEPT:
            raise ConfigError(f"At least {MIN_KEPT} versions are kept, because one may just be read, got {keep}.")
        self.path = path.expanduser().absolute()
        self.keep = keep
        self.pinned: frozenset[int] = frozenset()  # numbers of versions that are kept as well
        self._rejections: list[GateDecision] = []
        self._domains: dict[str, VersionFolder] = {}
        self._busy = threading.RLock()
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
            raise ConfigError(f"{pointer} is not a link to a version. Choose another folder, or move it away.")
        for entry in list(self.path.iterdir()):
            if UNFINISHED.fullmatch(entry.name):  # of a publisher that was killed
                _remove(entry)
        good = [number for number in self._numbers() if not (self._folder(number) / REJECTED).exists()]
        if good and self._pointed is None:  # a link that a user has set back stays
            with contextlib.suppress(OSError):
                self._point(good[-1])

    def of(self, domain: str | None) -> VersionFolder:
        """Return the versions of a domain, which are in a subfolder; raises ConfigError and StateError."""
        if domain is None:
            return self
        if domain not in self._domains:
            name = folder_name(domain)
            if name is None:
                raise ConfigError(f"The domain {domain[:40]!r}... is too long for the name of a folder.")
            try:
                self._domains[domain] = VersionFolder(self.path / name, keep=self.keep)
            except (OSError, ConfigError) as error:
                raise StateError(f"Versions of {domain!r} cannot be written: {first_line(error)}.") from error
        return self._domains[domain]

    def publish(self, write: Callable[[Path], object], facts: dict[str, Any], *, is_start: bool = False) -> Path:
        """Publish the next version, and return its folder. `write` writes it to a folder that does not exist yet.
        `facts` are added to `version.json`. `v000000` (`is_start`) is the link's target only if there is no other
        version. Raises StateError if the version cannot be written; earlier versions and the link stay unchanged."""
        with self._busy:
            try:
                number = 0 if is_start else self.number + 1
            except OSError as error:
                raise StateError(f"The folder {self.path} cannot be read: {error}.") from error
            while os.path.lexists(self._folder(number)):  # of another program
                number += 1
            unfinished = self._hidden(f"v{number:06d}")
            try:
                write(unfinished)
                unfinished.mkdir(exist_ok=True)
                known = {"version": number, **facts}
                if any(unfinished.glob("*.safetensors")):
                    known["digest"] = weights_digest(unfinished)
                write_report(unfinished / FACTS, known)
                sync_tree(unfinished)
                os.replace(unfinished, self._folder(number))
                try:
                    if not is_start or self._pointed is None:
                        self._point(number)
                except BaseException:
                    if self._pointed != number:
                        _remove(self._folder(number))
                    raise
            except Exception as error:  # safetensors and tokenizers raise many types on a full disk
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                raise StateError(f"Version {number} cannot be written to {self.path}: {kind}{error}.") from error
            finally:
                _remove(unfinished)
            if is_start:
                self.pinned |= {number}
            with contextlib.suppress(OSError):
                for old in set(self._numbers()[: -self.keep]) - {number, *self.pinned}:
                    # Renamed first, so that no reader finds half a version.
                    os.replace(self._folder(old), gone := self._hidden(f"v{old:06d}"))
                    _remove(gone)
            return self._folder(number)

    def reject(self, decision: GateDecision) -> None:
        """Roll back a version: point to the one that serves instead, and mark the rejected one with `REJECTED.json`.
        Raises OSError."""
        with self._busy:
            self._point(decision.serving)
            with contextlib.suppress(FileNotFoundError):  # it was removed
                at = {"rejected_at_seconds": time.time()}
                write_report(self._folder(decision.version) / REJECTED, decision.to_dict() | at)
            self._rejections.append(decision)

    def rejected(self) -> set[str]:
        """Return the digests of the versions that were rolled back; raises OSError."""
        with self._busy:
            marked = [number for number in self._numbers() if (self._folder(number) / REJECTED).exists()]
            return {found.digest for found in map(self.version, marked) if found is not None}

    def take_rejections(self) -> list[GateDecision]:
        """Return the rollbacks since the last call, also those of domains."""
        with self._busy:
            taken, self._rejections = self._rejections, []
            return sum((folder.take_rejections() for folder in self._domains.values()), taken)

    def pin(self, numbers: Iterable[int]) -> None:
        """Replace the set of old versions that are kept."""
        with self._busy:
            self.pinned = frozenset(numbers)

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
        """Number of the newest version, or 0."""
        return max(self._numbers(), default=0)

    @property
    def latest(self) -> Path | None:
        """Folder of the version that `latest` points to, if there is one."""
        link = self.path / LATEST
        return link.resolve() if link.exists() else None

    def version(self, number: int) -> PublishedVersion | None:
        """Return a version by its number, if it is still there."""
        folder = self._folder(number)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            facts = json.loads((folder / FACTS).read_text())
            digest = facts.get("digest") or weights_digest(folder)
            return PublishedVersion(int(facts["version"]), folder, str(digest))
        return None

    def newest(self) -> PublishedVersion | None:
        """Return the version that `latest` points to, if there is one."""
        with self._busy:
            number = self._pointed
            return None if number is None else self.version(number)

    @property
    def _pointed(self) -> int | None:
        """Number of the version that `latest` points to."""
        with contextlib.suppress(OSError):
            name = VERSION.fullmatch(os.readlink(self.path / LATEST))
            if name is not None and int(name[1]) in self._numbers():
                return int(name[1])
        return None

    def _numbers(self) -> list[int]:
        names = (VERSION.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name is not None and (self.path / name[0] / FACTS).is_file())

    def close(self) -> None:
        """Release the lock, so that another process can publish here."""
        for folder in self._domains.values():
            folder.close()
        self._lock.release()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
