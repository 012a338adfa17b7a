"""What every test runs under: offline, one thread, seeded."""

from __future__ import annotations

import os

# Before any import: torch and the Hub's client read these once. Models this small are slower on many threads.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "agg")

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# Times differ between machines; what is drawn must not, where a failure should be everybody's.
settings.register_profile("home", deadline=None)
settings.register_profile("everywhere", deadline=None, derandomize=True)
settings.load_profile("everywhere" if os.environ.get("CI") else "home")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from seed 0 of Python, NumPy and torch."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
