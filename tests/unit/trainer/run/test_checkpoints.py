from pathlib import Path
from types import SimpleNamespace

import pytest

from rlite.config import load
from rlite.errors import CheckpointError, WorkerError
from rlite.runtime.storage.atomic import MANIFEST
from rlite.trainer.run.checkpoints import Checkpoints
from rlite.trainer.run.training_run import TrainingRun
from rlite.trainer.supervised_options import SftConfig


@pytest.mark.parametrize("given", [".", "state", "latest"])
def test_the_folder_of_a_run_in_place_of_a_checkpoint_is_refused_with_the_newest_there(tmp_path: Path, given: str):
    run = tmp_path / "run"
    for folder in ("state/step-9", "state/step-10", "state/step-10-critic", "latest"):
        (run / folder).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"no checkpoint; the newest of that run is {run}/state/step-10 .*latest"):
        Checkpoints(tmp_path / "other" / "state", 2, str(run / given), is_asynchronous=False)


def test_a_checkpoint_is_taken_by_its_path_and_a_broken_one_is_left_to_say_what_it_lacks(tmp_path: Path):
    for step in (1, 2):
        (tmp_path / f"state/step-{step}").mkdir(parents=True)
    (tmp_path / "state/step-1" / MANIFEST).touch()
    for step in (1, 2):
        wanted = tmp_path / f"state/step-{step}"
        assert Checkpoints(tmp_path / "state", 2, str(wanted), is_asynchronous=False).found == wanted


def test_resumed_run_that_saves_nothing_deletes_leftovers_of_a_killed_one(tmp_path: Path):
    state = tmp_path / "state"
    for folder in (".step-8.deleted", "step-8-critic", ".step-10.writing", "step-9", "step-9-critic"):
        (state / folder).mkdir(parents=True)
    settings = ["actor.model_name=x", "data.path=x", f"trainer.save_dir={tmp_path}", "trainer.load_ckpt_from=latest"]
    run = TrainingRun(load(SftConfig, settings), total_steps=9)
    run.open()
    run.close()
    assert sorted(path.name for path in state.iterdir()) == ["step-9", "step-9-critic"]


class Writing:
    def __init__(self, path: Path, *, is_full: bool) -> None:
        self._path, self._is_full = path, is_full

    def result(self) -> None:
        if self._is_full:
            raise CheckpointError(f"{self._path}: could not be written")
        self._path.mkdir()


class Disk:
    """An engine whose checkpoints fill the disk, and another one that cannot begin to write them."""

    group = SimpleNamespace(handles=[SimpleNamespace(process=1)])
    is_full = is_lost = False

    def save_state(self, path: Path, *args: object, **facts: object) -> Writing:
        if self.is_lost:
            raise WorkerError("rank 0 has ended")
        return Writing(path, is_full=self.is_full)


def test_two_failures_of_one_checkpoint_leave_the_one_before(tmp_path: Path):
    engine, critic = Disk(), Disk()
    checkpoints = Checkpoints(tmp_path, keep=1, wanted=None, is_asynchronous=True)
    checkpoints.save(1, engine, {"critic": critic}, {})
    checkpoints.finish()
    critic.is_full = engine.is_lost = True
    with pytest.raises(WorkerError):
        checkpoints.save(2, engine, {"critic": critic}, {})
    with pytest.raises(CheckpointError, match="step-2-critic: could not be written"):
        checkpoints.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-1-critic"]
