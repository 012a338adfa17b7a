"""Storage Buckets of one's own: what is asked of huggingface_hub to make, list and fill one, and to read it back.

Their files go through a service that only hf-xet speaks to, so the methods are replaced, not the Hub behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import BucketNotFoundError


class FakeBuckets:
    """
    Buckets in memory, which take calls as `HfApi` does.

    Attributes:
        files: bucket -> path -> bytes.
        public: those of them that everybody may read.
        asked: name of each method that was called.
        before: called with the name and the arguments of each call, to fail it, or to spoil what it does.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.public: set[str] = set()
        self.asked: list[str] = []
        self.before: Callable[[str, dict[str, Any]], object] = lambda name, given: None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(HfApi, name)  # what HfApi has not, or takes otherwise, fails here as well

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(inspect.signature(method).bind(self, *args, **kwargs).arguments)
            given.pop("self")
            self.asked.append(name)
            self.before(name, given)
            return getattr(self, f"_{name}")(**given)

        return call

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let these be the buckets of the Hub, for who has a token."""
        monkeypatch.setenv("HF_TOKEN", "hf_fake")
        monkeypatch.setattr("osd_hf.hub.buckets.HfApi", lambda token: self)

    def _create_bucket(self, bucket_id: str, private: bool, exist_ok: bool) -> None:
        assert private and exist_ok
        self.files.setdefault(bucket_id, {})

    def _bucket_info(self, bucket_id: str) -> Any:
        self._of(bucket_id)
        return SimpleNamespace(private=bucket_id not in self.public)

    def _list_bucket_tree(self, bucket_id: str, prefix: str | None, recursive: bool) -> Iterator[BucketFile]:
        assert recursive
        for path, data in list(self._of(bucket_id).items()):
            if path.startswith(prefix or ""):  # as the Hub does: of "a" that is "ab/c", too
                yield BucketFile(type="file", path=path, size=len(data), xetHash="0")

    def _batch_bucket_files(self, bucket_id: str, add: Any = None, delete: Any = None) -> None:
        for path, place in add or ():
            self._of(bucket_id)[place] = Path(path).read_bytes()
        for place in delete or ():
            del self._of(bucket_id)[place]

    def _download_bucket_files(self, bucket_id: str, files: Any) -> None:
        for file, path in files:
            Path(path).write_bytes(self._of(bucket_id)[file.path])

    def _of(self, bucket_id: str) -> dict[str, bytes]:
        if bucket_id not in self.files:
            response: Any = SimpleNamespace(status_code=404, headers={}, request=None)
            raise BucketNotFoundError("no such bucket", response=response)
        return self.files[bucket_id]
