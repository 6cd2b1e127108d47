"""Steps at the true shape of Qwen3-0.6B: FLOPs, bytes, peak memory, and the time that a roofline predicts of them."""

from __future__ import annotations

from typing import Any

import torch

import rlite
from benchmarks.gpu_training import TOKENS, rows
from rlite import RliteTrainEngine
from tools.mock_gpu import mock
from tools.mock_gpu.programs.models import WholePolicy, WholeSft, trainable, true_model
from tools.mock_gpu.roofline import MACHINE, accounted

CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sft 8k": (WholeSft(), "sft", {}),
    "rl 16k": (WholePolicy(), "rl", {}),
    "sft 8k recomputed": (WholeSft(), "sft", {"gradient_checkpointing": True}),
    "sft 8k fused": (WholeSft(), "sft", {"fused_head": True, "compile": "layers"}),
    "rl 16k fused": (WholePolicy(), "rl", {"fused_head": True, "compile": "layers"}),
}


def step(module: Any, loss: Any, num_tokens: int, options: dict[str, Any]) -> dict[str, float]:
    """Return figures of one step of one pack, the second."""
    engine = RliteTrainEngine(module)
    engine.build(max_tokens_per_microbatch=num_tokens, **options)
    engine.train()
    batch = rows(1, num_tokens, prompt=1)
    batch["logprobs"] = torch.zeros(batch["input_ids"].shape)
    engine.train_batch(batch, loss, loss.weight)
    torch.cuda.reset_peak_memory_stats()
    with accounted() as roofline:
        engine.train_batch(batch, loss, loss.weight)
    peak = torch.cuda.max_memory_allocated() / 2**30
    engine.release()
    for name, seconds in roofline.by_operation.most_common(12):
        print(f"   {name:44s} {1e3 * seconds:8.2f} ms")
    total, kinds = roofline.total_seconds, ("gemm", "attention", "elementwise")
    with_attention_3 = (
        total - roofline.seconds["attention"] + roofline.flops["attention"] / MACHINE["attention_3_flops_per_second"]
    )
    return {
        "TFLOP of matrix products": roofline.flops["gemm"] / 1e12,
        "TFLOP of attention": roofline.flops["attention"] / 1e12,
        "GB of other operations": roofline.bytes["elementwise"] / 1e9,
        "peak GiB": peak,
        **{f"predicted ms, {kind}": 1e3 * roofline.seconds[kind] for kind in kinds},
        "predicted ms": 1e3 * total,
        "predicted ms, with FlashAttention 3": 1e3 * with_attention_3,
        "predicted tokens per second": num_tokens / total,
    }


def measure() -> dict[str, float]:
    """Return figures of each case."""
    mock.stand_in_for_values()
    rlite.init(device="cuda", num_devices=1, launcher="inprocess")
    module, figures = trainable(true_model()), {}
    for case, (loss, task, options) in CASES.items():
        print(case)
        found = step(module, loss, TOKENS["qwen3-0.6b"][task], options)
        figures |= {f"{case}: {name}": value for name, value in found.items()}
    rlite.shutdown()
    return figures
