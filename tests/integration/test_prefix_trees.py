"""Tokens with which sequences begin alike are computed once, and give the gradients of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlite import RliteTrainEngine, gathered
from rlite.algorithms import TokenLogprobs, on_logprobs
from rlite.backends.models.huggingface import HuggingFaceFsdp2ScoreModule
from rlite.batch import KEYS
from rlite.nn import HuggingFaceFsdp2TrainModule, LoraOptions
from rlite.nn.pretrained import score_class
from rlite.runtime.parallel.fsdp import full_tensor
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import POLICIES, LlamaPolicy, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

Build = Callable[..., RliteTrainEngine]
EXACT: dict[str, Any] = {"param_dtype": "float64", "max_tokens_per_microbatch": 90}
LAYOUTS = [
    {},
    {"size": 2},
    {"size": 4, "gradient_checkpointing": True},
    {"size": 2, "copies": 2},
    {"size": 2, "tp_size": 2},
    {"size": 2, "sp_size": 2, "gradient_checkpointing": True},
    {"size": 4, "tp_size": 2, "sp_size": 2},
]
OPTIMIZER = OptimizerOptions(lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=5)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": build_model_dir(root / "qwen3", "qwen3", tie=True, hidden=64, layers=1),
        "llama": build_model_dir(root / "llama", "llama", tie=False, hidden=64, layers=1, vocab_size=264),
        "qwen3_moe": build_mixture_dir(root / "moe", "qwen3_moe"),
    }


@pytest.fixture
def build() -> Iterator[Build]:
    """build(module, size=, copies=, **options): an engine that is released after the test."""
    built = []

    def build_engine(module: Any, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **{**EXACT, **options})
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


def branches(seed: int = 0) -> dict[str, Tensor]:
    """Two groups of three answers to a prompt, of which one has two further turns, and a row of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(0, 250, (length,), generator=generator).tolist()

    prompts = [draw(22), draw(25)]
    rows = [prompts[0] + draw(n) for n in (5, 1, 9)] + [prompts[1] + draw(n) for n in (7, 4, 4)] + [draw(6)]
    rows += [rows[2] + draw(8), rows[2] + draw(3)]
    lengths, width = [len(row) for row in rows], max(map(len, rows))
    steps, length = torch.arange(width), torch.tensor(lengths)[:, None]
    order = torch.randperm(len(rows), generator=generator)
    mask = torch.rand(len(rows), width, generator=generator) < 0.7
    return {
        "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows])[order],
        "attention_mask": (steps < length).long()[order],
        "loss_mask": (mask & (steps < length - 1)).long()[order],
        "weights": torch.rand(len(rows), width, generator=generator, dtype=torch.float64)[order],
    }


@on_logprobs(temperature=0.8)
def logprob_loss(tokens: TokenLogprobs, data: dict[str, Any]) -> Tensor:
    """A mean over counted tokens, each with a weight of its own row."""
    counted = data["loss_mask"].bool()
    return ((-tokens.logprobs - 0.1 * tokens.entropy) * data["weights"])[counted].sum() / counted.sum()


@on_logprobs
def logprobs_of(tokens: TokenLogprobs, data: dict[str, Any]) -> Tensor:
    return tokens.logprobs * data["loss_mask"]


class ExactNorm(nn.Module):
    """The norm in float64. That of transformers rounds to float32, so that a sum of gradients has other bits."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


class Exact(HuggingFaceFsdp2TrainModule):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for module in self.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.__class__ = ExactNorm

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)

    @gathered("first")
    def gradients(self) -> dict[str, Tensor]:
        return {name: full_tensor(p.grad).clone() for name, p in self.named_parameters() if p.grad is not None}


EXACT_POLICIES: dict[str, type] = {
    kind: type(f"Exact{policy.__name__}", (Exact, policy), {"__module__": __name__})
    for kind, policy in POLICIES.items()
}


def computed(engine: RliteTrainEngine, loss: Any = logprob_loss, hook: Any = logprobs_of) -> tuple[Any, ...]:
    """Gradients of two batches, the last batch's statistics, and log-probabilities."""
    for seed in range(2):
        stats = engine.forward_backward(branches(seed), loss, num_counted)
    return engine.gradients(), stats, engine.forward(branches(), hook)


def assert_alike(found: Any, expected: Any, what: Any, atol: float = 1e-9) -> None:
    (gradients, stats, values), (whole, whole_stats, whole_values) = found, expected
    assert stats["shared_tokens"] > 0.1, what
    assert "shared_tokens" not in whole_stats
    assert gradients.keys() == whole.keys()
    for name, tensor in gradients.items():
        torch.testing.assert_close(
            tensor, whole[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{what} {name} {m}"
        )
    for key in whole_stats.keys() - {"num_microbatches"}:
        assert stats[key] == pytest.approx(whole_stats[key], abs=atol), (what, key)
    torch.testing.assert_close(values, whole_values, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.nightly)])
