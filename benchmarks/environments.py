"""Reinforcement learning in three third-party environments with their own rewards, on a CPU.

    pip install reasoning-gym gem-llm
    python -m benchmarks.environments                  all three, about a quarter of an hour
    python -m benchmarks.environments sort guess       a part
    python -m benchmarks.environments --report         only the page, from the finished runs

    spell     reasoning-gym's spell_backward
    sort      reasoning-gym's number_sorting: three or four numbers below 100, in ascending or descending order
    guess     GEM's game:GuessTheNumber-v0-hard, a number up to 50, in four turns instead of seven, through the adapter
              for Gym-like environments

Questions, games and rewards are those of the packages: a puzzle scores 1 for a full `score_answer`, else 0, and a
game scores the sum of the rewards of its `step`. Each run starts from a Qwen3 of 0.4 million parameters with random
weights, which first imitates an unreliable teacher: it cuts long words short, copies lists unsorted, or repeats one
number. Then `rlite.trainer.ppo` (Dr. GRPO) trains the model with rewards. Every run is a command line of
`rlite.trainer`, printed before it starts. Tokens are bytes, and each longer text between two numbers that the
environment repeats; in games, numbers and roles are tokens, too.

Two figures have to rise: the mean reward of greedy answers to held-out puzzles, or in games with other seeds, and the
mean reward of all sampled answers (no dynamic filtering). `docs/environments-learning/` gets a picture of each run and
a table. The exit status is 0 if all runs pass.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM

from rlite.assembly.quickstart.run import build_tiny_qwen3, byte_tokenizer, impatient_demonstrations
from rlite.data.reasoning import held_out_split
from rlite.services.console.plots import plot_learning_curve
from rlite.services.record.files import FOLDER, TRAIN, record_files

try:
    from benchmarks.environments_gem import make as make_game
except ModuleNotFoundError:
    make_game = None

STEPS, TEST_FREQ, NUM_TRIED = 80, 4, 256
"""steps of reinforcement learning, steps between two evaluations, puzzles or games in each evaluation"""
NUM_SHOWN, NUM_PROMPTS = 12_000, 3_000
"""puzzles or games in demonstrations, and other ones for reinforcement learning"""
PROMPTS_PER_STEP = 32
"""prompts of one step; no run uses all prompts"""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data of one run: demonstrations to imitate, rows to train on and held-out rows."""

    demonstrations: list[Row]
    train: list[Row]
    test: list[Row]
    words: Sequence[str] = ()
    """texts that are tokens, besides bytes and the texts that the environment repeats"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, and how to learn in it."""

    title: str
    data: Callable[[], Data]
    env_path: str
    settings: Sequence[str]
    sft_epochs: int
    lowest_reward: float = 0.0
    """lowest reward of an episode; the highest is 1"""


def puzzles(name: str, teach: Callable[[Sequence[Row]], Sequence[str]], **options: Any) -> Data:
    """Return puzzles of reasoning-gym: some with a teacher's answers, other ones for reinforcement learning.

    Raises: ConfigError if reasoning-gym is missing.
    """
    rows, test = held_out_split(name, NUM_SHOWN + NUM_PROMPTS, NUM_TRIED, 0, **options)
    shown, prompts = rows[:NUM_SHOWN], rows[NUM_SHOWN:]
    return Data(
        demonstrations=[
            {"messages": [*row["messages"], {"role": "assistant", "content": answer}]}
            for row, answer in zip(shown, teach(shown), strict=True)
        ],
        train=[{"messages": row["messages"], "extra_info": row} for row in prompts],
        test=[{"messages": row["messages"], "extra_info": row} for row in test],
    )


def impatient(rows: Sequence[Row]) -> list[str]:
    """Return answers of a teacher who spells short words right and cuts most long words short."""
    return impatient_demonstrations(rows, 0, patience=4, impatience=0.6)


def careless(rows: Sequence[Row]) -> list[str]:
    """Return answers of a teacher who copies the numbers unsorted in 7 of 10 cases."""
    rng = random.Random(0)
    return [row["answer"] if rng.random() < 0.3 else str(row["metadata"]["original_numbers"]) for row in rows]


