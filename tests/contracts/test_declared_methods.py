"""Engines call workers by the methods that protocols declare, and by no other name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine
from rlite.backends.serving.pump import PumpedReplica, PumpedWorker
from rlite.engine.registry import TrainWorker, find_backend, registered_executors
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.shared_memory import SharedArena, aligned_bytes
from rlite.runtime.replicas import replica, transport, workers
from rlite.runtime.replicas.digests import Digest, held_digests, sha256_of
from rlite.runtime.replicas.replica import InferenceBackend
from tests.contracts.executors import EXECUTORS, declared, installed_executors, recorded_calls
from tests.faulty_serving import FAULTY
from tests.tiny import build_model_dir

REPLICAS = Path(inspect.getfile(workers)).parent
LIBRARY = REPLICAS.parents[1]
BACKENDS = LIBRARY / "backends"
CALLERS = [
    *(LIBRARY / "engine").glob("*.py"),
    *REPLICAS.glob("*.py"),
    *(path for part in ("*/replica.py", "vllm/*.py") for path in BACKENDS.glob(part)),
]
HANDLES = (workers.Resident, replica.Replica)
CALLS = {"call", "ask", "keep", "cast"}


@pytest.mark.parametrize("path", sorted(CALLERS), ids=lambda path: path.relative_to(LIBRARY).as_posix())
def test_no_worker_method_is_called_by_a_string(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    named = [call for call in calls if call.func.attr in CALLS and call.args]  # type: ignore[attr-defined]
    strings = [ast.unparse(call) for call in named if isinstance(call.args[0], ast.Constant | ast.JoinedStr)]
    assert strings == []


@pytest.mark.parametrize("protocol", [*(tested.worker for tested in EXECUTORS.values()), TrainWorker, *HANDLES])
def test_every_declared_method_says_what_it_does(protocol: type) -> None:
    assert [name for name in declared(protocol) if not inspect.getdoc(getattr(protocol, name))] == []


def test_every_registered_executor_is_under_the_contract_tests() -> None:
    # a remote server keeps its weights: tests/integration/test_remote_servers.py holds what it promises
    known = {*registered_executors("inference")} - FAULTY  # which other tests compare
    assert known == {*EXECUTORS, "remote"}


@pytest.mark.parametrize("name", EXECUTORS)
def test_the_workers_of_an_executor_have_the_methods_that_its_replica_declares(name: str) -> None:
    backend: Any = find_backend("inference", name, InferenceBackend)
    worker = backend.worker if isinstance(backend.worker, type) else get_type_hints(backend.worker)["return"]
    is_pumped = isinstance(backend.replica, type) and issubclass(backend.replica, PumpedReplica)
    for protocol in (replica.ServingWorker, *([PumpedWorker] if is_pumped else []), EXECUTORS[name].worker):
        for method in sorted(declared(protocol)):
            theirs, ours = (list(signature(getattr(cls, method)).parameters) for cls in (worker, protocol))
            assert theirs == ours, f"{worker.__name__}.{method} and {protocol.__name__}.{method}"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name == "vllm" else []) for name in installed_executors()],
)
def test_a_whole_life_calls_declared_methods_alone(name: str, tmp_path: Path) -> None:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(build_model_dir(tmp_path / "model", layers=1), executor=name)
    with recorded_calls() as called:
        engine.build(max_model_len=64, max_num_seqs=2)
        assert len(engine.generate([[1], [2]], {"max_tokens": 4})) == 2
        assert len(engine.prompt_logprobs([[1, 2]])) == 1
        engine.pause()
        engine.resume()
        engine.set_version(3)
        engine.memory_bytes()
        for move in (engine.cpu, engine.cuda, engine.meta, lambda: engine.cuda("weights", "kv_cache"), engine.load):
            move()
        engine.abort_all()
        engine.release()
    rlite.shutdown()
    assert called <= declared(EXECUTORS[name].worker)
    assert {"to_device", "to_cpu", "to_meta", "load_weights", "weights_changed", "set_version"} <= called


def test_weight_sync_needs_only_the_shards_of_a_targets_worker() -> None:
    tensor = torch.zeros(2, 3)
    worker: Any = SimpleNamespace(parameter_shards=lambda: {"weight": ParameterShard(tensor, (0, 0), (4, 3))})
    layout = transport.describe(worker, is_source=False, is_shared=False)
    assert (layout.places["weight"].shape, layout.places["weight"].global_shape) == ((2, 3), (4, 3))
    whole = (slice(0, 2), slice(0, 3))
    piece = transport.Piece("weight", "weight", 0, whole, whole, layout.places["weight"].dtype)
    arena = SharedArena(aligned_bytes((2, 3), torch.float32))
    sent = arena.empty((2, 3), torch.float32).fill_(1.0)
    assert transport.read(worker, [piece], [{"weight": arena.handle_of(sent)}]) == tensor.nbytes
    assert tensor.sum() == 6
    assert held_digests(worker, [piece], is_served=True).digests == [[Digest(sha256_of(sent))]]


def test_the_methods_that_vllms_workers_are_asked_for_exist() -> None:
    def nodes(module: str) -> Iterator[ast.AST]:
        return ast.walk(ast.parse((BACKENDS / f"vllm/{module}.py").read_text()))

    calls = [node for node in nodes("server") if isinstance(node, ast.Call)]
    asked = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func).endswith(".collective_rpc")}
    assert asked
    assert asked <= {node.name for node in nodes("extension") if isinstance(node, ast.FunctionDef)}
