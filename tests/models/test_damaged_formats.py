"""Damaged and hostile checkpoints: one line that names the file, never a crash, a hang, a default or a pickle."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from dmtp_kernels.models.checkpoint import CheckpointError
from tests.models.format_cases import (
    READERS,
    each_kind,
    edit_tensors,
    refused,
    shard,
    tensors_of,
    write,
    write_index,
)


@each_kind
def test_every_tensor_missing_or_misshapen_names_itself(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    path = tmp_path / "model.safetensors"
    kept, tensors = path.read_bytes(), tensors_of(path)
    for name, tensor in tensors.items():
        known = name.removeprefix("model.")
        edit_tensors(tmp_path, lambda t, name=name: t.pop(name))  # type: ignore[misc]
        refused(tmp_path, kind, known, "missing", str(list(tensor.shape)))
        path.write_bytes(kept)
        wrong = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
        edit_tensors(tmp_path, lambda t, name=name, wrong=wrong: t.update({name: wrong}))  # type: ignore[misc]
        refused(tmp_path, kind, str(path), name, str(list(wrong.shape)), str(list(tensor.shape)))
        path.write_bytes(kept)
    READERS[kind](tmp_path)


@each_kind
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8])
def test_weights_of_another_dtype(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    write(tmp_path, kind)
    name = random.Random(kind).choice(sorted(tensors_of(tmp_path / "model.safetensors")))
    edit_tensors(tmp_path, lambda t: t.update({name: t[name].to(dtype)}))
    refused(tmp_path, kind, name, "expected BF16, F16, F32, F64")


@each_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, kind: str, value: float) -> None:
    write(tmp_path, kind)
    name = random.Random(kind).choice(sorted(tensors_of(tmp_path / "model.safetensors")))
    edit_tensors(tmp_path, lambda t: t[name].view(-1)[-1].fill_(value))
    refused(tmp_path, kind, name, "not finite")


@each_kind
def test_a_tensor_too_many(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    extra = "mtp.layers.1.x" if kind.startswith("mtp") else "layers.9.x"
    edit_tensors(tmp_path, lambda t: t.update({extra: torch.zeros(1)}))
    refused(tmp_path, kind, extra, "not part of the configuration")


@each_kind
def test_cut_anywhere(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    path = tmp_path / "model.safetensors"
    whole, draw = path.read_bytes(), random.Random(kind)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for kept in [0, 1, 7, 8, 9, header - 1, header, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(30))]:
        path.write_bytes(whole[:kept])
        refused(tmp_path, kind, str(path))


@each_kind
def test_flipped_bytes_are_refused_or_change_a_value_only(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    path = tmp_path / "model.safetensors"
    whole, draw = path.read_bytes(), random.Random(kind)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(header)] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            READERS[kind](tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            # metadata and the order of names carry no meaning
            assert {n.removeprefix("model.") for n in tensors_of(path)} == {
                n.removeprefix("model.") for n in _names(whole)
            }


def _names(raw: bytes) -> set[str]:
    size = struct.unpack("<Q", raw[:8])[0]
    return set(json.loads(raw[8 : 8 + size])) - {"__metadata__"}


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**63 - 1, 2**32, 100_000_001, 10**8, 0, 1])
def test_hostile_header_sizes(tmp_path: Path, size: int) -> None:
    write(tmp_path, "dflash")
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", size) + raw[8:])
    tracemalloc.start()
    refused(tmp_path, "dflash", str(path))
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def _header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def _entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "raw",
    [
        _header(x=_entry([4], 0, 8)) + bytes(8),
        _header(x=_entry([2], 0, 8)) + bytes(4),
        _header(x=_entry([2], 8, 0)) + bytes(8),
        _header(x=_entry([2], 0, 8), y=_entry([2], 0, 8)) + bytes(8),
        _header(x=_entry([2], 0, 8), y=_entry([2], 4, 12)) + bytes(12),
        _header(x=_entry([2**62, 8], 0, 8)) + bytes(8),
        _header(x=_entry([2**63, 2**63], 0, 8)) + bytes(8),
        _header(x=_entry([-1], 0, 8)) + bytes(8),
        _header(x=_entry([2], 0, 2**63)) + bytes(8),
        _header(x=_entry([2], 0, 8, "F31")) + bytes(8),
        _header(x={"dtype": "F32"}) + bytes(8),
        _header(x=[1, 2]),
        _header(x=_entry([2], 0, 8)) + bytes(4096),
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
        struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
        b"PK\x03\x04" + bytes(200),
        pickle.dumps({"fc.weight": 1}),
    ],
)
def test_headers_that_lie(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path, "dflash")
    (tmp_path / "model.safetensors").write_bytes(raw)
    refused(tmp_path, "dflash", "model.safetensors", "not a readable safetensors file")


class _Exploding:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["DMTP_TEST_EXPLODED"],)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exploded = tmp_path / "exploded"
    monkeypatch.setenv("DMTP_TEST_EXPLODED", str(exploded))
    directory = write(tmp_path / "checkpoint", "dflash")
    (directory / name).write_bytes(pickle.dumps(_Exploding()))
    READERS["dflash"](directory)  # beside safetensors it is nobody's business
    places = shard(directory)
    index = directory / "model.safetensors.index.json"
    write_index(directory, dict.fromkeys(places, name))
    refused(directory, "dflash", name, "not the name of a .safetensors file")
    index.unlink()
    refused(directory, "dflash", name, "pickle")
    with pytest.raises(CheckpointError, match="is a pickle"):
        READERS["dflash"](directory / name)
    assert not exploded.exists()
    # the file would have done it
    pickle.loads((directory / name).read_bytes())
    assert exploded.is_dir()


@each_kind
def test_an_index_and_shards_that_disagree(tmp_path: Path, kind: str) -> None:
    write(tmp_path, kind)
    whole = (tmp_path / "model.safetensors").read_bytes()
    places = shard(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    first, second = sorted(places)[:2]
    file = places[first]
    assert file != places[second]
    raw = json.dumps(places)

    def listed(text: str) -> None:
        index.write_text('{"weight_map": ' + text + "}")

    listed(raw[:-1] + f', "{first}": "{places[second]}"}}')
    refused(tmp_path, kind, first, "twice")
    write_index(tmp_path, places | {first: places[second]})
    refused(tmp_path, kind, first, file, places[second])
    write_index(tmp_path, {name: place for name, place in places.items() if name != first})
    refused(tmp_path, kind, first, file)
    write_index(tmp_path, places | {"invented.weight": file})
    refused(tmp_path, kind, "invented.weight", "missing", file)
    for name in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", "x\0.safetensors", ""):
        write_index(tmp_path, places | {first: name})
        refused(tmp_path, kind, "not the name of a .safetensors file")
    write_index(tmp_path, places | {first: "absent.safetensors"})
    refused(tmp_path, kind, "absent.safetensors", "no such file")
    for text in ("[]", "{}", "null", "3", '{"a": 3}', '{"a": ["x"]}'):
        listed(text)
        refused(tmp_path, kind, "model.safetensors.index.json")
    index.write_text("[" * 100_000)
    refused(tmp_path, kind, "nested too deep")
    # the same tensor in two shards
    write_index(tmp_path, places)
    (tmp_path / places[second]).write_bytes((tmp_path / file).read_bytes())
    refused(tmp_path, kind, places[second])
    (tmp_path / "model.safetensors").write_bytes(whole)
    refused(tmp_path, kind, "must hold one of them")


def test_a_tensor_under_two_names(tmp_path: Path) -> None:
    write(tmp_path, "dflash")
    edit_tensors(tmp_path, lambda t: t.update({"model.fc.weight": t["fc.weight"] + 1}))
    refused(tmp_path, "dflash", "fc.weight is there twice")


@pytest.mark.parametrize("kind", ["dflash", "qwen3"])
def test_places_without_a_checkpoint(tmp_path: Path, kind: str) -> None:
    refused(tmp_path / "nowhere", kind, "no such directory")
    refused(tmp_path, kind, "holds neither model.safetensors nor model.safetensors.index.json")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", kind, "is not a directory")
    write(tmp_path, kind)
    (tmp_path / "config.json").unlink()
    refused(tmp_path, kind, "config.json", "no such file")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, kind, "config.json", "is not a file")
