from __future__ import annotations

import multiprocessing
import os
import resource
from dataclasses import replace

import pytest
import torch

from rlite.errors import ConfigError, StorageError
from rlite.runtime.parallel.shared_memory import (
    DeviceArena,
    SharedArena,
    SharedBlock,
    SharedMemoryReader,
    aligned_bytes,
    can_share_memory,
    check_gpu_sharing,
    has_expandable_segments,
)

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="this system shares no memory by file descriptor")


def arena_for(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> SharedArena:
    return SharedArena(sum(aligned_bytes(shape, dtype) for shape in shapes))


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    arena = arena_for((3,), (2, 5), ())
    tensors = [arena.empty(shape, torch.float32).fill_(i) for i, shape in enumerate([(3,), (2, 5), ()])]
    assert [float(tensor.min()) for tensor in tensors] == [0.0, 1.0, 2.0]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_tensor_of_elsewhere_has_no_handle() -> None:
    arena = arena_for((4, 4))
    tensor = arena.empty((4, 4), torch.float32)
    assert arena.handle_of(torch.empty(4)) is None
    assert arena.handle_of(tensor.T[:2]) is None, "not contiguous"
    assert arena.handle_of(tensor[1]) is not None


def _serve(pipe) -> None:
    """Another process: shares ones, then a second arena in its place."""
    arena = arena_for((1000,))
    tensor = arena.empty((1000,), torch.float32).fill_(1.0)
    pipe.send(arena.handle_of(tensor))
    assert pipe.recv() == "change"
    tensor.fill_(2.0)
    pipe.send("changed")
    assert pipe.recv() == "renew"
    del arena, tensor
    arena = arena_for((1000,))
    tensor = arena.empty((1000,), torch.float32).fill_(3.0)
    pipe.send(arena.handle_of(tensor))
    assert pipe.recv() == "discard"
    arena.discard()
    pipe.send(float(tensor.sum()))
    pipe.recv()


def test_another_process_reads_a_tensor_where_it_lies_and_knows_a_new_arena_from_an_old_one() -> None:
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(other,))
    process.start()
    reader = SharedMemoryReader()
    first: SharedBlock = pipe.recv()
    view = reader.view(first)
    assert torch.equal(view, torch.ones(1000))
    pipe.send("change")
    assert pipe.recv() == "changed"
    assert torch.equal(view, torch.full((1000,), 2.0)), "the memory is the same, not a copy"
    pipe.send("renew")
    second: SharedBlock = pipe.recv()
    (first_pid, first_fd, first_inode, nbytes), (_, second_fd, second_inode, _) = first.memory[1], second.memory[1]
    assert second_inode != first_inode
    renewed = reader.view(second)
    assert torch.equal(renewed, torch.full((1000,), 3.0))
    if second_fd == first_fd:
        with pytest.raises(OSError, match="closed the arena"):
            SharedMemoryReader().view(first)
    pipe.send("discard")
    assert pipe.recv() == 0.0
    assert not renewed.any(), "the memory is given back though it is still mapped here"
    pipe.send("end")
    process.join(timeout=30)
    assert process.exitcode == 0
    with pytest.raises(OSError, match=str(first_pid)):
        reader.view(replace(first, memory=(first.memory[0], (first_pid, first_fd, -1, nbytes))))


def test_an_arena_is_gone_with_its_last_tensor() -> None:
    arena = arena_for((10,))
    tensor = arena.empty((10,), torch.float32)
    block = arena.handle_of(tensor)
    assert block is not None
    del arena, tensor
    _, fd, inode, _ = block.memory[1]
    assert not os.path.exists(f"/proc/self/fd/{fd}") or os.stat(f"/proc/self/fd/{fd}").st_ino != inode


def test_the_tensors_of_a_device_arena_are_opened_together_and_once() -> None:
    arena = DeviceArena(1024, torch.device("cpu"))
    openings = []
    for number in range(2):
        arena.reset()
        tensors = [arena.empty((3,), torch.float32).fill_(number), arena.empty((2, 2), torch.bfloat16).fill_(7)]
        blocks = [arena.handle_of(tensor) for tensor in tensors]
        assert blocks[0].memory is blocks[1].memory
        assert blocks[0].memory not in openings, "a handle opens once: each round needs another"
        openings.append(blocks[0].memory)
        opened = []
        counted = (lambda *args, opened=opened: opened.append(args) or openings[-1][0](*args), blocks[0].memory[1])
        reader = SharedMemoryReader()
        for block, tensor in [*zip(blocks, tensors, strict=True)] * 2:
            assert torch.equal(reader.view(replace(block, memory=counted)), tensor)
        assert len(opened) == 1


@pytest.mark.parametrize(
    ("environment", "is_expandable"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_found_in_torchs_settings(environment: dict[str, str], is_expandable: bool) -> None:
    assert has_expandable_segments(environment) is is_expandable


def test_memory_that_another_process_may_not_open_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()
    check_gpu_sharing(child.pid)  # ordinary memory travels otherwise
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"process {child.pid} .*Leave expandable_segments out, or"):
        check_gpu_sharing(child.pid)  # it is gone: for a process that may not be looked into the call fails likewise


def test_a_limit_of_file_sizes_is_named_for_shared_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        with pytest.raises(StorageError, match=r"4096 bytes of shared memory.*\(ulimit -f\)"):
            SharedArena(4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
