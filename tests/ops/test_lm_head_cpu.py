"""The compiled head kernels alone: memory they may not touch, offsets beyond 32 bits, threads, what goes elsewhere."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dmtp_kernels import backends, use_backend
from dmtp_kernels.ops.lm_head import LMHead, lm_head_rescore, lm_head_screen, lm_head_select, pack_lm_head
from tests.ops.conftest import kernel_backends
from tests.ops.lm_head_cases import FORMAT_NAMES, random
from tests.ops.lm_head_oracle import best_keys
from tests.ops.test_lm_head_agreement import SCREENS, packed

OPS = ("lm_head_select", "lm_head_screen", "lm_head_rescore")
COMPILED = [b for b in kernel_backends(*OPS, every_capability=True) if b.startswith("cpu-")]
KERNEL_FORMATS = [s for s in SCREENS if s != "deflated"]


@pytest.fixture(params=[b.removeprefix("cpu-") for b in COMPILED], autouse=True)
def capability(request: pytest.FixtureRequest) -> Iterator[str]:
    compiled = backends.compiled()
    before = compiled.capability()
    with use_backend("cpu", *OPS):
        compiled.set_capability(request.param)
        yield request.param
        compiled.set_capability(before)


class GuardedMemory:
    """Copies of tensors whose last byte is the last one that may be read."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._maps: list[tuple[mmap.mmap, int]] = []

    def copy(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        size = tensor.numel() * tensor.element_size()
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, room + mmap.PAGESIZE)
        out = torch.frombuffer(memory, dtype=torch.uint8)[room - size : room].view(tensor.dtype).view(tensor.shape)
        out.copy_(tensor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._protect(address + room, 0)
        self._maps.append((memory, address + room))
        return out

    def release(self) -> None:
        for _, address in self._maps:
            self._protect(address, mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, address: int, access: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


@pytest.fixture
def guarded() -> Iterator[GuardedMemory]:
    memory = GuardedMemory()
    yield memory
    memory.release()


@pytest.mark.parametrize("screen", KERNEL_FORMATS)
@pytest.mark.parametrize(("rows", "width", "n"), [(37, 70, 1), (33, 129, 3), (48, 64, 9), (5, 1, 20), (17, 300, 6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_behind_a_tensor_is_read(
    screen: str, rows: int, width: int, n: int, dtype: torch.dtype, guarded: GuardedMemory
) -> None:
    weight, hidden = random(rows, width, dtype=dtype), random(n, width, seed=1, dtype=dtype)
    head = packed(weight, screen, capacity=4, id_map=torch.arange(rows), id_map_mode="absolute")
    names = ("weight", "codes", "scale", "bound", "down", "up", "id_map")
    copies: dict[str, Any] = {name: guarded.copy(getattr(head, name)) for name in names}
    inside = dataclasses.replace(head, **copies)
    states, ids, count = guarded.copy(hidden), torch.arange(rows).repeat(n, 1), torch.full((n,), rows)
    assert states is not None
    want = best_keys(hidden, weight, 2)
    assert torch.equal(lm_head_select(states, inside, 2)[0], want)
    for got, plain in zip(lm_head_screen(states, inside), lm_head_screen(hidden, head), strict=True):
        assert torch.equal(got, plain)
    assert torch.equal(lm_head_rescore(states, inside.weight, ids, count, 2), want)


@pytest.mark.parametrize("screen", KERNEL_FORMATS)
def test_screens_reach_rows_beyond_32_bits(screen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # megablocks#186 for every format: only the pages of three rows are ever touched
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    weight = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 64).bfloat16().contiguous()
    factors = (torch.ones(1, 64), torch.tensor([[1.0], [2.0], [3.0]]))
    name = "low_rank" if screen == "low_rank_int8" else screen
    options: dict[str, Any] = {"fallback": "none"} if name in ("low_rank", "int4_g32") else {}
    if name == "low_rank":
        options |= {"factors": factors, "up_format": "same" if name == screen else "int8"}
    head = pack_lm_head(weight, format=name, capacity=1, **options)
    field = "up" if name == "low_rank" else "weight" if name == "dense" else "codes"
    near = getattr(head, field)
    size = near.element_size()
    far = torch.empty((2**32 + 4096) // size, dtype=near.dtype).as_strided(near.shape, (2**31 // size, 1))
    far.copy_(near)
    hidden = torch.ones(1, 64, dtype=torch.bfloat16)
    moved: dict[str, Any] = {field: far}
    key, _ = lm_head_select(hidden, dataclasses.replace(head, **moved))
    assert torch.equal(key, best_keys(hidden, weight, 1))


@pytest.mark.parametrize("screen", KERNEL_FORMATS)
@pytest.mark.parametrize("n", [1, 9])
def test_threads_change_nothing(screen: str, n: int) -> None:
    # large enough for a thread each, and every row survives for the last state
    weight, hidden = random(5003, 256), random(n, 256, seed=1)
    hidden[-1] = 0.0
    head = packed(weight, screen, capacity=40, **({"fallback": "none"} if "_g32" in screen or "low" in screen else {}))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((*lm_head_select(hidden, head, 3), *lm_head_screen(hidden, head, 5003, k=3)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    if head.certified:
        assert torch.equal(results[0][0], best_keys(hidden, weight, 3)) and int(results[0][3][-1]) == 5003


def test_scratch_of_a_large_call_serves_small_ones() -> None:
    for n in (1, 70, 3, 192, 1):
        for screen in ("int8", "int6_g64", "dense"):
            weight, hidden = random(n + 200, 90), random(n, 90, seed=n)
            assert torch.equal(lm_head_select(hidden, packed(weight, screen))[0], best_keys(hidden, weight, 1))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_float64_and_deflated_heads_are_the_references(name: str) -> None:
    weight, hidden = random(60, 40, dtype=torch.float64), random(3, 40, seed=1, dtype=torch.float64)
    options: dict[str, Any] = {"calibration": random(32, 40), "rank": 3} if name == "deflated" else {}
    if name == "low_rank":
        options = {"factors": (random(3, 40), random(60, 3))}
    head = pack_lm_head(weight, format=name, **options)
    compiled = lm_head_select(hidden, head, 2)
    with use_backend("reference", *OPS):
        assert all(torch.equal(a, b) for a, b in zip(compiled, lm_head_select(hidden, head, 2), strict=True))
    if name == "deflated":
        key, status = torch.empty(3, 1, dtype=torch.int64), torch.empty(3, dtype=torch.int32)
        assert not backends.compiled().lm_head_select(hidden.float(), *_single(head).args(), 1, "float32", key, status)


def _single(head: LMHead) -> LMHead:
    return dataclasses.replace(head, weight=head.weight.float(), up=None if head.up is None else head.up.float())
