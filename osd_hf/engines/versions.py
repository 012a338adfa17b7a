"""Published versions of a draft: whole folders with a pointer to the newest, by domain where each has a draft."""

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

__all__ = [
    "FACTS",
    "JOURNAL",
    "LATEST",
    "PICTURE",
    "REJECTED",
    "Published",
    "VersionFolder",
    "folder_name",
    "latest_version",
]

LATEST = "latest"
FACTS = "version.json"
REJECTED = "REJECTED.json"
JOURNAL, PICTURE = "deploy.jsonl", "alpha.png"  # that lie beside the versions
LEAST_KEPT = 2  # the newest, and the one that an engine may be loading just now
LOCK = ".publisher.lock"
VERSION = re.compile(r"v(\d{6,})")
UNFINISHED = re.compile(rf"\.(v\d{{6,}}|{LATEST})-[0-9a-f]+\.tmp")  # names that nobody else gives
TAKEN = re.compile(rf"{VERSION.pattern}|{LATEST}|{re.escape(JOURNAL)}|{re.escape(PICTURE)}", re.IGNORECASE)
LONGEST_NAME = 200  # bytes, of a folder


class Published(NamedTuple):
    """A published version: its number, its folder, and the digest of its weights."""

    number: int
    path: Path
    digest: str

    @classmethod
    def at(cls, folder: Path) -> Published:
        """The version in a folder; raises OSError and ValueError where there is none, or it is not whole."""
        try:
            facts = json.loads((folder / FACTS).read_text())
            return cls(int(facts["version"]), folder, str(facts.get("digest") or weights_digest(folder)))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / FACTS} tells of no version") from error


def latest_version(path: Path) -> Path | None:
    """Folder of the version that the pointer in a folder of versions names; `None` where there is none."""
    link = path / LATEST
    return link.resolve() if link.exists() else None


