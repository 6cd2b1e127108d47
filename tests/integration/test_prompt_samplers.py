"""Runs whose prompts a sampler chooses: results of every group reach it, and a resumed run draws the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.rollout.rewards.function import RewardFunction
from rlite.trainer.callbacks import Callback
from rlite.trainer.sampling import IntermediateSampler, PromptResult
from tests.tiny import build_model_dir

ROWS = [{"prompt": f"{n}+{n}=", "id": f"row{n}"} for n in range(6)]


class Noting(IntermediateSampler):
    """Notes what it chooses and observes."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[list[int]] = []
        self.results: list[PromptResult] = []

    def choose(self, count: int) -> list[int]:
        self.chosen.append(super().choose(count))
        return self.chosen[-1]

    def observe(self, result: PromptResult) -> None:
        super().observe(result)
        self.results.append(result)


class StopAfter(Callback):
    """Stops the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, metrics: Any) -> None:
        if run.step == self.step:
            run.stop("enough")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("model"), hidden=32, layers=1)


def distinct(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
    return float(len(set(completion_ids)) > 3) if row["id"] != "row0" else 0.0


def train(model: Path, folder: Path, sampler: Noting, *others: Any, **options: Any) -> None:
    settings: dict[str, Any] = {
        "rollout.train_sampling_params": {"max_new_tokens": 4},
        "rollout.max_model_len": 32,
        "train_data": {"prompts_per_rollout": 2, "responses_per_prompt": 3},
        "trainer": {"total_steps": 6, "save_freq": 2, "record": "none", "test_freq": 100},
        "actor": {"lr": 1e-3, "gradient_checkpointing": False},
        "num_devices": 1,
        **options,
    }
    reward = RewardFunction(distinct, in_process=True)
    kept = {"save_dir": str(folder), "callbacks": [sampler, *others]}
    rlite.train("ppo", model=model, data=ROWS, reward=reward, **kept, **settings)


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_prompts(model: Path, tmp_path: Path) -> None:
    bitwise = {"rollout.deterministic": True, "rollout.dynamic_filtering": True, "rollout.max_refills": 1}
    whole, first, second = Noting(), Noting(), Noting()
    train(model, tmp_path / "whole", whole, **bitwise)
    train(model, tmp_path / "parts", first, StopAfter(3), **bitwise)
    train(model, tmp_path / "parts", second, **bitwise)  # a run with the same callbacks stays stopped
    assert first.chosen + second.chosen == whole.chosen
    assert first.results + second.results == whole.results
    asked = [number for chosen in whole.chosen for number in chosen]
    assert [result.number for result in whole.results] == asked[: len(whole.results)], "in the order of the items"
    assert any(len(set(result.rewards)) == 1 for result in whole.results), "a group that is filtered is observed, too"
