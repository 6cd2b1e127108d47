"""Muon on sharded matrices makes the steps of `torch.optim.Muon` on whole ones; its state is saved and resharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlite import RliteTrainEngine
from rlite.errors import CheckpointError
from rlite.nn import LoraOptions
from rlite.runtime.parallel.fsdp import dtensor_like, local_shard
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.optimizers import make_optimizer, parameter_groups
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions
from tests.integration.modules import LlamaPolicy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.tiny import build_model_dir

LENGTHS = [9, 4, 13, 1, 7, 6, 5]
LAYOUTS = [
    {"size": 2},
    {"size": 3},  # no matrix has rows for three
    {"size": 2, "tp_size": 2},
    {"size": 4, "tp_size": 2},
    {"size": 2, "copies": 2, "tp_size": 2},
    {"size": 4, "tp_size": 2, "sp_size": 2},
]
NORMS = {"norms": ParameterGroupOptions(pattern="norm", weight_decay=0.0, lr_factor=0.5)}
MUON = OptimizerOptions(
    name="muon", lr=1e-2, weight_decay=0.1, scheduler="constant", warmup_steps=0, total_steps=9, parameter_groups=NORMS
)
TOLERANCE = 0.05
"""largest distance between two layouts' weights, as a share of the distance that training moved them: torch
orthogonalises in bfloat16, so a gradient's last bit may become the last bit of a bfloat16"""


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The largest distance of a tensor, as a share of the way from `start`."""
    return max(
        float((found[name] - tensor).norm() / (tensor - start[name]).norm())
        for name, tensor in expected.items()
        if not torch.equal(tensor, start[name])
    )


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("model") / "llama", "llama", tie=False, hidden=64, vocab_size=264)


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)) + step))


class Stepped(LlamaPolicy):
    """Makes steps on gradients of its own."""

    groups: Any = ()

    def on_weights_materialized(self) -> None:
        self.optimizer = make_optimizer(self, self.groups)

    def make_steps(self, count: int) -> None:
        for step in range(count):
            for name, parameter in self.named_parameters():
                whole = gradient(name, parameter.shape, step)
                parameter.grad = dtensor_like(parameter, whole[local_shard(parameter).box].clone())
            self.optimizer.step()


def build(module: Any, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
    engine = RliteTrainEngine(module)
    engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
    return engine


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Tensor]:
    """Weights after three steps of torch's own optimizers on whole tensors."""
    whole = AutoModelForCausalLM.from_pretrained(model)
    parameters = dict(whole.named_parameters())
    matrices = [name for name, value in parameters.items() if value.ndim == 2 and ".layers." in name]
    rest = [name for name in parameters if name not in matrices]
    norms = [name for name in rest if "norm" in name]
    muon = torch.optim.Muon(
        [parameters[name] for name in matrices], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [parameters[name] for name in rest if name not in norms]},
        {"params": [parameters[name] for name in norms], "lr": 5e-3, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(3):
        for name, parameter in parameters.items():
            parameter.grad = gradient(name, parameter.shape, step)
        muon.step()
        adamw.step()
    return {name: value.detach() for name, value in parameters.items()}


@pytest.mark.parametrize("layout", [{}, *LAYOUTS], ids=str)
def test_equal_gradients_give_the_bits_of_torchs_optimizers(model: Path, layout: Any, expected: Any) -> None:
    module = on_meta(Stepped, model)
    module.groups = parameter_groups(module, MUON)
    engine = build(module, **layout, param_dtype="float32")
    engine.make_steps(3)
    found = engine.state_dict()
    engine.release()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def trained(engine: RliteTrainEngine, seeds: range = range(2)) -> dict[str, Tensor]:
    for seed in seeds:
        engine.train_batch(make_batch(LENGTHS, seed), token_loss, num_counted)
        engine.step_lr_scheduler()
    return engine.state_dict()


@pytest.mark.parametrize(
    "lora", [None, pytest.param(LoraOptions(rank=4), marks=pytest.mark.nightly)], ids=["weights", "adapters"]
)
def test_training_with_muon_is_independent_of_the_layout(model: Path, lora: LoraOptions | None) -> None:
    options = {"param_dtype": "float64", "max_grad_norm": 0.05}
    groups = {} if lora else NORMS

    def make() -> Any:
        return policy_module(model, replace(MUON, parameter_groups=groups), lora)

    alone = build(make(), **options)
    start, whole = alone.state_dict(), trained(alone)
    alone.release()
    assert any(not torch.equal(start[name], whole[name]) for name in whole)
    for layout in LAYOUTS:
        engine = build(make(), **layout, **options)
        assert distance(trained(engine), whole, start) < TOLERANCE, layout
        engine.release()


def test_each_rank_holds_its_part_of_the_momentum_alone(model: Path) -> None:
    for layout in ({"size": 2}, {"size": 2, "tp_size": 2}):
        engine = build(policy_module(model, MUON), **layout)
        trained(engine)
        for held in engine.memory_bytes():
            assert held["optimizer"] <= 1.6 * held["weights"]  # one number for matrices, two for the rest
        engine.release()


@pytest.mark.nightly
@pytest.mark.parametrize("resumed_layout", LAYOUTS, ids=str)
def test_a_resumed_run_makes_the_steps_of_an_uninterrupted_one_in_any_layout(
    model: Path, tmp_path: Path, resumed_layout: Any
) -> None:
    layout = {"size": 4, "tp_size": 2}
    engine = build(policy_module(model, MUON), **layout, param_dtype="float32")
    start = trained(engine)
    engine.save_state(tmp_path / "state")
    expected = trained(engine, range(2, 4))
    engine.release()
    resumed = build(policy_module(model, MUON), **resumed_layout, param_dtype="float32")
    resumed.load_state(tmp_path / "state")
    found = trained(resumed, range(2, 4))
    resumed.release()
    assert distance(found, expected, start) < (TOLERANCE if resumed_layout != layout else 1e-12)


def test_a_checkpoint_of_another_optimizer_is_refused(model: Path, tmp_path: Path) -> None:
    engine = build(policy_module(model, replace(MUON, name="adamw")))
    trained(engine)
    engine.save_state(tmp_path / "state")
    engine.release()
    other = build(policy_module(model, MUON))
    with pytest.raises(CheckpointError, match="another optimizer or other parameter groups: 2 groups, not 3"):
        other.load_state(tmp_path / "state")
    other.release()
