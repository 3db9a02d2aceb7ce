"""Parts that a drafter may have beyond DFlash: their configurations, their file, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dmtp_kernels.models.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from dmtp_kernels.models.config import PARTS, ConvConfig, MarkovConfig, SelectorConfig
from dmtp_kernels.models.dflash2 import BlockConvolution
from dmtp_kernels.models.drafter import Drafter
from dmtp_kernels.testing.models import tiny_checkpoint

HEADED = ("dflash2", "dspark", "domino")


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    config = json.loads(metadata["config"])
    edit(config)
    save_file(tensors, path, metadata={**metadata, "config": json.dumps(config)})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    trio = tiny_checkpoint(3)
    trio.drafters = {name: trio.drafters[name] for name in HEADED}
    trio.fusions = {}
    return save_checkpoint(
        tmp_path_factory.mktemp("parts") / "trio.safetensors", trio, int8_drafters=False
    ).read_bytes()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "groups that do not divide": (lambda d: d["dflash2"]["conv"].update(group=5), "ConvConfig.group is 5, must divide"),
    "no taps": (lambda d: d["dflash2"]["conv"].update(taps=0), "ConvConfig.taps is 0"),
    "two heads": (lambda d: d["dflash2"].update(markov=d["dspark"]["markov"]), "selector and markov, must have one"),
    "a negative softcap": (lambda d: d["dflash2"]["selector"].update(softcap=-1.0), "softcap is -1.0"),
    "another vocabulary": (
        lambda d: d["dspark"]["markov"].update(vocab_size=21),
        "markov has 21 tokens, the target has 20",
    ),
    "an unknown size": (lambda d: d["domino"]["recurrent"].update(depth=2), "depth"),
    "a rank that the file has not": (lambda d: d["domino"]["recurrent"].update(rank=7), "embed_proj.0.weight is"),
    "a part as text": (lambda d: d["dspark"].update(markov="yes"), "cannot be read"),
    "a part left out": (lambda d: d["domino"].update(recurrent=None), "is not part of the configuration"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_configuration_that_cannot_be_is_one_line(tmp_path: Path, saved: bytes, change: str) -> None:
    path = tmp_path / "trio.safetensors"
    path.write_bytes(saved)
    assert list(load_checkpoint(path).drafters) == list(HEADED)
    edit, message = CHANGES[change]
    rewrite(path, lambda config: edit(config["drafters"]))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_from_before_the_parts_is_read(tmp_path: Path) -> None:
    trio = tiny_checkpoint(3)
    trio.drafters, trio.fusions = {"dflash": trio.drafters["dflash"]}, {}
    path = save_checkpoint(tmp_path / "trio.safetensors", trio)
    rewrite(path, lambda config: [config["drafters"]["dflash"].pop(part) for part in PARTS])
    assert load_checkpoint(path).drafters["dflash"].config == trio.drafters["dflash"].config


def test_parts_of_a_configuration() -> None:
    plain = tiny_checkpoint(0).drafters["dflash"].config
    both = replace(plain, conv=ConvConfig(2, 4), selector=SelectorConfig(20, 3, 4))
    assert (plain.parts, plain.heads) == ((), ())
    assert (both.parts, both.heads) == (("conv", "selector"), ("selector",))
    assert not hasattr(Drafter(replace(plain, markov=MarkovConfig(20, 3, confidence=False))), "confidence_head")
    with pytest.raises(ValueError, match=r"DrafterConfig\.conv is \(2, 4\), must be a ConvConfig"):
        replace(plain, conv=(2, 4))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize(("taps", "group"), [(1, 1), (2, 4), (3, 8), (5, 2)])
def test_convolution_is_the_sum_over_earlier_slots(taps: int, group: int) -> None:
    width, slots = 8, 4
    conv = BlockConvolution(width, ConvConfig(taps, group)).double()
    generator = torch.Generator().manual_seed(taps)
    for parameter in conv.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x, out = (torch.randn(2, 3, slots, width, generator=generator).double() for _ in range(2))
    before, dynamic = conv.before(x)
    found = {0: before, 1: conv.after(out, dynamic)}
    kernels = conv.kernel_projection(x).view(2, 3, slots, 2, taps, width // group)
    for side, source in ((0, x), (1, out)):
        want = torch.zeros_like(x)
        for slot in range(slots):
            for tap in range(min(taps, slot + 1)):
                for channel in range(width):
                    weight = conv.base_kernel[side, tap, channel] + kernels[:, :, slot, side, tap, channel // group]
                    want[:, :, slot, channel] += weight * source[:, :, slot - tap, channel]
        torch.testing.assert_close(found[side], want)


@torch.no_grad()
def test_a_fresh_convolution_is_the_identity() -> None:
    conv, x = BlockConvolution(8, ConvConfig(3, 4)), torch.randn(2, 5, 8)
    before, dynamic = conv.before(x)
    assert torch.equal(before, x) and torch.equal(conv.after(x, dynamic), x)
