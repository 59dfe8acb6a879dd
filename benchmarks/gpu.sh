#!/usr/bin/env bash
# One command on a bare GPU machine: its python3 has torch for CUDA and transformers, and there is no network.
#
#   bash benchmarks/gpu.sh WHEELS [RESULTS] [OPTIONS OF benchmarks.gpu ...]
#
# WHEELS is a folder with what that Python lacks, made where there is a network, for its version:
#
#   pip download -d WHEELS --only-binary :all: --no-deps --python-version 3.12 'pulp<4' highspy plotext
#
# What else is missing is said. RESULTS, by default $OUT or benchmarks/results, gets at most five files: gpu.json and
# gpu.md, written after every row so that a run that is cut off keeps what it has, gpu.log, gpu.zip with profiles, and
# setup.log. After a run elsewhere, "python -m benchmarks.gpu --page" writes gpu.md anew from gpu.json.
set -uo pipefail
wheels=$(cd "${1:?name the folder with the wheels; see the head of this file}" && pwd) || exit 2
results=${2:-${OUT:-benchmarks/results}}
shift $(($# < 2 ? $# : 2))
mkdir -p "$results"
results=$(cd "$results" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
{
    python3 -V
    python3 -m pip install --no-index --no-deps --target "$packages" "$wheels"/*.whl ||
        for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$packages"; done
} >"$results/setup.log" 2>&1
export PYTHONPATH=$PWD:$packages CHECKPOINT_PLANNER_CACHE=off
missing=$(python3 - <<'PYTHON'
from importlib.util import find_spec

wanted = ("torch", "transformers", "pulp", "highspy", "networkx", "rich", "jinja2", "plotext", "numpy")
print(*(name for name in wanted if find_spec(name) is None))
PYTHON
)
if [[ -n $missing ]]; then
    echo "python3 lacks $missing: put their wheels into $wheels" | tee -a "$results/setup.log" >&2
    exit 2
fi
python3 -m benchmarks.gpu --json "$results/gpu.json" "$@"
