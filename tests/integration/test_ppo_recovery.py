"""A PPO run whose train worker and whose rollout replica are killed ends as a run in which nothing happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

from rlite.errors import WorkerDied
from rlite.trainer.ppo import PpoTrainer
from tests.integration.test_ppo_trainer import logged, trainer
from tests.integration.worlds import kill, process_of, ray_session
from tests.tiny import build_model_dir

pytestmark = pytest.mark.slow
DETERMINISTIC = {"deterministic": True, "dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


class UnderFire(PpoTrainer):
    """Loses a train worker in its second update, and a replica before its third rollouts."""

    num_kills = 0

    def update(self, batch: TensorDict) -> TensorDict:
        if self.run.step == 1 and self.num_kills == 0:
            self.num_kills += 1
            kill(process_of(self.engines.actor, 1))
        return super().update(batch)

    def sync(self) -> None:
        super().sync()
        if self.run.step == 1 and self.num_kills == 1:
            self.num_kills += 1
            kill(process_of(self.engines.rollout, 0))


class LosesResult(PpoTrainer):
    """Loses a train worker after its first step, before the metrics, and after its last step, before the checkpoint."""

    num_kills = 0

    def finish_step(self, batch: TensorDict) -> dict[str, float]:
        if self.run.step == 0:
            self.lose()
        return super().finish_step(batch)

    def _save(self) -> None:
        if self.num_kills == 1:
            self.lose()
        super()._save()

    def lose(self) -> None:
        self.num_kills += 1
        kill(process_of(self.engines.actor, 1))


def release(run: PpoTrainer) -> None:
    for engine in (run.engines.rollout, run.engines.actor):
        engine.release()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [UnderFire, LosesResult])
def test_a_run_goes_on_and_ends_with_the_same_bits(tmp_path: Path, kind: type[UnderFire | LosesResult]) -> None:
    model = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    calm = trainer(model, tmp_path / "calm", 4, rollout=DETERMINISTIC)
    calm.fit()
    release(calm)
    run = trainer(model, tmp_path / "fire", 4, kind=kind, rollout=DETERMINISTIC, max_recoveries=2)
    run.fit()
    assert run.num_kills == 2
    run.engines.rollout.wait_for_replacements()
    assert [lost.replica for lost in run.engines.rollout.lost_replicas] == ([0] if kind is UnderFire else [])
    release(run)
    for row, expected in zip(logged(tmp_path / "fire"), logged(tmp_path / "calm"), strict=True):
        assert row["step"] == expected["step"]
        assert (row["reward"], row["loss"]) == (expected["reward"], expected["loss"])
    weights, expected_weights = (load_file(tmp_path / name / "latest/model.safetensors") for name in ("fire", "calm"))
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_without_recoveries_a_lost_train_worker_ends_the_run(tmp_path: Path) -> None:
    model = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    run = trainer(model, tmp_path / "run", 4, kind=UnderFire)
    with pytest.raises(WorkerDied, match="rank 1"):
        run.fit()
    release(run)
