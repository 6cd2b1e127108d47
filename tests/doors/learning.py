"""Held-out rewards before and after training a tiny model, which is made in a moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rlite
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.engine.inference import RliteInferenceEngine
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow
from rlite.trainer.options import TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions

NUM_TRIED = 128


def check_learning(
    folder: Path,
    make: Callable[[Any], RolloutWorkflow],
    rows: Sequence[dict[str, Any]],
    held_out: Sequence[dict[str, Any]],
    steps: int = 40,
    least: float = 0.2,
) -> None:
    """Train, and check that the mean reward of sampled held-out episodes rises by `least` and five standard errors.

    `make` makes the workflow of a tokenizer.
    """
    rlite.init(num_devices=1)
    try:
        model = str(build_tiny_qwen3(str(folder / "model"), seed=0))
        options = PpoConfig(
            actor=ActorOptions(model_name=model, lr=3e-3),
            train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=8),
            trainer=TrainerOptions(save_dir=str(folder / "run"), total_steps=steps),
        )
        tokenizer = load_tokenizer(model)
        before = rewards_of(model, make(tokenizer), held_out)
        trained = PpoTrainer(options, make(tokenizer), rows).fit()
        after = rewards_of(str(getattr(trained, "model", folder / "run" / "latest")), make(tokenizer), held_out)
    finally:
        rlite.shutdown()
    (low, low_error), (high, high_error) = before, after
    assert high - low > max(least, 5 * math.hypot(low_error, high_error)), (before, after)


def rewards_of(model: str, workflow: RolloutWorkflow, rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the mean reward of NUM_TRIED episodes, and its standard error."""
    engine = RliteInferenceEngine(model, executor="torch")
    engine.build()
    items = [dict(rows[place % len(rows)]) for place in range(NUM_TRIED)]
    rewards = engine.rollout_batch(items, workflow)["rewards"].double()
    engine.release()
    return rewards.mean().item(), (rewards.std() / math.sqrt(len(rewards))).item()
