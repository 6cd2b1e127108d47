"""A PPO run whose reward model loses a worker to SIGKILL ends as a run in which nothing happens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import RliteError
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.rollout.rewards.models import RewardModel
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.test_ppo_trainer import logged
from tests.integration.worlds import kill, process_of, ray_session
from tests.tiny import build_model_dir
from tests.unit.rollout.rewards.test_reward_models import scorer

pytestmark = pytest.mark.slow
ROWS = [{"prompt": f"{n}: "} for n in range(8)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


class UnderFire(PpoTrainer):
    """Loses a worker of its reward model before its second rollouts, and in the midst of its third ones."""

    num_kills = 0

    def _next_batch(self) -> TensorDict:
        [engine] = self.parts.rewards.engines.values()
        if self.run.step in (1, 2):
            self.num_kills += 1
            killing = threading.Timer(0.1 * (self.run.step - 1), kill, [process_of(engine, self.run.step - 1)])
            killing.start()
            if self.run.step == 1:
                killing.join()
        return super()._next_batch()


def run(folder: Path, kind: type[PpoTrainer], **own: Any) -> tuple[PpoTrainer, RewardFunction]:
    model, judge = folder / "model", folder / "rm"
    if not model.exists():
        build_model_dir(model, "qwen3", hidden=64)
        scorer(judge, hidden_size=64, initializer_range=0.3)
    sampling = SamplingOptions(max_new_tokens=8)
    rollout = RolloutOptions(train_sampling_params=sampling, deterministic=True, dtype="float32", max_model_len=64)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=3e-3),
        train_data=PromptOptions(prompts_per_rollout=8, responses_per_prompt=4),
        rollout=rollout,
        trainer=TrainerOptions(save_dir=str(folder / kind.__name__), total_steps=4, **own),
    )
    reward = RewardFunction(RewardModel(str(judge)), in_process=True, batch_size=8, timeout=120)
    made = kind(options, SingleTurnWorkflow(reward, sampling.gconfig(), byte_tokenizer()), ROWS)
    try:
        made.fit()
    finally:
        made.parts.rewards.release()
        for engine in (made.engines.rollout, made.engines.actor):
            engine.release()
    return made, reward


@pytest.mark.nightly
def test_answers_are_scored_once_by_workers_that_replace_lost_ones(tmp_path: Path) -> None:
    _, expected = run(tmp_path, PpoTrainer)
    fired, reward = run(tmp_path, UnderFire, max_recoveries=2)
    assert fired.num_kills == 2
    assert reward.outcomes == expected.outcomes == {"ok": 4 * 8 * 4}
    for row, calm in zip(logged(tmp_path / "UnderFire"), logged(tmp_path / "PpoTrainer"), strict=True):
        assert (row["reward"], row["loss"]) == (calm["reward"], calm["loss"])


def test_without_recoveries_a_lost_worker_of_a_reward_model_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RliteError, match="rank 0"):
        run(tmp_path, UnderFire)
