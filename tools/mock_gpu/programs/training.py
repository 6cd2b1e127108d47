"""Train engine on one GPU: SFT and PPO steps with and without checkpointing and offload, in steady state."""

from __future__ import annotations

from typing import Any

import torch

import rlite
from benchmarks.gpu_training import rows
from rlite import RliteTrainEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import Policy, Sft, small_model, trainable

PACKS, TOKENS = 4, 2048
RECOMPUTED = {"gradient_checkpointing": True, "offload_optimizer": True}
COUNTED = ("waits", "launches", "gemms", "h2d", "d2h", "d2d", "mallocs", "host_allocs")


def step_usage(engine: Any, loss: Any, num_packs: int) -> mock.Usage:
    """Return the calls of CUDA in the third of three equal steps."""
    batch = rows(num_packs, TOKENS, prompt=TOKENS // 16)
    batch["logprobs"] = torch.zeros(batch["input_ids"].shape)
    for _ in range(3):
        with mock.counting() as usage:
            engine.train_batch(batch, loss, loss.weight)
    return usage


def measure() -> dict[str, float]:
    """Return figures of each kind of step: of one more microbatch, and of a step with one microbatch."""
    mock.stand_in_for_values()
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    figures, module = {}, trainable(small_model())
    kinds = {"sft": (Sft(), {}), "ppo": (Policy(), {}), "recomputed sft": (Sft(), RECOMPUTED)}
    for kind, (loss, options) in kinds.items():
        engine = RliteTrainEngine(module)
        engine.build(max_tokens_per_microbatch=TOKENS, **options)
        engine.train()
        one, many = step_usage(engine, loss, 1), step_usage(engine, loss, PACKS)
        mock.print_places(f"a {kind} microbatch", many.places - one.places, PACKS - 1)
        mock.print_places(f"a {kind} step", one.places, 1)
        for name in COUNTED:
            figures[f"{kind}: {name} of a microbatch"] = (many[name] - one[name]) / (PACKS - 1)
            figures[f"{kind}: {name} of a step of one microbatch"] = one[name]
        engine.release()
    rlite.shutdown()
    figures["MiB after release"] = torch.cuda.memory_allocated() / 2**20
    return figures
