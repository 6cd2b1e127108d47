"""Memory that an engine gives up returns to the driver, where other processes can take it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rlite
from benchmarks.gpu_bringup_steps import ipc
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.runtime.parallel.host_memory import HostMemory
from rlite.runtime.parallel.shared_memory import aligned_bytes
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import make_batch, num_counted, token_loss
from tests.tiny import build_model_dir

pytestmark = pytest.mark.gpu
OPTIMIZER = OptimizerOptions(lr=1e-3, weight_decay=0.1, scheduler="constant", warmup_steps=0, total_steps=8)
SLACK = 64 * 2**20
"""bytes that libraries keep"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    yield build_model_dir(tmp_path / "model", "qwen3", hidden=512, layers=8, vocab_size=32768)
    rlite.shutdown()


def taken() -> int:
    """Bytes of the GPU that the driver has given out."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("move", ["meta", "cpu"])
def test_an_inference_engine_that_leaves_frees_the_gpu(path: Path, move: str) -> None:
    served = RliteInferenceEngine(path)
    served.build(max_model_len=1024, max_num_seqs=64, dtype="bfloat16", gpu_memory_utilization=0.5)
    served.generate([[1, 2, 3]] * 8, {"max_tokens": 16, "ignore_eos": True})
    held, before = sum(served.memory_bytes()[0].values()), taken()
    getattr(served, move)()
    assert taken() <= before - held + SLACK


def test_memory_that_training_only_caches_is_given_back_before_others_allocate(path: Path) -> None:
    served, trained = RliteInferenceEngine(path), RliteTrainEngine(policy_module(path, OPTIMIZER))
    served.build(max_model_len=256, max_num_seqs=4, dtype="bfloat16", gpu_memory_utilization=0.5)
    served.meta()
    trained.build(colocate_with=served)
    trained.train()
    trained.train_batch(make_batch([900] * 8, 0), token_loss, num_counted)
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert cached > SLACK, "the step's activations are cached"
    served.cuda("weights")
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < SLACK


def test_host_memory_is_pinned_and_not_a_byte_larger_than_what_it_holds() -> None:
    memory = HostMemory()
    tensors = [torch.randn(3_000_000, device="cuda"), torch.randn(7, device="cuda").bfloat16()]
    copies = memory.copies(tensors)
    torch.cuda.synchronize()
    assert all(
        copy.is_pinned() and torch.equal(copy, tensor.cpu()) for copy, tensor in zip(copies, tensors, strict=True)
    )
    assert copies[0].untyped_storage().nbytes() == sum(aligned_bytes(tuple(t.shape), t.dtype) for t in tensors)
    del memory, copies
    torch.zeros(1, device="cuda")  # giving the memory back was no error


def test_weights_for_another_process_leave_nothing_behind(tmp_path: Path) -> None:
    *_, last = ipc("cuda", tmp_path)
    assert last["grown_gib"] < 0.05
