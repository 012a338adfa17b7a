"""What every test runs under: offline, one thread, seeded."""

from __future__ import annotations

import os

# Before any import: torch and the Hub's client read these once. Models this small are slower on many threads, and two
# teams of threads on the same cores wait for each other; whoever sets OMP_NUM_THREADS gets what they set.
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

import pytest
from hypothesis import settings

gc.disable()  # until all is imported: a million objects that stay are looked through for garbage again and again

# Times differ between machines; what is drawn must not, where a failure should be everybody's.
settings.register_profile("home", deadline=None)
settings.register_profile("everywhere", deadline=None, derandomize=True)
settings.load_profile("everywhere" if os.environ.get("CI") else "home")


MOST_WORKERS = 8  # each loads torch and the bundled pair
# The files that take longest, longest first: begun last, they would be waited for.
LONG_FILES = (
    "browser verification generation_config lossless recipes app_strangers hook store_learning faults draft_forward "
    "learner offline batches hub server proxy experiments replay memory_plan pairs text draft_vocabulary docs "
    "assistant benchmark drafting serving pacing effort"
).split()


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist nobody asks
def pytest_xdist_auto_num_workers() -> int | None:
    """How many processes `-n auto` means: one a core that this process may run on."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first; the rest stays in its order."""
    places = {f"test_{name}": place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Leave what the imports have made out of the collections of garbage to come, of which a trainer starts some in
    each run: they would go through a million objects that stay anyway."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures have ended
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Likewise what each file leaves: modules imported meanwhile, what was traced for a compiler."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# Imported where they are used: the process that hands the tests to others needs neither, and they wait for it.


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from seed 0 of Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What a test sets for the whole process ends with it: the app takes all cores for a pair that is not bundled."""
    import torch

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lab() -> Path:
    """The folder of the lab pair (`target`, `draft`, `draft-1layer`); its prompts lie in `lab.parent / "data"`."""
    root = os.environ.get("OSD_HF_DATA")
    if not root:
        pytest.skip("needs the lab pair: set OSD_HF_DATA to a folder that holds data/ and lab/")
    folder = Path(root) / "lab"
    if not (folder / "target").is_dir():
        pytest.skip(f"needs the lab pair: OSD_HF_DATA is {root}, which has no lab/target")
    return folder
