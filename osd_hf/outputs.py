"""What commands write: output folders, and reports that are JSON whatever was measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from osd_hf.errors import ConfigError

__all__ = ["json_text", "make_folder"]


def make_folder(folder: Path) -> None:
    """Make an output folder where it is missing; raises ConfigError where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The output folder {folder} cannot be made: {error}.") from error
    if not is_writable:
        raise ConfigError(f"The output folder {folder} cannot be written to.")


def json_text(data: Any, indent: int | None = None) -> str:
    """The text that `json.dumps` makes, with `null` in place of what JSON has no number for: NaN and infinities."""
    return json.dumps(_finite(data), indent=indent, allow_nan=False)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
