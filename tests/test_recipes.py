"""Each recipe of the lab pair runs its smallest form, as a user would start it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LONG

RECIPES = Path(__file__).parent.parent / "recipes"
SMOKES = {
    "lab_online": ["--requests", "16", "--seeds", "0", "--datasets", "gsm8k", "--epochs", "1", "--live", "2"],
    "online_rules": ["--requests", "16", "--rules", "default", "4 steps", "--datasets", "gsm8k"],
    "lab_drafting": [
        *("--requests", "1", "--learn", "4", "--drafts", "draft", "--datasets", "gsm8k", "--max-new-tokens", "12"),
        *("--parts", "equal", "learned", "pace", "useless", "loop", "--no-compile", "--traces", "traces"),
    ],
    "capture_overhead": ["--requests", "2", "--repeats", "1", "--max-new-tokens", "8"],
}


@pytest.mark.parametrize("name", SMOKES)
def test_a_recipe_runs_its_smallest_form(name: str, lab: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(RECIPES / f"{name}.py"), *SMOKES[name]]
    environment = {**os.environ, "OSD_HF_DATA": str(lab.parent), "OSD_HF_RESULTS": str(tmp_path / "results")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / f"results/{name}.json").read_text())
    assert report["provenance"]["command"].startswith(f"{name}.py")
    if name == "lab_online":
        live = report["rows"][0]["live"]
        assert live["token_identical"] == live["equal_counts_by_replay_of_captured"] == live["requests"] == 2


def test_a_recipe_without_its_data_says_what_to_set(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OSD_HF_DATA"}
    command = [sys.executable, str(RECIPES / "lab_online.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 1
    assert "Set OSD_HF_DATA" in done.stderr
