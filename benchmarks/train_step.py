"""Seconds per training step of the engine, and of a loop written by hand in PyTorch over the same packs, in one run.

    .venv/bin/python -m benchmarks.train_step [--threads 1] [--steps 10]

Both train the same model class with the same packed attention and the same linear layers, in float32, by AdamW on the
cross entropy of every token, with gradients clipped to norm 1. A step takes 64 rows of 16 to 512 tokens. The loop is
given its packs ready made and does nothing else: logits, `F.cross_entropy`, backward, `clip_grad_norm_`, step. The
engine is given a padded batch, as every user's: it checks, plans and packs it. Steps alternate in one process; the
ratio is of the medians, and of CPU time beside it, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks.model import build_model
from benchmarks.sft import ROWS_PER_STEP, build_rows, token_rows
from rlite.backends.models.attention import PACKED, PackedLayout
from rlite.backends.models.linear import speed_up_linear_layers
from rlite.data.packs import lazy_pack
from rlite.engine.train import RliteTrainEngine
from rlite.runtime.parallel.microbatch_plan import plan_microbatches
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import ModelOptions

LR = 1e-4


class HandWritten:
    """Training loop written by hand, without a library."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=PACKED)
        speed_up_linear_layers(self.model)
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self, packs: list[dict[str, Any]], num_labels: int) -> float:
        """One optimizer step on the mean over all labels; a pack's `labels` [T] are next tokens, -100 at the ends."""
        total = 0.0
        for data in packs:
            logits = self.model(
                input_ids=data["input_ids"][None],
                position_ids=data["position_ids"][None],
                use_cache=False,
                packed_layout=PackedLayout(data["cu_seqlens"], data["max_seqlen"]),
            ).logits[0]
            loss = F.cross_entropy(logits, data["labels"], reduction="sum") / num_labels
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def engine_step(engine: RliteTrainEngine, batch: Any) -> float:
    """The same by the engine."""
    loss = SftLoss()
    return engine.train_batch(batch, loss, loss.weight)["loss"]


def ready_packs(batch: Any, capacity: int) -> list[dict[str, Any]]:
    """The packs that the engine makes of a batch, with labels."""
    lengths = batch["attention_mask"].sum(-1).tolist()
    packs = [lazy_pack(batch, rows, torch.device("cpu")) for rows in plan_microbatches(lengths, 1, capacity)[0]]
    for data in packs:
        data["labels"] = data["input_ids"].roll(-1)
        data["labels"][data["cu_seqlens"][1:].long() - 1] = -100
    return packs


def timed(function: Callable[[], float]) -> tuple[float, float, float]:
    """Seconds, CPU seconds, result."""
    started, cpu_started = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - started, time.process_time() - cpu_started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--vocab-size", type=int, help="default: the byte tokenizer's 259")
    parser.add_argument("--max-length-per-device", type=int, default=2048, help="tokens of a forward")
    args = parser.parse_args()
    rows = token_rows(build_rows((args.steps + 2) * ROWS_PER_STEP))
    rlite.init(num_devices=1, num_threads=args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        path = build_model(Path(scratch), vocab_size=args.vocab_size)
        options = ModelOptions(
            model_name=str(path),
            lr=LR,
            weight_decay=0.0,
            scheduler="constant",
            warmup_ratio=0.0,
            gradient_checkpointing=False,
            max_length_per_device=args.max_length_per_device,
        )
        engine = RliteTrainEngine(policy_module(path, options.optimizer_options(args.steps)))
        engine.build(**options.build_options(1, seed=0))
        engine.train()
        by_hand = HandWritten(path)
        measured = []
        for number, batch in enumerate(rows.batches(ROWS_PER_STEP)):
            packs = ready_packs(batch, args.max_length_per_device)
            num_labels = int(batch["loss_mask"].sum())
            sides = [partial(engine_step, engine, batch), partial(by_hand.step, packs, num_labels)]
            order = (0, 1) if number % 2 else (1, 0)  # each meets the other's caches as often
            results = {side: timed(sides[side]) for side in order}
            measured.append((results[0], results[1]))
            difference = abs(results[0][2] - results[1][2])
            print(f"engine {results[0][0]:.3f} s, by hand {results[1][0]:.3f} s, losses differ by {difference:.1e}")
    rlite.shutdown()
    for index, what in enumerate(("seconds per step", "CPU seconds per step")):
        mine, other = (statistics.median(step[side][index] for step in measured[2:]) for side in (0, 1))
        print(f"{what}: engine {mine:.3f}, by hand {other:.3f}, engine / by hand = {mine / other:.3f}")
    tokens = rows.lengths.sum() / len(rows) * ROWS_PER_STEP
    print(
        f"{tokens:.0f} tokens per step in packs of at most {args.max_length_per_device}, float32, torch "
        f"{torch.__version__}, {args.threads} thread(s), {args.steps} steps"
    )


if __name__ == "__main__":
    main()
