"""`profiling.traffic --backend cuda`: its counts equal counts by hand, and block attention records all it accesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dmtp_kernels.ops import _workspace
from dmtp_kernels.ops._spec import Case, CudaTraffic, Traffic
from dmtp_kernels.ops.block_attention.spec import SPEC, TRAFFIC
from profiling import cuda_traffic, traffic
from tests.cuda_host import host
from tests.cuda_host.attention_cases import E4M3, attention_case

OP = "block_attention"
KEYWORDS = [a.name for a in torch.ops.dmtp.block_attention.default._schema.arguments][5:]
PARTIAL: tuple[Any, ...] = attention_case((4200, 70), 2, (2, 1), 64, 64)
"""One request of two chunks, whose sums go through memory."""
CASES = {case.name: case.make for case in SPEC.cases if case.name != "empty"} | {
    "partial_sums": lambda generator: PARTIAL,
    "cluster": lambda generator: attention_case((1100,), 8, (2, 1), 256, 64, dense=8, window=1000),
    "fp8": lambda generator: attention_case((600,), 8, (2, 1), 128, 64, cache=(E4M3, E4M3), scales=(1, 1), causal=True),
    "bytes": lambda generator: attention_case((90,), 3, (2, 1), 33, 1, sink=torch.float32, soft_cap=3.0),
}


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    _workspace._buffers.clear()
    with host.accepted(OP):
        yield


def recorded(*accesses: tuple[int, int, int, int, int]) -> cuda_traffic.Accesses:
    """Rows of address, bytes, block, launch, store."""
    return np.array(list(accesses), host.ACCESS)


@pytest.mark.parametrize(
    ("accesses", "large", "cached"),
    [
        ([], 0, 0),
        ([(64, 16, 0, 0, 0), (80, 16, 0, 0, 0)], 32, 32),
        # four bytes are a sector; the same ones again are no new sector
        ([(64, 4, 0, 0, 0)] * 5, 32, 32),
        ([(64, 4, 0, 0, 0)] * 9, 36, 32),
        # across the end of a sector
        ([(90, 8, 0, 0, 0)], 64, 64),
        # a sector that two blocks touch
        ([(64, 16, 0, 0, 0), (80, 16, 1, 0, 0)], 64, 32),
        # a second pass of one block, and a block that touches little
        ([(64, 16, 3, 0, 0), (80, 16, 3, 0, 0)] * 3 + [(1 << 40, 2, 7, 0, 0)], 128, 64),
    ],
)
def test_what_reaches_memory(accesses: list[tuple[int, int, int, int, int]], large: int, cached: int) -> None:
    assert cuda_traffic.reached(recorded(*accesses), False) == large
    assert cuda_traffic.reached(recorded(*accesses), True) == cached


def test_accesses_belong_to_the_tensor_that_holds_them() -> None:
    a, b = torch.zeros(8, 64)[:, :32], torch.zeros(16, dtype=torch.int32)
    at, other = a.data_ptr(), b.data_ptr()
    rows = recorded((at, 16, 0, 0, 0), (at + 128, 4, 0, 0, 0), (other + 60, 4, 0, 0, 0), (other + 60, 8, 0, 0, 0))
    assert cuda_traffic.owners(rows, {"a": a, "b": b}).tolist() == [0, -1, 1, -1]


def small(make: Any, kernels: Any, **options: Any) -> Traffic:
    return Traffic(OP, Case("small", "", make), {}, cuda=CudaTraffic(kernels, **options))


def test_a_call_is_counted_byte_for_byte() -> None:
    lengths, slots, heads, dim = (40, 0, 90), 2, (4, 2), 64

    def case(scaled: tuple[str, ...]) -> Traffic:
        kernels = {"block_attention_kernel": SPEC.floor_bytes}
        made = small(lambda _: attention_case(lengths, slots, heads, dim, dense=slots), kernels, scaled=scaled)
        return replace(made, scale=1e9)

    # of the large tensors each access counts, of the others each sector once
    for one in (case(()), case(("k_cache", "v_cache", "block_k", "q", "out"))):
        (row,) = cuda_traffic.measure(one, traffic.run_op(OP, "cuda"))
        keys = sum(lengths) * heads[1] * dim * 2
        block = 3 * slots * heads[1] * dim * 2
        query = 3 * slots * heads[0] * dim * 2
        wanted = {"k_cache": keys, "v_cache": keys, "block_k": block, "block_v": block, "q": query, "out": query}
        assert {n: row.tensors[n] for n in wanted} == wanted
        assert set(row.tensors) == {*wanted, "page_table", "ctx_len", "lse"} and row.backend == "cuda"
        # ids, lengths and logarithms are in whole sectors
        assert row.floor is not None and row.floor <= row.bytes <= row.floor + 400


def test_what_the_list_lacks_is_refused() -> None:
    def make(generator: torch.Generator) -> Any:
        return PARTIAL

    run = traffic.run_op(OP, "cuda")
    both = dict.fromkeys(("block_attention_kernel", "block_attention_combine_kernel"))
    with pytest.raises(ValueError, match="2 launches, its Traffic lists"):
        cuda_traffic.measure(small(make, {"block_attention_kernel": None}), run)
    # the partial sums are in no tensor of the call
    with pytest.raises(ValueError, match="accesses to no tensor of the call"):
        cuda_traffic.measure(small(make, both), run)
    with pytest.raises(ValueError, match="has no CUDA kernels that record all"):
        cuda_traffic.measure(replace(small(make, both), cuda=None), run)
    call = small(make, both)
    tensor = torch.zeros(4)
    with pytest.raises(ValueError, match="block_attention_combine_kernel recorded no access"):
        cuda_traffic.rows_of(call, (), {"q": tensor}, recorded((tensor.data_ptr(), 4, 0, 0, 0)))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def mark(memory: torch.Tensor, accesses: Any) -> torch.Tensor:
    """Which bytes of `memory` the accesses cover."""
    seen = torch.zeros(len(memory), dtype=torch.bool)
    at = torch.from_numpy(accesses["address"].astype(np.int64)) - memory.data_ptr()
    size = torch.from_numpy(accesses["bytes"].astype(np.int64))
    own = (at >= 0) & (at < len(memory))
    for i in range(16):
        seen[(at + i)[own & (size > i)]] = True
    return seen


def attend(inputs: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    """A call that begins on other garbage each time."""
    for buffer in _workspace._buffers.values():
        buffer.fill_(0xFF)
    torch.ops.dmtp.block_attention_out(
        *inputs[:5], **dict(zip(KEYWORDS, inputs[5:], strict=True)), out=outputs[0], lse=outputs[1]
    )


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(flat(x), flat(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_no_load_and_no_store_is_unrecorded(name: str) -> None:
    """Poison shows nowhere where no load was recorded, and in each tensor where some were."""
    inputs = CASES[name](torch.Generator().manual_seed(3))
    if name == "partial_sums":
        inputs = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in inputs)
    given = dict(zip(("q", "k", "v", "table", "ctx", *KEYWORDS), inputs, strict=True))
    tensors = {n: t for n, t in given.items() if isinstance(t, torch.Tensor)}
    outputs = torch.empty(inputs[0].shape, dtype=inputs[0].dtype), torch.empty(inputs[0].shape[:3])
    for output in outputs:
        flat(output).fill_(0xA5)
    with host.emulated(OP):
        host.seed(0)
        with host.recorded() as read:
            attend(inputs, outputs)
        assert host.launches() == (2 if name == "partial_sums" else 1)
        accesses = read()
        loads, stores = accesses[accesses["store"] == 0], accesses[accesses["store"] == 1]
        assert all(mark(flat(output), stores).all() for output in outputs)
        wanted = [output.clone() for output in outputs]
        for tensor in tensors.values():
            flat(tensor)[~mark(flat(tensor), loads)] = 0xFF
        attend(inputs, outputs)
        assert same(outputs, wanted)
        for label, tensor in tensors.items():
            before = flat(tensor).clone()
            flat(tensor).fill_(0xFF)
            attend(inputs, outputs)
            assert not same(outputs, wanted), label
            flat(tensor).copy_(before)


def test_every_case_of_the_command_counts_the_cuda_kernels() -> None:
    assert all(case.cuda is not None and case.cuda.limit <= 1.05 for case in TRAFFIC)
    # one request: no partial sums but in the cluster
    (alone,) = (case for case in TRAFFIC if case.case.name == "mtp_4k_alone")
    rows = cuda_traffic.measure(alone, traffic.run_op(OP, "cuda"))
    assert [row.kernel for row in rows] == ["block_attention_kernel", "block_attention_combine_kernel"]
    assert all(row.within and row.ratio is not None and row.ratio >= 1.0 for row in rows)
    assert "sums" not in rows[0].tensors and traffic.report(rows, as_json=False) == 0


def test_other_ops_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        traffic.main(["--op", "commit_kv", "--backend", "cuda"])
    assert "--op: is commit_kv, must be an op whose CUDA kernels record all they access: block_attention" in (
        capsys.readouterr().err
    )
