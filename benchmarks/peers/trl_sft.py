"""Tokens per second of TRL's `SFTTrainer` on CPU, as the other side of a benchmark of ours.

    make bench-trl-env                                   # once: .venv-trl
    .venv/bin/python -m benchmarks.sft --write-only runs/sft-bench
    .venv-trl/bin/python benchmarks/peers/trl_sft.py runs/sft-bench/model runs/sft-bench/rows.json --packing none

Runs in TRL's own environment and imports nothing of rlite. Rows are tokenised already and every token is learnt, in
float32, without gradient checkpointing. `--packing none` pads the rows of each forward to the longest of them; `bfd` is
TRL's default packing (best-fit decreasing, sequences kept apart); `wrapped` lays all rows end to end and cuts them
every `--max-length` tokens, so that sequences see each other. The last line of standard output is one JSON object: the
settings, `tokens_per_second` (real tokens of all measured steps by their time), the same by CPU time, which a busy
machine disturbs less, and every step. The first step is a warm-up.

`--rows-per-forward` is TRL's per-device batch size, of rows or packs; gradients are accumulated over a step's rows.
Smaller forwards waste less on padding, larger ones run faster per token: report the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import datasets
import torch
import transformers
import trl


class StepClock(transformers.TrainerCallback):
    """Notes the time and the CPU time at the end of every optimizer step."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.cpu_marks: list[float] = []

    def _mark(self) -> None:
        self.marks.append(time.perf_counter())
        self.cpu_marks.append(time.process_time())

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self._mark()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self._mark()


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path, help="JSON: a list of lists of token ids, in the order of training")
    parser.add_argument("--packing", choices=("none", "bfd", "wrapped"), default="none")
    parser.add_argument("--max-length", type=int, default=512, help="of a pack")
    parser.add_argument("--rows-per-step", type=int, default=64, help="rows, or packs, of one optimizer step")
    parser.add_argument("--rows-per-forward", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="measured ones; one more comes first")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Settings and figures of `args.steps` steps after one warm-up step."""
    torch.set_num_threads(args.threads)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.rows_per_step % args.rows_per_forward:
        raise SystemExit(f"--rows-per-forward does not divide {args.rows_per_step} rows")
    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl.SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"input_ids": json.loads(args.rows.read_text())}),
            callbacks=[clock],
            args=trl.SFTConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                packing=args.packing != "none",
                packing_strategy="bfd" if args.packing == "none" else args.packing,
                max_length=args.max_length,
                per_device_train_batch_size=args.rows_per_forward,
                gradient_accumulation_steps=args.rows_per_step // args.rows_per_forward,
                max_steps=1 + args.steps,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    total_tokens = [0] + [int(entry["num_tokens"]) for entry in trainer.state.log_history if "num_tokens" in entry]
    tokens, seconds, cpu_seconds = (
        [after - before for before, after in itertools.pairwise(marks)]
        for marks in (total_tokens[: 2 + args.steps], clock.marks, clock.cpu_marks)
    )
    names = ("tokens", "seconds", "cpu_seconds")
    steps = [dict(zip(names, step, strict=True)) for step in zip(tokens, seconds, cpu_seconds, strict=True)][1:]
    num_tokens = sum(step["tokens"] for step in steps)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "trainer": f"trl {trl.__version__} SFTTrainer, transformers {transformers.__version__}",
        "torch": torch.__version__,
        "attention": model.config._attn_implementation,
        "packing": args.packing,
        "rows_per_step": args.rows_per_step,
        "rows_per_forward": args.rows_per_forward,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tokens_per_step": num_tokens / len(steps),
        "tokens_per_second": num_tokens / sum(step["seconds"] for step in steps),
        "tokens_per_cpu_second": num_tokens / sum(step["cpu_seconds"] for step in steps),
        "losses": losses,
        "steps": steps,
    }


if __name__ == "__main__":
    main()
