"""Every trainer learns: SFT, reward models, DPO, and PPO in three forms, on a task of reasoning-gym, on a CPU.

    python -m benchmarks.learning                   all of it, about a quarter of an hour on two free cores
    python -m benchmarks.learning sft rm dpo        a part; ppo, dpo and rm start from what sft left in the folder

The task is to spell words backwards. Data is written as files, and every run is a command line of `rlite.trainer`,
printed before it starts:

    sft       imitates, from random weights, a teacher who spells short words right and cuts many long words short
    rm        scores the right answer above a wrong one, which is cut short or not reversed
    dpo       prefers the right answer in the same pairs
    dr_grpo   reinforcement learning from the same model as DPO; the reward is 1 for the right answer, else 0
    grpo      the same with the group's deviation, the mean per sequence and a KL penalty in the loss
    ppo       the same with a critic, GAE and a KL penalty in the rewards

All figures are on held-out words. `docs/learning/` gets a picture of each run and a table of figures and targets. The
exit status is 0 if all targets were met.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.assembly.quickstart.run import build_tiny_qwen3, impatient_demonstrations
from rlite.data.reasoning import held_out_split, question_of
from rlite.services.console.plots import plot_learning_curve

NUM_TRAIN, NUM_HELD_OUT, NUM_DPO_PAIRS = 12_000, 512, 6_400
PPO_STEPS, TEST_FREQ, NUM_TRIED = 40, 4, 256
"""steps of reinforcement learning, steps between two evaluations, held-out words that are tried in each"""
EVALUATE_EVERY = 10
"""steps of a run that learns from rows"""

Metrics = list[dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One figure, before and after, with its target."""

    figure: str
    before: float
    after: float
    target: str
    is_met: bool


@dataclass(frozen=True, kw_only=True)
class LearningRun:
    """A trainer's command line, and the targets of its metrics."""

    trainer: str
    settings: Sequence[str]
    findings: Callable[[Metrics], list[Finding]]
    drawn: Sequence[str]
    title: str


