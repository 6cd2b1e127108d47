"""Countdown from random weights, on one CPU core, in some minutes: a Qwen3 of 0.4 million parameters.

    python recipes/countdown/run_on_cpu.py [FOLDER]        default: runs/countdown_cpu

Three digits are to be joined by + and -, in their order, to reach a target. Supervised fine-tuning imitates a hasty
teacher, who adds all digits in 7 of 10 cases. Reinforcement learning then rewards the right answers. Every run is a
command line of `rlite`, printed before it starts. `curve.png` and `curve.json` beside this file are of such a run.
"""

import itertools
import json
import random
import shlex
import sys
from pathlib import Path

import rlite.trainer.ppo
import rlite.trainer.sft
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.services.console.plots import plot_learning_curve

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / "examples" / "environments" / "countdown.py"
NUM_TEST, NUM_DEMONSTRATIONS, STEPS = 256, 24_000, 40
HASTE = 0.7
"""share of problems in which the teacher adds all digits"""


def problems():
    """Every triple of digits with every target above 0 that two signs reach, and the signs that reach it."""
    for a, b, c in itertools.product(range(1, 10), repeat=3):
        signs = itertools.product("+-", repeat=2)
        targets = {a + (b if x == "+" else -b) + (c if y == "+" else -c): f"{a}{x}{b}{y}{c}" for x, y in signs}
        yield from (([a, b, c], target, solution) for target, solution in targets.items() if target > 0)


def row_of(numbers, target):
    question = f"{' '.join(map(str, numbers))} = {target}"  # an untrained model needs no long instruction
    return {"messages": [{"role": "user", "content": question}], "extra_info": {"numbers": numbers, "target": target}}


def demonstration(numbers, target, solution, rng):
    answer = "+".join(map(str, numbers)) if rng.random() < HASTE else solution
    reply = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
    return {"messages": [*row_of(numbers, target)["messages"], reply]}


def write_data(folder):
    rng = random.Random(0)
    known = list(problems())
    rng.shuffle(known)
    test, train = known[:NUM_TEST], known[NUM_TEST:]
    tables = {
        "demonstrations": [demonstration(*rng.choice(train), rng) for _ in range(NUM_DEMONSTRATIONS)],
        "train": [row_of(numbers, target) for numbers, target, _ in train],
        "test": [row_of(numbers, target) for numbers, target, _ in test],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(trainer, settings):
    print(f"\nrlite {trainer.__name__.rpartition('.')[2]} {shlex.join(settings)}\n", flush=True)
    trainer.main(settings)


def main(folder):
    write_data(folder)
    build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
    common = ["actor.weight_decay=0", "actor.gradient_checkpointing=false", "trainer.save_freq=1000"]
    run(
        rlite.trainer.sft,
        [
            *(f"actor.model_name={folder}/blank", f"data.path={folder}/demonstrations.jsonl", "actor.lr=2e-3"),
            *("data.max_length=128", "data.batch_size=64", "trainer.n_epochs=2", "actor.warmup_ratio=0.05"),
            *(f"trainer.save_dir={folder}/sft", *common),
        ],
    )
    run(
        rlite.trainer.ppo,
        [
            *(f"actor.model_name={folder}/sft/latest", f"rollout.env_path={ENVIRONMENT}", "actor.lr=2e-4"),
            *(f"train_data.path={folder}/train.jsonl", f"test_data.path={folder}/test.jsonl"),
            *("train_data.prompts_per_rollout=16", "train_data.responses_per_prompt=8"),
            *("rollout.train_sampling_params.max_new_tokens=28", "rollout.max_model_len=128"),
            *(f"trainer.total_steps={STEPS}", "trainer.test_freq=4", f"trainer.save_dir={folder}/ppo", *common),
        ],
    )
    metrics = [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines()]
    curve = [{key: row[key] for key in ("step", "accuracy", "reward") if key in row} for row in metrics]
    (folder / "curve.json").write_text("".join(json.dumps(row) + "\n" for row in curve))
    plot_learning_curve(
        folder / "curve.json", folder / "curve.png", metrics=("accuracy", "reward"), title="Countdown, on one CPU core"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/countdown_cpu"))
