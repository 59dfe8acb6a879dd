#!/usr/bin/env bash
# One command on a bare GPU machine that has torch for CUDA and no network: the whole GPU benchmark in under 9 minutes.
#
#   bash benchmarks/gpu.sh WHEELS [RESULTS]
#
# WHEELS is a folder with everything but torch, made where there is a network, for the Python of the GPU machine:
#
#   pip download -d WHEELS --only-binary :all: --python-version 3.12 --no-deps \
#       pulp highspy networkx rich markdown-it-py mdurl pygments numpy transformers huggingface-hub hf-xet tokenizers \
#       safetensors regex pyyaml tqdm requests packaging filelock typer click httpx
#
# RESULTS is where gpu.json and gpu.md go (benchmarks/results): written after every row, so that a run that is cut off
# keeps what it has.
set -euo pipefail
wheels=$(cd "${1:?name the folder with the wheels; see the head of this file}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${2:-benchmarks/results}
mkdir -p "$results"
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv --system-site-packages "$environment"
"$environment/bin/python" -m pip install -q --no-index --no-deps "$wheels"/*.whl
"$environment/bin/python" -m benchmarks.gpu --seconds 420 --json "$results/gpu.json"