def short(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with a question of a few bytes. A model with random weights needs no long instruction."""
    return {**row, "messages": [{"role": "user", "content": f"reverse {row['metadata']['word']}"}]}


def wrong(row: Mapping[str, Any], rng: random.Random) -> str:
    """Return a wrong answer: the beginning of the right one, or the unchanged word."""
    right = row["answer"]
    return rng.choice([right[: len(right) // 2 + 1], row["metadata"]["word"]])


def write_data(folder: Path) -> None:
    """Write demonstrations, preferences and prompts of training and held-out words."""
    rng = random.Random(0)
    for part, rows in zip(("train", "test"), held_out_split("spell_backward", NUM_TRAIN, NUM_HELD_OUT, 0), strict=True):
        rows = [short(row) for row in rows]
        teacher = impatient_demonstrations(rows, 0, patience=4, impatience=0.6)
        answers = teacher if part == "train" else [row["answer"] for row in rows]
        sft = [
            {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
            for row, answer in zip(rows, answers, strict=True)
        ]
        sides = [(row, row["answer"], wrong(row, rng)) for row in rows]
        pairs = [{"messages": row["messages"], "chosen": a, "rejected": b} for row, a, b in sides if a != b]
        prompts = [{"messages": row["messages"], "extra_info": {"answer": row["answer"]}} for row in rows]
        for name, table in (("sft", sft), ("pairs", pairs), ("prompts", prompts)):
            lines = "".join(json.dumps(row) + "\n" for row in table)
            (folder / f"{name}_{part}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{part}: {len(rows)} words such as {question_of(rows[0])!r} -> {rows[0]['answer']!r}")


def of_rows(kind: str, folder: Path) -> list[str]:
    """Settings of a trainer that learns from rows."""
    table = "sft" if kind == "sft" else "pairs"
    part = f"train[:{NUM_DPO_PAIRS}]@" if kind == "dpo" else ""
    return [
        f"data.path={part}{folder}/{table}_train.jsonl",
        f"test_data.path={folder}/{table}_test.jsonl",
        "data.max_length=64",
        "data.batch_size=64",
        f"trainer.test_freq={EVALUATE_EVERY}",
        "trainer.save_freq=1000",
    ]


def of_ppo(folder: Path) -> list[str]:
    """Settings that the forms of PPO share."""
    return [
        f"actor.model_name={folder}/sft/latest",
        "actor.lr=5e-5",
        "actor.weight_decay=0",
        "actor.gradient_checkpointing=false",
        f"train_data.path={folder}/prompts_train.jsonl",
        f"test_data.path=train[:{NUM_TRIED}]@{folder}/prompts_test.jsonl",
        "train_data.prompts_per_rollout=16",
        "train_data.responses_per_prompt=8",
        f"rollout.env_path={Path(__file__).with_name('learning_env.py')}",
        "rollout.train_sampling_params.max_new_tokens=12",
        "rollout.max_model_len=128",
        f"trainer.total_steps={PPO_STEPS}",
        f"trainer.test_freq={TEST_FREQ}",
        "trainer.save_freq=1000",
    ]


def tested(metrics: Metrics, key: str) -> list[float]:
    """Return the values of a metric that is not logged at every step."""
    return [row[key] for row in metrics if key in row]


def sft_findings(metrics: Metrics) -> list[Finding]:
    """Return the held-out loss. Held-out answers are right; many training answers are cut short."""
    loss = tested(metrics, "test_loss")
    return [Finding(figure="loss", before=loss[0], after=loss[-1], target="falls", is_met=loss[-1] < 0.5 * loss[0])]


def rm_findings(metrics: Metrics) -> list[Finding]:
    """Return the accuracy of held-out pairs."""
    right = tested(metrics, "test_accuracy")
    return [Finding(figure="pair accuracy", before=right[0], after=right[-1], target="> 0.9", is_met=right[-1] > 0.9)]


def dpo_findings(metrics: Metrics) -> list[Finding]:
    """Return margin and accuracy of held-out pairs. At first the policy is the reference: margin 0, accuracy 0.5."""
    margin, right = tested(metrics, "test_margin")[-1], tested(metrics, "test_accuracy")[-1]
    return [
        Finding(figure="margin", before=0.0, after=margin, target="rises", is_met=margin > 0.5),
        Finding(figure="pair accuracy", before=0.5, after=right, target="rises", is_met=right > 0.9),
    ]


def ppo_findings(metrics: Metrics) -> list[Finding]:
    """Return the rewards of the first and the last tenth of the steps.

    All greedy evaluations in a tenth count as one sample, because they use the same words.
    """
    looks = [(row["step"], row["accuracy"]) for row in metrics if "accuracy" in row]
    first = [value for step, value in looks if step <= PPO_STEPS / 10]
    last = [value for step, value in looks if step >= PPO_STEPS * 9 / 10]
    before, after = sum(first) / len(first), sum(last) / len(last)
    error = ((before * (1 - before) + after * (1 - after)) / NUM_TRIED) ** 0.5
    rise = after - before
    is_enough = rise >= 0.2 and rise >= 5 * error
    target = f"+0.2 and 5 standard errors of {error:.3f}"
    return [Finding(figure="reward", before=before, after=after, target=target, is_met=is_enough)]


def runs(folder: Path) -> dict[str, LearningRun]:
    """Return all runs by name, in the order in which they run."""
    blank, warm, rl = f"actor.model_name={folder}/blank", f"{folder}/sft/latest", of_ppo(folder)
    tuned = ["warmup_ratio=0.05", "weight_decay=0", "gradient_checkpointing=false"]
    actor, critic = [f"actor.{setting}" for setting in tuned], [f"critic.{setting}" for setting in tuned]
    grpo = ["adv.norm_var=true", "actor.avg_level=sequence", "kl.type=loss", "kl.loss_estimator=k3", "kl.coef=0.001"]
    gae = ["adv.estimator=gae", f"critic.model_name={warm}", "critic.lr=1e-3", "kl.type=reward", "kl.coef=0.001"]
    return {
        "sft": LearningRun(
            trainer="sft",
            settings=[blank, "actor.lr=2e-3", "trainer.n_epochs=4", *actor, *of_rows("sft", folder)],
            findings=sft_findings,
            drawn=("loss", "test_loss"),
            title="SFT: spelling backwards from an impatient teacher",
        ),
        "rm": LearningRun(
            trainer="rm",
            settings=[f"critic.model_name={warm}", "critic.lr=1e-3", *critic, *of_rows("rm", folder)],
            findings=rm_findings,
            drawn=("loss", "test_accuracy"),
            title="Reward model: right answers above wrong ones",
        ),
        "dpo": LearningRun(
            trainer="dpo",
            settings=[f"actor.model_name={warm}", "actor.lr=1e-4", *actor, *of_rows("dpo", folder)],
            findings=dpo_findings,
            drawn=("loss", "test_margin", "test_accuracy"),
            title="DPO: right answers above wrong ones",
        ),
        "dr_grpo": LearningRun(
            trainer="ppo",
            settings=rl,
            findings=ppo_findings,
            drawn=("accuracy", "reward"),
            title="Dr. GRPO: spelling backwards",
        ),
        "grpo": LearningRun(
            trainer="ppo",
            settings=[*rl, *grpo],
            findings=ppo_findings,
            drawn=("accuracy", "reward"),
            title="GRPO: spelling backwards",
        ),
        "ppo": LearningRun(
            trainer="ppo",
            settings=[*rl, *gae],
            findings=ppo_findings,
            drawn=("accuracy", "reward"),
            title="PPO with a critic: spelling backwards",
        ),
    }


def report(folder: Path, out: Path) -> bool:
    """Write pictures and table of the finished runs, and return True if they met all targets."""
    lines = ["| run | held-out figure | before | after | target | |", "|---|---|---|---|---|---|"]
    pictures, is_met = [], True
    for name, run in runs(folder).items():
        path = folder / name / "metrics.jsonl"
        if not (folder / name / "latest").exists():  # not made, or not finished
            continue
        metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for found in run.findings(metrics):
            is_met &= found.is_met
            mark = "met" if found.is_met else "**missed**"
            lines.append(
                f"| {name} | {found.figure} | {found.before:.3f} | {found.after:.3f} | {found.target} | {mark} |"
            )
        plot_learning_curve(path, out / f"{name}.png", metrics=run.drawn, title=run.title)
        pictures.append(f"![{run.title}]({name}.png)")
    text = "\n".join(
        [
            "# Every trainer learns",
            "",
            "`python -m benchmarks.learning` writes this page. Each run trains a Qwen3 of 0.4 million parameters,",
            "starting from random weights, to spell words backwards (reasoning-gym) on a CPU. All figures are on",
            f'{NUM_HELD_OUT} held-out words ({NUM_TRIED} for RL). "Before" is the first evaluation. For rewards it is',
            'the mean over the first tenth of the steps. "After" is the last evaluation, or the last tenth. DPO starts',
            "from its own reference, so its first margin is 0 and its first pair accuracy 0.5. The SFT demonstrations",
            "cut long words short; RL learns to write them out. The training rewards in the pictures include all",
            "sampled answers.",
            "",
            *lines,
            "",
            *pictures,
            "",
        ]
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    print("\n".join(lines))
    return is_met


def main() -> None:
    """Make the chosen runs, then report all finished runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="sft rm dpo dr_grpo grpo ppo; default: all")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="data and runs")
    parser.add_argument("--out", type=Path, default=Path("docs/learning"), help="pictures and table")
    arguments = parser.parse_args()
    folder, known = arguments.folder, runs(arguments.folder)
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    build_tiny_qwen3(folder / "blank", seed=0, hidden_size=128, intermediate_size=256)
    for name in arguments.names or known:
        settings = [*known[name].settings, f"trainer.save_dir={folder}/{name}"]
        print(f"\npython -m rlite.trainer.{known[name].trainer} {shlex.join(settings)}\n", flush=True)
        importlib.import_module(f"rlite.trainer.{known[name].trainer}").main(settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if report(folder, arguments.out) else 1)


if __name__ == "__main__":
    main()
