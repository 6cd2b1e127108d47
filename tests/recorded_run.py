"""Writes the folder of a run that played Countdown: config, metrics, a record of every rollout, and a trace."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from rlite.services.record.files import ROWS, TOKENS
from rlite.services.record.writer import write_table

BEGAN = 1_790_000_000.0
STEP_S = 14.0
EVENTS_OF_A_STEP = 107
THOUGHTS = (
    "I need to reach {goal} with {a}, {b} and {c}.",
    "First I add {a} and {b}, which gives {ab}.",
    "Then {ab} times {c} is too large, so I try the difference.",
    "If I subtract {c} from {ab}, I get {rest}.",
    "That is not {goal}; the distance is still {distance}.",
    "Perhaps {b} times {c} works better: that is {bc}.",
    "Let me check the order of the operations once more.",
)
REASONS = {
    "filtered": "all 8 rewards of the group are equal",
    "too_old": "2 updates older than the policy, rollout.max_head_offpolicyness=1",
    "failed": "ValueError: could not convert string to float: '4 +' (my_reward.py:17)",
    "timed_out": "the episode did not end within 30 s",
    "reward_killed": "the reward used more than 512 MB and was killed",
}


@dataclass(frozen=True)
class Shape:
    """Size of the record."""

    steps: int = 12
    groups: int = 12
    samples: int = 8
    thoughts: int = 9
    """sentences of an answer"""
    share_of_tokens: float = 0.5
    """groups whose tokens are recorded"""
    seed: int = 0


Answer = tuple[list[dict[str, str]], list[str], list[bool]]
"""segments; and the tokens of the whole text, with the mask"""


def write_run(folder: Path, shape: Shape = Shape(), learning_rate: float = 1e-6) -> Path:
    """Write a run. The same arguments write the same run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, shape, learning_rate)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, shape.steps + 1):
            write_step(folder, step, shape)
            file.write(json.dumps(metrics_of(step, shape)) + "\n")
            if step % 4 == 0:
                write_evaluation(folder, step, shape)
    write_trace(folder / "trace.json", shape.steps)
    return folder


