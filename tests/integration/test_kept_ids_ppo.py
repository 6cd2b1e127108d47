"""PPO on truncated rollouts: no drift, its KL over the vocabulary, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.embedded.worker import BACKEND
from rlite.engine import registry
from rlite.errors import ConfigError, DataError
from rlite.nn import LoraOptions
from rlite.rollout import SingleTurnWorkflow
from rlite.runtime.replicas.replica import Capabilities
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, KlOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.rewards import digits

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(3) for b in range(3)]
SAMPLING = SamplingOptions(max_new_tokens=8, top_p=0.9)


class Forgetful(SingleTurnWorkflow):
    """Forgets among which ids its tokens were sampled."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        return (await super().arun_episode(engine, data)).exclude("kept_ids", "kept_counts")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def trainer(
    model: Path, folder: Path, kind: type[SingleTurnWorkflow] = SingleTurnWorkflow, **options: Any
) -> PpoTrainer:
    config = PpoConfig(
        actor=ActorOptions(
            model_name=str(model), lr=3e-3, update_per_rollout=2, off_policy_metrics=True, **options.pop("actor", {})
        ),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(
            train_sampling_params=SAMPLING, max_model_len=64, dynamic_filtering=False, **options.pop("rollout", {})
        ),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=3, save_freq=2),
        **options,
    )
    return PpoTrainer(config, kind(digits, SAMPLING.gconfig(), byte_tokenizer()), ROWS)


@pytest.mark.parametrize("kl", ["reward", "loss"])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4, alpha=8.0)])
def test_ppo_on_truncated_rollouts_measures_no_drift_and_its_kl_over_the_vocabulary(
    models: dict[str, Path], tmp_path: Path, kl: Any, lora: LoraOptions | None
) -> None:
    run = trainer(models["llama"], tmp_path / "run", actor={"lora": lora}, kl=KlOptions(type=kl, coef=0.01))
    run.fit()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["logprob_drift"] < 1e-4
        assert abs(row["off_policy/kl"]) < 1e-5
    if kl == "reward":
        assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-5), "the policy is the reference still"


def test_a_workflow_that_drops_the_kept_ids_is_refused_at_its_first_batch(
    models: dict[str, Path], tmp_path: Path
) -> None:
    run = trainer(models["llama"], tmp_path / "run", Forgetful)
    run.start()
    with pytest.raises(DataError, match=r"trajectories of Forgetful have no kept_ids.*top_p=1 and top_k=0"):
        run.rollouts.next_batch()
    run.run.close()


def test_an_executor_that_cannot_return_kept_ids_is_refused_before_anything_starts(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = dataclasses.replace(BACKEND, capabilities=Capabilities())
    monkeypatch.setitem(registry._backends, ("inference", "forgetful"), forgetful)
    with pytest.raises(ConfigError, match=r"top_p=0.9, top_k=0.*executor=forgetful does not return.*executor=torch"):
        trainer(models["llama"], tmp_path / "run", rollout={"executor": "forgetful"})
