"""Faults of compiled extensions: what they link, second copies, forks, threads, processes, import order."""

from __future__ import annotations

import importlib
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.accept import accept_prefix
from dmtp_kernels.ops.lm_head import lm_head_select, pack_lm_head
from dmtp_kernels.ops.t1_prep import Fusion, fused_t1_prep

ROOT = Path(__file__).parents[1]
needs_module = pytest.mark.skipif(backends.compiled_missing() is not None, reason=str(backends.compiled_missing()))
needs_cuda = pytest.mark.skipif(backends.cuda_missing() is not None, reason=str(backends.cuda_missing()))
needs_binutils = pytest.mark.skipif(not (shutil.which("readelf") and shutil.which("nm")), reason="no binutils")

# a model's head and a call that the compiled kernels take
CALL = """
import torch, dmtp_kernels
from dmtp_kernels import backends
from dmtp_kernels.ops.lm_head import decode_key, lm_head_select, pack_lm_head
torch.set_num_threads(2)
weight = torch.arange(4000 * 64).remainder(97).float().view(4000, 64)
head = pack_lm_head(weight, format="int8")
def run(): return decode_key(lm_head_select(weight[7:15].contiguous(), head)[0])[0].flatten().tolist()
"""


def fresh(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=timeout)


def library_path(name: str) -> Path:
    build = importlib.import_module("dmtp_kernels._build")
    (found,) = Path(str(build.__file__)).parent.glob(name)
    return found


def needed(path: Path) -> set[str]:
    """Shared libraries that a file asks the loader for, without their versions."""
    out = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    return {line.partition("[")[2].partition(".so")[0] for line in out.splitlines() if "(NEEDED)" in line}


@needs_cuda
@needs_binutils
def test_row_167_the_cuda_library_asks_for_no_driver_and_no_runtime() -> None:
    # DeepSeek-R1#493: what needs a driver to load does not load where there is none. The runtime is inside, static
    path = library_path("_cuda.so")
    assert needed(path) <= {"libtorch_cpu", "libstdc++", "libm", "libgcc_s", "libc", "ld-linux-x86-64"}
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(path)], capture_output=True, text=True, check=True)
    wanted = {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    # torch's stable C interface alone: C++ names of torch change from release to release
    assert not {name for name in wanted if name.startswith(("_ZN2at", "_ZN3c10", "_ZNK2at", "_ZNK3c10", "_ZN5torch"))}
    assert {name for name in wanted if name.startswith(("aoti_torch_", "torch_"))}
    assert not {name for name in wanted if name.startswith(("cuda", "cu", "__cuda", "nv"))}
    dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic, "no path of the machine that built it"


@needs_module
@needs_binutils
def test_row_167_the_compiled_module_asks_for_no_cuda() -> None:
    assert not {name for name in needed(library_path("_C.*.so")) if "cuda" in name or name.startswith("libnv")}


@needs_cuda
def test_a_second_copy_of_the_cuda_library_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    # its ops are registered when it is loaded, a second time ends the process
    shutil.copy(library_path("_cuda.so"), tmp_path)
    code = (
        "from types import SimpleNamespace\n"
        "import sys, torch\n"
        "from dmtp_kernels import backends\n"
        "backends.cuda_library()\n"
        "backends._cuda = None\n"
        "print(backends.cuda_missing())\n"  # the same file once more
        f"build = SimpleNamespace(NO_CUDA='', __file__={str(tmp_path / '_build.py')!r})\n"
        "sys.modules['dmtp_kernels._build'] = build\n"
        "backends._cuda = None\n"
        "print(backends.cuda_missing())\n"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr
    same, other = done.stdout.splitlines()
    assert same == "None"
    assert "_cuda.so does not load: another copy than" in other


def test_a_file_that_is_no_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_cuda.so").write_bytes(b"not a shared object")
    build = type("build", (), {"NO_CUDA": "", "__file__": str(tmp_path / "_build.py")})
    monkeypatch.setitem(sys.modules, "dmtp_kernels._build", build)
    monkeypatch.setattr(backends, "_cuda", None)
    monkeypatch.setattr(torch.ops, "loaded_libraries", {*torch.ops.loaded_libraries, str(tmp_path / "_cuda.so")})
    reason = backends.cuda_missing()
    assert reason is not None and "_cuda.so does not load: " in reason


@needs_module
def test_the_module_may_be_imported_first() -> None:
    code = (
        "import dmtp_kernels._C as c\nimport torch\nprint(c.parallel_parts(3, 3), c.capability() in c.capabilities())"
    )
    done = fresh(code)
    assert done.returncode == 0 and done.stdout == "[(0, 3)] True\n", done.stderr


@needs_module
def test_a_forked_child_runs_what_its_parent_ran() -> None:
    # threads do not survive a fork: a child that waits for its parent's would hang
    code = CALL + (
        "import os\n"
        "want = run()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if run() == want else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), run() == want)\n"
    )
    done = fresh(code)
    assert done.returncode == 0 and done.stdout == "0 True\n", done.stderr


@needs_module
def test_calls_from_several_threads_do_not_mix() -> None:
    # kernels run without the interpreter's lock, their scratch is a thread's own
    weights = [torch.arange(900 * 32).remainder(53 + i).float().view(900, 32) for i in range(4)]
    heads = [pack_lm_head(weight, format="int8") for weight in weights]

    def run(i: int) -> torch.Tensor:
        with torch.no_grad():
            key: torch.Tensor = lm_head_select(weights[i][5:9].contiguous(), heads[i])[0]
            return key

    with use_backend("cpu", "lm_head_select"):
        wanted = [run(i) for i in range(4)]
        wrong: list[int] = []

        def work(i: int) -> None:
            wrong.extend(i for _ in range(40) if not torch.equal(run(i), wanted[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_heads_fusions_and_results_go_to_another_process() -> None:
    weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    head = pack_lm_head(weight, format="int8")
    fusion = Fusion(mode="residual", weight=torch.ones(16, 32) / 32, norm_e=torch.ones(16), norm_m=torch.ones(16))
    head_again, fusion_again = pickle.loads(pickle.dumps((head, fusion)))
    ids = torch.tensor([1, 2])

    def prepare(head: object, fusion: Fusion) -> tuple[torch.Tensor, ...]:
        return tuple(fused_t1_prep(ids, weight[:2], head, weight, fusion, mask_id=49))  # type: ignore[arg-type]

    for a, b in zip(prepare(head, fusion), prepare(head_again, fusion_again), strict=True):
        assert torch.equal(a, b)
    result = accept_prefix(ids[None], ids[None], stop_ids=ids[:0], budget=ids[:1])
    again = pickle.loads(pickle.dumps(result))
    assert type(again) is type(result) and all(map(torch.equal, again, result))
