"""The sampler of intermediate success against the uniform order, at equal generated tokens.

    python -m benchmarks.samplers            about a quarter of an hour on two free cores
    python -m benchmarks.samplers --draw     only the picture and the table of runs that are there

A small model learns by imitation to spell short words backwards, then by Dr. GRPO to spell a table of 128 words, each
of which is asked three times on average. Each sampler has three runs with different seeds, equal in everything else,
without dynamic filtering: each step generates 16 x 8 answers. The held-out accuracy is drawn over the tokens that were
generated, with standard errors over the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import rlite
from rlite.assembly.commands.options import QuickstartConfig
from rlite.assembly.quickstart.run import MAX_LENGTH, MAX_NEW_TOKENS, build_tiny_qwen3, problems, warm_start

SAMPLERS, SEEDS = ("uniform", "intermediate"), (0, 1, 2)
NUM_ROWS, NUM_PROMPTS, GROUP_SIZE, STEPS, TEST_FREQ = 128, 16, 8, 24, 3


def is_right(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str) -> float:
    """Return 1 for the right answer, else 0."""
    return float(completions.strip() == answer)


def run(folder: Path, sampler: str, seed: int, train: Sequence[object], held_out: Sequence[object]) -> None:
    """Make one run, or nothing if it has ended before."""
    options = {
        "actor": {"lr": 5e-5, "weight_decay": 0.0, "gradient_checkpointing": False},
        "train_data": {"prompts_per_rollout": NUM_PROMPTS, "responses_per_prompt": GROUP_SIZE},
        "train_data.sampler.name": sampler,
        "rollout": {"max_model_len": MAX_LENGTH, "dynamic_filtering": False},
        "rollout.train_sampling_params.max_new_tokens": MAX_NEW_TOKENS,
        "trainer": {"total_steps": STEPS, "test_freq": TEST_FREQ, "save_freq": STEPS, "seed": seed, "record": "none"},
        "save_dir": str(folder / f"{sampler}-{seed}"),
    }
    reward = {"path": is_right, "in_process": True}
    rlite.train("ppo", model=folder / "warm", data=train, test_data=held_out, reward=reward, **options)


def curve(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that a run had generated before each of its evaluations, and the held-out accuracies."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lengths = {row["step"]: row["response_length"] for row in rows if "response_length" in row}
    tokens = dict(zip([0, *lengths], itertools.accumulate([0, *lengths.values()]), strict=True))
    looks = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    scale = NUM_PROMPTS * GROUP_SIZE
    return np.array([tokens[step] * scale for step, _ in looks]), np.array([value for _, value in looks])


def report(folder: Path, out: Path) -> None:
    """Write the picture, and print the table."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    curves = {(name, seed): curve(folder / f"{name}-{seed}") for name in SAMPLERS for seed in SEEDS}
    grid = np.linspace(0, min(tokens[-1] for tokens, _ in curves.values()), 9)
    print("| sampler | " + " | ".join(f"{tokens / 1000:.0f} k" for tokens in grid) + " |")
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in SAMPLERS:
        values = np.stack([np.interp(grid, *curves[name, seed]) for seed in SEEDS])
        mean, error = values.mean(0), values.std(0, ddof=1) / len(SEEDS) ** 0.5
        axes.errorbar(grid / 1000, mean, error, capsize=3, label=name)
        print(f"| {name} | " + " | ".join(f"{m:.3f} ± {e:.3f}" for m, e in zip(mean, error, strict=True)) + " |")
    axes.set(xlabel="generated tokens (thousands)", ylabel="held-out accuracy", title=f"{len(SEEDS)} seeds, ± 1 s.e.")
    axes.legend()
    figure.tight_layout()
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "samplers.png", dpi=110)


def main() -> None:
    """Make the runs that are missing, then report all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/samplers"), help="runs")
    parser.add_argument("--out", type=Path, default=Path("docs/learning"), help="picture")
    parser.add_argument("--draw", action="store_true", help="make no runs")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not arguments.draw:
        options = QuickstartConfig(folder=str(folder))
        train, held_out = problems(options, folder)
        if not (folder / "warm").exists():
            blank = build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
            rlite.init(num_devices=1)
            warm_start(options, blank, folder, train)
            rlite.shutdown()
        for seed in SEEDS:
            for name in SAMPLERS:
                run(folder, name, seed, train[:NUM_ROWS], held_out)
    report(folder, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
