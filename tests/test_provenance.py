import json
import sys
from pathlib import Path

import numpy as np
import pytest

from osd_hf.utils import report as module
from osd_hf.utils.report import provenance


def test_is_ready_for_json_and_carries_the_extra_entries() -> None:
    result = provenance(
        seed=np.int64(3), device="cpu", share=np.float32(0.5), ks=(1, 2), path=Path("a.json"), none=None
    )
    assert json.loads(json.dumps(result)) == result
    assert (result["seed"], result["device"], result["share"]) == (3, "cpu", 0.5)
    assert (result["ks"], result["path"], result["none"]) == ([1, 2], "a.json", None)
    assert {"command", "commit", "date", "python", "torch", "transformers", "osd_hf", "processor", "cpu_count"} <= {
        *result
    }
    assert result["date"].endswith("+00:00")
    assert result["python"] == ".".join(map(str, sys.version_info[:3]))
    assert result["processor"]


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("{cwd}/results/a.json", "results/a.json"),
        ("--out={cwd}/results/a.json", "--out=results/a.json"),
        ("results/a.json", "results/a.json"),
        ("/home/someone/b.json", "b.json"),
        ("/home/some one/b.json", "'b.json'"),
        ("--out=/home/someone/b.json", "--out=b.json"),
        ("x=/home/someone/b,/home/someone/c", "x=b,c"),
        ("~/b.json", "b.json"),
        ("../../someone/b.json", "b.json"),
        ("file:///home/someone/b.json", "b.json"),
        ("owner/name", "owner/name"),
        ("https://host/owner/name", "https://host/owner/name"),
        ("--k=5", "--k=5"),
        ("-", "-"),
        ("a b", "'a b'"),
        ("{{x}}\\n/home/someone/a", "'{x}\\na'"),
        ("db: {{x}}\\n{{y}}", "'db: {x}\\n{y}'"),
    ],
)
def test_the_command_shows_no_folder_of_the_machine(
    argument: str, kept: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/opt/env/bin/osd-hf", "run", argument.format(cwd=tmp_path)])
    assert provenance()["command"] == f"osd-hf run {kept}".replace("'b.json'", "b.json")


def test_works_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(module, "_own_commit", module._own_commit.__wrapped__)
    assert provenance()["commit"] is None
