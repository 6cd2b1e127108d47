"""Held-out rewards before and after training a tiny model, which is made in a moment, by the name of an environment."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import rlite
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.nn.pretrained import load_tokenizer

NUM_TRIED, PROMPTS = 128, 8
Rows = Sequence[dict[str, Any]]
ROWS, HELD_OUT = ([{"number": number} for number in numbers] for numbers in (range(64), range(100, 116)))
"""rows of agents"""


def share_of(letter: str, *texts: str) -> float:
    """Return the share of a letter in all texts."""
    return sum(text.count(letter) for text in texts) / max(sum(map(len, texts)), 1)


def tiny_model(folder: Path, chat_template: str | None = None) -> Path:
    """Make an untrained model, and return its folder."""
    model = folder / "model"
    build_tiny_qwen3(str(model), seed=0)
    if chat_template is not None:
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(model)
    return model


def imitating(model: Path, demonstrations: Rows) -> Path:
    """Train a model on conversations of a teacher, and return its folder."""
    run = rlite.train(
        "sft",
        model=model,
        data=[*demonstrations],
        actor={"lr": 3e-3},
        num_devices=1,
        save_dir=str(model.parent / "imitation"),
        n_epochs=3,
        **{"data.batch_size": 16},
    )
    return run.model


def check_learning(
    folder: Path,
    model: Path,
    rows: Rows,
    held_out: Rows,
    steps: int = 12,
    lr: float = 3e-3,
    max_new_tokens: int = 8,
    scored_as: Sequence[str] = (),
    **options: Any,
) -> None:
    """Train, and check that the mean reward of sampled held-out episodes rises by 0.2 and five standard errors.

    Args:
        folder: folder for the run.
        model: folder of the model.
        rows: rows to train on.
        held_out: rows of the held-out episodes.
        steps: steps of training.
        lr: learning rate. That of an untrained model is too high for a model that has learnt something.
        max_new_tokens: tokens of one answer.
        scored_as: workflows whose rewards must rise; default: those that are trained on.
        **options: `env_path` or `workflow`, and further options of the training's rollouts and the evaluation.
    """
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 1.0}
    run = rlite.train(
        "ppo",
        model=model,
        data=[*islice(cycle(rows), max(len(rows), PROMPTS))],
        rollout={"train_sampling_params": sampling, **options},
        actor={"lr": lr},
        num_devices=1,
        save_dir=str(folder / "run"),
        total_steps=steps,
        **{"train_data.prompts_per_rollout": PROMPTS, "train_data.responses_per_prompt": 8},
    )
    samples = NUM_TRIED // len(held_out)
    for own in [{"workflow": name} for name in scored_as] or [{}]:
        result = rlite.evaluate(model, run.model, data=held_out, samples=samples, **sampling, **{**options, **own})
        failed = Counter(sample.reason for each in result.models for sample in each.samples if sample.reason)
        assert not failed, str(failed)
        before, after = (
            [sample.score for sample in each.samples if sample.score is not None] for each in result.models
        )
        error = math.hypot(*(statistics.stdev(scores) / math.sqrt(len(scores)) for scores in (before, after)))
        first, last = statistics.fmean(before), statistics.fmean(after)
        assert last - first > max(0.2, 5 * error), f"{own}: from {first:.3f} to {last:.3f}, error {error:.3f}"
