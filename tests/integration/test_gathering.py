"""A whole tensor is gathered from any layout of its blocks, a few rows at a time, into memory that waits for it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlite.runtime.parallel import fsdp
from tests.integration.worlds import ranks

LAYOUTS = {
    "fully sharded": (Shard(0), Replicate()),
    "tensor parallel": (Replicate(), Shard(1)),
    "both, along different dimensions": (Shard(0), Shard(1)),
    "both, along the first dimension": (_StridedShard(0, split_factor=2), Shard(0)),
    "replicated": (Replicate(), Replicate()),
}
SHAPES = [(8, 4), (7, 6), (1, 4), (5, 3, 2)]


def gather_everything(rank: int, file: str) -> None:
    warnings.simplefilter("error")  # torch renames its collectives
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2))
    for name, layout in LAYOUTS.items():
        for shape in SHAPES:
            if name == "both, along the first dimension" and shape[0] % 4:
                continue  # FSDP refuses it
            for fsdp.GATHERED_BYTES in (8, 2**20):  # one row at a time, all at once
                check_gathered(distribute_tensor(torch.randn(shape).mul_(3), mesh, layout), rank)
    dist.destroy_process_group()


def check_gathered(parameter: DTensor, rank: int) -> None:
    whole = parameter.full_tensor()
    block = 2 * parameter.to_local()  # as a hook of the module may change it
    for dtype in (torch.float32, torch.bfloat16):
        out: Tensor = torch.empty(whole.shape, dtype=dtype, device="cpu" if rank % 2 else "meta")
        fsdp.gather_into(out, block, parameter)
        if rank % 2:
            assert torch.equal(out, (2 * whole).to(dtype))


@pytest.mark.timeout(120)
def test_blocks_of_every_layout_make_the_whole_tensor_in_the_dtype_of_its_reader(tmp_path: Path) -> None:
    with ranks(gather_everything, [(rank, str(tmp_path / "store")) for rank in range(4)]):
        pass
