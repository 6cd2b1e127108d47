"""Tokens per second of supervised fine-tuning, ours and TRL's, on one model and the same rows, in one run.

    make bench-trl-env
    .venv/bin/python -m benchmarks.sft --trl-python .venv-trl/bin/python [--threads 1] [--rounds 3]

Rows have lengths spread evenly over 16 to 512, in random order; every token is learnt. A step is whole on both sides:
making the batch, forward, backward, clipping, AdamW, logging; float32, no gradient checkpointing. An optimizer step
takes 64 rows, and of TRL's packs of 512 as many as hold the same tokens. Real tokens count, not padding. Ours keeps
sequences apart; TRL's packing is measured in both its ways, of which "wrapped" lets sequences see each other.

Rounds alternate; the ratios are of the medians, and by CPU time beside it, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlite
from benchmarks.model import NUM_PRINTABLE, build_model
from rlite.data.tokens import Tally, TokenRows
from rlite.observability import stats_tracker
from rlite.trainer.model.options import ModelOptions
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import AnsweringOptions, DataOptions, SftConfig

SHORTEST, LONGEST, ROWS_PER_STEP = 16, 512, 64
PACKS_PER_STEP = 33
"""64 x 264 tokens are 33 x 512"""
PACKINGS = ("none", "bfd", "wrapped")


def build_rows(count: int, seed: int = 0) -> list[list[int]]:
    """`count` rows of printable characters with lengths spread evenly over [SHORTEST, LONGEST]."""
    draw = random.Random(seed)
    return [[draw.randrange(NUM_PRINTABLE) for _ in range(draw.randint(SHORTEST, LONGEST))] for _ in range(count)]


def token_rows(rows: list[list[int]]) -> TokenRows:
    """The rows as a trainer takes them; all tokens but the first, which nothing predicts, are learnt."""
    starts = np.cumsum([0, *map(len, rows)])
    loss_mask = np.ones(starts[-1], dtype=bool)
    loss_mask[starts[:-1]] = False
    return TokenRows(
        input_ids=np.concatenate([np.array(row, dtype=np.int32) for row in rows]),
        loss_mask=loss_mask,
        starts=starts,
        source=np.arange(len(rows)),
        tally=Tally(
            num_read=len(rows),
            num_kept=len(rows),
            num_truncated=0,
            longest=max(map(len, rows)),
            max_length=LONGEST,
        ),
    )


def ours(model: Path, rows: list[list[int]], scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    rlite.init(num_devices=1, num_threads=args.threads)
    options = SftConfig(
        actor=ModelOptions(
            model_name=str(model),
            lr=1e-4,
            scheduler="constant",
            warmup_ratio=0.0,
            weight_decay=0.0,
            gradient_checkpointing=False,
            max_length_per_device=args.max_length_per_device,
        ),
        data=DataOptions(path="", batch_size=ROWS_PER_STEP),
        trainer=AnsweringOptions(save_dir=str(scratch), save_freq=10**6, test_freq=10**6),
    )
    num_rows = (args.steps + 2) * ROWS_PER_STEP  # the first step warms up, the last one saves
    trainer = SftTrainer(options, token_rows(rows[:num_rows]))
    trainer.start()
    marks, steps = [(time.perf_counter(), time.process_time())], []
    for batch in trainer.loader:
        with stats_tracker.record_timing("step"):
            stats = trainer.update(trainer.prepare(batch))
        steps.append(trainer.finish_step(batch, stats))
        marks.append((time.perf_counter(), time.process_time()))
    trainer.run.close()
    rlite.shutdown()
    seconds, cpu_seconds = (end - start for start, end in zip(marks[1], marks[-2], strict=True))
    num_tokens = sum(step["num_tokens"] for step in steps[1:-1])
    return {
        "tokens_per_second": num_tokens / seconds,
        "tokens_per_cpu_second": num_tokens / cpu_seconds,
        "tokens_per_step": num_tokens / args.steps,
        "rows_per_step": ROWS_PER_STEP,
        "tokens_per_microbatch": args.max_length_per_device,
        "losses": [round(step["loss"], 3) for step in steps],
        "threads": torch.get_num_threads(),
        "dtype": "float32",
    }


def theirs(model: Path, rows: Path, packing: str, args: argparse.Namespace) -> dict[str, Any]:
    rows_per_step, per_forward = ROWS_PER_STEP, args.rows_per_forward
    if packing != "none":
        rows_per_step, per_forward = PACKS_PER_STEP, args.packs_per_forward
    script = Path(__file__).parent / "peers" / "trl_sft.py"
    command = [args.trl_python, str(script), str(model), str(rows), "--packing", packing]
    command += ["--threads", str(args.threads), "--steps", str(args.steps), "--max-length", str(LONGEST)]
    command += ["--rows-per-step", str(rows_per_step), "--rows-per-forward", str(per_forward)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return {key: value for key, value in result.items() if key != "steps"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--vocab-size", type=int, help="default: the byte tokenizer's 259")
    parser.add_argument("--max-length-per-device", type=int, default=2048, help="ours: tokens of a forward")
    parser.add_argument("--rows-per-forward", type=int, default=8, help="TRL's without packing; report the best")
    parser.add_argument("--packs-per-forward", type=int, default=1, help="TRL's with packing; report the best")
    parser.add_argument("--packings", nargs="+", choices=PACKINGS, default=PACKINGS)
    parser.add_argument("--write-only", type=Path, help="write the model and rows.json to this folder, and end")
    args = parser.parse_args()
    rows = build_rows((args.steps + 4) * ROWS_PER_STEP)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = args.write_only or Path(temporary)
        model = build_model(scratch / "model", vocab_size=args.vocab_size)
        rows_file = scratch / "rows.json"
        rows_file.write_text(json.dumps(rows))
        if args.write_only:
            return
        rounds = []
        for number in range(args.rounds):
            sides = {"rlite": ours(model, rows, scratch / f"run-{number}", args)}
            sides |= {packing: theirs(model, rows_file, packing, args) for packing in args.packings}
            rounds.append(sides)
            print(json.dumps(sides), flush=True)
    for key in ("tokens_per_second", "tokens_per_cpu_second"):
        medians = {side: statistics.median(each[side][key] for each in rounds) for side in rounds[0]}
        shown = ", ".join(
            f"trl {p} {medians[p]:.0f} (rlite / trl = {medians['rlite'] / medians[p]:.2f})" for p in args.packings
        )
        print(f"{key}: rlite {medians['rlite']:.0f}, {shown}")
    print(f"torch {torch.__version__}, {args.threads} thread(s), {args.rounds} rounds of {args.steps} steps")


if __name__ == "__main__":
    main()