def test_any_layout_gives_the_gradients_of_whole_sequences(build: Build, models: dict[str, Path], kind: str) -> None:
    alone = build(on_meta(EXACT_POLICIES[kind], models[kind]), share_prefixes=False)
    expected = computed(alone)
    alone.release()
    for layout in LAYOUTS:
        engine = build(on_meta(EXACT_POLICIES[kind], models[kind]), **layout)
        assert_alike(computed(engine), expected, layout)
        engine.release()


@pytest.mark.parametrize("layout", [{"size": 2, "sp_size": 2}, {"size": 4, "tp_size": 2, "ep_size": 4}])
def test_a_shared_token_counts_in_the_load_of_experts_once_for_each_sequence(
    build: Build, models: dict[str, Path], layout: dict[str, int]
) -> None:
    found = []
    for options in ({"share_prefixes": False}, layout):
        module = on_meta(EXACT_POLICIES["qwen3_moe"], models["qwen3_moe"])
        engine = build(module, **options, router_aux_loss_coef=0.1)
        found.append(computed(engine))
        engine.release()
    assert any(name.startswith("moe/load") for name in found[0][1])
    assert_alike(found[1], found[0], layout, atol=1e-6)  # routers compute in float32


def test_adapters_are_trained_alike(build: Build, models: dict[str, Path]) -> None:
    found = []
    for options in ({"share_prefixes": False}, {"size": 2, "tp_size": 2}):
        engine = build(policy_module(models["llama"], OPTIMIZER, LoraOptions(rank=2)), **options)
        stats = [engine.train_batch(branches(seed), logprob_loss, num_counted) for seed in range(2)][-1]
        found.append((engine.state_dict(), stats, engine.forward(branches(), logprobs_of)))
        engine.release()
    assert_alike(found[1], found[0], "adapters", atol=1e-5)


class Scorer(Exact, HuggingFaceFsdp2ScoreModule):
    pass


def score_loss(scores: Tensor, data: dict[str, Any]) -> Tensor:
    return (scores * data["weights"] * data["loss_mask"]).sum() / data["loss_mask"].sum()


def test_scores_of_shared_tokens_belong_to_every_sequence(build: Build, models: dict[str, Path]) -> None:
    found = []
    for options in ({"share_prefixes": False}, {"size": 2}):
        engine = build(on_meta(score_class(models["llama"], Scorer), models["llama"]), **options)
        found.append(computed(engine, score_loss, lambda scores, data: scores))
        engine.release()
    assert_alike(found[1], found[0], "scores")


def test_kept_ids_are_those_of_each_sequence(build: Build, models: dict[str, Path]) -> None:
    batch = branches()
    counts = torch.where(batch["loss_mask"].roll(1, 1) * batch["attention_mask"] > 0, 2, 0)
    counts[:, :30] = 0
    rows = [
        [i for token in ids[n > 0].tolist() for i in (token, (token + 1) % 250)]
        for ids, n in zip(batch["input_ids"], counts, strict=True)
    ]
    width = max(map(len, rows))
    kept = torch.tensor([row + [KEYS["kept_ids"].padding] * (width - len(row)) for row in rows])
    batch |= {"kept_counts": counts.int(), "kept_ids": kept.int()}
    found = []
    for options in ({"share_prefixes": False}, {}):
        engine: Any = build(on_meta(EXACT_POLICIES["qwen3"], models["qwen3"]), **options)
        stats = engine.forward_backward(batch, logprob_loss, num_counted)
        found.append((engine.gradients(), stats, engine.forward(batch, logprobs_of)))
    assert_alike(found[1], found[0], "kept ids")


class OwnLogits(LlamaPolicy):
    def compute_logits(self, data: Any) -> Tensor:
        """Logits of a pack, by a computation of the user's own."""
        return super().compute_logits(data)


class Dropping(LlamaPolicy):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config.attention_dropout = 0.1


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (OwnLogits, {}, "OwnLogits has 1 method of its own: compute_logits"),
        (Dropping, {}, "dropout"),
        (LlamaPolicy, {"share_prefixes": False}, "share_prefixes=false"),
        (LlamaPolicy, {"deterministic": True, "param_dtype": "float32"}, "deterministic=true"),
    ],
)
def test_sequences_are_computed_whole_with_a_reason(
    build: Build, models: dict[str, Path], module: type[HuggingFaceFsdp2TrainModule], options: Any, words: str
) -> None:
    engine = build(on_meta(module, models["llama"]), **options)
    assert words in (engine.prefix_obstacle() or "")
    assert "shared_tokens" not in engine.train_batch(branches(), logprob_loss, num_counted)


def test_a_loss_on_logits_gets_whole_sequences(build: Build, models: dict[str, Path]) -> None:
    engine = build(on_meta(POLICIES["qwen3"], models["qwen3"]))
    assert engine.prefix_obstacle() is None
    assert "shared_tokens" not in engine.train_batch(branches(), token_loss, num_counted)
