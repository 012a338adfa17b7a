"""Settings of all tests: offline, one thread, seeded."""

from __future__ import annotations

import os

# Set before imports because torch and the Hub client read these variables once. Threads slow small models down.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

gc.disable()  # during imports, which create a million permanent objects

# CI draws the same examples each time, so that failures can be reproduced.
settings.register_profile("home", deadline=None)
settings.register_profile("everywhere", deadline=None, derandomize=True)
settings.load_profile("everywhere" if os.environ.get("CI") else "home")


MAX_WORKERS = 8  # each loads torch and the bundled pair
# The longest files, longest first. They start first, so that no worker waits for one at the end.
LONG_FILES = (
    "browser recipes app_strangers store_learning faults hub server proxy serving session store "
    "forward exactness generation_config lossless hook learner offline batches experiments replay memory_plan models "
    "recurrent text draft_vocabulary docs assistant benchmark changed_target draft_length gate"
).split()
# Their processes are forks of one that imports the package, which takes seconds (tests/processes.py).
STARTS_PROCESSES = {
    f"test_{name}"
    for name in "browser recipes app_strangers store_learning faults hub server proxy serving session store".split()
}


@pytest.hookimpl(optionalhook=True)  # only pytest-xdist calls it
def pytest_xdist_auto_num_workers() -> int | None:
    """Return the number of processes for `-n auto`: one per available core."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


@pytest.hookimpl(optionalhook=True)  # only pytest-xdist calls it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, and one worker all files that start processes."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "processes" if Path(file).stem in STARTS_PROCESSES else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first and keep the order of the others."""
    places = {f"test_{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Exclude the objects of the imports from later garbage collections, which trainers start often."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude what each file leaves, such as imported modules and compiled code."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# Imported inside the fixtures, because the controlling process of pytest-xdist does not need them.


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed Python, NumPy, and torch with 0."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of torch threads after each test."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random pair (`target`, `draft`), which no test may change."""
    from saved_pair import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def traces(pair: Path) -> list[Any]:
    """Return 16 recorded requests of that pair, of two domains."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from osd_hf.prompts import encode_turn
    from osd_hf.recording import record_traces

    target, tokenizer = (kind.from_pretrained(pair / "target") for kind in (AutoModelForCausalLM, AutoTokenizer))
    prompts = {d: [encode_turn(tokenizer, f"{d} {i}") for i in range(8)] for d in ("sql", "math")}
    return [t for d, texts in prompts.items() for t in record_traces(target, texts, max_new_tokens=12, domain=d)]


@pytest.fixture(scope="session")
def store(traces: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of those requests, which no test may change."""
    from osd_hf import CorrectionStore

    path = tmp_path_factory.mktemp("store") / "store"
    with CorrectionStore(path) as written:
        for trace in traces:
            written.append(trace)
    return path


@pytest.fixture(scope="session")
def lab() -> Path:
    """Return the folder of the lab pair (`target`, `draft`, `draft-1layer`); prompts are in `lab.parent / "data"`."""
    root = os.environ.get("OSD_HF_DATA")
    if not root:
        pytest.skip("needs the lab pair: set OSD_HF_DATA to a folder that holds data/ and lab/")
    folder = Path(root) / "lab"
    if not (folder / "target").is_dir():
        pytest.skip(f"needs the lab pair: OSD_HF_DATA is {root}, which has no lab/target")
    return folder
