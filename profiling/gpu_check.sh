#!/usr/bin/env bash
# Everything that needs a GPU, in under five minutes: correctness, capture and replay, memory checker, timings.
#   profiling/gpu_check.sh [results directory]     (PYTHON picks the interpreter, else .venv/bin/python, else python3)
# Each part has its own time limit; a part that fails or runs out of time is recorded and the rest goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
out=${1:-profiling/results}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" -c 'import torch' || exit 2
name=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))' 2>/dev/null) || {
    echo "gpu_check: no CUDA device" >&2
    exit 2
}
log="$out/$name.log"
: >"$log"
parts=()

part() { # name, seconds, command...
    local label=$1 limit=$2 start rc
    shift 2
    start=$SECONDS
    timeout "$limit" "$@" >>"$log" 2>&1
    rc=$?
    parts+=("{\"part\": \"$label\", \"exit\": $rc, \"seconds\": $((SECONDS - start))}")
    echo "$label: exit $rc after $((SECONDS - start)) s"
}

part doctor 30 "$python" -m dmtp_kernels.cli doctor
part correctness 90 "$python" -m pytest -q -p no:cacheprovider tests/gpu --ignore tests/gpu/test_graphs_cuda.py
part graphs 60 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_graphs_cuda.py
if command -v compute-sanitizer >/dev/null; then
    part memcheck 60 compute-sanitizer --error-exitcode 9 "$python" -m pytest -q -p no:cacheprovider tests/gpu \
        -k "reference and (select-odd or select-int4 or t1_prep-dual)"
else
    parts+=('{"part": "memcheck", "exit": null, "seconds": 0}')
    echo "memcheck: not measured, compute-sanitizer is not on PATH"
fi
# the shard of a 248,320-row head over four ranks, and the whole head
part bench_tp4 90 bash -c "'$python' -m dmtp_kernels.cli bench t1 --device cuda --vocab 62080 --batch 1,8,32 \
    --rounds 50 --json >'$out/$name.t1_tp4.json'"
part bench_tp1 60 bash -c "'$python' -m dmtp_kernels.cli bench t1 --device cuda --batch 8 --rounds 30 \
    --entries dense,int8,int4,low_rank,eager --json >'$out/$name.t1_tp1.json'"
printf '{"device": "%s", "parts": [%s]}\n' "$name" "$(IFS=,; echo "${parts[*]}")" >"$out/$name.parts.json"
"$python" - "$out" "$name" <<'PY'
import json, pathlib, sys

out, name = pathlib.Path(sys.argv[1]), sys.argv[2]
result = json.loads((out / f"{name}.parts.json").read_text())
for run in ("t1_tp4", "t1_tp1"):
    try:
        result[run] = json.loads((out / f"{name}.{run}.json").read_text())
    except (OSError, ValueError):
        result[run] = "not measured"
(out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
for part in (f"{name}.parts.json", f"{name}.t1_tp4.json", f"{name}.t1_tp1.json"):
    (out / part).unlink(missing_ok=True)
# what the T1 path must reach on Hopper at the TP4 shard, B = 8
limits = {"dense": 0.85, "int8": 0.6, "int4": 0.45}
cases = result["t1_tp4"]["cases"] if isinstance(result["t1_tp4"], dict) else []
for case in cases:
    if case["shape"]["B"] == 8 and case["entry"] in limits:
        share = 1 / case["ratio_to_eager"]
        verdict = "ok" if share <= limits[case["entry"]] else "MISSED"
        print(f"{case['entry']}: {share:.2f}x eager's time, at most {limits[case['entry']]}: {verdict};"
              f" {100 * case['share_of_bandwidth']:.0f} % of copy bandwidth")
if not cases:
    print("T1 timings: not measured")
PY
