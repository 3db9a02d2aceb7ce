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
            [[ -n ${2:-} ]] || refuse 2 "$1: needs a value"
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

# what `dmtp profile` would refuse, before anything is shown or measured; sets `names`, the kernels' expression, and
# `label`, the range of the stage as ncu's filter wants it: a backslash before what means something else there
check_options() { # tool
    [[ ! -d $out && $out != */ ]] || refuse 2 "--out: is $out, must be a file"
    [[ $("$python" -c 'print("runs")' 2>/dev/null) == runs ]] ||
        refuse 2 "PYTHON: is $python, must be a Python interpreter"
    [[ -n $dry_run ]] || require "$1"
    local checked
    checked=$(
        "$python" - "$stage" "$method" "$batch" "$rounds" "$family" <<'PY'
import re
import sys

from profiling.kernel_names import families, kernel_names

stage, method, batch, rounds, family = sys.argv[1:]


def refuse(message):
    print(message)
    sys.exit(2)


if family and family not in families():
    refuse(f"--op: is {family}, must be a family with Triton kernels: {', '.join(families())}")
try:
    from dmtp_kernels._cli_options import MOST_ROWS
    from dmtp_kernels.decode.method import METHODS
    from dmtp_kernels.decode.ranges import label
    from dmtp_kernels.decode.round import STAGES
except ImportError as error:
    refuse(f"PYTHON: is {sys.executable}, cannot import what `dmtp profile` needs: {error}")


def whole(text, most):
    return text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most


if method not in METHODS:
    refuse(f"--method: is {method}, must be one of {', '.join(METHODS)}")
if not whole(batch, MOST_ROWS):
    refuse(f"--batch: is {batch}, must be a whole number between 1 and {MOST_ROWS}")
if not whole(rounds, 10**9):
    refuse(f"--rounds: is {rounds}, must be a whole number, at least 1")
if stage and stage not in STAGES:
    refuse(f"--stage: is {stage}, must be one of {', '.join(STAGES)}")
print(re.sub(r"[][@,/*+]", r"\\\g<0>", label(stage, METHODS[method])) if stage else "")
print(f"^({'|'.join(kernel_names(family or None))})$")
PY
    ) || refuse 2 "${checked:-PYTHON: is $python, cannot tell what the options mean}"
    { read -r label && read -r names; } <<<"$checked"
}

make_folder() {
    mkdir -p "$(dirname "$out")" || refuse 2 "--out: is $out, cannot write there"
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