def games() -> Data:
    """Return games of GEM: some played by a stubborn player, others for training and evaluation, with other seeds.

    Raises: SystemExit if GEM is missing.
    """
    if make_game is None:
        sys.exit("the run `guess` needs GEM, which is not installed: pip install gem-llm")
    train, test = range(NUM_PROMPTS), range(10**6, 10**6 + NUM_TRIED)
    return Data(
        demonstrations=[stubborn_game(seed) for seed in range(2 * 10**6, 2 * 10**6 + 8_000)],
        train=[{"seed": seed} for seed in train],
        test=[{"seed": seed} for seed in test],
        words=[*map(str, range(10, 51)), "user\n", "assistant\n"],
    )


def stubborn_game(seed: int) -> Row:
    """Return a game of a player who repeats the lowest number, or in 2 of 10 games bisects what hints leave."""
    rng, game = random.Random(f"player {seed}"), make_game()  # the game draws from `seed` itself
    is_attentive = rng.random() < 0.2
    observation, _ = game.reset(seed=seed)
    low, high = game.min_number, game.max_number
    messages, is_done = [], False
    while not is_done:
        guess = (low + high) // 2 if is_attentive else game.min_number
        action = f"\\boxed{{{guess}}}"
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": action}]
        observation, _, terminated, truncated, _ = game.step(action)
        low = max(low, guess + 1) if "higher" in observation else low
        high = min(high, guess - 1) if "lower" in observation else high
        is_done = terminated or truncated
    return {"messages": messages}


def tasks() -> dict[str, Task]:
    """Return all runs by name."""
    reasoning, gem = (str(Path(__file__).with_name(f"environments_{name}.py")) for name in ("reasoning", "gem"))
    return {
        "spell": Task(
            title="reasoning-gym: spell_backward",
            data=lambda: puzzles("spell_backward", impatient),
            env_path=reasoning,
            settings=["rollout.train_sampling_params.max_new_tokens=12", "actor.lr=5e-5"],
            sft_epochs=3,
        ),
        "sort": Task(
            title="reasoning-gym: number_sorting",
            data=lambda: puzzles(
                "number_sorting", careless, min_numbers=3, max_numbers=4, max_decimals=0, min_value=0, max_value=99
            ),
            env_path=reasoning,
            settings=["rollout.train_sampling_params.max_new_tokens=28", "actor.lr=2e-4"],
            sft_epochs=4,
        ),
        "guess": Task(
            title="GEM: GuessTheNumber-v0-hard, in four turns",
            data=games,
            env_path=gem,
            settings=[
                "rollout.train_sampling_params.max_new_tokens=6",
                "rollout.max_turns=4",
                "actor.lr=1e-4",
            ],
            sft_epochs=2,
            lowest_reward=-0.1,
        ),
    }


def sft_settings(task: Task, folder: Path) -> list[str]:
    """Return the settings of the imitation, which starts from random weights."""
    return [
        f"actor.model_name={folder}/blank",
        "actor.lr=2e-3",
        "actor.warmup_ratio=0.05",
        "actor.weight_decay=0",
        "actor.gradient_checkpointing=false",
        f"data.path={folder}/demonstrations.jsonl",
        "data.max_length=384",
        "data.batch_size=64",
        f"trainer.n_epochs={task.sft_epochs}",
        "trainer.save_freq=1000",
        f"trainer.save_dir={folder}/sft",
    ]


def ppo_settings(task: Task, folder: Path) -> list[str]:
    """Return the settings of the reinforcement learning, which starts from the imitation's model."""
    return [
        f"actor.model_name={folder}/sft/latest",
        "actor.warmup_ratio=0.1",
        "actor.weight_decay=0",
        "actor.gradient_checkpointing=false",
        f"train_data.path={folder}/train.jsonl",
        f"test_data.path={folder}/test.jsonl",
        f"train_data.prompts_per_rollout={PROMPTS_PER_STEP}",
        "train_data.responses_per_prompt=8",
        f"rollout.env_path={task.env_path}",
        "rollout.dynamic_filtering=false",  # rewards that are counted are those of all answers
        "rollout.max_model_len=384",
        f"trainer.total_steps={STEPS}",
        f"trainer.test_freq={TEST_FREQ}",
        "trainer.save_freq=1000",
        f"trainer.save_dir={folder}/ppo",
        *task.settings,
    ]


def common_texts(rows: Iterable[Mapping[str, Any]], least: int = 100) -> list[str]:
    """Return texts of more than two characters between two numbers that at least `least` messages contain."""
    counts: dict[str, int] = {}
    for row in rows:
        for message in row["messages"]:
            for text in set(re.split(r"\d+|(?<=: )", message["content"])):
                counts[text] = counts.get(text, 0) + 1
    return sorted(text for text, count in counts.items() if len(text) > 2 and count >= least)


