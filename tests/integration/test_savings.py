"""Options that save memory in training change no bit of its results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite import RliteTrainEngine
from tests.integration.modules import Qwen3Policy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


def failing_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    raise ValueError("of the user's")


def trained(model: Path, **options: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights after steps, an evaluation, and a loss that raised after its forward pass."""
    engine = RliteTrainEngine(on_meta(Qwen3Policy, model))
    engine.build(tensor_parallel_size=2, data_parallel_size=1, max_tokens_per_microbatch=16, **options)
    batch = make_batch([5, 9, 3, 11, 7, 2])
    for _ in range(2):
        engine.train_batch(batch, token_loss, num_counted)
        engine.eval_batch(batch, token_loss, num_counted)
        with pytest.raises(ValueError, match="of the user's"):
            engine.train_batch(batch, failing_loss, num_counted)
    weights, choices = engine.state_dict(), engine.choices()
    engine.release()
    return weights, choices


@pytest.mark.slow
def test_saving_memory_changes_no_bit_and_the_choice_is_told(models: dict[str, Path]) -> None:
    always = {"gradient_checkpointing": True, "offload_optimizer": True, "reshard_after_forward": True}
    expected, told = trained(models["qwen3"], **always)
    assert told["memory"].startswith(", ".join(f"{name}=true" for name in always))
    found, told = trained(models["qwen3"], **dict.fromkeys(always, "auto"))
    assert told["memory"].startswith(
        "gradient_checkpointing=false, offload_optimizer=false, reshard_after_forward=false"
    )
    assert told["memory"].endswith(f"chosen by free memory: {', '.join(always)}")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
