"""Parts of global tensors: the box of a parameter that a rank holds, and reading just that box from a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rlite.errors import CheckpointError
from rlite.files import reading

Box = tuple[slice, ...]
"""one slice with start and stop per axis of a global tensor"""


@dataclass(frozen=True)
class ParameterShard:
    """The block of a parameter that this rank holds. The shard's owner may write into `tensor` in place."""

    tensor: torch.Tensor
    """the local block itself, not a copy"""
    offset: tuple[int, ...]
    """first index of the block in the global tensor, per axis"""
    global_shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The block's slices in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.tensor.shape, strict=True))


def nonfinite_names(shards: Mapping[str, ParameterShard]) -> list[str]:
    """Return the names of shards that hold NaN or infinity."""
    return [name for name, shard in shards.items() if not torch.isfinite(shard.tensor).all()]


class CheckpointReader:
    """Reader of boxes of tensors from a Hugging Face safetensors folder, a single file or indexed.

    Only the requested box is loaded.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        index = self.path / "model.safetensors.index.json"
        if index.exists() or index.is_symlink():
            self._file_of = _weight_map(index)
        elif (self.path / "model.safetensors").exists():
            self._file_of = dict.fromkeys(self._handle("model.safetensors").keys(), "model.safetensors")
        else:
            told = f"{self.path}: expected model.safetensors or model.safetensors.index.json, found neither"
            raise CheckpointError(f"{told}; give the path of a local Hugging Face checkpoint")

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.read(name, tuple(slice(0, 0) for _ in self.shape(name))).dtype

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, on CPU in the checkpoint's dtype; without a box the whole tensor."""
        view = self._slice(name)
        try:
            if not view.get_shape():
                return self._handle(self._file_of[name]).get_tensor(name)
            return view[box if box is not None else (slice(None),)]
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: the tensor {name!r} cannot be read: {error}") from error

    def fingerprint(self) -> str:
        """Return a hash of names, shapes and some values of all tensors, which other weights do not have."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            shape = self.shape(name)
            some = self.read(name, tuple(slice(0, 1) for _ in shape[:-1]) + (slice(0, 16),) * bool(shape))
            digest.update(repr((name, shape, some.flatten().float().tolist())).encode())
        return digest.hexdigest()

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(f"{self.path}: no tensor named {name!r} among its {len(self._file_of)} tensors")
        file = self._file_of[name]
        try:
            return self._handle(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.path / file}: holds no tensor {name!r}: {error}") from error

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                with reading(self.path / file):  # a pipe would be waited for
                    pass
                self._open[file] = safe_open(str(self.path / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / file}: cannot be read: {error}") from error
        return self._open[file]


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, which is a name in the index's own folder."""
    try:
        with reading(index) as stream:
            found = {str(name): str(file) for name, file in json.load(stream)["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: no usable index of tensors: {error}") from error
    if strange := next((file for file in found.values() if Path(file).name != file), None):
        raise CheckpointError(f"{index}: names the file {strange!r}; expected names of files beside the index")
    return found
