"""A captured decode step at the true shape of Qwen3-0.6B: bytes, predicted time, and the floor of weights and cache.

Sampling and the host's work between bursts are not part of a captured step.
"""

from __future__ import annotations

from typing import Any

import torch

import rlite
from rlite import RliteInferenceEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import true_model
from tools.mock_gpu.roofline import MACHINE, Roofline, own_kernels

ROWS, CONTEXT = 256, 1536
"""sequences, and tokens of each"""
KV_BYTES = 28 * 2 * 8 * 128 * 2
"""keys and values of one token: layers, both, heads, width, bfloat16"""
PARTLY_READ = {"partial_attention": ROWS * CONTEXT * KV_BYTES / 28}
"""bytes of kernels that read the pages of the sequences, and not the whole cache"""


def captured_steps() -> list[Roofline]:
    """Return a list to which every capture from now on adds its operations."""
    found: list[Roofline] = []
    enter, leave = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__

    def begin(self: Any) -> None:
        enter(self)
        found.append(Roofline())
        self.accounting = own_kernels(found[-1], PARTLY_READ), found[-1]
        for each in self.accounting:
            each.__enter__()

    def end(self: Any, *error: Any) -> None:
        for each in reversed(self.accounting):
            each.__exit__(*error)
        leave(self, *error)

    torch.cuda.graph.__enter__, torch.cuda.graph.__exit__ = begin, end
    return found


def measure() -> dict[str, float]:
    """Return figures of one captured step of ROWS sequences."""
    mock.stand_in_for_values()
    steps = captured_steps()
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    path = true_model()
    engine = RliteInferenceEngine(str(path))
    engine.build(max_model_len=2048, max_num_seqs=ROWS, dtype="bfloat16", gpu_memory_utilization=0.9, paged_kernel=True)
    prompts = [[row % 200 + 1] * CONTEXT for row in range(ROWS)]
    engine.generate(prompts, {"max_tokens": 2, "min_new_tokens": 2})
    largest = max(steps, key=lambda step: step.total_seconds)
    for name, seconds in largest.by_operation.most_common(12):
        print(f"   {name:44s} {1e3 * seconds:8.2f} ms")
    peak = torch.cuda.max_memory_allocated() / 2**30
    weights = (path / "model.safetensors").stat().st_size
    engine.release()
    rlite.shutdown()
    floor = (weights + ROWS * CONTEXT * KV_BYTES) / MACHINE["bytes_per_second"]
    return {
        "GB of a step": sum(largest.bytes.values()) / 1e9,
        "predicted ms of a step": 1e3 * largest.total_seconds,
        "floor, ms of a step": 1e3 * floor,
        "ratio to the floor": largest.total_seconds / floor,
        "peak GiB": peak,
        "captures": len(steps),
    }
