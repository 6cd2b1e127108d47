"""Tokens per second, MFU and peak memory of training a Qwen3-0.6B shape on one GPU, by SFT and by PPO's policy loss.

    make gpu-check                                        the GPU tests, then this, without and with Liger's kernels
    .venv/bin/python -m benchmarks.gpu_training [--packs 4] [--steps 8] [--gradient-checkpointing] [--offload-optimizer]
    .venv/bin/python -m benchmarks.gpu_training --device cpu --shape tiny --out FOLDER     the same code, without a GPU

The model is made in code with random weights and trained through `RliteTrainEngine.train_batch`: bfloat16 with float32
master weights, AdamW. A step takes `--packs` packs, each one sequence: 8,192 tokens for SFT, which learns all of them,
and 16,384 for RL, whose first sixteenth is the prompt. (The MFU of the figures to beat is that of such packs at their
tokens per second: a causal mask, and one sequence in each.) Seconds are the median of whole steps, optimizer included.
The results go to `training-SHAPE-HARDWARE.json` in the folder `--out` (with Liger's kernels: `...-liger.json`). Where
memory runs out, recompute activations.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip
import transformers
from tensordict import TensorDict

from rlite.engine.train import RliteTrainEngine
from rlite.services.console.mfu import usage_metrics
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import OwnLogprobs, PolicyLoss
from tests.tiny import build_model_dir

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden": 1024,
        "layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "initializer_range": 0.02,
    },
    "tiny": {"hidden": 64},
}
TOKENS = {"qwen3-0.6b": {"sft": 8192, "rl": 16384}, "tiny": {"sft": 64, "rl": 128}}
"""tokens of one pack"""
TO_BEAT = {
    "sft": {"tokens_per_second": 26.0e3, "mfu": 0.168, "hardware": "one H100"},
    "rl": {"tokens_per_second": 11.9e3, "mfu": 0.111, "hardware": "one H100"},
}
"""figures to beat with the shape qwen3-0.6b"""
WARM_UP = 2
"""steps before the first that counts"""


def rows(num_packs: int, num_tokens: int, prompt: int) -> TensorDict:
    """Random sequences, of which all tokens after the prompt are learnt."""
    generator = torch.Generator().manual_seed(0)
    shape = (num_packs, num_tokens)
    loss_mask = torch.ones(shape, dtype=torch.long)
    loss_mask[:, :prompt] = 0
    return TensorDict(
        {
            "input_ids": torch.randint(0, 256, shape, generator=generator),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "loss_mask": loss_mask,
            "advantages": torch.randn(num_packs, 1, generator=generator).expand(shape).clone(),
        },
        batch_size=num_packs,
    )


def measure(task: str, model: Path, num_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train for some steps in packs of so many tokens."""
    optimizer = OptimizerOptions(lr=1e-6, weight_decay=0.01, scheduler="constant", warmup_steps=0, total_steps=1)
    engine = RliteTrainEngine(policy_module(model, optimizer))
    engine.build(
        max_tokens_per_microbatch=num_tokens,
        gradient_checkpointing=args.gradient_checkpointing,
        offload_optimizer=args.offload_optimizer,
        use_liger_kernel=args.use_liger_kernel,
    )
    batch = rows(args.packs, num_tokens, prompt=1 if task == "sft" else num_tokens // 16)
    loss: Any = SftLoss() if task == "sft" else PolicyLoss()
    if task == "rl":
        engine.eval()
        batch["logprobs"] = engine.forward(batch, OwnLogprobs())
    engine.train()
    seconds, losses = [], []
    for step in range(WARM_UP + args.steps):
        if step == WARM_UP:
            engine.device_usage()  # the peak is counted from here on
        started = time.perf_counter()
        stats = engine.train_batch(batch, loss, loss.weight)
        seconds.append(time.perf_counter() - started)
        losses.append(stats["loss"])
        assert stats["num_microbatches"] == args.packs
    typical = statistics.median(seconds[WARM_UP:])
    result = {
        "tokens_per_pack": num_tokens,
        "tokens_per_second": args.packs * num_tokens / typical,
        **usage_metrics(engine.device_usage(), engine.module, [num_tokens] * args.packs, typical),
        "seconds": seconds,
        "losses": losses,
        "num_parameters": engine.num_parameters,
    }
    engine.release()
    return result


def report(task: str, result: dict[str, Any], to_beat: dict[str, Any] | None) -> str:
    def figures(of: dict[str, Any]) -> str:
        mfu = f"{of['mfu']:.1%} MFU" if "mfu" in of else "MFU unknown (no peak is known for this device)"
        return f"{of['tokens_per_second'] / 1e3:.1f}k tokens/s, {mfu}"

    line = f"{task} at {result['tokens_per_pack']} tokens per pack: {figures(result)}, {result['memory_gib']:.1f} GiB"
    return line if to_beat is None else f"{line}; to beat: {figures(to_beat)} on {to_beat['hardware']}"


def main(argv: Sequence[str]) -> Path:
    """Measure, print, and write the file that is returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tasks", nargs="+", choices=TO_BEAT, default=list(TO_BEAT))
    parser.add_argument("--packs", type=int, default=4, help="in an optimizer step")
    parser.add_argument("--steps", type=int, default=8, help=f"that count, after {WARM_UP} that do not")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--offload-optimizer", action="store_true")
    parser.add_argument("--use-liger-kernel", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device here; --device cpu --shape tiny tries the code out")
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model_dir(Path(scratch) / "model", "qwen3", **SHAPES[args.shape])
        rlite.init(device=args.device, num_devices=1)
        try:
            for task in args.tasks:
                to_beat = TO_BEAT[task] if args.shape == "qwen3-0.6b" else None
                result = measure(task, model, TOKENS[args.shape][task], args)
                results[task] = {**result, "to_beat": to_beat}
                print(report(task, result, to_beat), flush=True)
        finally:
            rlite.shutdown()
    args.out.mkdir(parents=True, exist_ok=True)
    kernels = "-liger" if args.use_liger_kernel else ""
    path = args.out / f"training-{args.shape}-{re.sub(r'[^a-z0-9]+', '-', hardware.lower())}{kernels}.json"
    record = {
        "hardware": hardware,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "rlite": rlite.__version__,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "results": results,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{hardware}, torch {torch.__version__}: {path}")
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
