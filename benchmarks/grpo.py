"""Seconds per GRPO step, ours and TRL's, on one model and the same prompts, in one run.

    make bench-trl-env
    .venv/bin/python -m benchmarks.grpo --trl-python .venv-trl/bin/python [--threads 1] [--rounds 3]

A step is whole on both sides: 8 prompts x 8 generations of up to 128 tokens (about 40 on average, geometric: the
stopping is in the weights), rewards, log-probabilities, loss, backward, AdamW, and on ours the weight sync. float32,
no reference model, no gradient checkpointing. Rounds alternate; the ratio is of the medians, and of CPU time beside it,
which a busy machine disturbs less.

    python -m benchmarks.grpo --prompt-tokens 400 --answer-tokens 80 --whole [--trl-python none]

The second form has prompts and answers of fixed lengths, and with `--whole` a third side: ours without shared prefixes.
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
from benchmarks.model import build_model, build_prompts
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


def grpo_trainer(
    model: Path,
    scratch: Path,
    total_steps: int,
    record: Amount,
    max_new_tokens: int = MAX_NEW_TOKENS,
    max_model_len: int = 256,
    **actor: Any,
) -> PpoTrainer:
    """Return the trainer of this benchmark, for the current session."""
    prompts = json.loads((model / "prompts.json").read_text())
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-6, **actor),
        train_data=PromptOptions(prompts_per_rollout=NUM_PROMPTS, responses_per_prompt=NUM_GENERATIONS),
        rollout=RolloutOptions(max_model_len=max_model_len),
        trainer=TrainerOptions(
            save_dir=str(scratch), total_steps=total_steps, save_freq=10**6, test_freq=10**6, record=record
        ),
    )
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    workflow = SingleTurnWorkflow(RewardFunction(share_of_even_tokens), gconfig, tokenizer)
    return PpoTrainer(options, workflow, [{"input_ids": prompt} for prompt in prompts])


def ours(model: Path, scratch: Path, steps: int, threads: int, **options: Any) -> dict[str, Any]:
    rlite.init(num_devices=1, num_threads=threads)
    trainer = grpo_trainer(model, scratch, steps + 1, record="none", **options)
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


def theirs(
    python: str, model: Path, steps: int, threads: int, rows_per_forward: int, max_new_tokens: int
) -> dict[str, Any]:
    script = Path(__file__).parent / "peers" / "trl_grpo.py"
    command = [python, str(script), str(model), str(model / "prompts.json"), "--threads", str(threads)]
    command += ["--steps", str(steps), "--rows-per-forward", str(rows_per_forward)]
    command += ["--max-new-tokens", str(max_new_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows-per-forward", type=int, default=64, help="TRL's; report the best")
    parser.add_argument("--prompt-tokens", type=int, help="length of every prompt; default: 8 to 64")
    parser.add_argument("--answer-tokens", type=int, help="length of every answer; default: about 40")
    parser.add_argument("--whole", action="store_true", help="a side of ours that computes every sequence whole")
    args = parser.parse_args()
    longest, answer = args.prompt_tokens or 64, args.answer_tokens or MAX_NEW_TOKENS
    own = {"max_new_tokens": answer, "max_model_len": max(256, longest + answer)}
    sides: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        stop = None if args.answer_tokens else STOP_PROBABILITY
        model = build_model(Path(scratch) / "model", stop_probability=stop)
        prompts = build_prompts(shortest=args.prompt_tokens or 8, longest=longest)
        (model / "prompts.json").write_text(json.dumps(prompts))
        for number in range(args.rounds):
            folder, common = Path(scratch) / f"run-{number}", (args.steps, args.threads)
            found = {"rlite": ours(model, folder, *common, **own)}
            if args.whole:
                found["whole"] = ours(model, folder / "whole", *common, **own, share_prefixes=False)
            if args.trl_python != "none":
                found["trl"] = theirs(args.trl_python, model, *common, args.rows_per_forward, answer)
            for name, side in found.items():
                sides.setdefault(name, []).append(side)
            print(json.dumps({name: {k: v for k, v in side.items() if k != "steps"} for name, side in found.items()}))
    for key in ("seconds_per_step", "cpu_seconds_per_step"):
        medians = {name: statistics.median(each[key] for each in found) for name, found in sides.items()}
        print(f"{key}: {', '.join(f'{name} {value:.3f}' for name, value in medians.items())}", end="")
        others = {name: value for name, value in medians.items() if name != "rlite"}
        print("".join(f", {name} / rlite = {value / medians['rlite']:.2f}" for name, value in others.items()))
    print(f"torch {torch.__version__}, {args.threads} thread(s), {args.rounds} rounds of {args.steps} steps")


if __name__ == "__main__":
    main()
