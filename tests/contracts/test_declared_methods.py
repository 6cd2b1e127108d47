"""Engines call workers by the methods that protocols declare, and by no other name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite import RliteInferenceEngine, register_executor
from rlite.cluster.group import WorkerGroup
from rlite.engine import replica, workers
from rlite.engine.embedded import replica as pumped
from rlite.engine.registry import find_backend
from rlite.engine.replica import InferenceBackend
from tests.contracts.executors import installed_executors
from tests.tiny import build_model_dir

ENGINE = Path(inspect.getfile(workers)).parent
DRIVER = [
    "base",
    "inference",
    "inference_lifecycle",
    "replica",
    "router",
    "weight_sync",
    "workers",
    "embedded/replica",
    "sglang/replica",
    "vllm/replica",
]
PROTOCOLS = (workers.Worker, replica.ServingWorker, pumped.PumpedWorker)
CALLS = {"call", "ask"}

register_executor("inference", "pushing", "tests.third_party_executor.backend:BACKEND")


def declared(protocol: type) -> set[str]:
    return {name for name, value in inspect.getmembers(protocol, callable) if not name.startswith("_")}


@pytest.mark.parametrize("module", DRIVER)
def test_no_worker_method_is_called_by_a_string(module: str) -> None:
    tree = ast.parse((ENGINE / f"{module}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    named = [call for call in calls if call.func.attr in CALLS and call.args]  # type: ignore[attr-defined]
    strings = [ast.unparse(call) for call in named if isinstance(call.args[0], ast.Constant)]
    assert strings == []


@pytest.mark.parametrize("protocol", [*PROTOCOLS, workers.SourceWorker, workers.Resident, replica.Replica])
def test_every_declared_method_says_what_it_does(protocol: type) -> None:
    assert [name for name in declared(protocol) if not inspect.getdoc(getattr(protocol, name))] == []


@pytest.mark.parametrize("name", installed_executors())
def test_a_whole_life_calls_declared_methods_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    call = WorkerGroup.call

    def recording(group: WorkerGroup, method: str, *args: Any, **kwargs: Any) -> Any:
        called.add(method)
        return call(group, method, *args, **kwargs)

    monkeypatch.setattr(WorkerGroup, "call", recording)
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(build_model_dir(tmp_path / "model", hidden=64, layers=1), executor=name)
    engine.build(max_model_len=64, max_num_seqs=2)
    assert len(engine.generate([[1], [2]], {"max_tokens": 4})) == 2
    engine.set_version(3)
    engine.memory_bytes()
    for move in (engine.cpu, engine.cuda, engine.meta, lambda: engine.cuda("weights", "kv_cache"), engine.load):
        move()
    engine.abort_all()
    rlite.shutdown()
    own = set(vars(find_backend("inference", name, InferenceBackend).worker)) if name == "pushing" else set()
    assert called <= set().union(*map(declared, PROTOCOLS)) | own
    assert {"to_device", "to_cpu", "to_meta", "load_weights", "weights_changed", "set_version"} <= called
