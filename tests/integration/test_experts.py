"""Mixtures of experts on four CPU processes give the gradients and weights of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rlite import RliteInferenceEngine, RliteTrainEngine, gathered
from rlite.data.routing import ROUTED
from rlite.nn import LoraOptions
from rlite.nn.pretrained import causal_lm_class
from rlite.runtime.parallel.fsdp import full_tensor
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.routing import RecordedLogprobs
from tests.integration.modules import Policy, make_batch, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.mixtures import build_mixture_dir, random_model

Build = Callable[..., RliteTrainEngine]
LENGTHS = [9, 4, 13, 1, 7, 6, 5]
EXACT = {"param_dtype": "float64", "max_grad_norm": 0.05}
LAYOUTS = [
    {"size": 2, "ep_size": 2},
    {"size": 2, "tp_size": 2},
    {"size": 4, "tp_size": 2, "ep_size": 4},
    {"size": 4, "sp_size": 2, "ep_size": 2},
    {"size": 2, "copies": 2, "tp_size": 2, "ep_size": 2},
]
MORE_LAYOUTS = [
    {"size": 4, "ep_size": 2},
    {"size": 4, "ep_size": 4},
    {"size": 2, "tp_size": 2, "ep_size": 2},
    {"size": 2, "sp_size": 2, "ep_size": 2},
    {"size": 4, "tp_size": 2},
    {"size": 4, "tp_size": 2, "ep_size": 2},
    {"size": 4, "sp_size": 2, "ep_size": 4},
    {"size": 4, "tp_size": 2, "sp_size": 2, "ep_size": 2},
    {"size": 4, "tp_size": 2, "sp_size": 2, "ep_size": 4},
    {"size": 2, "copies": 2, "ep_size": 2},
    {"size": 2, "copies": 2, "tp_size": 2},
    {"size": 2, "copies": 2, "sp_size": 2, "ep_size": 2},
]


class MixturePolicy(Policy):
    @gathered("first")
    def gradients(self) -> dict[str, Tensor]:
        return {name: full_tensor(p.grad).clone() for name, p in self.named_parameters() if p.grad is not None}


class Padded(MixturePolicy):
    """A policy that computes a padded batch, with transformers' own attention."""

    def check_architecture(self) -> None:
        """Packs are not used."""

    def compute_logits(self, data: dict[str, Any]) -> Tensor:
        self.config._attn_implementation = "eager"
        rows = data["input_ids"].split(data["cu_seqlens"].diff().tolist())
        ids, mask = (pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows]))
        return self(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = build_mixture_dir(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return folder_of


@pytest.fixture
def build(folder: Callable[[str], Path]) -> Iterator[Build]:
    """build(kind, size=, copies=, **options): an engine that is released after the test."""
    built = []

    def build_engine(kind: str, size: int = 1, copies: int = 1, carrier: Any = MixturePolicy, **options: Any) -> Any:
        engine: Any = RliteTrainEngine(on_meta(causal_lm_class(folder(kind), carrier), folder(kind)))
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


def trained(engine: RliteTrainEngine) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights after two AdamW steps, and the last step's statistics."""
    for seed in range(2):
        stats = engine.train_batch(make_batch(LENGTHS, seed), token_loss, num_counted)
    return engine.state_dict(), stats


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: Any, atol: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=atol, rtol=0, msg=f"{what} {name}")


@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen2_moe", marks=pytest.mark.nightly)])
def test_any_product_of_parallelisms_gives_the_weights_of_one_device(build: Build, kind: str, layouts: Any) -> None:
    balanced = {**EXACT, "router_aux_loss_coef": 0.1}
    alone = build(kind, **balanced)
    expected, expected_stats = trained(alone)
    alone.release()
    for layout in layouts:
        engine = build(kind, **layout, **balanced, max_tokens_per_microbatch=14, gradient_checkpointing=True)
        weights, stats = trained(engine)
        assert_close(weights, expected, layout)
        for key in ("loss", "grad_norm", "weight", *(name for name in expected_stats if name.startswith("moe/"))):
            assert stats[key] == pytest.approx(expected_stats[key], abs=1e-9), (layout, key)
        engine.release()


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["eager", pytest.param("batched_mm", marks=pytest.mark.nightly)])
def test_experts_on_two_ranks_have_the_gradients_of_whole_experts(build: Build, kind: str, implementation: str) -> None:
    carrier = Padded if kind == "gpt_oss" else MixturePolicy
    found = []
    for ep_size in (1, 2):
        engine: Any = build(
            kind, size=2, ep_size=ep_size, carrier=carrier, experts_implementation=implementation, **EXACT
        )
        engine.forward_backward(make_batch(LENGTHS), token_loss, num_counted)
        found.append(engine.gradients())
        engine.release()
    assert any("experts" in name for name in found[0])
    assert_close(found[1], found[0], kind)


