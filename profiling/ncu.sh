#!/usr/bin/env bash
# Counters of this library's kernels inside steady rounds, or inside one stage of them, by Nsight Compute.
#
#   profiling/ncu.sh [--method M] [--batch B] [--rounds N] [--stage S] [--op FAMILY] [--set SET] [--out FILE]
#                    [--dry-run] [-- PROFILE OPTIONS...]
#
#   --method M    method of the round (default dmtp)
#   --batch B     requests decoded together (default 8)
#   --rounds N    rounds to profile, after 16 others (default 1)
#   --stage S     only kernels launched in one stage: t1, draft, verify, accept, mtp, commit or advance
#   --op FAMILY   only kernels of one op family, e.g. lm_head (default: every Triton kernel here)
#   --set SET     sections to collect (default full)
#   --out FILE    report, written as FILE.ncu-rep (default profiling/results/ncu-M-bB)
#   --dry-run     print the command and stop; needs neither ncu nor a GPU
#   --            what follows goes to `dmtp profile`, e.g. -- --verification block
#
# PYTHON picks the interpreter, else .venv/bin/python, else python3.
# Exit codes: 2 bad option, 3 no ncu on PATH, 4 no CUDA device, 5 no package nvtx; else those of ncu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=profiling/nsight.bash
source profiling/nsight.bash

rounds=1
nsight_options ncu "$@"
: "${out:=profiling/results/ncu-$method-b$batch}"
check_options ncu
range="timed_rounds/"
if [[ -n $stage ]]; then
    range="timed_rounds/*/$label"
fi

profile=(
    ncu --nvtx "--nvtx-include=dmtp@$range" "--kernel-name=regex:$names" "--set=$sections"
    --force-overwrite "--export=$out"
    "$python" -m dmtp_kernels.cli profile --device cuda --method "$method" --against none
    --batch "$batch" --rounds "$rounds" "${extra[@]}"
)
if [[ -n $dry_run ]]; then
    show "${profile[@]}"
    exit 0
fi
make_folder
"${profile[@]}"
