"""Reports: output folders, JSON files, figures, and the provenance of results."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from osd_hf.errors import ConfigError, first_line, without_credentials, without_secrets

PACKAGES = ("torch", "transformers", "osd_hf")
# Paths in an argument, such as `a=/x/y,/z`, but not the path of a URL or `owner/name`.
_PATH = re.compile(r"(?<![\w.:/\\-])(?:file://|~\w*|\.\.|[A-Za-z]:)?[/\\][^,;:='\"]+")


def make_folder(folder: Path) -> None:
    """Create an output folder if it is missing; raises ConfigError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The output folder {folder} cannot be made: {error}.") from error
    if not is_writable:
        raise ConfigError(f"The output folder {folder} cannot be written to.")


def json_text(data: Any, indent: int | None = None) -> str:
    """Return `json.dumps(data)` with `null` in place of NaN and infinities."""
    finite = json.loads(json.dumps(data), parse_constant=lambda _: None)
    return json.dumps(finite, indent=indent)


def write_report(path: Path, report: Any) -> None:
    """Write a report as indented JSON."""
    path.write_text(json_text(report, indent=1) + "\n")


def plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """Convert a value to types that JSON supports, and apply `text` to its strings. Other values become strings. Dicts
    with keys that are not strings, such as `sequence_bias` of transformers, become pairs."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item, text) for key, item in value.items()}
        return [[plain(key, text), plain(item, text)] for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, text) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy and torch
        return plain(value.tolist(), text)
    return text(str(value))


def provenance(**extra: Any) -> dict[str, Any]:
    """Return what is needed to reproduce a result, with `extra` entries such as `seed`, ready for JSON. Secrets are
    masked, and paths are relative to the working directory or only a name. `commit` may end in `-dirty`."""
    program, *arguments = sys.argv or [""]
    shown = [_without_folders(argument) for argument in without_secrets(arguments)]
    return {
        "command": shlex.join([Path(program).name, *shown]),
        "commit": _own_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        **{name: plain(value, without_credentials) for name, value in extra.items()},
    }


def _without_folders(argument: str) -> str:
    parts = re.split(r"(\\[nrt])", argument.replace(f"{Path.cwd()}{os.sep}", ""))  # line breaks of templates stay
    parts[::2] = [_PATH.sub(lambda match: re.split(r"[/\\]", match[0].rstrip("/"))[-1], part) for part in parts[::2]]
    return "".join(parts)


# Cached, because a learner may publish a version every few seconds.
@functools.cache
def _own_commit() -> str | None:
    """Return the commit of the checkout that tracks this file; `None` for an environment inside another checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).resolve().parent
        command = ["git", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        return git("describe", "--always", "--dirty", "--exclude=*").strip() if git("ls-files", ".") else None
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def read_config(path: Path) -> dict[str, Any]:
    """Read names and values from a JSON file, or a YAML file if the suffix is not `.json`; raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        read = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration {str(path)!r} cannot be read: {first_line(error)}.") from error
    if not isinstance(read, dict):
        raise ConfigError(f"The configuration {str(path)!r} must hold names with values, such as `gate: true`.")
    return {str(name): value for name, value in read.items()}


LEARNING, FROZEN = "#0072B2", "#D55E00"  # for color-blind readers (Okabe and Ito)


def new_figure(width: float, height: float, rows: int = 1) -> tuple[Any, list[Any]]:
    """Create a figure of `width` x `height` inches, and return it with the axes of each row."""
    from matplotlib.figure import Figure  # pyplot would need global state and a window system

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    found = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    for axes in found:
        axes.grid(True, axis="y", color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def new_curve_figure(width: float, height: float, window: int, rows: int = 1) -> tuple[Any, list[Any]]:
    """Create a figure for tokens per target forward over requests, each point pooled over `window` requests."""
    figure, found = new_figure(width, height, rows)
    found[0].margins(x=0.01)
    found[0].set_ylabel("tokens per target forward")
    found[-1].set_xlabel(f"request (each point: the last {window})")
    return figure, found


def rolling_window(requests: int) -> int:
    """Return the number of requests that each point of a run of this length averages."""
    return max(8, min(50, requests // 8))


def pooled(requests: NDArray[Any], window: int) -> NDArray[np.float64]:
    """Return the ratio of the second to the first of two counts `(requests, 2)`, such as accepted to examined tokens,
    over the last `window` requests at each request; `nan` if the first is 0."""
    sums = np.concatenate([np.zeros((1, 2)), requests.cumsum(0)])
    ends = np.arange(1, len(requests) + 1)
    base, counted = (sums[ends] - sums[np.maximum(ends - window, 0)]).T
    ratios = np.full(len(requests), np.nan)
    np.divide(counted, base, out=ratios, where=base > 0)
    return ratios