def folder_name(domain: str) -> str | None:
    """What the folder of a domain is called: its label, with what is no letter, digit, `-`, `_`, `~` or inner dot as
    `%` and its code, and the first letter of what lies beside the versions; `None` for one that is too long."""
    name = quote(domain, safe="") or "%"
    if name.startswith(".") or TAKEN.fullmatch(name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return name if len(name) <= LONGEST_NAME else None


class VersionFolder:
    """
    Published versions `v000001`, `v000002`, ... and a symbolic link `latest` to the newest. A reader finds whole
    versions only: each is written under a hidden name, synced and renamed, and the link is replaced after that. Other
    files in the folder stay as they are: a version of ours is known by its `version.json`. `v000000` is the draft as
    it was, where something is to be gone back to. May be used from several threads.

    Args:
        path (`Path`): Folder of the versions, made where it is missing.
        keep (`int`, *optional*, defaults to 5): Newest versions kept, at least 2; others as long as they are `pinned`.

    Raises:
        ConfigError: it cannot be written, another process publishes there, or `latest` is something else there.
    """

    def __init__(self, path: Path, *, keep: int = 5) -> None:
        if keep < LEAST_KEPT:
            raise ConfigError(f"At least {LEAST_KEPT} versions are kept, as one may just be read, got {keep}.")
        self.path, self.keep = path.expanduser().absolute(), keep
        self.pinned: frozenset[int] = frozenset()  # numbers that somebody may go back to
        self._rejections: list[GateDecision] = []
        self._unfinished: dict[GateDecision, int] = {}  # and the newest version when they came
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
            raise ConfigError(f"{pointer} is no pointer to a version. Choose another folder, or move it away.")
        for entry in sorted(self.path.iterdir()):
            if not UNFINISHED.fullmatch(entry.name):
                continue
            # A publisher was killed before the version had its name, or before the pointer followed.
            if entry.name.startswith(f".{LATEST}") and (entry / FACTS).is_file() and not (entry / REJECTED).exists():
                with contextlib.suppress(OSError):
                    os.replace(entry, pointer)
            _remove(entry)
        good = [number for number in self._numbers() if not (self._folder(number) / REJECTED).exists()]
        if good and self._pointed is None:  # one that somebody set back stays
            with contextlib.suppress(OSError):
                self._point(good[-1])

    def of(self, domain: str | None) -> VersionFolder:
        """The versions of a domain, in a folder of its own below this one; of `None`, this one. Raises ConfigError for
        a name that is too long, and StateError where its folder cannot be used now."""
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

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(self, write: Callable[[Path], object], facts: dict[str, Any], *, is_start: bool = False) -> Path:
        """
        Publish the next version, which `write` writes into a folder that does not exist yet, and return its folder.
        The facts are kept beside it in `version.json`, with its number and the digest of its weights. The start is
        `v000000`, and pointed to where nothing else is.

        Raises:
            StateError: it cannot be written; the versions before it, and the pointer, stay as they are.
        """
        with self._busy:
            try:
                number = 0 if is_start else self.number + 1
            except OSError as error:
                raise StateError(f"The folder {self.path} cannot be read: {error}.") from error
            while os.path.lexists(self._folder(number)):  # somebody else's
                number += 1
            unfinished, link = self._hidden(f"v{number:06d}"), self._hidden(LATEST)
            points = not is_start or self._pointed is None
            try:
                write(unfinished)
                unfinished.mkdir(exist_ok=True)
                known = {"version": number, **facts}
                if any(unfinished.glob("*.safetensors")):
                    known["digest"] = weights_digest(unfinished)
                write_report(unfinished / FACTS, known)
                sync_tree(unfinished)
                if points:  # before the version is there: a publisher that is killed in between leaves it to the next
                    os.symlink(self._folder(number).name, link, target_is_directory=True)
                os.replace(unfinished, self._folder(number))
                with contextlib.suppress(OSError):  # before the pointer names it; what is amiss is told below
                    sync_folder(self.path)
                try:
                    if points:
                        os.replace(link, self.path / LATEST)
                        sync_folder(self.path)
                except BaseException:
                    if self._pointed != number:  # nobody is ever told of it
                        _remove(self._folder(number))
                    raise
            except Exception as error:  # safetensors and tokenizers report a full disk as errors of many kinds
                raise StateError(f"Version {number} cannot be written to {self.path}: {error}.") from error
            finally:
                _remove(unfinished)
                _remove(link)
            if is_start:
                self.pinned |= {number}
            self._sweep(number)
            return self._folder(number)

    def _sweep(self, number: int) -> None:
        """Remove old versions, but not this one."""
        old_numbers: list[int] = []
        with contextlib.suppress(OSError):
            old_numbers = self._numbers()[: -self.keep]
        for old in filter(self._is_ours, old_numbers):
            if old not in self.pinned and old != number:
                with contextlib.suppress(OSError):  # by its name nobody finds half of it
                    os.replace(self._folder(old), gone := self._hidden(f"v{old:06d}"))
                    _remove(gone)

    def reject(self, decision: GateDecision) -> None:
        """Point to the version that serves in place of one that was rolled back, mark that one with `REJECTED.json`,
        and let [`~VersionFolder.take_rejections`] tell of it, once. Raises OSError where the disk does not take it;
        the next call of the same goes on."""
        with self._busy:
            if decision not in self._unfinished:
                self._rejections.append(decision)
                self._unfinished[decision] = decision.version
                self._unfinished[decision] = max(self.number, decision.version)
            pointed = self._pointed
            if pointed is None or pointed <= self._unfinished[decision]:  # otherwise a later version is there by now
                self._point(decision.serving)
            with contextlib.suppress(FileNotFoundError):  # it is gone already
                at = {"rejected_at_seconds": time.time()}
                write_report(self._folder(decision.version) / REJECTED, decision.to_dict() | at)
            del self._unfinished[decision]

    def rejected(self) -> set[str]:
        """Digests of the versions here that were rolled back; raises OSError."""
        with self._busy:
            marked = [number for number in self._numbers() if (self._folder(number) / REJECTED).exists()]
            return {found.digest for found in map(self.version, marked) if found is not None}

    def take_rejections(self) -> list[GateDecision]:
        """What was rolled back since the last call, also of domains, by the numbers of versions here."""
        with self._busy:
            taken, self._rejections = self._rejections, []
            return sum((folder.take_rejections() for folder in self._domains.values()), taken)

    def pin(self, numbers: Iterable[int]) -> None:
        """Keep these versions, and none but these, however old they get."""
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

    # --- what is there ----------------------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the newest version; 0 where there is none."""
        return max(self._numbers(), default=0)

    @property
    def latest(self) -> Path | None:
        """Folder of the version that the pointer names; `None` where there is none."""
        return latest_version(self.path)

    def version(self, number: int) -> Published | None:
        """The version of that number; `None` where it is not there any more."""
        with contextlib.suppress(OSError, ValueError):
            return Published.at(self._folder(number))
        return None

    def newest(self) -> Published | None:
        """The version that the pointer names; `None` where there is none."""
        with self._busy:
            number = self._pointed
            return None if number is None else self.version(number)

    @property
    def _pointed(self) -> int | None:
        """Number of the version that the pointer names; `None` where it names none."""
        with contextlib.suppress(OSError):
            name = VERSION.fullmatch(os.readlink(self.path / LATEST))
            if name is not None and int(name[1]) in self._numbers():
                return int(name[1])
        return None

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
        for folder in self._domains.values():
            folder.close()
        self._lock.release()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
