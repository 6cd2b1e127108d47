"""Two ranks under torchrun, with a GPU each: FSDP and tensor-parallel steps, weight sync between engines, shutdown.

NCCL moves nothing, so the ranks see their own numbers. What is counted is rank 0's.
"""

from __future__ import annotations

import time

import torch

import rlite
from benchmarks.gpu_training import rows
from rlite import RliteInferenceEngine, RliteTrainEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import WholeSft, small_model, trainable

NUM = 2
PACKS, TOKENS = 4, 512


def measure() -> dict[str, float]:
    """Return figures of one step of each layout, and of a sync."""
    mock.stand_in_for_values()
    rlite.init(device="cuda", num_devices=NUM, launcher="torchrun")
    path, loss, figures = small_model(hidden=128, layers=4), WholeSft(), {}
    for name, options in {"fsdp": {}, "tp": {"tp_size": NUM}}.items():
        trainer = RliteTrainEngine(trainable(path))
        trainer.build(tensor_parallel_size=NUM, max_tokens_per_microbatch=TOKENS, **options)
        trainer.train()
        batch = rows(PACKS, TOKENS, prompt=32)
        for _ in range(3):
            with mock.counting() as step:
                trainer.train_batch(batch, loss, loss.weight)
        for counted in ("waits", "launches", "collectives", "mallocs"):
            figures[f"{name}: {counted} of a step"] = step[counted]
        figures[f"{name}: MiB in collectives of a step"] = step["collective_bytes"] / 2**20
        mock.print_places(f"a step of {name}", step.places, 1)
        if name == "fsdp":
            figures |= _sync(trainer, str(path))
        trainer.release()
    begun = time.perf_counter()
    rlite.shutdown()
    figures["seconds of shutdown"] = time.perf_counter() - begun
    figures["MiB after release"] = torch.cuda.memory_allocated() / 2**20
    return figures


def _sync(trainer: RliteTrainEngine, path: str) -> dict[str, float]:
    server = RliteInferenceEngine(path)
    server.build(
        tensor_parallel_size=NUM,
        colocate_with=trainer,
        max_model_len=256,
        max_num_seqs=8,
        dtype="bfloat16",
        gpu_memory_utilization=0.3,
    )
    for _ in range(2):
        with mock.counting() as sync:
            report = trainer.p2p_weight_sync(server)
    print("transport", report.transport)
    server.release()
    return {
        "sync: waits": sync["waits"],
        "sync: collectives": sync["collectives"],
        "sync: MiB in collectives": sync["collective_bytes"] / 2**20,
    }
