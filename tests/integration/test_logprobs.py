"""Losses on log-probabilities, on real processes: four CPU slots over gloo, rank 0 in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn

from rlite import RliteTrainEngine, gathered
from rlite.algorithms import OnLogprobs, TokenLogprobs, gather_logprobs_entropy, next_token, on_logprobs
from rlite.nn import BaseTrainModule, linear_logprobs
from rlite.runtime.parallel.processes import subgroup
from tests.integration.modules import LlamaPolicy, Policy, Qwen2Policy, make_batch, num_counted, on_meta
from tests.integration.worlds import world
from tests.kept_ids import kept_columns, kept_sets, pairs_of, sets_of_pack, written_out

Build = Callable[..., RliteTrainEngine]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


def surprise_and_spread(tokens: TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss with gradients of its own for both, and 0 / 0 where nothing counts."""
    mask, count = data["loss_mask"], data["loss_mask"].sum()
    per_token = -tokens.logprobs - 0.1 * tokens.entropy**2
    return (per_token * mask).sum() / count, {"entropy": (tokens.entropy * mask).sum() / count}


class Counted(OnLogprobs):
    """Asks for the positions that count."""

    temperature = 0.7

    def positions(self, data: dict[str, Any]) -> Tensor:
        return data["loss_mask"].bool()

    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> Any:
        return surprise_and_spread(tokens, data)


def from_logits(logits: Tensor, data: dict[str, Any]) -> TokenLogprobs:
    return TokenLogprobs(*gather_logprobs_entropy(logits, next_token(data["input_ids"], data["cu_seqlens"]), 0.7))


def surprise_and_spread_of_logits(logits: Tensor, data: dict[str, Any]) -> Any:
    return surprise_and_spread(from_logits(logits, data), data)


def stacked(tokens: TokenLogprobs, data: dict[str, Any]) -> Tensor:
    return torch.stack(tokens, -1)


