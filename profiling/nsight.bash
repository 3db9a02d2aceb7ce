# What nsys.sh and ncu.sh share; sourced by them.
# shellcheck shell=bash disable=SC2034

python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
method=dmtp batch=8 stage="" family="" sections=full dry_run="" extra=()

refuse() { # exit code, message
    echo "$(basename "$0"): $2" >&2
    exit "$1"
}

nsight_options() { # tool, the script's arguments
    local tool=$1
    shift
    while (($#)); do
        case $1 in
        -h | --help)
            # the comment at the top of the script
            sed -n '2,/^set -/{s/^# \{0,1\}//p}' "profiling/$tool.sh"
            exit 0
            ;;
        --dry-run) dry_run=1 ;;
        --)
            shift
            extra=("$@")
            return
            ;;
        --stage | --set)
            [[ $tool == ncu ]] || refuse 2 "no option $1; see --help"
            ;;&
        --method | --batch | --rounds | --out | --op | --stage | --set)
            (($# > 1)) || refuse 2 "$1: needs a value"
            case $1 in
            --method) method=$2 ;;
            --batch) batch=$2 ;;
            --rounds) rounds=$2 ;;
            --out) out=${2%.n*-rep} ;;
            --op) family=$2 ;;
            --stage) stage=$2 ;;
            --set) sections=$2 ;;
            esac
            shift
            ;;
        *) refuse 2 "no option $1; see --help" ;;
        esac
        shift
    done
}

kernel_names() {
    "$python" -m profiling.kernel_names --regex ${family:+--op "$family"} ||
        refuse 2 "--op: is $family, must be a family with Triton kernels"
}

# the range of a stage as ncu's filter wants it: a backslash before what means something else there
stage_label() {
    "$python" - "$stage" "$method" <<'PY' || refuse 2 "--stage: is $stage (of $method), must be a stage of a method"
import re, sys

from dmtp_kernels.decode.method import METHODS
from dmtp_kernels.decode.ranges import label
from dmtp_kernels.decode.round import STAGES

stage, method = sys.argv[1:]
if stage not in STAGES or method not in METHODS:
    sys.exit(1)
print(re.sub(r"[][@,/*+]", r"\\\g<0>", label(stage, METHODS[method])))
PY
}

require() { # tool
    command -v "$1" >/dev/null || refuse 3 "$1 is not on PATH; --dry-run shows the command it would run"
    "$python" -c 'import nvtx' 2>/dev/null ||
        refuse 5 "the package nvtx is not installed, so there are no ranges to capture; pip install nvtx"
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        refuse 4 "no CUDA device is visible to torch"
}

show() { # command, quoted for a shell
    printf '%q ' "$@" | sed 's/ $//'
    echo
}
