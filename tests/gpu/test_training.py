"""Training on a GPU: bfloat16, where memory goes, Liger's kernels, and weights on their way to a served model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import make_batch, num_counted, token_loss
from tests.tiny import build_model_dir

pytestmark = pytest.mark.gpu
OPTIMIZER = OptimizerOptions(lr=1e-3, weight_decay=0.1, scheduler="constant", warmup_steps=0, total_steps=8)
LENGTHS = [70, 3, 129, 1, 40]
Build = Callable[..., RliteTrainEngine]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden=256, initializer_range=0.02)


@pytest.fixture
def build(path: Path) -> Iterator[Build]:
    """build(**options): a policy with AdamW in a session on one GPU, in this process unless it has started already."""

    def build_engine(launcher: Any = "inprocess", **options: Any) -> RliteTrainEngine:
        if not started:
            rlite.init(device="cuda", num_devices=1, launcher=launcher)
            started.append(True)
        engine = RliteTrainEngine(policy_module(path, OPTIMIZER))
        engine.build(**options)
        engine.train()
        return engine

    started: list[bool] = []
    yield build_engine
    rlite.shutdown()


def on_worker(engine: Engine, function: Callable[[Any], Any]) -> Any:
    """function(worker) on the engine's first worker."""
    group = engine.group
    return apply_on_processes([(group, 0, (group.key(0),), ())], function, [group], "look", 60)[0]


def losses(engine: RliteTrainEngine, steps: int, seed: int = 0) -> list[float]:
    batch = make_batch(LENGTHS, seed)
    return [engine.train_batch(batch, token_loss, num_counted)["loss"] for _ in range(steps)]


def test_bfloat16_with_float32_masters_learns_as_float32_does(build: Build) -> None:
    half = build()
    full = build(compute_dtype="float32", colocate_with=half)
    found, expected = losses(half, 6), losses(full, 6)
    assert expected[-1] < expected[0] - 0.1
    assert found == pytest.approx(expected, rel=0.01)
    assert on_worker(half, lambda worker: {p.dtype for p in worker.module.parameters()}) == {torch.float32}


def state_devices(engine: RliteTrainEngine) -> set[str]:
    """Return the devices of the optimizer's moments."""

    def look(worker: Any) -> set[str]:
        state = worker.module.optimizer.state.values()
        return {value.device.type for each in state for value in each.values() if value.dim()}

    return on_worker(engine, look)


def test_an_offloaded_optimizer_is_on_the_gpu_during_steps_alone(build: Build, tmp_path: Path) -> None:
    offloaded = build(offload_optimizer=True)
    resident = build(colocate_with=offloaded)
    assert losses(offloaded, 2) == pytest.approx(losses(resident, 2), rel=1e-3)
    assert (state_devices(offloaded), state_devices(resident)) == ({"cpu"}, {"cuda"})
    for engine in (offloaded, resident):
        engine.cpu()
        assert state_devices(engine) == {"cpu"}
        engine.cuda()
    assert (state_devices(offloaded), state_devices(resident)) == ({"cpu"}, {"cuda"})
    for asynchronous in (False, True):
        for engine, name in ((offloaded, "offloaded"), (resident, "resident")):
            engine.save_state(tmp_path / name, asynchronous=asynchronous).result()
            losses(engine, 1, seed=1)
            engine.load_state(tmp_path / name)
        assert (state_devices(offloaded), state_devices(resident)) == ({"cpu"}, {"cuda"})
        assert losses(offloaded, 2, seed=2) == pytest.approx(losses(resident, 2, seed=2), rel=1e-3)


def test_residency_moves_memory(build: Build) -> None:
    engine = build()
    before = losses(engine, 2)

    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    whole = allocated()
    held = engine.memory_bytes()[0]
    weights = engine.state_dict()
    engine.cpu()
    away = allocated()  # what libraries keep
    assert away <= whole - held["weights"] - held["optimizer"]
    engine.cuda()
    assert allocated() == pytest.approx(whole, rel=0.02)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in engine.state_dict().items())
    assert losses(engine, 1)[0] < before[0]
    engine.meta()
    assert allocated() <= away
    engine.load()
    assert losses(engine, 1)[0] == pytest.approx(before[0], rel=1e-3)


@pytest.mark.parametrize("launcher", ["inprocess", "ray"])
def test_served_weights_equal_trained_weights(build: Build, path: Path, launcher: str) -> None:
    """Under Ray the engines are two processes on one GPU, and weights go from one to the other by CUDA IPC."""
    transport = {"inprocess": "shared", "ray": "gathered"}[launcher]
    if launcher == "ray":
        pytest.importorskip("ray")
    engine = build(launcher=launcher)
    served = RliteInferenceEngine(path)
    served.build(colocate_with=engine, max_model_len=256, max_num_seqs=4, dtype="bfloat16", gpu_memory_utilization=0.3)
    for _ in range(2):  # the second one meets memory that the first one mapped
        losses(engine, 2)
        report = engine.p2p_weight_sync(served, verify_checksums=True)
        assert report.transport == transport
        trained, held = engine.state_dict(), on_worker(served, boxes)
        assert held.keys() == trained.keys()
        for name, tensor in held.items():
            assert torch.equal(tensor, trained[name].bfloat16()), name
    assert len(served.generate([[1, 2, 3]], {"max_tokens": 8, "ignore_eos": True})[0].outputs[0].token_ids) == 8


def boxes(worker: Any) -> dict[str, Tensor]:
    return {name: shard.tensor.detach().cpu() for name, shard in worker.parameter_shards().items()}


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_ligers_kernels_compute_the_same_in_one_model_alone(build: Build, options: dict[str, Any]) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    fused = build(compute_dtype="float32", use_liger_kernel=True, **options)
    plain = build(compute_dtype="float32", colocate_with=fused, **options)
    assert losses(fused, 4) == pytest.approx(losses(plain, 4), rel=1e-3)
    assert vars(modeling_qwen3) == before
    assert on_worker(fused, lambda worker: worker.module.model.norm._get_name()) == "LigerRMSNorm"
    assert on_worker(plain, lambda worker: worker.module.model.norm._get_name()) == "Qwen3RMSNorm"