def stacked_of_logits(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return torch.stack(from_logits(logits, data), -1)


class Watched(Policy):
    """Remembers what its forward makes."""

    def compute_logits(self, data: Any) -> Tensor:
        output = super().compute_logits(data)
        self.width = output.shape[-1]
        return output

    @gathered("first")
    def last_width(self) -> int:
        return self.width


class WatchedQwen2(Watched, Qwen2Policy):
    pass


class WatchedLlama(Watched, LlamaPolicy):
    pass


class Scaled(WatchedQwen2):
    """Model that scales its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


class ScaledInPlace(WatchedQwen2):
    def compute_logits(self, data: Any) -> Tensor:
        return super().compute_logits(data).mul_(0.5)


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("module", [WatchedQwen2, WatchedLlama, Scaled, ScaledInPlace])
def test_loss_on_log_probabilities_equals_loss_on_logits_without_making_logits(
    build: Build, models: dict[str, Path], module: type, size: int, is_recomputed: bool
) -> None:
    path = models["llama" if issubclass(module, LlamaPolicy) else "qwen2"]
    batch = make_batch([9, 4, 17, 2, 30, 11])
    batch["loss_mask"][:, :2] = 0
    tolerance = {"atol": 1e-9, "rtol": 0}
    options = {"param_dtype": "float64", "max_tokens_per_microbatch": 40, "gradient_checkpointing": is_recomputed}
    expected, engine = (build(on_meta(module, path), size, **options) for _ in range(2))
    ours = engine.train_batch(batch, Counted(), num_counted)
    theirs = expected.train_batch(batch, surprise_and_spread_of_logits, num_counted)
    for name in ("loss", "grad_norm", "entropy"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-9)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, **tolerance)
    on_function = on_logprobs(surprise_and_spread, temperature=0.7)
    ours, theirs = (
        engine.eval_batch(batch, loss, num_counted) for loss in (on_function, surprise_and_spread_of_logits)
    )
    assert ours == pytest.approx(theirs, abs=1e-9)
    values = engine.forward(batch, on_logprobs(stacked, temperature=0.7))
    assert engine.last_width() == (2 if "Watched" in module.__name__ else 259)
    torch.testing.assert_close(values, engine.forward(batch, stacked_of_logits), **tolerance)
    assert engine.last_width() == 259


def over_kept_ids(tokens: TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss with gradients of its own for all three."""
    mask, count = data["loss_mask"], data["loss_mask"].sum()
    per_token = -tokens.logprobs - 0.1 * tokens.entropy**2 + 0.2 * tokens.full_logprobs**2
    means = {"kept": tokens.logprobs, "entropy": tokens.entropy, "full": tokens.full_logprobs}
    return (per_token * mask).sum() / count, {key: (value * mask).sum() / count for key, value in means.items()}


class Replayed(Counted):
    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> Any:
        return over_kept_ids(tokens, data)


def over_kept_ids_of_logits(logits: Tensor, data: dict[str, Any]) -> Any:
    logprobs, entropy = from_logits(logits, data)
    labels = next_token(data["input_ids"], data["cu_seqlens"])
    kept = written_out(logits, labels, sets_of_pack(data), 0.7)
    return over_kept_ids(TokenLogprobs(kept, entropy, logprobs), data)


@pytest.mark.parametrize(
    ("module", "size", "layout"),
    [
        (Qwen2Policy, 1, {}),
        (Qwen2Policy, 2, {"tp_size": 2}),
        (LlamaPolicy, 4, {"tp_size": 2}),
        (Qwen2Policy, 2, {"sp_size": 2}),
        (LlamaPolicy, 4, {"tp_size": 2, "sp_size": 2}),
        (Scaled, 1, {}),
        (Scaled, 2, {"sp_size": 2}),
    ],
)
def test_kept_ids_count_in_any_layout_as_by_a_softmax_over_them(
    build: Build, models: dict[str, Path], module: type, size: int, layout: dict[str, int]
) -> None:
    path = models["llama" if issubclass(module, LlamaPolicy) else "qwen2"]
    batch = make_batch([9, 4, 17, 2, 30, 11])
    batch |= kept_columns(batch, 40)
    options = {"param_dtype": "float64", "max_tokens_per_microbatch": 40}
    engine = build(on_meta(module, path), size, **layout, **options)
    expected = build(on_meta(module, path), 1, colocate_with=engine, **options)
    theirs = expected.train_batch(batch, over_kept_ids_of_logits, num_counted)
    ours = engine.train_batch(batch, Replayed(), num_counted)
    for name in ("loss", "grad_norm", "kept", "entropy", "full"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, atol=1e-9, rtol=0)


class Vocabulary(BaseTrainModule):
    """Gives each rank its part of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def materialization_source(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(1)}

    def both_ways(self, hidden: Tensor, weight: Tensor, labels: Tensor, borders: list[int]) -> list[list[Tensor]]:
        """From hidden states, from logits, and over kept ids: log-probabilities, entropies, and gradients."""
        size = len(borders) - 1
        group = subgroup(range(size)) if size > 1 else None
        rank = dist.get_rank() if group else 0
        hidden, part = hidden.requires_grad_(), weight[borders[rank] : borders[rank + 1]].clone().requires_grad_()
        logits = (hidden @ part.T).detach().requires_grad_()
        where = {"group": group, "start": borders[rank]}
        results = []
        for outputs, leaves in (
            (linear_logprobs(hidden, part, labels, 0.7, **where, block_size=3, num_kept=20), [hidden, part]),
            (gather_logprobs_entropy(logits, labels, 0.7, **where, chunk_size=5), [logits]),
        ):
            gradients = torch.autograd.grad((outputs[0].square() + outputs[0] * outputs[1]).sum(), leaves)
            results.append([x.detach() for x in (*outputs, *gradients)])
        kept = kept_sets(labels.tolist(), 13)
        outputs = linear_logprobs(hidden, part, labels, 0.7, **where, block_size=3, num_kept=20, replay=pairs_of(kept))
        total = outputs.logprobs.square() + outputs.logprobs * outputs.entropy + outputs.full_logprobs**3
        gradients = torch.autograd.grad(total.sum(), [hidden, part])
        results.append([x.detach() for x in (*outputs, outputs.full_logprobs, *gradients)])
        return results


@pytest.mark.parametrize("borders", [[0, 7, 13], [0, 5, 9, 13], [0, 1, 13, 13]])
def test_a_vocabulary_in_parts_gives_every_rank_the_results_of_the_whole(build: Build, borders: list[int]) -> None:
    with init_empty_weights():
        module = Vocabulary()
    engine = build(module, len(borders) - 1)
    for num_tokens in (0, 1, 26):
        hidden, weight = torch.randn(num_tokens, 4).double(), torch.randn(13, 4).double()
        labels = torch.arange(num_tokens) % 13  # both sides of every border are among them
        direct, of_whole_logits, whole_kept = module.both_ways(hidden.clone(), weight, labels, [0, 13])
        for rank, (ours, of_logits, kept) in enumerate(engine.both_ways(hidden, weight, labels, borders)):
            part = slice(borders[rank], borders[rank + 1])
            torch.testing.assert_close(ours, [*direct[:3], direct[3][part]])
            torch.testing.assert_close(of_logits, [*of_whole_logits[:2], of_whole_logits[2][:, part]])
            torch.testing.assert_close(ours[:2], of_logits[:2])
            torch.testing.assert_close(kept, [*whole_kept[:4], whole_kept[4][part]])
