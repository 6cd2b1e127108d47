"""Layers compiled by torch's real compiler, on CPU: what they compute, and how often they are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.utils import get_compilation_metrics

from rlite import RliteTrainEngine, gathered
from rlite.nn import LoraOptions, LoraTrainModule
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import Qwen3Policy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world

OPTIMIZER = OptimizerOptions(lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=20)
LENGTHS = ([5, 9, 3], [7, 2], [30, 12, 1, 4], [64], [11, 12, 13, 14, 15], [2, 3], [17, 17, 17], [40, 3])


class Counted(Qwen3Policy):
    @gathered("first")
    def num_compiled(self) -> int:
        """Compilations of the code that was compiled most often."""
        found = Counter((one.co_name, one.co_filename, one.co_firstlineno) for one in get_compilation_metrics())
        return max(found.values(), default=0)


class CountedLora(LoraTrainModule, Counted):
    lora = LoraOptions(rank=4)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def trained(model: Path, cls: Any, size: int, **options: Any) -> tuple[list[dict[str, float]], int]:
    """Steps and evaluations over packs of many lengths, and how often a layer's code was compiled."""
    engine = RliteTrainEngine(on_meta(cls, model))
    engine.build(tensor_parallel_size=size, data_parallel_size=1, param_dtype="float64", **options)
    found = []
    for lengths in LENGTHS:
        batch = make_batch(lengths)
        found.append(engine.train_batch(batch, token_loss, num_counted))
        found.append(engine.eval_batch(batch, token_loss, num_counted))
    num_compiled = engine.num_compiled()
    engine.release()
    return [{name: one[name] for name in ("loss", "grad_norm") if name in one} for one in found], num_compiled


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cls", "size", "options"),
    [
        (Counted, 1, {}),
        (Counted, 1, {"gradient_checkpointing": True}),
        (Counted, 2, {"gradient_checkpointing": True}),
        (CountedLora, 1, {"gradient_checkpointing": True}),
        (CountedLora, 2, {}),
    ],
)
def test_compiled_layers_compute_what_layers_compute_and_are_compiled_three_times_at_most(
    models: dict[str, Path], cls: Any, size: int, options: dict[str, Any]
) -> None:
    plain, none = trained(models["qwen3"], cls, size, **options)
    found, num_compiled = trained(models["qwen3"], cls, size, compile="layers", **options)
    for ours, expected in zip(found, plain, strict=True):
        assert ours == pytest.approx(expected, rel=1e-9)
    assert 1 <= num_compiled - none <= 3
