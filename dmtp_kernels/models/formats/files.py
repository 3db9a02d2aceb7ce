"""The tensors of a checkpoint directory, by name: `model.safetensors`, or shards and their index.

Nothing but safetensors is opened. Tensors are read one at a time, when they are asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from dmtp_kernels.models.checkpoint import CheckpointError
from dmtp_kernels.models.formats.fields import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FLOATS = {"F64", "F32", "BF16", "F16"}
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq")
_MOST_SHARDS = 4096
_PIECE = 1 << 20
M = TypeVar("M", bound=nn.Module)
Take = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]


def _as_stored(name: str) -> str:
    return name


class TensorFiles:
    """An open checkpoint directory, for use in a `with` statement.

    `rename` maps a stored name to the name that `take` is asked for. Raises CheckpointError where the directory has no
    safetensors, or the index and its shards disagree.
    """

    def __init__(self, directory: Path, rename: Callable[[str], str] = _as_stored) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._place: dict[str, tuple[Path, Any, str]] = {}
        self._taken: set[str] = set()
        try:
            for path in self._shards():
                self._open(path, rename)
        except OSError as error:  # a name that is too long, a directory that cannot be read
            self._stack.close()
            raise CheckpointError(f"checkpoint {str(directory)[:200]}: {error.strerror or error}") from error
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, renamed."""
        return self._place.keys()

    def fail_missing(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError: the tensor is not there."""
        raise CheckpointError(f"checkpoint {self.directory}: tensor {name} is missing, expected shape {list(shape)}")

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError where a tensor is missing, or of another shape or kind."""
        if name not in self._place:
            self.fail_missing(name, shape)
        path, handle, stored = self._place[name]
        try:
            view = handle.get_slice(stored)
            if tuple(view.get_shape()) != shape:
                raise CheckpointError(
                    f"checkpoint {path}: tensor {stored} is {list(view.get_shape())}, expected {list(shape)}"
                )
            if view.get_dtype() not in _FLOATS:
                raise CheckpointError(
                    f"checkpoint {path}: tensor {stored} is {view.get_dtype()}, expected {', '.join(sorted(_FLOATS))}"
                )
        except SafetensorError as error:
            raise CheckpointError(f"checkpoint {path}: tensor {stored} cannot be read ({error})") from error

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in `dtype`. Raises CheckpointError: missing, of another shape or kind, or not finite."""
        self._taken.add(name)
        self.check(name, shape)
        path, handle, stored = self._place[name]
        try:
            # a copy: the file may change while the model lives
            tensor = torch.empty(shape, dtype=dtype)
            tensor.copy_(handle.get_tensor(stored))
        except SafetensorError as error:
            raise CheckpointError(f"checkpoint {path}: tensor {stored} cannot be read ({error})") from error
        # in pieces: the check's own temporaries are three times what it looks at
        if not all(torch.isfinite(piece).all() for piece in tensor.view(-1).split(_PIECE)):
            raise CheckpointError(f"checkpoint {path}: tensor {stored} holds values that are not finite")
        return tensor

    def build(self, kind: Callable[..., M], *arguments: Any, **options: Any) -> M:
        """A module on the meta device. Raises CheckpointError on sizes that no tensor can have."""
        try:
            with torch.device("meta"):
                return kind(*arguments, **options)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(
                f"checkpoint {self.directory}: its configuration is not a model ({reason})"
            ) from error

    def fill(
        self, module: nn.Module, prefix: str, dtype: torch.dtype, skip: Collection[str] = (), take: Take | None = None
    ) -> None:
        """Load every tensor of a module that lives on the meta device, from `prefix` + its name, in eval mode and
        without gradients; `take` reads one in place of the method of that name."""
        take = take or self.take
        state = {
            name: take(prefix + name, tuple(tensor.shape), dtype)
            for name, tensor in module.state_dict().items()
            if name not in skip
        }
        module.load_state_dict(state, assign=True, strict=not skip)
        module.eval().requires_grad_(False)

    def check_layers(self, prefix: str, count: int) -> None:
        """Fail unless the layers that the configuration counts are there, before a model of as many is built."""
        pattern = re.compile(re.escape(prefix) + r"(\d{1,9})\.")
        found = {int(match[1]) for name in self._place if (match := pattern.match(name))}
        if len(found) < count:
            absent = next(i for i in range(count) if i not in found)
            raise CheckpointError(
                f"checkpoint {self.directory}: tensors {prefix}{absent}.* are missing, the configuration has {count} "
                "layers"
            )

    def finish(self, ignored: Callable[[str], bool] = lambda name: False) -> None:
        """Fail on a tensor that was never asked for, other than those that `ignored` says belong to somebody else."""
        for name in sorted(self._place.keys() - self._taken):
            if not ignored(name) and not _BUFFERS.fullmatch(name):
                path, _, stored = self._place[name]
                raise CheckpointError(f"checkpoint {path}: tensor {stored} is not part of the configuration")

    def _shards(self) -> list[Path]:
        directory = self.directory
        if directory.suffix in _PICKLES:
            raise CheckpointError(
                f"checkpoint {directory}: is a pickle, which is never read; convert it to safetensors"
            )
        if not directory.is_dir():
            raise CheckpointError(
                f"checkpoint {directory}: {'is not a directory' if directory.exists() else 'no such directory'}"
            )
        single, index = directory / SINGLE, directory / INDEX
        if index.exists():
            if single.exists():
                raise CheckpointError(f"checkpoint {directory}: holds {SINGLE} and {INDEX}, must hold one of them")
            return self._indexed(index)
        if single.is_file():
            return [single]
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise CheckpointError(
                f"checkpoint {directory}: has no {SINGLE}; {pickles[0]} is a pickle, which is never read: convert it"
            )
        raise CheckpointError(f"checkpoint {directory}: holds neither {SINGLE} nor {INDEX}")

    def _indexed(self, index: Path) -> list[Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"checkpoint {index}: weight_map must be an object of file names")
        self._listed: dict[str, str] = weight_map
        shards = sorted(set(weight_map.values()))
        if not 1 <= len(shards) <= _MOST_SHARDS:
            raise CheckpointError(f"checkpoint {index}: lists {len(shards)} files, must list 1 to {_MOST_SHARDS}")
        for shard in shards:
            if not shard.endswith(".safetensors") or os.path.basename(shard) != shard or "\0" in shard:
                raise CheckpointError(
                    f"checkpoint {index}: {shard[:80]!r} is not the name of a .safetensors file in this directory"
                )
            if not (self.directory / shard).is_file():
                raise CheckpointError(f"checkpoint {self.directory / shard}: no such file, {INDEX} lists it")
        return [self.directory / shard for shard in shards]

    def _open(self, path: Path, rename: Callable[[str], str]) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
            stored = list(handle.keys())
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path}: not a readable safetensors file ({error})") from error
        except OSError as error:
            raise CheckpointError(f"checkpoint {path}: {error.strerror or error}") from error
        listed = getattr(self, "_listed", None)
        for name in stored:
            if listed is not None and listed.get(name) != path.name:
                raise CheckpointError(f"checkpoint {path}: tensor {name} is here, {INDEX} has it in {listed.get(name)}")
            known = rename(name)
            if known in self._place:
                raise CheckpointError(
                    f"checkpoint {path}: tensor {name} is there twice, also as {self._place[known][2]} in "
                    f"{self._place[known][0].name}"
                )
            self._place[known] = (path, handle, name)
        if listed is not None:
            for name in sorted({n for n, shard in listed.items() if shard == path.name} - set(stored)):
                raise CheckpointError(f"checkpoint {path}: tensor {name} is missing, {INDEX} has it here")


def save_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write `model.safetensors`, whole or not at all. Raises OSError when the disk refuses."""
    path = directory / SINGLE
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as created:
            mode = os.fstat(created.fileno()).st_mode
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.chmod(temporary, mode)  # safetensors writes a file of its own that only its owner reads
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path}: cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)
