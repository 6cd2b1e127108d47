"""Seconds per GRPO step of TRL on CPU, as the other side of a benchmark of ours.

    make bench-trl-env                                                       # once: .venv-trl
    .venv/bin/python -m benchmarks.model runs/stop --stop-probability 0.0235  # completions of 40.5 tokens on average
    .venv-trl/bin/python benchmarks/peers/trl_grpo.py runs/stop runs/stop/prompts.json --threads 1

Runs in TRL's own environment and imports nothing of rlite. A step is whole: 8 prompts x 8 generations with the
transformers backend, up to 128 tokens each, rewards, log-probabilities, loss, backward and AdamW, all in float32,
without a reference model and without gradient checkpointing. The reward is the share of even token ids in a completion.
The last line of standard output is one JSON object: the settings, `seconds_per_step` (the median after one warm-up
step), the same in CPU time, which a busy machine disturbs less, and every step with its mean completion length.

`--rows-per-forward` is TRL's per-device batch size; gradients are accumulated over the 64 sequences. Smaller forwards
waste less on padding, larger ones run faster per token: report the best. `--continuous-batching` generates with the
continuous batching of transformers. TRL's tree packing (`experimental.async_grpo`) needs FlashAttention, so a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
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


def share_of_even_tokens(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """The benchmark's reward: cheap, and different within every group."""
    return [sum(token % 2 == 0 for token in row) / max(len(row), 1) for row in completion_ids]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--num-prompts", type=int, default=8, help="per step")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rows-per-forward", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="measured ones; one more comes first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--continuous-batching", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Settings and figures of `args.steps` steps after one warm-up step."""
    torch.set_num_threads(args.threads)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(args.model)
    num_steps = 1 + args.steps
    rows = itertools.islice(itertools.cycle(json.loads(args.prompts.read_text())), num_steps * args.num_prompts)
    prompts = [tokenizer.decode(row) for row in rows]
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    num_sequences = args.num_prompts * args.num_generations
    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = trl.GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=share_of_even_tokens,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            callbacks=[clock],
            args=trl.GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                num_generations=args.num_generations,
                per_device_train_batch_size=args.rows_per_forward,
                gradient_accumulation_steps=num_sequences // args.rows_per_forward,
                max_completion_length=args.max_new_tokens,
                max_steps=num_steps,
                use_transformers_continuous_batching=args.continuous_batching,
                beta=0.0,
                learning_rate=1e-6,
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "reward" in entry]
    seconds, cpu_seconds = ([b - a for a, b in itertools.pairwise(marks)] for marks in (clock.marks, clock.cpu_marks))
    names = ("seconds", "cpu_seconds", "mean_completion_length")
    warm_up, *steps = (dict(zip(names, step, strict=True)) for step in zip(seconds, cpu_seconds, lengths, strict=True))
    return {
        "trainer": f"trl {trl.__version__} GRPOTrainer, transformers {transformers.__version__} generate",
        "torch": torch.__version__,
        "model": str(args.model),
        "sequences_per_step": num_sequences,
        "num_prompts": args.num_prompts,
        "num_generations": args.num_generations,
        "max_new_tokens": args.max_new_tokens,
        "rows_per_forward": args.rows_per_forward,
        "mean_completion_length": statistics.mean(step["mean_completion_length"] for step in steps),
        "loss_type": trainer.args.loss_type,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "seconds_per_step": statistics.median(step["seconds"] for step in steps),
        "cpu_seconds_per_step": statistics.median(step["cpu_seconds"] for step in steps),
        "warm_up_seconds": warm_up["seconds"],
        "steps": steps,
    }


if __name__ == "__main__":
    main()
