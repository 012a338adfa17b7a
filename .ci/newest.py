"""Check whether constraints.txt pins the newest versions that pyproject.toml allows (`make newest`).

The exit code is 1 if not. No test calls this script, because it asks the package index.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def newest(requirement: Requirement) -> Version:
    """Return the newest release on the index within the bounds of a requirement that pip would install here."""
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
            print(f"{requirement.name}: {pins[requirement.name]} is tested, {there} is available")
            behind += 1
    if not behind:
        print("constraints.txt pins the newest versions that pyproject.toml allows")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
