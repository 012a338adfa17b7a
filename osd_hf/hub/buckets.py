"""A store in a Storage Bucket of the Hub, so that one machine collects and another one learns."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, parse_hf_uri

from osd_hf.errors import ConfigError, HubError, StoreError, first_line
from osd_hf.hub.push import check_push, telling
from osd_hf.store.folder import SHARD, UNFINISHED, WRITER, list_shards, open_store, store_errors
from osd_hf.utils.disk import make_private_folder, sync_folder, write_whole

__all__ = ["StoreBucket", "kept_alike"]

RECORD_NAME = ".osd_hf_store-buckets.json"
LAST_SECONDS = 60.0  # that the last copy may take when a command ends
AGAIN = "It is tried again."

logger = logging.getLogger(__name__)


class StoreBucket:
    """
    The finished shards of a store, in a folder of a Storage Bucket as in a folder of the disk: a subfolder for each
    process that writes. Many machines may copy to one place, and from it; a shard is never changed, and one that its
    store has deleted goes here, too.

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
        self._id, self._prefix = parsed.id, parsed.path_in_repo.strip("/")
        self._api = api or HfApi(token=check_push(self._id, token))
        self._is_checked = False
        open_store(self.folder)

    def check(self, *, make: bool) -> None:
        """
        Look at the bucket, which is made, private, where it is missing and `make` asks for it.

        Raises:
            ConfigError: everybody can read it, and a store holds the text of its requests; or the Hub is switched off.
            HubError: there is none, or the Hub refused, or could not be reached.
        """
        with self._telling():
            if make:
                self._api.create_bucket(self._id, private=True, exist_ok=True)
            if self._api.bucket_info(self._id).private is not True:
                raise ConfigError(f"{self._id!r} is open to everybody, and a store holds the text of its requests.")
        self._is_checked = True

    def upload(self) -> int:
        """
        Copy to the bucket the shards that it lacks, oldest first, and delete there what this store had and has no
        more; returns how many were copied. Before anything goes to a bucket, [`check`] looks at it.

        Raises:
            ConfigError, HubError: as of [`check`]. What has been copied stays there.
            StoreError: the folder cannot be read.
        """
        if not self._is_checked:
            self.check(make=True)
        record = self._record()
        with self._telling():
            remote = self._remote()
        local = {name: path for name, path in self._local().items() if name[0] not in record["fetched"]}
        missing = [name for name in local if name not in remote]
        self._note(record, "sent", {writer for writer, _ in missing})
        for name in missing:  # one after the other: who learns takes the shards of a writer in their order
            with self._telling():
                self._api.batch_bucket_files(self._id, add=[(local[name], self._place(name))])
        if gone := [name for name in remote if name[0] in record["sent"] and name not in local]:
            with self._telling():
                self._api.batch_bucket_files(self._id, delete=[self._place(name) for name in gone])
        return len(missing)

    def download(self) -> int:
        """
        Copy from the bucket the shards that the store lacks, each of which appears whole, in the order of its writer,
        and delete what came from there and is there no more; returns how many were copied. Errors as of [`upload`];
        StoreError too where the disk cannot be written.
        """
        record = self._record()
        with self._telling():
            remote = {name: file for name, file in self._remote().items() if name[0] not in record["sent"]}
        local = self._local()
        self._note(record, "fetched", {writer for writer, _ in remote} - {writer for writer, _ in local})
        missing = [name for name in remote if name not in local and name[0] in record["fetched"]]
        with store_errors("write to the store", self.folder):
            self._tidy(record["fetched"])
            coming = {name: self._unfinished(name) for name in missing}
            if missing:
                with self._telling():
                    self._api.download_bucket_files(self._id, [(remote[name], coming[name]) for name in missing])
            for name in missing:
                if not coming[name].exists() or coming[name].stat().st_size != remote[name].size:
                    raise HubError(f"{self._place(name)} of {self.uri} did not come whole. {AGAIN}")
                os.replace(coming[name], self._path(name))
            for name, path in local.items():
                if name[0] in record["fetched"] and name not in remote:
                    path.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # others are there
                        path.parent.rmdir()
            for writer in {writer for writer, _ in missing}:
                sync_folder(self.folder / writer)
        return len(missing)

    def _remote(self) -> dict[tuple[str, str], Any]:
        """The shards in the bucket, by writer and name, in their order."""
        begin = f"{self._prefix}/" if self._prefix else ""
        found: dict[tuple[str, str], Any] = {}
        for file in self._api.list_bucket_tree(self._id, prefix=self._prefix or None, recursive=True):
            writer, _, name = file.path.removeprefix(begin).partition("/")
            if WRITER.fullmatch(writer) and SHARD.fullmatch(name):  # no path leads out
                found[writer, name] = file
        return dict(sorted(found.items()))

    def _local(self) -> dict[tuple[str, str], Path]:
        """The shards in the folder that a store wrote, likewise."""
        paths = [Path(path) for path in list_shards(self.folder)]
        named = [((path.parent.name, path.name), path) for path in paths]
        return {name: path for name, path in named if WRITER.fullmatch(name[0]) and SHARD.fullmatch(name[1])}

    def _place(self, name: tuple[str, str]) -> str:
        return "/".join((*filter(None, [self._prefix]), *name))

    def _path(self, name: tuple[str, str]) -> Path:
        return self.folder.joinpath(*name)

    def _unfinished(self, name: tuple[str, str]) -> Path:
        make_private_folder(self.folder / name[0])
        return self._path(name).with_name(f".{Path(name[1]).stem}-{secrets.token_hex(4)}.tmp")

    def _tidy(self, writers: set[str]) -> None:
        """Delete what a copy that was broken off left."""
        for writer in writers:
            with contextlib.suppress(FileNotFoundError):
                for path in (self.folder / writer).iterdir():
                    if UNFINISHED.fullmatch(path.name):
                        path.unlink()

    def _record(self) -> dict[str, set[str]]:
        """The writers whose shards this folder has `sent` to the bucket, and `fetched` from it."""
        with store_errors("read the store", self.folder):
            known = self._records().get(self.uri, {})
        return {way: set(known.get(way, ())) for way in ("sent", "fetched")}

    def _records(self) -> dict[str, dict[str, list[str]]]:
        try:
            found: dict[str, dict[str, list[str]]] = json.loads((self.folder / RECORD_NAME).read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StoreError(
                f"{self.folder / RECORD_NAME} cannot be read: {error}. Move it away to go on; what the store has "
                "deleted then stays in the bucket"
            ) from error
        return found

    def _note(self, record: dict[str, set[str]], way: str, writers: set[str]) -> None:
        """Remember writers before anything of them is copied, so that it is known whose it was wherever that ends."""
        if writers <= record[way]:
            return
        record[way] |= writers
        with store_errors("write to the store", self.folder):
            records = self._records() | {self.uri: {way: sorted(those) for way, those in record.items()}}
            write_whole(self.folder / RECORD_NAME, json.dumps(records).encode())

    def _telling(self) -> contextlib.AbstractContextManager[None]:
        return telling(self.uri, f"The store stays in {self.folder}.", again=AGAIN)


@contextlib.contextmanager
def kept_alike(copy: Callable[[], int], *, seconds: float, is_last: bool = False) -> Iterator[None]:
    """
    Call [`~StoreBucket.upload`] or [`~StoreBucket.download`] every so many seconds inside the block, in a thread. What
    fails is said once in the log, until it works again; nothing else comes of it.

    Args:
        copy (`Callable[[], int]`): What is called.
        seconds (`float`): Between the end of a call and the next one.
        is_last (`bool`, *optional*, defaults to `False`): Whether it is called once more at the end.
    """
    stop, is_failing = threading.Event(), False

    def once() -> None:
        nonlocal is_failing
        try:
            copy()
            is_failing = False
        except Exception as error:  # noqa: BLE001  # of whatever kind, those who are served do not notice
            if not is_failing:
                logger.warning("%s", first_line(error))
            is_failing = True

    def run() -> None:
        while not stop.wait(seconds):
            once()
        if is_last:
            once()

    thread = threading.Thread(target=run, name="osd_hf-bucket", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LAST_SECONDS)
        if thread.is_alive():
            logger.warning("The bucket has not got all after %.0f s; the next run goes on.", LAST_SECONDS)
