"""Checkpoints of the train engine: any layout loads those of another, and what is half written never counts."""

from __future__ import annotations

import random
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rlite import RliteTrainEngine
from rlite.errors import CheckpointError, DamagedCheckpointError
from rlite.runtime.storage import huggingface, sharded
from rlite.trainer.losses import ValueLoss, own_values
from rlite.trainer.model.modules import critic_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.run.checkpoints import Checkpoints
from tests.integration.modules import LlamaPolicy, Qwen2Policy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.marks import nightly
from tests.tiny import build_model_dir

Build = Callable[..., RliteTrainEngine]
LENGTHS = [9, 4, 13, 1, 7, 6, 5]
CONSTANT: dict[str, Any] = {"weight_decay": 0.0, "scheduler": "constant", "warmup_steps": 0, "total_steps": 9}
LAYOUTS: list[dict[str, int]] = [
    {},
    {"size": 2, "tp_size": 2},
    {"size": 4},
    {"size": 2, "copies": 2},
    {"size": 2, "sp_size": 2},
    {"size": 4, "tp_size": 2, "sp_size": 2},
    {"size": 2},
    {"size": 4, "tp_size": 2},
    {"size": 2, "copies": 2, "tp_size": 2},
    {"size": 2, "copies": 2, "sp_size": 2},
    {"size": 4, "sp_size": 2},
]
"""one after the other, and the last before the first: each is saved in and loaded into"""
OFTEN = 9
"""that of every run of the tests: from tensor to context parallelism"""


class Learner(Qwen2Policy):
    """AdamW with a schedule; also says which random numbers come next, and adds up gradients without a step."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.8**step)

    def draw(self) -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def add_gradients(self, row: list[int]) -> None:
        self(torch.tensor([row])).logits.square().mean().backward()

    def step_with_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainSgd(Qwen2Policy):
    """Remembers nothing but its learning rate."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.1)


