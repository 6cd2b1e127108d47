"""A train engine whose worker is killed starts again from a snapshot in memory or on disk, bit by bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import CheckpointError, WorkerDied
from tests.adapters import ADAPTERS
from tests.integration.modules import LlamaPolicy, make_batch, num_counted, on_meta, token_loss
from tests.integration.redefinition import run_cell
from tests.integration.worlds import kill, process_of, ray_session

pytestmark = pytest.mark.slow
SOON_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


@pytest.fixture
def train(models: dict[str, Path]) -> Iterator[RliteTrainEngine]:
    engine = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    engine.build(tensor_parallel_size=2)
    yield engine
    engine.release()


def step(engine: RliteTrainEngine, number: int) -> dict[str, float]:
    return engine.train_batch(make_batch([5, 9, 7, 3], seed=number), token_loss, num_counted)


def train_on(engine: RliteTrainEngine) -> None:
    for number in range(10_000):
        step(engine, number)


def check_same(weights: dict[str, Any], expected: dict[str, Any]) -> None:
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_recovery_from_a_snapshot_is_bit_identical(
    train: RliteTrainEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    serve = RliteInferenceEngine(models["llama"])
    serve.build(data_parallel_size=2, max_model_len=64, max_num_seqs=4, colocate_with=train)
    train.save_state(tmp_path / "first")
    metrics = [step(train, number) for number in range(4)]
    expected = train.state_dict()

    train.load_state(tmp_path / "first")
    assert [step(train, number) for number in range(2)] == metrics[:2]
    snapshot = train.take_snapshot()
    killer = threading.Timer(0.05, kill, [process_of(train, 1)])
    killer.start()
    with pytest.raises(WorkerDied):
        train_on(train)
    killer.join()
    with pytest.raises(WorkerDied):
        step(train, 2)
    train.recover(snapshot)
    assert [step(train, number) for number in range(2, 4)] == metrics[2:], "losses, norms and rates, to the last bit"
    check_same(train.state_dict(), expected)

    train.p2p_weight_sync(serve, verify_checksums=True)
    assert serve.get_version() == 1
    kill(process_of(train, 0))
    wait([train.group.handles[0].death], SOON_S)
    train.recover(snapshot)
    assert [step(train, number) for number in range(2, 4)] == metrics[2:]
    pid = process_of(train, 0)
    train.recover(snapshot)
    assert process_of(train, 0) == pid, "who lives goes back without a new process"
    assert [step(train, number) for number in range(2, 4)] == metrics[2:]
    check_same(train.state_dict(), expected)
    train.p2p_weight_sync(serve, verify_checksums=True)
    serve.release()


@pytest.mark.nightly
def test_adapters_and_averages_recover_with_a_snapshot(train: RliteTrainEngine) -> None:
    def steps(numbers: range) -> list[dict[str, float]]:
        batches = [(make_batch([5, 9, 7, 3], seed=number), name) for number in numbers for name in ADAPTERS]
        return [train.train_batch(batch, token_loss, num_counted, adapter=name) for batch, name in batches]

    step(train, 0)
    train.average_weights(0.5)
    for name, options in ADAPTERS.items():
        train.add_adapter(name, options)
    steps(range(1, 3))
    train.forward_backward(make_batch([5, 9]), token_loss, num_counted, adapter="mlp")
    snapshot, known = train.take_snapshot(), train.adapters
    expected = train.optimizer_step("mlp"), steps(range(3, 5))
    kill(process_of(train, 1))
    wait([train.group.handles[1].death], SOON_S)
    train.recover(snapshot)
    assert (train.adapters, train.has_average()) == (known, [True, True])
    assert (train.optimizer_step("mlp"), steps(range(3, 5))) == expected


class FragilePolicy(LlamaPolicy):
    def die_in_next_step(self, rank: int) -> None:
        """Let a rank die in its optimizer step, before it writes what its peers write."""
        if torch.distributed.get_rank() == rank:
            self.optimizer.register_step_pre_hook(lambda *_: kill(os.getpid()))


@pytest.mark.nightly
def test_a_worker_that_dies_in_the_optimizer_step_leaves_no_trace(models: dict[str, Path]) -> None:
    train = RliteTrainEngine(on_meta(FragilePolicy, models["llama"]))
    train.build(tensor_parallel_size=2)
    step(train, 0)
    snapshot = train.take_snapshot()
    metrics = [step(train, number) for number in (1, 2)]
    expected = train.state_dict()
    train.recover(snapshot)
    train.die_in_next_step(1)
    with pytest.raises(WorkerDied):
        train_on(train)
    train.recover(snapshot)
    assert [step(train, number) for number in (1, 2)] == metrics
    check_same(train.state_dict(), expected)
    train.release()


def test_recovery_without_a_snapshot_reads_a_checkpoint(train: RliteTrainEngine, tmp_path: Path) -> None:
    step(train, 0)
    train.save_state(tmp_path / "state", step=1)
    metrics = step(train, 1)
    expected = train.state_dict()
    kill(process_of(train, 0))
    with pytest.raises(WorkerDied):
        step(train, 2)
    assert train.recover(tmp_path / "state")["step"] == 1
    assert step(train, 1) == metrics
    check_same(train.state_dict(), expected)


def test_a_save_under_way_is_whole_or_has_failed(train: RliteTrainEngine, tmp_path: Path) -> None:
    step(train, 0)
    snapshot = train.take_snapshot()
    writing = train.save_state(tmp_path / "state", asynchronous=True)
    kill(process_of(train, 1))
    wait([train.group.handles[1].death], SOON_S)
    train.recover(snapshot)
    with suppress(CheckpointError):
        train.load_state(writing.result())
    train.save_state(tmp_path / "state")
    train.load_state(tmp_path / "state")


def test_new_methods_reach_ray_workers_and_those_that_are_started_later(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RliteTrainEngine(on_meta(run_cell(monkeypatch, "1"), models["llama"]))
    engine.build(tensor_parallel_size=2)
    step(engine, 0)
    weights = engine.state_dict()
    run_cell(monkeypatch, "len(super().fsdp_units())")
    assert engine.reload_methods() == ["answer"]
    assert engine.answer() == engine.module.config.num_hidden_layers
    check_same(engine.state_dict(), weights)
    step(engine, 1)
    kill(process_of(engine, 0))
    with pytest.raises(WorkerDied):
        engine.answer()
    engine.recover(None)
    assert engine.answer() == engine.module.config.num_hidden_layers
    engine.release()