def build_blank(folder: Path, texts: Sequence[str]) -> None:
    """Write an untrained Qwen3 whose tokens are bytes and these texts."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(texts))
    model = AutoModelForCausalLM.from_pretrained(
        build_tiny_qwen3(folder, seed=0, hidden_size=128, intermediate_size=256)
    )
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare(task: Task, folder: Path) -> None:
    """Write the data and the first model, and delete the files of an earlier run."""
    data = task.data()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("demonstrations", "train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in getattr(data, name))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    for message in data.demonstrations[0]["messages"]:
        print(f"{message['role']}: {message['content']}")
    build_blank(folder / "blank", [*common_texts(data.demonstrations), *data.words])


def train(trainer: str, settings: Sequence[str]) -> None:
    """Print a command line and run it."""
    print(f"\npython -m rlite.trainer.{trainer} {shlex.join(settings)}\n", flush=True)
    importlib.import_module(f"rlite.trainer.{trainer}").main(settings)


@dataclass(frozen=True, kw_only=True)
class Rise:
    """Mean reward in the first and in the last tenth of a run, and the standard error of their difference."""

    before: float
    after: float
    error: float

    @property
    def is_reached(self) -> bool:
        """Return True if the reward rose by 0.2 and by five standard errors."""
        rise = self.after - self.before
        return rise >= 0.2 and rise >= 5 * self.error

    def __str__(self) -> str:
        return f"{self.before:.3f} → {self.after:.3f} ± {self.error:.3f}"


def held_out_rise(metrics: Sequence[Mapping[str, float]], lowest_reward: float) -> Rise:
    """Return the rise of a run's evaluations, including the one before the first step.

    All greedy evaluations in a tenth count as one sample, because they use the same items. The two samples count as
    independent.
    """
    looks = [(row["step"], row["accuracy"]) for row in metrics if "accuracy" in row]
    return rise(looks, metrics[-1]["step"], lambda num_looks: NUM_TRIED, lowest_reward)


def training_rise(metrics: Sequence[Mapping[str, float]], lowest_reward: float) -> Rise:
    """Return the rise of the training reward. All responses to a prompt count as one sample."""
    rewards = [(row["step"], row["reward"]) for row in metrics if "reward" in row]
    return rise(rewards, metrics[-1]["step"], lambda num_steps: num_steps * PROMPTS_PER_STEP, lowest_reward)


def rise(
    means: Iterable[tuple[float, float]], steps: float, sample_size: Callable[[int], int], lowest_reward: float
) -> Rise:
    """Return the rise from the first tenth of the steps to the last tenth.

    Rewards between `lowest_reward` and 1 with the mean m have at most the variance (1 - m) (m - lowest_reward). The
    standard error assumes this variance.

    Args:
        means: steps and their mean rewards.
        steps: steps of the run.
        sample_size: number of means -> number of independent samples in them.
        lowest_reward: lowest reward of an episode.
    """
    points = list(means)
    first = [mean for step, mean in points if step <= steps / 10]
    last = [mean for step, mean in points if step > steps * 9 / 10]
    before, after = (sum(values) / len(values) for values in (first, last))
    variance = sum(
        (1 - mean) * (mean - lowest_reward) / sample_size(len(values))
        for mean, values in ((before, first), (after, last))
    )
    return Rise(before=before, after=after, error=variance**0.5)


def heeded(rollouts: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of guesses that agree with all hints so far, without the first guess of each game."""
    is_open: list[bool] = []
    for rollout in rollouts:
        low, high, num_guesses = 0, 10**9, 0
        for found in re.finditer(r"number is (higher|lower) than (\d+)|\\boxed{(\d+)}", rollout["response"]):
            hint, limit, guess = found.groups()
            if guess is None:
                low, high = (max(low, int(limit) + 1), high) if hint == "higher" else (low, min(high, int(limit) - 1))
                continue
            if num_guesses > 0:
                is_open.append(low <= int(guess) <= high)
            num_guesses += 1
    return sum(is_open) / max(len(is_open), 1)


