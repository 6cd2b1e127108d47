"""Copies in host memory, and an optimizer's state that lies elsewhere between steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlite.runtime.parallel.host_memory import HostMemory, keep_on_host_between_steps, move_state
from rlite.runtime.parallel.shared_memory import aligned_bytes

META = torch.device("meta")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def stepped(parameter: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_all_but_step_counters_moves() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = stepped(parameter)
    move_state(optimizer, META)
    assert {key: value.device.type for key, value in optimizer.state[parameter].items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_a_shards_state_moves_and_stays_a_part_of_the_whole(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], run_check=False))
    optimizer = stepped(parameter)
    before = optimizer.state[parameter]["exp_avg"]
    move_state(optimizer, META)
    after = optimizer.state[parameter]["exp_avg"]
    assert isinstance(after, DTensor)
    assert after.to_local().is_meta
    assert after.shape == before.shape == (6, 2)
    assert after.placements == before.placements
    assert after.device_mesh is before.device_mesh


def test_steps_are_the_same_with_state_on_the_host_between_them() -> None:
    def trained(is_kept_on_host: bool) -> Tensor:
        parameter = nn.Parameter(torch.arange(4.0))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        if is_kept_on_host:
            keep_on_host_between_steps(optimizer, torch.device("cpu"))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for _ in range(3):
            parameter.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return parameter.detach()

    assert torch.equal(trained(True), trained(False))


def test_copies_in_host_memory_lie_side_by_side_and_take_the_place_of_those_before() -> None:
    memory = HostMemory()
    tensors = [torch.randn(1000, 3), torch.randn(7).bfloat16(), torch.zeros(0, 4), torch.tensor(3.0)]
    first = memory.copies(tensors)
    size = first[0].untyped_storage().nbytes()
    assert size == sum(aligned_bytes(tuple(tensor.shape), tensor.dtype) for tensor in tensors), (
        "not a byte is rounded up"
    )
    assert {copy.untyped_storage().data_ptr() for copy in first} == {first[0].untyped_storage().data_ptr()}
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(first, tensors, strict=True))
    assert all(copy.data_ptr() % 64 == 0 for copy in first if copy.numel())
    second = memory.copies(tensors[1:])
    assert second[0].untyped_storage().data_ptr() == first[0].untyped_storage().data_ptr()
    larger = memory.copies([torch.ones(4000)])
    assert torch.equal(second[0], tensors[1]), "what is still held keeps its memory"
    assert torch.equal(larger[0], torch.ones(4000))
