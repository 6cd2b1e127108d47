"""Checkpoints of a worker whose GPU is not the first one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlite.runtime.parallel.processes import join_alone, leave
from rlite.runtime.storage import sharded
from rlite.runtime.storage.atomic import staging

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("is_copied", [False, True])
def test_snapshot_of_the_second_gpu_is_written_exactly(tmp_path: Path, is_copied: bool) -> None:
    join_alone("cuda")
    torch.cuda.set_device(1)
    try:
        modules = [torch.nn.Linear(4096, 4096, device="cuda") for _ in range(8)]
        module = torch.nn.ModuleList(modules)
        group = dist.new_group(backend="gloo")
        for step in range(3):
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(step + 1)  # still under way when the snapshot is taken
            expected = [parameter.detach().clone() for parameter in module.parameters()]
            state = sharded.snapshot(sharded.Trained(module), is_copied)
            path = tmp_path / str(step)
            sharded.start_writing(state, staging(path), path, {}, 0, group).result()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            sharded.load(path, sharded.Trained(module), 0, group)
            assert all(torch.equal(*pair) for pair in zip(module.parameters(), expected, strict=True))

        assert torch.cuda.memory_allocated(0) == 0, "nothing went to the first GPU"
    finally:
        torch.cuda.set_device(0)
        leave()