def adapted(folder: Path, size: int = 1, **options: Any) -> dict[str, Tensor]:
    """Served weights after two steps of adapters of linear layers and experts."""
    lora = LoraOptions(rank=2, target_modules=["q_proj"], target_parameters=["gate_up_proj", "experts.down_proj"])
    optimizer = OptimizerOptions(lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=5)
    engine = RliteTrainEngine(policy_module(folder, optimizer, lora))
    engine.build(tensor_parallel_size=size, data_parallel_size=1, **EXACT, **options)
    weights, _ = trained(engine)
    engine.release()
    return weights


@pytest.mark.nightly
def test_adapters_of_experts_are_trained_in_any_layout(folder: Callable[[str], Path]) -> None:
    path = folder("qwen3_moe")
    expected = adapted(path)
    original = random_model("qwen3_moe").state_dict()
    name = "model.layers.2.mlp.experts.down_proj"
    assert (expected[name] - original[name]).abs().amax((1, 2)).min() > 0
    for layout in ({"size": 2, "ep_size": 2}, {"size": 2, "tp_size": 2}, {"size": 4, "tp_size": 2, "ep_size": 4}):
        assert_close(adapted(path, **layout), expected, layout)


@pytest.mark.nightly
def test_state_is_saved_synced_and_resumed_across_layouts(
    build: Build, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = build("glm4_moe", size=4, tp_size=2, ep_size=4, router_bias_update_rate=0.01)
    weights, _ = trained(engine)
    engine.save_state(tmp_path / "state")
    engine.save(tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name].float(), tensor) for name, tensor in weights.items())
    answers = []
    for source in (folder("glm4_moe"), tmp_path / "model"):
        served = RliteInferenceEngine(source)
        served.build(data_parallel_size=1, colocate_with=engine, max_model_len=64, max_num_seqs=2)
        if not answers:
            engine.p2p_weight_sync(served, verify_checksums=True)
        answers.append(served.generate([[1, 2, 3]], {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}))
        served.release()
    assert answers[0][0].outputs[0].token_ids == answers[1][0].outputs[0].token_ids
    following = engine.train_batch(make_batch(LENGTHS, 2), token_loss, num_counted)
    engine.release()
    resumed = build("glm4_moe", size=2, ep_size=2, router_bias_update_rate=0.01)
    resumed.load_state(tmp_path / "state")
    assert_close(resumed.state_dict(), weights, "resumed", atol=0)
    stats = resumed.train_batch(make_batch(LENGTHS, 2), token_loss, num_counted)
    for key in ("loss", "grad_norm", "moe/load_max"):
        assert stats[key] == pytest.approx(following[key], rel=1e-4)


def test_each_rank_holds_its_share_of_the_experts(build: Build) -> None:
    alone = build("mixtral")
    whole = alone.memory_bytes()[0]["weights"]
    alone.release()
    for layout in ({"size": 4, "ep_size": 4}, {"size": 4, "tp_size": 2, "ep_size": 2}):
        engine = build("mixtral", **layout)
        trained(engine)
        for held in engine.memory_bytes():
            assert held["weights"] <= 0.35 * whole
            assert held["optimizer"] <= 2.1 * held["weights"]
        engine.release()


def test_muon_updates_divided_experts(build: Build, folder: Callable[[str], Path]) -> None:
    optimizer = OptimizerOptions(
        name="muon", lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=5
    )
    found = []
    for ep_size in (1, 2):
        engine = RliteTrainEngine(policy_module(folder("qwen3_moe"), optimizer))
        engine.build(tensor_parallel_size=2, data_parallel_size=1, ep_size=ep_size, param_dtype="float64")
        found.append(trained(engine)[0])
        engine.release()
    assert_close(found[1], found[0], "muon", atol=1e-3)


@pytest.mark.nightly
def test_replayed_choices_give_the_gradients_of_one_device_in_any_product(build: Build) -> None:
    batch, found, recorded = make_batch(LENGTHS), [], []
    layouts = [{"size": 1}, {"size": 4, "ep_size": 2}, {"size": 4, "tp_size": 2, "sp_size": 2, "ep_size": 2}]
    for layout in layouts:
        engine: Any = build("qwen3_moe", **layout, **EXACT, max_tokens_per_microbatch=14, gradient_checkpointing=True)
        shape = engine.module.routing_shape()
        generator = torch.Generator().manual_seed(7)
        sizes = (*batch["input_ids"].shape, shape.num_layers, shape.num_experts)
        given = torch.rand(sizes, generator=generator).topk(shape.top_k).indices
        given[:, ::4] = -1
        recorded.append(RecordedLogprobs.parts(engine.forward(batch, RecordedLogprobs()))[1])
        stats = engine.forward_backward({**batch, ROUTED: shape.encode(given)}, token_loss, num_counted)
        found.append((engine.gradients(), stats))
        engine.release()
    for layout, column, (gradients, stats) in zip(layouts[1:], recorded[1:], found[1:], strict=True):
        assert_close(gradients, found[0][0], layout)
        assert torch.equal(column, recorded[0]), layout
        assert stats["moe/replay_differs"] == pytest.approx(found[0][1]["moe/replay_differs"]), layout
    assert 0.5 < found[0][1]["moe/replay_differs"] < 1
