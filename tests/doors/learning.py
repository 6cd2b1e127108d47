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


def check_learning(
    folder: Path,
    environment: str,
    rows: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    chat_template: str | None = None,
    steps: int = 12,
    **options: Any,
) -> None:
    """Train, and check that the mean reward of sampled held-out episodes rises by 0.2 and five standard errors."""
    model = folder / "model"
    build_tiny_qwen3(str(model), seed=0)
    if chat_template is not None:
        tokenizer = load_tokenizer(model)
        tokenizer.chat_template = chat_template
        tokenizer.save_pretrained(model)
    sampling = {"max_new_tokens": 8, "temperature": 1.0}
    run = rlite.train(
        "ppo",
        model=model,
        data=[*islice(cycle(rows), max(len(rows), PROMPTS))],
        rollout={"env_path": environment, "train_sampling_params": sampling, **options},
        actor={"lr": 3e-3},
        num_devices=1,
        save_dir=str(folder / "run"),
        total_steps=steps,
        **{"train_data.prompts_per_rollout": PROMPTS, "train_data.responses_per_prompt": 8},
    )
    samples = NUM_TRIED // len(held_out)
    result = rlite.evaluate(
        model, run.model, data=held_out, env_path=environment, samples=samples, **sampling, **options
    )
    failed = Counter(sample.reason for each in result.models for sample in each.samples if sample.reason)
    assert not failed, str(failed)
    before, after = ([sample.score for sample in each.samples if sample.score is not None] for each in result.models)
    error = math.hypot(*(statistics.stdev(scores) / math.sqrt(len(scores)) for scores in (before, after)))
    assert statistics.fmean(after) - statistics.fmean(before) > max(0.2, 5 * error)
