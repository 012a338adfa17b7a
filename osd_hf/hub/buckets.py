"""A store in a Storage Bucket of the Hub, so that one machine collects and another one learns."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants, parse_hf_uri
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, HfHubHTTPError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from osd_hf.errors import ConfigError, HubError, StoreError, first_line
from osd_hf.hub.push import check_push, telling
from osd_hf.store.folder import SHARD, UNFINISHED, WRITER, list_shards, open_store, store_errors
from osd_hf.utils.disk import make_private_folder, sync_folder, wait_for_lock, write_whole

__all__ = ["StoreBucket", "kept_alike"]

RECORD_NAME, LOCK_NAME = ".osd_hf_store-bucket.json", ".osd_hf_store-bucket.lock"
AT_ONCE = 16  # shards that are asked for together
LAST_SECONDS = 60.0  # that the last copy may take when a command ends, or another process that copies the same store
AGAIN = "It is tried again."
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}

Direction = Literal["upload", "download"]
Record = dict[str, list[str]]  # by place, the shards that were copied, each as writer/file
logger = logging.getLogger(__name__)


class StoreBucket:
    """
    The finished shards of a store, in a folder of a Storage Bucket as in a folder of the disk: a subfolder for each
    process that writes. Many machines may copy to one place, and from it; a shard is never changed, and one that its
    store has deleted goes here, too. A store is copied in one direction alone.

    Args:
        folder (`Path`): Folder of the store, made where it is missing.
        uri (`str`): `hf://buckets/USER/NAME`, or a folder in it.
        token (`str`, *optional*): A token of the Hub; the login of this machine by default.
        api (`HfApi`, *optional*): The Hub; made with the token otherwise.

    Raises:
        ConfigError: an address of something else, or no token.
        StoreError: the folder is no store.
    """

    def __init__(self, folder: Path, uri: str, *, token: str | None = None, api: HfApi | None = None) -> None:
        try:
            parsed = parse_hf_uri(uri)
        except ValueError as error:
            raise ConfigError(f"{first_line(error)}. A bucket is named as hf://buckets/USER/NAME/FOLDER.") from error
        if not parsed.is_bucket:
            raise ConfigError(f"A bucket is named as hf://buckets/USER/NAME/FOLDER, got {uri!r}.")
        self.folder, self.uri = folder.expanduser().absolute(), uri
        self._id, self._prefix = parsed.id, f"{parsed.path_in_repo.strip('/')}/".lstrip("/")
        self._key = f"{self._id}/{self._prefix}"
        self._api = api or HfApi(token=check_push(self._id, token))
        open_store(self.folder)

    def upload(self) -> int:
        """
        Delete in the bucket what this store had and has no more, and copy there the shards that it lacks, oldest
        first; returns how many. The bucket is made, private, where it is missing.

        Raises:
            ConfigError: everybody can read the bucket, and a store holds the text of its requests; the store is copied
                from a bucket; or the Hub is switched off.
            HubError: the Hub refused, or could not be reached to the end. What has been copied stays there.
            StoreError: the folder cannot be read or written.
        """
        copied = 0
        with self._copying("upload") as record, without_progress_bars():
            self._make_private()
            remote, local = self._remote(), self._local()
            sent = set(record.get(self._key, ())) & remote.keys()
            self._note("upload", record, sent | local.keys())
            if gone := sorted(sent - local.keys()):
                with self._telling():
                    self._api.batch_bucket_files(self._id, delete=[self._prefix + name for name in gone])
            # One after the other: who learns takes the shards of a writer in their order.
            for name in (name for name in local if name not in remote):
                try:
                    if local[name].exists():
                        with self._telling():
                            self._api.batch_bucket_files(self._id, add=[(local[name], self._prefix + name)])
                        copied += 1
                except HubError:
                    if local[name].exists():  # otherwise it was deleted meanwhile, and nothing is missing
                        raise
        return copied

    def download(self) -> int:
        """
        Delete what came from the bucket and is there no more, and copy the shards that the store lacks, each of which
        appears whole, in the order of its writer; returns how many were copied.

        Raises:
            ConfigError: the store is copied to a bucket, and has all that it could get from there; or the Hub is
                switched off.
            HubError: there is no such bucket, the Hub refused, or could not be reached to the end. What came stays.
            StoreError: the folder cannot be read or written.
        """
        with self._copying("download") as record:
            remote, local, before = self._remote(), self._local(), set(record.get(self._key, ()))
            fetched = before & local.keys()
            self._note("download", record, fetched | remote.keys())
            self._tidy({name.partition("/")[0] for name in before})
            for name in fetched - remote.keys():
                local[name].unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # others are there
                    local[name].parent.rmdir()
            missing = [name for name in remote if name not in local]
            for begin in range(0, len(missing), AT_ONCE):
                self._fetch({name: remote[name] for name in missing[begin : begin + AT_ONCE]})
        return len(missing)

    @contextlib.contextmanager
    def _copying(self, direction: Direction) -> Iterator[Record]:
        """What was copied before, while no other process copies this store."""
        with store_errors("copy the store", self.folder):
            lock = wait_for_lock(self.folder / LOCK_NAME, LAST_SECONDS)
            try:
                yield self._record(direction)
            finally:
                if lock is not None:
                    lock.close()

    def _make_private(self) -> None:
        """Make the bucket where it is missing; raises ConfigError for one that is open to everybody."""
        with self._telling():
            self._api.create_bucket(self._id, private=True, exist_ok=True)
            is_private = self._api.bucket_info(self._id).private
        if is_private is not True:
            raise ConfigError(f"{self._id!r} is open to everybody, and a store holds the text of its requests.")

    def _fetch(self, files: dict[str, Any]) -> None:
        """Bring some shards, which appear whole and in this order."""
        paths = {name: self.folder / name for name in files}
        for folder in {path.parent for path in paths.values()}:
            make_private_folder(folder)
        coming = {name: path.with_name(f".{path.stem}-{secrets.token_hex(4)}.tmp") for name, path in paths.items()}
        with self._telling(missing=f"A file of {self.uri!r} is there no more: its store has deleted it meanwhile."):
            self._api.download_bucket_files(self._id, [(file, coming[name]) for name, file in files.items()])
        for name, file in files.items():
            if not coming[name].exists() or coming[name].stat().st_size != file.size:
                raise HubError(f"{name} of {self.uri} did not come whole. {AGAIN}")
            with coming[name].open("rb") as whole:
                os.fsync(whole.fileno())
            os.replace(coming[name], paths[name])
            sync_folder(paths[name].parent)

    def _remote(self) -> dict[str, Any]:
        """The shards in the bucket, in their order."""
        found: dict[str, Any] = {}
        with self._telling():
            for file in self._api.list_bucket_tree(self._id, prefix=self._prefix.rstrip("/") or None, recursive=True):
                # The Hub has looked for letters, not for a folder.
                if file.path.startswith(self._prefix) and is_shard(name := file.path.removeprefix(self._prefix)):
                    found[name] = file
        return dict(sorted(found.items()))

    def _local(self) -> dict[str, Path]:
        """The shards in the folder that a store wrote, likewise."""
        named = {f"{Path(path).parent.name}/{Path(path).name}": Path(path) for path in list_shards(self.folder)}
        return {name: path for name, path in named.items() if is_shard(name)}

    def _tidy(self, writers: set[str]) -> None:
        """Delete what a copy that was broken off left."""
        for writer in writers:
            with contextlib.suppress(FileNotFoundError):
                for path in (self.folder / writer).iterdir():
                    if UNFINISHED.fullmatch(path.name):
                        path.unlink()

    def _record(self, direction: Direction) -> Record:
        """What was copied, so that what a store has deleted is told from what others have; raises ConfigError where
        it went the other way."""
        path = self.folder / RECORD_NAME
        try:
            found = json.loads(path.read_bytes())
            before = str(found["direction"])
            record = {str(place): [str(name) for name in names] for place, names in found["shards"].items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StoreError(
                f"{path} cannot be read: {first_line(error)}. Move it away to go on; what was copied before and is "
                "deleted since then stays"
            ) from error
        if before != direction:
            told = "is copied to a bucket" if direction == "download" else "is a copy of what a bucket has"
            raise ConfigError(
                f"The store in {self.folder} {told}. Copy it in one direction: give who learns from a bucket a folder "
                "of its own, and no bucket where it reads the store itself."
            )
        return record

    def _note(self, direction: Direction, record: Record, names: set[str]) -> None:
        """Let these be the shards of this place, before any of them is copied."""
        if record.get(self._key) != (shards := sorted(names)):
            whole = {"direction": direction, "shards": record | {self._key: shards}}
            write_whole(self.folder / RECORD_NAME, json.dumps(whole).encode())

    @contextlib.contextmanager
    def _telling(self, *, missing: str | None = None) -> Iterator[None]:
        """What fails inside is raised with what became of the store; `missing` is what status 404 means there, where
        that is not an unknown user."""
        kept = f"The store stays in {self.folder}."
        try:
            with telling(self.uri, kept, again=AGAIN):
                yield
        except HubError as error:
            if isinstance(why := error.__cause__, OSError) and why.errno in OF_THE_DISK:
                raise StoreError(f"cannot copy the store in {self.folder}: {first_line(why)}") from why
            if isinstance(why, BucketNotFoundError):
                told = f"There is no bucket {self._id!r}, or this token cannot see it; who collects makes it. {kept}"
                raise HubError(told) from why
            if isinstance(why, BucketBatchError):
                raise HubError(f"{self.uri!r} has not taken all: {why.failures}. {AGAIN} {kept}") from why
            if missing is not None and isinstance(why, HfHubHTTPError) and why.response.status_code == 404:
                raise HubError(f"{missing} {AGAIN} {kept}") from why
            raise


def is_shard(name: str) -> bool:
    """Whether this is writer/file, which does not lead out of a store's folder."""
    writer, _, file = name.partition("/")
    return bool(WRITER.fullmatch(writer) and SHARD.fullmatch(file))


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep huggingface_hub from showing two for each call, in a file that stderr goes to as well. What the user has
    said of them by `HF_HUB_DISABLE_PROGRESS_BARS` stays."""
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass
class Copying:
    """What goes on inside [`kept_alike`]; `is_behind` is whether something was not copied, known once it has ended."""

    is_behind: bool = False


@contextlib.contextmanager
def kept_alike(copy: Callable[[], int], *, seconds: float, is_last: bool = False) -> Iterator[Copying]:
    """
    Call [`~StoreBucket.upload`] or [`~StoreBucket.download`] at once and every so many seconds inside the block, in a
    thread. What fails is said once in the log, until it works again; nothing else comes of it but what
    is yielded.

    Args:
        copy (`Callable[[], int]`): What is called.
        seconds (`float`): Between the end of a call and the next one.
        is_last (`bool`, *optional*, defaults to `False`): Whether it is called once more, and waited for, at the end.
    """
    stop, state = threading.Event(), Copying()

    def once(*, is_told: bool = True) -> None:
        try:
            copy()
            state.is_behind = False
        except BaseException as error:  # noqa: BLE001  # of whatever kind, as Rust panics; who is served does not notice
            if is_told or not state.is_behind:
                logger.warning("%s", first_line(error))
            state.is_behind = True

    def run() -> None:
        while not stop.is_set():
            once(is_told=False)
            stop.wait(seconds)
        if is_last:
            once()

    thread = threading.Thread(target=run, name="osd_hf-bucket", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        stop.set()
        if is_last:
            thread.join(LAST_SECONDS)
            if thread.is_alive():
                state.is_behind = True
                logger.warning("The bucket has not got all after %.0f s; the next run goes on.", LAST_SECONDS)
