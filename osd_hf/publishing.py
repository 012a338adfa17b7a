"""Drafts of several domains in one folder: each as PEFT or transformers loads it, and an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from osd_hf.disk import write_whole
from osd_hf.errors import StateError
from osd_hf.outputs import make_folder
from osd_hf.snapshots import Snapshot

__all__ = ["read_drafts", "write_drafts"]

INDEX = "drafts.json"


def write_drafts(
    directory: Path, versions: Mapping[str | None, int], save: Callable[[str | None, Path], None]
) -> None:
    """Write the draft of each domain by `save`, and the index last; raises ConfigError where it cannot be written."""
    make_folder(directory)
    index = {}
    for number, (domain, version) in enumerate(versions.items()):
        folder = f"draft-{number:03d}"
        save(domain, directory / folder)
        index[folder] = {"domain": domain, "version": version}
    write_whole(directory / INDEX, (json.dumps(index, indent=1) + "\n").encode(), private=False)


def read_drafts(
    directory: Path, *, adapters: bool, without: Collection[str]
) -> dict[str | None, tuple[int, Snapshot]]:
    """Version and weights by domain, less the tensors named in `without`; raises StateError where nothing
    can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    try:
        index = json.loads((directory / INDEX).read_text())
        loaded = {}
        for folder, entry in index.items():
            state = load_file(directory / folder / name)
            kept = {tensor: state[tensor] for tensor in state if tensor not in without}
            loaded[entry["domain"]] = (int(entry["version"]), kept)
        return loaded
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise StateError(f"The drafts in {directory} cannot be read: {error}. Restore them from a copy.") from error
