"""On-policy distillation against GRPO: generated tokens until a student is as good as its teacher, on a CPU.

    python -m benchmarks.distillation [--folder runs/distillation] [--seeds 3] [--answers 16]

The task is the quickstart's: to spell words backwards. One warm start imitates a teacher who is too impatient for long
words. GRPO trains it to a better model, which is the teacher from then on. Students begin with the same warm start, and
learn by distillation or by GRPO until their held-out accuracy is 95 % of the teacher's. Each method has three learning
rates; the best is the rate whose runs need the fewest tokens in the mean. Every run of a method has another seed for
its prompts and samples. A step of both has as many answers, GRPO eight to each prompt, and the held-out accuracy is
taken after each step, so that a step's tokens are the resolution: 16 answers are few enough to tell the methods apart.
Tokens of evaluations do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlite
from rlite.assembly.commands.options import QuickstartConfig
from rlite.assembly.quickstart.run import MAX_LENGTH, MAX_NEW_TOKENS, build_tiny_qwen3, problems, warm_start
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.rollout.rewards.reasoning import verify_exactly
from rlite.services.console.sinks import read_metrics
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.distillation_options import DistillationOptions, TeacherOptions
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions

SHARE = 0.95
"""share of the teacher's accuracy that a student has to reach"""
RATES = dict.fromkeys(("distill", "grpo"), (2.5e-4, 5e-4, 1e-3))
STEPS = {"teacher": 60, "grpo": 480, "distill": 480}
TEST_EVERY = {"teacher": 60, "grpo": 1, "distill": 1}
"""steps from one evaluation to the next"""
Table = Sequence[Mapping[str, Any]]


def train(
    kind: str,
    folder: Path,
    warm: Path,
    rows: tuple[Table, Table],
    lr: float,
    batch: tuple[int, int],
    seed: int,
    teacher: str,
    goal: float,
) -> dict[str, float]:
    """Train from the warm start.

    Args:
        kind: teacher, grpo or distill.
        folder: folder of the run.
        warm: folder of the warm start.
        rows: training and held-out problems.
        lr: learning rate.
        batch: prompts in a batch, and answers to each.
        seed: seed of prompts and samples.
        teacher: folder of the teacher of a distillation.
        goal: held-out accuracy at which the run stops.

    Returns:
        Held-out accuracy at the end, generated tokens until then, steps, and whether the goal was reached. A run that
            has ended is not made again.
    """
    if (done := folder / "found.json").exists():
        return dict(json.loads(done.read_text()))
    prompts, responses = batch
    distill = DistillationOptions()
    if kind == "distill":
        distill = DistillationOptions(teacher={"": TeacherOptions(model_name=teacher)}, task_rewards=False)
    config = PpoConfig(
        actor=ActorOptions(model_name=str(warm), lr=lr, weight_decay=0.0, gradient_checkpointing=False),
        distill=distill,
        train_data=PromptOptions(prompts_per_rollout=prompts, responses_per_prompt=responses),
        rollout=RolloutOptions(
            train_sampling_params=SamplingOptions(max_new_tokens=MAX_NEW_TOKENS),
            max_model_len=MAX_LENGTH,
            dynamic_filtering=False,
        ),
        trainer=TrainerOptions(
            save_dir=str(folder),
            total_steps=STEPS[kind],
            save_freq=1000,
            test_freq=TEST_EVERY[kind],
            stop_at={"accuracy": goal},
            sinks=["jsonl"],
            record="none",
            overwrite=True,
            seed=seed,
        ),
    )
    sampling = config.rollout.train_sampling_params.gconfig()
    workflow = SingleTurnWorkflow(RewardFunction(verify_exactly), sampling, load_tokenizer(warm))
    rlite.init(num_devices=1)
    PpoTrainer(config, workflow, *rows).fit()
    rlite.shutdown()
    tokens, accuracy, steps = 0.0, 0.0, 0
    for line in read_metrics(folder / "metrics.jsonl"):
        tokens += line.get("response_length", 0.0) * prompts * responses
        accuracy, steps = line.get("accuracy", accuracy), int(line["step"])
    found = {"accuracy": accuracy, "tokens": tokens, "steps": steps, "is_reached": float(accuracy >= goal)}
    done.write_text(json.dumps(found))
    return found


def main() -> None:
    """Train the teacher and all students, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=16)
    arguments = parser.parse_args()
    began, folder = time.monotonic(), arguments.folder.resolve()
    options = QuickstartConfig(folder=str(folder))
    rows: Any = problems(options, folder)
    warm, teacher = folder / "warm", folder / "teacher"
    if not warm.exists():
        blank = build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
        rlite.init(num_devices=1)
        warm_start(options, blank, folder, rows[0])
        rlite.shutdown()
    found: dict[str, Any] = {"teacher": train("teacher", teacher, warm, rows, 5e-4, (32, 8), 0, "", 2.0)}
    goal = SHARE * found["teacher"]["accuracy"]
    print(f"teacher: {found['teacher']}, goal {goal:.3f}", flush=True)
    batches = {"distill": (arguments.answers, 1), "grpo": (arguments.answers // 8, 8)}
    for seed in range(1, arguments.seeds + 1):
        for kind, lr in ((kind, lr) for kind, rates in RATES.items() for lr in rates):
            name, given = f"{kind} lr={lr:g}", (warm, rows, lr)
            own = folder / f"{kind}-{lr:g}-{arguments.answers}-{seed}"
            run = train(kind, own, *given, batches[kind], seed, str(teacher / "latest"), goal)
            found.setdefault(name, []).append(run)
            print(f"{time.monotonic() - began:6.0f} s {name}, seed {seed}: {run}", flush=True)
    for kind in RATES:
        runs = {name: each for name, each in found.items() if name.startswith(f"{kind} ")}
        complete = {name: each for name, each in runs.items() if all(run["is_reached"] for run in each)}
        if complete:
            best = min(complete, key=lambda name: statistics.mean(run["tokens"] for run in complete[name]))
            tokens = [run["tokens"] for run in complete[best]]
            found[kind] = {"best": best, "mean_tokens": statistics.mean(tokens), "tokens": tokens}
        else:
            found[kind] = {"best": None}
        print(kind, found[kind])
    (folder / f"result-{arguments.answers}.json").write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
