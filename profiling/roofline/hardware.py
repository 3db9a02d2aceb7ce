"""GPUs of the estimates: datasheet figures, and what of them is assumed to be reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Datasheet figures of one GPU: bytes/s of memory and of one NVLink direction, dense FLOP/s."""

    name: str
    bandwidth: float
    bf16: float
    fp8: float
    link: float


H100 = Gpu("H100", 3.35e12, 989e12, 1979e12, 450e9)
H200 = Gpu("H200", 4.8e12, 989e12, 1979e12, 450e9)
B200 = Gpu("B200", 7.7e12, 2250e12, 4500e12, 900e9)
GPUS = (H100, H200, B200)


@dataclass(frozen=True)
class Reach:
    """What is assumed to be reached of a datasheet, and fixed costs in seconds.

    A sum-reduction of an engine (one shot over NVLink) costs `reduce_latency + bytes / reduce_rate`; any other
    collective goes through NCCL and costs `nccl_latency` plus the received bytes over `link`'s share of NVLink.
    """

    bandwidth: float = 4.3 / 4.8
    flops: float = 790 / 989
    link: float = 0.8
    launch: float = 1.3e-6
    reduce_latency: float = 6e-6
    reduce_rate: float = 120e9
    nccl_latency: float = 21e-6


REACH = Reach()
ASSUMPTIONS = (
    "GPU figures: NVIDIA datasheets, dense, SXM: H100 3.35 TB/s, 989 TFLOP/s bf16, 1979 fp8; H200 4.8 TB/s, same "
    "rates; HGX B200 7.7 TB/s, 2250 bf16, 4500 fp8; NVLink 450 GB/s a direction, B200 900.",
    "Reached: 90 % of the memory bandwidth and 80 % of the matrix rate, which is what was measured on one H200 (4.3 "
    "TB/s copy, 790 TFLOP/s bf16); the same shares are assumed for H100, B200 and fp8.",
    "A kernel in a CUDA graph costs 1.3 us besides its work (H100, "
    "hazyresearch.stanford.edu/blog/2025-05-27-no-bubbles), the same on all three GPUs; no kernel overlaps the next.",
    "All-reduce over 4 GPUs: 6 us + bytes / 120 GB/s, a line through the one-shot column of the TP 4 table in "
    "vllm-project/vllm PR 24532 (0.5 MB 10 us, 1 MB 14 us, 1.5 MB 19 us), for all three GPUs.",
    "Other collectives by NCCL: 21 us (pynccl at 0.5 MB in the same table) + received bytes over 80 % of one NVLink "
    "direction. A small all-gather took 45-48 us on an H20-class node, so this is the low end.",
    "Host work between graphs, waiting for the slowest rank, and page or sampling preparation on the host: nothing.",
)
