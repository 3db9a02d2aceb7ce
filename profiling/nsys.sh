#!/usr/bin/env bash
# A timeline of steady rounds by Nsight Systems, and GPU time by stage and by kernel of this library.
#
#   profiling/nsys.sh [--method M] [--batch B] [--rounds N] [--out FILE] [--op FAMILY] [--dry-run]
#                    [-- PROFILE OPTIONS...]
#
#   --method M    method of the round (default dmtp)
#   --batch B     requests decoded together (default 8)
#   --rounds N    rounds in the timeline, after 16 others (default 20)
#   --out FILE    report, written as FILE.nsys-rep (default profiling/results/nsys-M-bB)
#   --op FAMILY   list only the kernels of one op family, e.g. lm_head
#   --dry-run     print the commands and stop; needs neither nsys nor a GPU
#   --            what follows goes to `dmtp profile`, e.g. -- --graphs --verification block
#
# PYTHON picks the interpreter, else .venv/bin/python, else python3.
# Exit codes: 2 bad option, 3 no nsys on PATH, 4 no CUDA device, 5 no package nvtx; else those of nsys.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=profiling/nsight.bash
source profiling/nsight.bash

rounds=20
nsight_options nsys "$@"
: "${out:=profiling/results/nsys-$method-b$batch}"
check_options nsys

profile=(
    nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none --cuda-graph-trace=node
    --capture-range=nvtx "--nvtx-capture=timed_rounds@dmtp" --capture-range-end=stop
    --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0 --force-overwrite=true "--output=$out"
    "$python" -m dmtp_kernels.cli profile --device cuda --method "$method" --against none
    --batch "$batch" --rounds "$rounds" "${extra[@]}"
)
stages=(nsys stats --force-export=true --report nvtx_gpu_proj_sum "$out.nsys-rep")
kernels=(nsys stats --report cuda_gpu_kern_sum --format csv "$out.nsys-rep")
if [[ -n $dry_run ]]; then
    show "${profile[@]}"
    show "${stages[@]}"
    show "${kernels[@]}"
    exit 0
fi
make_folder
"${profile[@]}"
"${stages[@]}"
# the header, and the rows whose last column is one of our kernels
"${kernels[@]}" | awk -F, -v names="$names" 'NR == 1 || /Time \(%\)/ || $NF ~ names'
