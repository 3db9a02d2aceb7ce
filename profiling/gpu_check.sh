#!/usr/bin/env bash
# Everything that needs a GPU, in under five minutes: build, correctness, capture and replay, memory checker, timings.
#   profiling/gpu_check.sh [--dry-run] [--output DIRECTORY]    DRY=1 is --dry-run, the parts that a CPU can run
# PYTHON picks the interpreter, else .venv/bin/python, else python3. profiling/gpu_parts.py says what the parts are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$python" -m profiling.gpu_parts ${DRY:+--dry-run} "$@"