def write_config(folder: Path, shape: Shape, learning_rate: float) -> None:
    config = {
        "actor": {
            "model_name": "Qwen/Qwen3-0.6B",
            "lr": learning_rate,
            "clip": 0.2,
            "policy_loss": {"name": "ppo_clip"},
        },
        "train_data": {"path": "countdown.jsonl", "responses_per_prompt": shape.samples},
        "rollout": {"train_sampling_params": {"temperature": 1.0, "max_new_tokens": 256}, "max_head_offpolicyness": 1},
        "trainer": {"total_steps": shape.steps, "seed": shape.seed, "save_dir": folder.name},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def write_chain(
    folder: Path, shape: Shape, learning_rate: float = 1e-6, ended: int | None = None, error: str = ""
) -> None:
    """Write the chain of a run that learns nothing from equal rewards, and perhaps its end after a step."""
    given = [
        "actor.model_name",
        "actor.lr",
        "train_data.path",
        "train_data.responses_per_prompt",
        "trainer.total_steps",
    ]
    command = f"rlite grpo actor.model_name=Qwen/Qwen3-0.6B actor.lr={learning_rate} train_data.path=countdown.jsonl"
    about = {"trainer": "grpo", "commit": "4f1d2c9a7b30-dirty", "versions": {"rlite": "0.1.0"}, "at": BEGAN}
    command += f" train_data.responses_per_prompt={shape.samples} trainer.total_steps={shape.steps}"
    links: list[dict[str, Any]] = [{"kind": "start", "step": 0, "set": given, "command": command, **about}]
    links[0]["total_steps"] = shape.steps
    if ended is not None:
        links.append({"kind": "end", "step": ended, **({"error": error} if error else {})})
    (folder / "chain.jsonl").write_text("".join(json.dumps(link) + "\n" for link in links))
    (folder / "learning.json").write_text(json.dumps({"equal_rewards": {"can_teach": False}}))


def metrics_of(step: int, shape: Shape) -> dict[str, float]:
    rng = random.Random(1000 * shape.seed + step)
    progress = step / shape.steps
    slow = 7.5 if step == shape.steps - 2 else 1.0
    phases = {"rollout": 8.0, "update": 4.2, "reference": 0.9, "sync": 0.4 * slow, "snapshot": 0.1}
    metrics = {f"seconds_{name}": value * rng.uniform(0.9, 1.15) for name, value in phases.items()}
    metrics |= {
        "reward": 0.15 + 0.6 * progress + rng.uniform(-0.04, 0.04),
        "reward_std": 0.4 - 0.1 * progress,
        "reward/correct": 0.1 + 0.6 * progress,
        "reward/format": 0.5 + 0.4 * progress,
        "response_length": 180 + 60 * progress + rng.uniform(-9, 9),
        "response_length_p50": 170 + 55 * progress,
        "response_length_p95": 240 + 14 * progress,
        "truncated": 0.12 + 0.2 * progress,
        "uniform_groups": 0.3 + 0.3 * progress + rng.uniform(-0.05, 0.05),
        "logprob_drift": 0.01 + 0.002 * rng.random(),
        "rollout/staleness": 0.8 + 0.2 * rng.random(),
        "tokens_per_second": 3100 + rng.uniform(-250, 250),
        "kl": 0.002 * step * rng.uniform(0.8, 1.2),
        "entropy": 1.4 - 0.5 * progress + rng.uniform(-0.03, 0.03),
        "loss": rng.uniform(-0.02, 0.02),
        "grad_norm": rng.uniform(0.6, 1.4),
        "lr": 1e-6,
    }
    metrics["seconds"] = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    if step % 4 == 0:
        metrics |= {"accuracy": 0.2 + 0.5 * progress, "num_errors": 1.0}
    return {"step": step, **metrics}


def write_step(folder: Path, step: int, shape: Shape) -> None:
    rows, tokens = step_tables(step, shape)
    write_table(folder, "train", step, "rows", rows)
    if len(tokens):
        write_table(folder, "train", step, "tokens", tokens)


def step_tables(step: int, shape: Shape) -> tuple[pa.Table, pa.Table]:
    """The rows of a step, and the tokens of its first groups."""
    rng = random.Random(7919 * shape.seed + step)
    progress = step / shape.steps
    rows, tokens = [], []
    for number in range(shape.groups):
        group = (step - 1) * shape.groups + number
        item = f"countdown-{number % 7 if number < 3 else (group * 7) % 101}"
        status = _status(rng, number)
        easy = rng.random() * 0.5 + 0.5 * progress if status != "filtered" else float(rng.random() < progress)
        for sample in range(shape.samples):
            segments, pieces, mask = write_answer(item, rng, shape.thoughts)
            place = {"step": step, "group": group, "sample": sample}
            row = _row(rng, place, item, status, easy, (len(pieces), sum(mask)))
            is_text_recorded = number < shape.groups * (shape.share_of_tokens + 0.25)
            shown = {"segments": segments, "data": data_of(item)} if is_text_recorded else {}
            rows.append({**row, **shown})
            if number < shape.groups * shape.share_of_tokens:
                tokens.append(_tokens(rng, place, pieces, mask, row, step))
    return pa.Table.from_pylist(rows, schema=ROWS), pa.Table.from_pylist(tokens, schema=TOKENS)


def write_evaluation(folder: Path, step: int, shape: Shape) -> None:
    rng = random.Random(104729 * shape.seed + step)
    rows = []
    for number in range(shape.groups):
        for sample in range(2):
            segments, pieces, mask = write_answer(f"held-out-{number}", rng, shape.thoughts)
            place = {"step": step, "group": number, "sample": sample}
            easy = 0.1 + 0.7 * step / shape.steps
            row = _row(rng, place, f"held-out-{number}", "evaluated", easy, (len(pieces), sum(mask)))
            rows.append({**row, "segments": segments, "score": row["reward"], "advantage": None})
    write_table(folder, "eval.countdown", step, "rows", pa.Table.from_pylist(rows, schema=ROWS))


def write_answer(item: str, rng: random.Random, num_thoughts: int) -> Answer:
    """A question, thoughts, a call of a tool with its answer, and the result."""
    a, b, c, goal = task_of(item)
    numbers = {"a": a, "b": b, "c": c, "ab": a + b, "bc": b * c, "goal": goal, "rest": a + b - c}
    thoughts = [
        rng.choice(THOUGHTS).format(**numbers, distance=abs(goal - a - b + c) + rng.randrange(5))
        for _ in range(max(1, num_thoughts + rng.randrange(-2, 3)))
    ]
    question = f"user\nUse each of the numbers {a}, {b} and {c} once, with + - * /, to make {goal}.\nassistant\n"
    call = f'\n<tool_call>{{"name": "calculate", "arguments": {{"expression": "{a} + {b} * {c}"}}}}</tool_call>'
    right = f"\n</think>\n<answer>{a} + {b} * {c} = {goal}</answer>"
    segments = [
        {"role": "prompt", "text": question},
        {"role": "model", "text": "<think>\n" + " ".join(thoughts) + call},
        {"role": "environment", "text": f"\n<tool_response>{a + b * c}</tool_response>\n"},
        {"role": "model", "text": "The tool says " + str(a + b * c) + ". " + rng.choice(thoughts) + right},
    ]
    pieces, mask = [], []
    for segment in segments:
        own_pieces = re.findall(r"\s?\w+|\s?[^\w\s]+|\s+", segment["text"])
        pieces += own_pieces
        mask += [segment["role"] == "model"] * len(own_pieces)
    return segments, pieces, mask


def task_of(item: str) -> tuple[int, int, int, int]:
    """Three numbers and the goal of a prompt."""
    own = random.Random(item)
    a, b, c = own.sample(range(2, 30), 3)
    return a, b, c, a + b * c if own.random() < 0.5 else a * b - c


def data_of(item: str) -> dict[str, str]:
    """Columns of a prompt's data row."""
    *numbers, goal = task_of(item)
    return {"numbers": str(numbers), "target": str(goal)}


def write_trace(path: Path, num_steps: int) -> None:
    """A trace as `rlite.observability.trace` writes it, with EVENTS_OF_A_STEP for each step."""
    with path.open("w") as file:
        separator = "[\n"
        for event in _trace_events(num_steps):
            file.write(separator + json.dumps(event))
            separator = ",\n"
        file.write("\n]\n")


def _trace_events(num_steps: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(3)
    yield from _names({1: "driver (process 4711)", 2: "actor-0", 3: "rollout-0", 4: "in flight"})
    for step in range(num_steps):
        at = step * STEP_S
        phases = {"rollout": (0, 8), "reference": (8, 8.9), "update": (8.9, 13.1), "sync": (13.1, 13.5)}
        yield from (_span(1, name, at + start, at + end) for name, (start, end) in phases.items())
        yield _span(1, "wait for rollouts", at + 0.2, at + 7.8)
        yield from (_span(2, "train_batch", at + 9 + index, at + 9.8 + index) for index in range(4))
        yield from (_span(3, "advance", at + 0.3 + 0.3 * index, at + 0.55 + 0.3 * index) for index in range(25))
        yield _span(3, "receive weights", at + 13.1, at + 13.5)
        for group in range(12):
            start, end = at + 0.1, at + rng.uniform(4, 7.8)
            waits = start + rng.uniform(0.1, 1.5)
            key = {"cat": "group", "id": f"group-{step * 12 + group}", "pid": 4, "tid": 0}
            name = f"group {step * 12 + group}"
            times = [("b", name, start), ("b", "waiting", start), ("e", "waiting", waits)]
            times += [("b", "running", waits), ("e", "running", end), ("e", name, end)]
            yield from ({"ph": phase, "name": label, "ts": time * 1e6, **key} for phase, label, time in times)


def _status(rng: random.Random, number: int) -> str:
    if number % 4 == 3:
        return "filtered"
    return rng.choices(["trained", "too_old", "failed", "timed_out", "reward_killed"], [90, 3, 4, 2, 1])[0]


def _row(
    rng: random.Random, place: dict[str, int], item: str, status: str, easy: float, lengths: tuple[int, int]
) -> dict[str, Any]:
    is_known = status in ("trained", "filtered", "too_old", "evaluated")
    correct = float(rng.random() < easy)
    shape = min(1.0, rng.choice([0.0, 0.5, 1.0]) + correct) if status != "filtered" else correct
    queue, generate, tool, judge = rng.uniform(0, 1), rng.uniform(2, 6), rng.uniform(0.1, 0.8), rng.uniform(0.05, 0.4)
    ends = np.cumsum([0, queue, 0.7 * generate, tool, 0.3 * generate, judge]).tolist()
    names = ("queue", "generate", "environment", "generate", "reward")
    return {
        **place,
        "item": item,
        "status": status,
        "reason": REASONS.get(status, ""),
        "reward": 0.8 * correct + 0.2 * shape if is_known else None,
        "reward_parts": {"correct": correct, "format": shape} if is_known else None,
        "advantage": rng.uniform(-1.5, 1.5) if status == "trained" else None,
        "answer": str(rng.randrange(90)),
        "turns": 2,
        "tool_calls": 1,
        "tool_errors": int(rng.random() < 0.05),
        "prompt_tokens": lengths[0] - lengths[1],
        "response_tokens": lengths[1],
        "truncated": rng.random() < 0.2,
        "version_min": max(0, place["step"] - 2),
        "version_max": max(0, place["step"] - 1),
        "seconds_queue": queue,
        "seconds_generate": generate,
        "seconds_environment": tool,
        "seconds_reward": judge,
        "ended": BEGAN + place["step"] * STEP_S,
        "events": [
            {"name": name, "start": start, "end": end}
            for name, start, end in zip(names, ends[:-1], ends[1:], strict=True)
        ],
    }


def _tokens(
    rng: random.Random, place: dict[str, int], pieces: Sequence[str], mask: Sequence[bool], row: Any, step: int
) -> dict[str, Any]:
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    logprobs = np.where(mask, -numbers.exponential(0.4, len(pieces)), 0.0)
    read = -numbers.exponential(5.0, len(pieces))  # the trainer's forward pass covers tokens that were only read
    turn = numbers.integers(len(pieces) // 2, len(pieces))  # weights arrived here
    return {
        **place,
        "sequence": 0,
        "text": "".join(pieces),
        "ids": numbers.integers(0, 150_000, len(pieces)),
        "offsets": np.cumsum([0, *map(len, pieces[:-1])]),
        "mask": mask,
        "versions": [(step - 1 - (index < turn)) if own else -1 for index, own in enumerate(mask)],
        "logprobs": logprobs,
        "trainer_logprobs": np.where(mask, logprobs + numbers.normal(0, 0.02, len(pieces)), read),
        "advantages": np.where(mask, row["advantage"], 0.0) if row["advantage"] is not None else None,
        "entropy": numbers.exponential(0.6, len(pieces)),
    }


def _names(processes: dict[int, str]) -> list[dict[str, Any]]:
    found = []
    for number, name in processes.items():
        row = {1: "the program", 2: "calls", 3: "calls"}.get(number)
        found.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})
        if row:
            found.append({"ph": "M", "name": "thread_name", "pid": number, "tid": 1, "args": {"name": row}})
    return found


def _span(process: int, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "pid": process, "tid": 1}