def on_hints(path: Path) -> list[str]:
    """Return sentences on the use of hints in the run `guess`, or an empty list if the run was not made."""
    if not (path / FOLDER).exists():
        return []
    tables = [pq.read_table(file.path) for file in record_files(path) if file.source == TRAIN and file.kind == "rows"]
    rows = [row for table in tables for row in table.to_pylist() if row["segments"]]
    rollouts = [{**row, "response": "".join(part["text"] for part in row["segments"][1:])} for row in rows]
    steps = rollouts[-1]["step"]
    first = heeded([rollout for rollout in rollouts if rollout["step"] <= steps / 4])
    last = heeded([rollout for rollout in rollouts if rollout["step"] > steps * 3 / 4])
    return [
        "Saying 1 four times scores 0.50 on average, 25 scores 0.74, and the best strategy that ignores hints scores",
        f"0.77. In the recorded games, {first:.0%} of later guesses agreed with the hints in the first quarter of the",
        f"steps, and {last:.0%} in the last quarter.",
        "",
    ]


def report(folder: Path, out: Path) -> bool:
    """Write pictures and table of the finished runs, and return True if all passed."""
    lines = ["| run | environment | held-out reward | training reward | |", "|---|---|---|---|---|"]
    pictures, is_reached = [], True
    for name, task in tasks().items():
        path = folder / name / "ppo" / "metrics.jsonl"
        if not (folder / name / "ppo" / "latest").exists():  # not made, or not finished
            continue
        metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rises = [measure(metrics, task.lowest_reward) for measure in (held_out_rise, training_rise)]
        is_reached &= (has_risen := all(found.is_reached for found in rises))
        mark = "passed" if has_risen else "**missed**"
        lines.append(f"| {name} | {task.title} | {rises[0]} | {rises[1]} | {mark} |")
        plot_learning_curve(path, out / f"{name}.png", metrics=("accuracy", "reward"), title=task.title)
        pictures.append(f"![{task.title}]({name}.png)")
    text = "\n".join(
        [
            "# Learning in third-party environments",
            "",
            "`python -m benchmarks.environments` writes this page. Each run trains a Qwen3 of 0.4 million parameters",
            "with Dr. GRPO, on two tasks of reasoning-gym and one game of GEM, with their own rewards. The model first",
            "imitates an unreliable teacher: it cuts long words short, copies lists unsorted, or repeats one number.",
            f"RL runs {STEPS} steps of {PROMPTS_PER_STEP} prompts x 8 responses on a CPU.",
            "",
            "Each reward is given as: mean over the first tenth of the steps → mean over the last tenth ± standard",
            "error of the difference. A run passes if both rewards rise by at least 0.2 and by 5 standard errors.",
            "",
            f"- Held-out reward (`accuracy` in the pictures): greedy answers to {NUM_TRIED} held-out puzzles, or games",
            f"  with other seeds, evaluated every {TEST_FREQ} steps and before the first. All evaluations in a tenth",
            "  count as one sample, because they use the same puzzles.",
            "- Training reward (`reward` in the pictures): all sampled answers, including groups with equal rewards,",
            "  which teach nothing. The 8 responses to a prompt count as one sample.",
            "",
            "Standard errors assume the largest variance possible for this mean and range.",
            "",
            "A puzzle scores 1 for a full `score_answer`, else 0. A game scores 1 for the right number; otherwise the",
            "last guess scores less the farther it is from the number. Numbers run from 1 to 50; games with other",
            "seeds draw from the same numbers.",
            "",
            *on_hints(folder / "guess" / "ppo"),
            *lines,
            "",
            *pictures,
            "",
        ]
    )
    (out / "README.md").write_text(text, encoding="utf-8")
    print("\n".join(lines))
    return is_reached


def main() -> None:
    """Make the chosen runs, then report all finished runs."""
    known = tasks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"{' '.join(known)}; default: all")
    parser.add_argument("--report", action="store_true", help="make no run")
    parser.add_argument("--folder", type=Path, default=Path("runs/environments"), help="data and runs")
    parser.add_argument("--out", type=Path, default=Path("docs/environments-learning"), help="pictures and table")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in () if arguments.report else arguments.names or known:
        folder = arguments.folder / name
        prepare(known[name], folder)
        train("sft", sft_settings(known[name], folder))
        train("ppo", ppo_settings(known[name], folder))
    arguments.out.mkdir(parents=True, exist_ok=True)
    sys.exit(0 if report(arguments.folder, arguments.out) else 1)


if __name__ == "__main__":
    main()
