"""Seconds per GRPO step, ours and TRL's, on one model and the same prompts, in one run.

    make bench-trl-env
    .venv/bin/python -m benchmarks.grpo --trl-python .venv-trl/bin/python [--threads 1] [--rounds 3]

A step is whole on both sides: 8 prompts x 8 generations of up to 128 tokens (about 40 on average, geometric: the
stopping is in the weights), rewards, log-probabilities, loss, backward, AdamW, and on ours the weight sync. float32,
no reference model, no gradient checkpointing. Rounds alternate; the ratio is of the medians, and of CPU time beside it,
which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import rlite
from benchmarks.model import build_model
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.services.record.recorder import Amount
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.types import GenerationHyperparameters

STOP_PROBABILITY = 0.0235
NUM_PROMPTS, NUM_GENERATIONS, MAX_NEW_TOKENS = 8, 8, 128


def share_of_even_tokens(prompt: str, completions: str, prompt_ids: list, completion_ids: list, **row: Any) -> float:
    return sum(token % 2 == 0 for token in completion_ids) / max(len(completion_ids), 1)


def grpo_trainer(model: Path, scratch: Path, total_steps: int, record: Amount) -> PpoTrainer:
    """Return the trainer of this benchmark, for the current session."""
    prompts = json.loads((model / "prompts.json").read_text())
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-6),
        train_data=PromptOptions(prompts_per_rollout=NUM_PROMPTS, responses_per_prompt=NUM_GENERATIONS),
        rollout=RolloutOptions(max_model_len=256),
        trainer=TrainerOptions(
            save_dir=str(scratch), total_steps=total_steps, save_freq=10**6, test_freq=10**6, record=record
        ),
    )
    gconfig = GenerationHyperparameters(max_new_tokens=MAX_NEW_TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    workflow = SingleTurnWorkflow(RewardFunction(share_of_even_tokens), gconfig, tokenizer)
    return PpoTrainer(options, workflow, [{"input_ids": prompt} for prompt in prompts])


def ours(model: Path, scratch: Path, steps: int, threads: int) -> dict[str, Any]:
    rlite.init(num_devices=1, num_threads=threads)
    trainer = grpo_trainer(model, scratch, steps + 1, record="none")
    trainer.start()
    wall, cpu, lengths = [], [], []
    while not trainer.run.is_over:
        started, cpu_started = time.perf_counter(), time.process_time()
        batch = trainer.with_advantages(trainer.rollouts.next_batch())
        trainer.update(batch)
        trainer.sync()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
        lengths.append(batch["loss_mask"].sum(-1).float().mean().item())
        trainer.run.step += 1
    rlite.shutdown()
    return {
        "seconds_per_step": statistics.median(wall[1:]),
        "cpu_seconds_per_step": statistics.median(cpu[1:]),
        "mean_completion_length": statistics.mean(lengths[1:]),
        "threads": threads,
        "dtype": "float32",
    }


def theirs(python: str, model: Path, steps: int, threads: int, rows_per_forward: int) -> dict[str, Any]:
    script = Path(__file__).parent / "peers" / "trl_grpo.py"
    command = [python, str(script), str(model), str(model / "prompts.json"), "--threads", str(threads)]
    command += ["--steps", str(steps), "--rows-per-forward", str(rows_per_forward)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows-per-forward", type=int, default=64, help="TRL's; report the best")
    args = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as scratch:
        model = build_model(Path(scratch) / "model", stop_probability=STOP_PROBABILITY)
        for number in range(args.rounds):
            mine = ours(model, Path(scratch) / f"run-{number}", args.steps, args.threads)
            peer = theirs(args.trl_python, model, args.steps, args.threads, args.rows_per_forward)
            rounds.append((mine, peer))
            print(json.dumps({"rlite": mine, "trl": {k: v for k, v in peer.items() if k != "steps"}}), flush=True)
    for key in ("seconds_per_step", "cpu_seconds_per_step"):
        mine, peer = (statistics.median(side[key] for side in sides) for sides in zip(*rounds, strict=True))
        print(f"{key}: rlite {mine:.3f}, trl {peer:.3f}, trl / rlite = {peer / mine:.2f}")
    print(f"torch {torch.__version__}, {args.threads} thread(s), {args.rounds} rounds of {args.steps} steps")


if __name__ == "__main__":
    main()
