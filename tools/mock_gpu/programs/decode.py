"""Embedded engine: build, decode with graphs, and later turns of conversations, whose prefixes are in the cache."""

from __future__ import annotations

from typing import Any

import torch

import rlite
from rlite import RliteInferenceEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import small_model

ROWS, BURST = 256, 8
COUNTED = ("waits", "launches", "graph_launches", "h2d", "d2h", "d2d", "mallocs", "host_allocs")
SHORT, LONG = 1 + 8 * BURST, 1 + 16 * BURST
"""tokens of two runs; their difference has no prefill"""


def generate(engine: Any, num_rows: int, num_prompt: int, num_tokens: int) -> mock.Usage:
    """Generate completions of equal length to different prompts, and return the calls of CUDA."""
    prompts = [[row % 200 + 1] * num_prompt for row in range(num_rows)]
    with mock.counting() as usage:
        engine.generate(prompts, {"max_tokens": num_tokens, "min_new_tokens": num_tokens})
    return usage


def measure() -> dict[str, float]:
    """Return figures of one decode burst and of prefills."""
    mock.stand_in_for_values()
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    engine = RliteInferenceEngine(str(small_model()))
    with mock.counting() as build:
        engine.build(
            max_model_len=2048, max_num_seqs=ROWS, dtype="bfloat16", gpu_memory_utilization=0.5, paged_kernel=True
        )
    generate(engine, ROWS, 10, LONG)  # captures
    short, long = generate(engine, ROWS, 10, SHORT), generate(engine, ROWS, 10, LONG)
    bursts = (LONG - SHORT) // BURST
    figures = {f"{name} of a burst": max(0.0, (long[name] - short[name]) / bursts) for name in COUNTED}
    mock.print_places("a burst", long.places - short.places, bursts)
    replayed = long["graph_kernels"] - short["graph_kernels"]
    figures["kernels of a captured step"] = replayed / (long["graph_launches"] - short["graph_launches"])
    prompts = [[row % 200 + 1] * 200 for row in range(64)]
    first = engine.generate(prompts, {"max_tokens": 16, "min_new_tokens": 16})
    # kernels that do nothing may sample any number
    answers = [[token % 256 for token in result.outputs[0].token_ids] for result in first]
    turns = [prompt + answer + [7] * 20 for prompt, answer in zip(prompts, answers, strict=True)]
    with mock.counting() as later:
        engine.generate(turns, {"max_tokens": 1})
    figures["launches of 64 later turns"] = later["launches"]
    figures["waits of 64 later turns"] = later["waits"]
    figures["waits of build"] = build["waits"]
    engine.release()
    rlite.shutdown()
    figures["MiB after release"] = torch.cuda.memory_allocated() / 2**20
    return figures
