"""Tells where constraints.txt no longer pins the newest version that pyproject.toml allows, and exits with 1 then.

Asks the package index, so no test calls it: `make newest`.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def newest(requirement: Requirement) -> Version:
    """The newest release on the index within a requirement's bounds; for this Python, by pip's own choice of files."""
    command = [sys.executable, "-m", "pip", "index", "versions", requirement.name]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    versions = answer.split("Available versions:")[1].splitlines()[0].split(",")
    return max(v for v in (Version(v.strip()) for v in versions) if not v.local and v in requirement.specifier)


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    behind = 0
    for requirement in map(Requirement, listed):
        if requirement.name in pins and (there := newest(requirement)) > Version(pins[requirement.name]):
            print(f"{requirement.name}: {pins[requirement.name]} is tested, {there} is there")
            behind += 1
    if not behind:
        print("constraints.txt pins the newest versions that pyproject.toml allows")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
