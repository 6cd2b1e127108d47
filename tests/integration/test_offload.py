"""The train engine with its optimizer's state on the host between steps does what it does without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rlite
from rlite import RliteTrainEngine
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import make_batch, num_counted, token_loss

OPTIMIZER = OptimizerOptions(lr=1e-2, weight_decay=0.1, scheduler="constant", warmup_steps=0, total_steps=4)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def trained(model: Path, folder: Path, offload_optimizer: bool) -> dict[str, Tensor]:
    """Two steps, away and back, a checkpoint that another engine goes on from, and two more steps."""
    for part in range(2):
        engine = RliteTrainEngine(policy_module(model, OPTIMIZER))
        engine.build(offload_optimizer=offload_optimizer)
        if part:
            engine.load_state(folder / "state")
        for step in range(2):
            engine.train_batch(make_batch([5, 9, 3 + step + part]), token_loss, num_counted)
            engine.cpu()
            engine.cuda()
        engine.save_state(folder / "state")
        weights = engine.state_dict()
        engine.release()
    return weights


def test_offloading_the_optimizer_changes_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    with_it = trained(models["qwen3"], tmp_path / "with", True)
    without = trained(models["qwen3"], tmp_path / "without", False)
    assert with_it.keys() == without.keys()
    for name, tensor in without.items():
        assert torch.equal(with_it[name], tensor), name
