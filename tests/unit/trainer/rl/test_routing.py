"""The experts that a run replays, and what is refused before it starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from rlite import RliteInferenceEngine
from rlite.errors import ConfigError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.trainer.rl.routing import RoutingReplay
from tests.integration.modules import on_meta
from tests.mixtures import build_mixture_dir


def choose(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as Qwen3-MoE does, by sorting."""
    logits = F.linear(hidden.flatten(0, -2), router.weight)
    weights, experts = logits.softmax(-1).sort(-1, descending=True)
    weights, experts = weights[:, : router.top_k], experts[:, : router.top_k]
    return logits, weights / weights.sum(-1, keepdim=True), experts


class Sorting(Qwen3MoeForCausalLM):
    """A mixture whose routers call no topk."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if "gate" in layer.mlp._modules:
                layer.mlp.gate.forward = partial(choose, layer.mlp.gate)


class Policy(HuggingFaceFsdp2TrainModule, Sorting):
    pass


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A policy without topk, and the engine that serves it."""
    folder: Path = build_mixture_dir(tmp_path_factory.mktemp("model"), "qwen3_moe")
    return on_meta(Policy, folder), RliteInferenceEngine(folder)


@pytest.mark.parametrize("asked", ["rollout", "old_policy"])
def test_a_router_without_topk_is_refused_before_a_process_starts(models: Any, asked: Any) -> None:
    with pytest.raises(ConfigError, match=rf"routing_replay={asked}: .*no topk has chosen.*; use off or auto"):
        RoutingReplay.of(asked, *models)


def test_auto_trains_a_model_without_topk_with_its_own_choice_and_says_why(models: Any) -> None:
    found = RoutingReplay.of("auto", *models)
    assert found.source == "off"
    assert "no topk has chosen" in found.topic()["routing replay"]
