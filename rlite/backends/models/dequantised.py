"""Tensors of quantised checkpoints as bfloat16: fp8 with a scale per block, and MXFP4. Only the wanted box is read.

fp8      NAME [M, N], NAME_scale_inv [ceil(M / m), ceil(N / n)]     NAME = value * scale of its block of [m, n]
mxfp4    NAME_blocks [E, N, K / 32, 16], NAME_scales [E, N, K / 32]  NAME [E, K, N] = value * 2 ** (scale - 127)
         two values of 4 bits in each byte, the lower ones first
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlite.backends.models.expressions import Shape, whole
from rlite.errors import CheckpointError
from rlite.nn.pretrained import quantised
from rlite.runtime.parallel.shards import Box, CheckpointReader

SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""values of E2M1 by their bits"""
MX_VALUES = 32
"""values that share a scale in MXFP4"""


class DequantisedReader:
    """A `CheckpointReader` of a quantised checkpoint.

    Args:
        reader: reader of the stored tensors.
        quantisation: `quantization_config` of the checkpoint's config.

    Raises:
        CheckpointError: it holds no scales.
    """

    def __init__(self, reader: CheckpointReader, quantisation: Mapping[str, Any]) -> None:
        self._reader = reader
        self._block: list[int] | None = quantisation.get("weight_block_size")
        stored = dict.fromkeys(reader.names())
        self._scaled = {name for name in stored if name + SCALE in stored}
        made = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
        self._packed = {name for name in made if name + SCALES in stored}
        parts = {name + SCALE for name in self._scaled}
        parts |= {name + ending for name in self._packed for ending in (BLOCKS, SCALES)}
        if not parts:
            told = f"its config says {quantisation.get('quant_method')}, and it has no tensors of scales"
            raise CheckpointError(f"{reader.path}: {quantised(told)}")
        self._names = [*(name for name in stored if name not in parts), *self._packed]

    def names(self) -> list[str]:
        """Return the names of all tensors, without their scales."""
        return list(self._names)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        if name not in self._packed:
            return self._reader.shape(name)
        experts, rows, blocks, size = self._reader.shape(name + BLOCKS)
        return experts, blocks * size * 2, rows

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return torch.bfloat16 if name in self._scaled | self._packed else self._reader.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor; without a box the whole tensor.

        Raises:
            CheckpointError: a scale does not fit its tensor.
        """
        if name in self._packed:
            return self._unpacked(name, box or whole(self.shape(name)))
        if name in self._scaled:
            return self._unscaled(name, box or whole(self.shape(name)))
        return self._reader.read(name, box)

    def _unscaled(self, name: str, box: Box) -> Tensor:
        shape, found = self.shape(name), self._reader.shape(name + SCALE)
        values = self._reader.read(name, box).float()
        if all(size == 1 for size in found):
            return (values * self._reader.read(name + SCALE).float().reshape(())).bfloat16()
        block = (1,) * (len(shape) - 2) + tuple(self._block or shape[-2:])
        if found != tuple(-(-size // each) for size, each in zip(shape, block, strict=True)):
            told = f"{name + SCALE} has the shape {found}, and blocks of {self._block} do not divide {shape} so"
            raise CheckpointError(f"{self._reader.path}: {told}")
        wanted = tuple(slice(s.start // each, -(-s.stop // each)) for s, each in zip(box, block, strict=True))
        scale = self._reader.read(name + SCALE, wanted).float()
        for dim, (part, each) in enumerate(zip(box, block, strict=True)):
            scale = scale.index_select(dim, torch.arange(part.start, part.stop) // each - part.start // each)
        return (values * scale).bfloat16()

    def _unpacked(self, name: str, box: Box) -> Tensor:
        experts, columns, rows = box
        blocks = slice(columns.start // MX_VALUES, -(-columns.stop // MX_VALUES))
        packed = self._reader.read(name + BLOCKS, (experts, rows, blocks, slice(0, MX_VALUES // 2)))
        exponents = self._reader.read(name + SCALES, (experts, rows, blocks)).int() - 127
        table = torch.tensor(FP4, dtype=torch.bfloat16)
        values = table[torch.stack([packed & 15, packed >> 4], -1).int()].flatten(-2)
        values = torch.ldexp(values, exponents[..., None]).flatten(-2)
        start = columns.start - blocks.start * MX_VALUES
        return values[..., start : start + columns.stop - columns.start].transpose(1, 2)
