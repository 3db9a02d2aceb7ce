"""Registers, spills and load widths of real kernels, compiled without a GPU; every gate catches its fault."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels", allow_module_level=True)

from dmtp_kernels.ops._variant import Variant
from profiling import machine_code, resources

GEMV = Variant(
    name="row_sum_kernel/wide",
    kernel="tests.testing.kernels:row_sum_kernel",
    signature={"w": "*bf16", "h": "*bf16", "y": "*fp32", "rows": "i32", "stride": "i32"},
    constants={"H": 2048, "ROWS": 4, "BLOCK": 256},
    aligned=("w", "h", "y", "stride"),
    num_warps=4,
    streams=("w",),
)


@pytest.mark.parametrize("arch", resources.ARCHITECTURES)
def test_a_streaming_kernel_compiles_clean_for_every_architecture(arch: int) -> None:
    usage = resources.usage(GEMV, arch)
    assert usage.faults() == [] and usage.spills == 0 and usage.load_bits == 128
    assert 16 <= usage.registers <= 128 and usage.arch == arch and usage.backend == "triton"
    # a second look comes from the cache and says the same
    assert resources.usage(GEMV, arch) == usage


def test_kernels_are_compiled_as_on_the_gpu_that_they_ask_for() -> None:
    # tl.target_info knows the machine's driver alone: branches for newer GPUs would not be compiled where there is none
    asks = Variant("asks", "tests.testing.kernels:capability_kernel", {"y": "*i32"}, {}, (), num_warps=1)
    codes = [resources.compile_triton(asks, arch)[0] for arch in resources.ARCHITECTURES]
    assert ["89;" in code for code in codes] == [False, True, True], codes


def test_four_byte_loads_are_caught() -> None:
    # rows that are not known to start at 16 bytes are read an element at a time
    narrow = replace(GEMV, name="narrow", aligned=("w", "h", "y"))
    usage = resources.usage(narrow, 90)
    assert usage.load_bits in (16, 32)
    assert usage.faults() == [f"w is loaded {usage.load_bits} bits at a time"]


def test_a_narrow_load_of_what_is_no_stream_is_fine() -> None:
    usage = resources.usage(replace(GEMV, aligned=("w", "stride")), 90)
    assert usage.load_bits == 128 and usage.faults() == []
    assert resources.usage(replace(GEMV, aligned=(), streams=()), 90).load_bits is None


def test_spills_are_caught() -> None:
    usage = resources.usage(replace(GEMV, constants={**GEMV.constants, "ROWS": 128}, num_warps=1), 90)
    assert usage.spills > 0 and f"{usage.spills} bytes spilled" in usage.faults()


def test_more_shared_memory_than_there_is_is_caught() -> None:
    usage = resources.usage(GEMV, 80)
    assert replace(usage, shared=164 << 10).faults() == ["more than 166,912 bytes of shared memory"]
    assert replace(usage, shared=164 << 10, arch=90).faults() == []


def test_a_stream_nobody_reads_is_a_fault() -> None:
    assert resources.usage(replace(GEMV, streams=("w", "y")), 90).faults() == ["no load of y found"]


def test_a_variant_must_name_every_argument() -> None:
    with pytest.raises(ValueError, match=r"arguments differ from the kernel's: \['BLOCK'\]"):
        resources.compile_triton(replace(GEMV, constants={"H": 2048, "ROWS": 4}), 90)


def test_report_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    good = resources.usage(GEMV, 90)
    assert resources.report([good], as_json=True) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    wanted = {"kernel", "backend", "arch", "registers", "spills", "shared", "load_bits"}
    assert wanted <= set(entry) and entry["load_bits"] == 128
    assert resources.report([good, replace(good, spills=8)], as_json=False) == 1
    printed = capsys.readouterr()
    assert "row_sum_kernel/wide" in printed.out and "8 bytes spilled" in printed.err
    assert resources.report([good, "x, sm_90: CompilationError: no"], as_json=False) == 1
    assert "CompilationError" in capsys.readouterr().err


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resources.main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_what_does_not_compile_is_a_message_and_processes_keep_order() -> None:
    done = resources.measure(
        [("tests.profiling.planted_config", "good", 90), ("tests.profiling.planted_config", "bad", 90)]
    )
    assert isinstance(done[0], resources.Usage) and done[0].load_bits == 128
    assert isinstance(done[1], str) and done[1].startswith("bad, sm_90: ")


PTX = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0, .param .u64 kernel_param_1, .param .u32 kernel_param_2
)
{
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];   // ld.global.b8 in a comment
    ld.param.b64 %rd2, [kernel_param_1];
    ld.param.b32 %r1, [kernel_param_2];
    mul.wide.s32 %rd3, %r1, 2;
    add.s64 %rd4, %rd1, %rd3;
    @%p1 ld.global.b32 { %r9 }, [ %rd4 + 0 ];
    mov.b64 %rd5, %rd4;
$L__BB0_1:
    @%p2 ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd5 + 0 ], %rd8;
    ld.global.nc.v2.b64 { %rd7, %rd8 }, [ %rd5 + 16 ];
    ld.global.b16 { %rs1 }, [ %rd5 + 4096 ];
    cp.async.ca.shared.global [ %r6 + 0 ], [ %rd2 + 0 ], 0x8, %r7;
    { .reg .pred p; setp.ne.b32 p, %r1, 0; @p ld.global.b32 { %r8 }, [ %rd7 + 0 ]; }
    add.s64 %rd5, %rd5, 4096;
    @%p3 bra $L__BB0_1;
    ret;
}
"""


def test_loads_are_traced_to_their_parameter() -> None:
    loads = machine_code.global_loads(PTX)
    assert [(sorted(x.parameters & {0, 1}), x.bits, x.looped) for x in loads] == [
        ([0], 32, False),
        ([0], 128, True),
        ([0], 128, True),
        ([0], 16, True),
        ([1], 64, True),
        ([], 32, True),  # through a pointer that was loaded
    ]


def test_a_width_counts_by_what_it_carries() -> None:
    loads = machine_code.global_loads(PTX)
    shares = machine_code.widths(loads, 0)
    assert shares == {16: 16 / 272, 128: 256 / 272}  # the load before the loop is left out
    assert machine_code.narrowest(shares) == 128
    assert machine_code.narrowest({16: 0.2, 128: 0.8}) == 16
    assert machine_code.narrowest(machine_code.widths(loads, 1)) == 64
    assert machine_code.narrowest(machine_code.widths(loads, 7)) == 0


def test_ptxas_output_without_figures_is_an_error() -> None:
    log = "ptxas info    : 16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\nUsed 40 registers"
    assert machine_code.ptxas_usage(log) == (40, 32)
    with pytest.raises(ValueError, match="no resource usage"):
        machine_code.ptxas_usage("")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    # kept over the tests of this file, away from the user's
    directory = tmp_path_factory.getbasetemp() / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