class Partial(Qwen2Policy):
    """A parameter that takes no part in the loss: the optimizer never remembers anything of it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.unused = torch.nn.Parameter(torch.zeros(8))

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return torch.ones(shape) if name == "unused" else None


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", tie=True, hidden=64, vocab_size=264)


@pytest.fixture
def build(model: Path) -> Iterator[Build]:
    """build(kind, size=, copies=, **options): an engine in float64 that is released after the test."""
    built = []

    def build_engine(kind: type = Learner, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(on_meta(kind, model))
        options = {"param_dtype": "float64", **options}
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


def learn(engine: RliteTrainEngine, steps: range) -> dict[str, Tensor]:
    for step in steps:
        engine.train_batch(make_batch(LENGTHS, step), token_loss, num_counted)
        engine.step_lr_scheduler()
    return engine.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flip_a_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("index", [OFTEN, *nightly(*(n for n in range(len(LAYOUTS)) if n != OFTEN))])
def test_a_run_goes_on_in_another_layout(build: Build, tmp_path: Path, index: int) -> None:
    here, there = LAYOUTS[index - 1], LAYOUTS[index]
    engine = build(**here)
    learn(engine, range(2))
    engine.save_state(tmp_path / "state", asynchronous=True, step=2)
    expected = learn(engine, range(2, 4))  # beside the writing
    engine.release()
    moved = build(**there)
    assert moved.load_state(tmp_path / "state")["step"] == 2
    for name, tensor in learn(moved, range(2, 4)).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-9, rtol=0, msg=f"{here} to {there}: {name}")
    moved.release()
    again = build(**here)
    learn(again, range(7, 8))  # what it was before must not matter
    again.load_state(tmp_path / "state")
    assert same(learn(again, range(2, 4)), expected), f"bit-identical in the layout {here}"


def test_asynchronous_save_holds_the_state_of_its_step(build: Build, tmp_path: Path) -> None:
    engine = build(size=2)
    learn(engine, range(1))
    engine.save_state(tmp_path / "waited")
    writing = engine.save_state(tmp_path / "beside", asynchronous=True)
    learn(engine, range(1, 5))
    assert writing.result() == tmp_path / "beside"
    restored = []
    for name in ("waited", "beside"):
        engine.load_state(tmp_path / name)
        restored.append(learn(engine, range(0)))
    assert same(*restored)


def test_random_numbers_gradients_and_learning_rate_go_on(build: Build, tmp_path: Path) -> None:
    engine = build(size=2)
    learn(engine, range(1))
    engine.add_gradients([5, 6, 7])
    engine.save_state(tmp_path / "state", asynchronous=True)
    numbers = engine.draw()
    engine.step_with_gradients()
    expected = engine.state_dict()
    engine.draw()
    engine.load_state(tmp_path / "state")
    assert engine.draw() == numbers
    assert len(set(numbers)) == 2, "each rank has its own"
    engine.step_with_gradients()
    assert same(engine.state_dict(), expected)


@pytest.mark.parametrize("kind", [PlainSgd, Partial])
def test_an_optimizer_that_remembers_little_goes_on_exactly(build: Build, tmp_path: Path, kind: type) -> None:
    engine = build(kind)
    batch = make_batch(LENGTHS)
    for _ in range(3):
        engine.train_batch(batch, token_loss, num_counted)
        if kind is PlainSgd:
            engine.step_lr_scheduler()
    engine.save_state(tmp_path / "state")
    resumed = build(kind)
    resumed.load_state(tmp_path / "state")
    assert resumed.memory_bytes() == engine.memory_bytes()
    for each in (engine, resumed):
        each.train_batch(batch, token_loss, num_counted)
    assert same(engine.state_dict(), resumed.state_dict())


def test_a_write_that_fails_is_reported_by_the_next_one_and_leaves_the_one_before(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(size=2)
    engine.save_state(tmp_path / "state", step=1)
    folder = tmp_path / ".state.writing"
    submit = sharded._writer.submit

    def submit_later(*args: Any) -> Any:  # rank 0 finds no folder to write into, its peer makes no difference
        shutil.rmtree(folder)
        folder.write_text("in the way")
        return submit(*args)

    monkeypatch.setattr(sharded._writer, "submit", submit_later)
    writing = engine.save_state(tmp_path / "state", asynchronous=True, step=2)
    monkeypatch.undo()
    learn(engine, range(1))
    with pytest.raises(CheckpointError, match="state: could not be written"):
        engine.save_state(tmp_path / "other")
    with pytest.raises(CheckpointError, match="state: could not be written"):
        writing.result()
    folder.unlink()
    assert engine.load_state(tmp_path / "state")["step"] == 1
    engine.save_state(tmp_path / "state", step=3)
    assert engine.load_state(tmp_path / "state")["step"] == 3


@contextmanager
def writing_held_up() -> Iterator[None]:
    """Inside, what rank 0 is to write in the background waits."""
    may_go_on = threading.Event()
    sharded._writer.submit(may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()


@contextmanager
def disk_full_for(monkeypatch: pytest.MonkeyPatch, path: Path, *names: str) -> Iterator[None]:
    """Inside, those files of the next checkpoint at `path` get no room when they are written."""
    start_writing = sharded.start_writing

    def start_later(state: Any, folder: Path, *others: Any) -> Any:
        if folder.name == f".{path.name}.writing":
            for name in names:
                (folder / name).symlink_to("/dev/full")
        return start_writing(state, folder, *others)

    with monkeypatch.context() as patch:
        patch.setattr(sharded, "start_writing", start_later)
        yield


def test_the_next_step_does_not_wait_for_the_writing(build: Build, tmp_path: Path) -> None:
    engine = build(size=2)
    learn(engine, range(1))
    with writing_held_up():
        writing = engine.save_state(tmp_path / "state", asynchronous=True, step=1)
        learn(engine, range(1, 3))
        assert not writing.done()
        assert not (tmp_path / "state").exists()
    assert writing.result() == tmp_path / "state"
    assert writing.done()
    assert engine.load_state(tmp_path / "state")["step"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__1_0.distcp", "rank-0.pt", "rank-1.pt", "facts.json", "manifest.json"]
)
def test_a_full_disk_is_an_error_that_names_the_path_and_leaves_the_checkpoint_before(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "state"
    engine = build(size=2)
    engine.save_state(path, step=1)
    expected = engine.state_dict()
    learn(engine, range(1))
    with disk_full_for(monkeypatch, path, name):
        writing = engine.save_state(path, asynchronous=True, step=2)
    learn(engine, range(1, 2))
    with pytest.raises(CheckpointError, match=r"/state: could not be written: .*No space left on device"):
        writing.result(timeout=60)
    assert [file.name for file in tmp_path.iterdir()] == ["state"], "what was half written makes room"
    assert engine.load_state(path)["step"] == 1
    assert same(engine.state_dict(), expected)
    engine.save_state(path, step=3)
    assert engine.load_state(path)["step"] == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_export_on_a_full_disk_leaves_the_one_before(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(size=2)
    engine.save(tmp_path / "latest")
    before = (tmp_path / "latest" / "model.safetensors").read_bytes()
    learn(engine, range(1))
    staging = huggingface.staging

    def full(path: Path) -> Path:
        folder = staging(path)
        (folder / "config.json").symlink_to("/dev/full")
        return folder

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "staging", full)
        with pytest.raises(CheckpointError, match=r"/latest: could not be written: .*No space left on device"):
            engine.save(tmp_path / "latest")
    assert (tmp_path / "latest" / "model.safetensors").read_bytes() == before
    engine.save(tmp_path / "latest")
    assert (tmp_path / "latest" / "model.safetensors").read_bytes() != before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_hears_of_a_failed_write_at_the_next_step_and_keeps_the_newest_good_one(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(size=2)
    critic = build(size=2, colocate_with=engine)
    beside = {"critic": critic}
    checkpoints = Checkpoints(tmp_path, keep=1, wanted=None, is_asynchronous=True)
    checkpoints.save(1, engine, beside, {})
    checkpoints.finish()
    with writing_held_up():
        checkpoints.save(2, engine, beside, {})
        checkpoints.look()
        assert names(tmp_path) == ["step-1", "step-1-critic"]
    checkpoints.finish()
    checkpoints.confirm()
    assert names(tmp_path) == ["step-2", "step-2-critic"]
    for step, broken in ((3, "step-3-critic"), (4, "step-4")):
        with disk_full_for(monkeypatch, tmp_path / broken, "rank-1.pt"):
            checkpoints.save(step, engine, beside, {})
        with pytest.raises(CheckpointError, match=rf"{broken}: could not be written"):
            steps_until_it_is_heard(checkpoints)
        assert names(tmp_path) == ["step-2", "step-2-critic"]
    assert Checkpoints(tmp_path, 1, "latest", is_asynchronous=True).restore(engine, beside)["step"] == 2


def steps_until_it_is_heard(checkpoints: Checkpoints) -> None:
    for _ in range(1000):
        checkpoints.look()
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [500, 3_000, 50_000], ids=["driver.pt", "rank-0.pt", "__0_0.distcp"])
def test_a_limit_of_file_sizes_is_named(build: Build, tmp_path: Path, num_bytes: int) -> None:
    engine = build()
    engine.save_state(tmp_path / "state", step=1)
    expected = engine.state_dict()
    for write in (engine.save_state, engine.save):
        path = tmp_path / ("state" if write == engine.save_state else "latest")
        with files_of_at_most(num_bytes), pytest.raises(CheckpointError, match=rf"{path}: could not.*\(ulimit -f\)"):
            write(path)
    assert engine.load_state(tmp_path / "state")["step"] == 1
    assert same(engine.state_dict(), expected)


def test_another_model_under_the_same_name_is_refused_and_changes_nothing(build: Build, tmp_path: Path) -> None:
    engine = build()
    engine.save_state(tmp_path / "state")
    deeper = build_model_dir(tmp_path / "deeper", "qwen2", hidden=64, layers=3, vocab_size=264)
    other = RliteTrainEngine(on_meta(Learner, deeper))
    other.build(data_parallel_size=1)
    before = other.state_dict()
    with pytest.raises(CheckpointError, match=r"another model: it has no model\.layers\.2"):
        other.load_state(tmp_path / "state")
    other.release()
    assert "model.layers.2.mlp.up_proj.weight" in before
    llama = RliteTrainEngine(on_meta(LlamaPolicy, build_model_dir(tmp_path / "llama", "llama", hidden=64)))
    llama.build(data_parallel_size=1)
    with pytest.raises(CheckpointError, match="saved from Learner, this engine has LlamaPolicy"):
        llama.load_state(tmp_path / "state")
    llama.release()


@pytest.mark.nightly
def test_a_run_keeps_the_newest_and_names_the_last_good_one(build: Build, tmp_path: Path) -> None:
    engine, critic = build(size=2), build(size=2)
    beside = {"critic": critic}
    checkpoints = Checkpoints(tmp_path, keep=2, wanted="latest", is_asynchronous=True)
    assert checkpoints.restore(engine, beside) == {}
    weights = {}
    for step in (1, 2, 30):
        weights[step] = learn(engine, range(step, step + 1)), learn(critic, range(step, step + 1))
        checkpoints.save(step, engine, beside, {"position": 10 * step})
    checkpoints.finish()
    assert len(names(tmp_path)) == 6, "none is deleted before a newer one is known to be good"
    checkpoints.confirm()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-2-critic", "step-30", "step-30-critic"]

    def resume(wanted: str) -> Checkpoints:
        return Checkpoints(tmp_path, keep=2, wanted=wanted, is_asynchronous=True)

    for name in ("", "-critic"):
        shutil.copytree(tmp_path / f"step-2{name}", tmp_path / f"step-1{name}")  # of a run that was killed before
    for wanted, kept in ((str(tmp_path / "step-2"), 6), ("latest", 4)):
        resumed = resume(wanted)
        resumed.restore(engine, beside)
        resumed.confirm()
        assert len(names(tmp_path)) == kept, "later checkpoints stay until this run has one of its own"
    assert names(tmp_path) == ["step-2", "step-2-critic", "step-30", "step-30-critic"]
    (tmp_path / ".step-31.writing").mkdir()  # a write that was cut short
    facts = {"module": "Learner", "step": 30, "beside": ["critic"], "position": 300}
    assert resume("latest").restore(engine, beside) == facts
    for damaged in ("step-30/rank-1.pt", "step-30-critic/__0_0.distcp"):
        shutil.copytree(tmp_path / "step-30", tmp_path / "whole")
        shutil.copytree(tmp_path / "step-30-critic", tmp_path / "whole-critic")
        flip_a_bit(tmp_path / damaged)
        learn(engine, range(5, 6))
        before = engine.state_dict()
        with pytest.raises(
            DamagedCheckpointError, match=rf"{damaged.split('/')[1]} is damaged.*good one is .*step-2:.*latest_good"
        ):
            resume("latest").restore(engine, beside)
        assert same(engine.state_dict(), before)
        good = resume("latest_good")
        assert good.restore(engine, beside)["step"] == 2
        assert same(engine.state_dict(), weights[2][0])
        assert same(critic.state_dict(), weights[2][1])
        for name in ("", "-critic"):
            shutil.rmtree(tmp_path / f"step-30{name}")
            (tmp_path / f"whole{name}").rename(tmp_path / f"step-30{name}")
    good.save(3, engine, beside, {})
    good.finish()
    good.confirm()  # those of the future that was given up go with the oldest
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-2", "step-2-critic", "step-3", "step-3-critic"}


def test_a_critic_that_was_exported_opens_in_transformers_and_goes_on_with_its_head(
    model: Path, tmp_path: Path
) -> None:
    trained = RliteTrainEngine(critic_module(model, OptimizerOptions(lr=1e-2, **CONSTANT)))
    trained.build(data_parallel_size=1)
    batch = make_batch(LENGTHS)
    before = trained.forward(batch, own_values)
    batch |= {"values": before, "returns": before + 1.0}
    trained.train_batch(batch, ValueLoss(), ValueLoss().weight)
    after = trained.forward(batch, own_values)
    assert not torch.allclose(before, after)
    trained.save(tmp_path / "critic_latest")
    trained.release()
    again = RliteTrainEngine(critic_module(tmp_path / "critic_latest"))
    again.build(data_parallel_size=1)
    assert torch.equal(again.forward(batch, own_values), after)
    again.release()
    opened, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "critic_latest", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert opened.num_labels == 1
