"""A run's life on one GPU: engines take turns in its memory, weights are synced, states are saved and loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import rlite
from benchmarks.gpu_training import rows
from rlite import RliteInferenceEngine, RliteTrainEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import WholeSft, small_model, trainable

TURNS = 4


def measure() -> dict[str, float]:
    """Return figures of the last turn, and how memory grew since the second."""
    mock.stand_in_for_values()
    path, loss = small_model(hidden=256, layers=4), WholeSft()
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    trainer, server = RliteTrainEngine(trainable(path)), RliteInferenceEngine(str(path))
    trainer.build(max_tokens_per_microbatch=1024, offload_optimizer=True)
    server.build(
        colocate_with=trainer, max_model_len=1024, max_num_seqs=32, dtype="bfloat16", gpu_memory_utilization=0.4
    )
    trainer.train()
    held = []
    for _ in range(TURNS):
        server.meta()
        trainer.cuda()
        trainer.train_batch(rows(2, 512, prompt=1), loss, loss.weight)
        server.cuda("weights")
        with mock.counting() as sync:
            report = trainer.p2p_weight_sync(server)
        with mock.counting() as moved:
            trainer.cpu()
            server.cuda("kv_cache")
        server.generate([[1, 2, 3] * 20] * 16, {"max_tokens": 24, "min_new_tokens": 24})
        held.append(torch.cuda.memory_allocated())
    figures = {f"sync: {name}": float(sync[name]) for name in ("waits", "launches", "h2d", "d2h", "d2d", "mallocs")}
    mock.print_places("a sync", sync.places, 1)
    assert report.transport == "shared", report
    figures |= {
        "residency: waits": moved["waits"],
        "KiB held more in each turn": (held[-1] - held[1]) / (TURNS - 2) / 1024,
    }
    trainer.cuda()
    folder = Path(tempfile.mkdtemp())
    for is_asynchronous in (False, True):
        trainer.save_state(folder / f"state-{is_asynchronous}", asynchronous=is_asynchronous).result()
    trainer.load_state(folder / "state-True")
    trainer.save(folder / "exported")
    server.release()
    trainer.release()
    rlite.shutdown()
    figures["MiB after release"] = torch.cuda.memory_allocated() / 2**20
    return figures
