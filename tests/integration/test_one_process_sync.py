"""Weight sync between two engines of one process, as on one GPU without Ray: no handle is opened there."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.engine.weights import Transport, sync_weights
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.parallel.processes import process_identity
from rlite.runtime.parallel.shared_memory import SharedMemoryReader
from rlite.runtime.replicas.engine import Engine
from rlite.runtime.replicas.transport import OwnTensor, Place, gather, open_handle, share
from tests.integration.modules import POLICIES, on_meta


@pytest.fixture
def engines(models: dict[str, Path]) -> Iterator[tuple[RliteTrainEngine, RliteInferenceEngine]]:
    """A train engine and an inference engine that share this process and its one device."""
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    path = models["qwen3"]
    train, serve = RliteTrainEngine(on_meta(POLICIES["qwen3"], path)), RliteInferenceEngine(path)
    train.build()
    serve.build(colocate_with=train, max_model_len=64, max_num_seqs=2)
    yield train, serve
    rlite.shutdown()


def on_worker(engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
    group = engine.group
    return apply_on_processes([(group, 0, (group.key(0),), args)], function, [group], "look", 60)[0]


def test_a_reader_in_the_same_process_gets_the_tensors_themselves(engines: tuple[RliteTrainEngine, Any]) -> None:
    handles = on_worker(engines[0], share, [process_identity()])
    held = on_worker(engines[0], lambda worker: {n: s.tensor.data_ptr() for n, s in worker.parameter_shards().items()})
    assert {type(handle) for handle in handles.values()} == {OwnTensor}
    assert {name: open_handle(handle, SharedMemoryReader()).data_ptr() for name, handle in handles.items()} == held
    assert pickle.loads(pickle.dumps(handles)) == handles, "a launcher may pickle what travels inside one process"


def test_tensors_without_a_reader_are_not_shared(engines: tuple[RliteTrainEngine, Any]) -> None:
    place = Place(torch.float32, (0,), (64,), (64,))
    assert on_worker(engines[0], share, []) == {}
    assert on_worker(engines[0], gather, {"model.norm.weight": place}, []) == {}
    assert on_worker(engines[0], lambda worker: worker.staged) is None


def test_a_process_with_the_same_id_is_another_process() -> None:
    program = "import os; os.getpid = lambda: {}; from rlite.runtime.parallel import processes; print(processes.{}())"
    command = program.format(process_identity().split("-")[0], "process_identity")
    other = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout.strip()
    assert other.split("-")[0] == process_identity().split("-")[0]
    assert other != process_identity()
    with pytest.raises(RuntimeError, match=f"a tensor of process {other} was offered"):
        open_handle(OwnTensor(other, 0), SharedMemoryReader())


@pytest.mark.parametrize("transport", ["auto", "shared", "gathered", "broadcast"])
def test_every_transport_brings_the_same_bits_inside_one_process(
    engines: tuple[RliteTrainEngine, RliteInferenceEngine], transport: Transport
) -> None:
    train, serve = engines
    for step in range(2):
        train.train_step(rlite.NeedParallel([[1, 2, 3, step]]))
        report = sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
        assert report.transport == ("shared" if transport == "auto" else transport)
        held = on_worker(serve, lambda worker: {n: s.tensor.clone() for n, s in worker.parameter_shards().items()})
        assert all(torch.equal(tensor, held[name]) for name, tensor in train.state_dict().items())
