"""Metrics and choices of a train step do not depend on how its batch is split: two CPU slots over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite import RliteTrainEngine
from rlite.data.packs import split_batch
from rlite.errors import ConfigError
from rlite.trainer.losses import ValueLoss
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import OwnLogprobs, PolicyLoss
from rlite.trainer.rl.statistics import with_selected
from tests.integration.modules import make_batch
from tests.integration.worlds import world

LENGTHS = [9, 4, 17, 3, 30, 12, 5]
LAYOUTS = [(1, 1000), (1, 30), (2, 1000), (2, 30)]
"""ranks and tokens of a microbatch"""


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture
def engines(models: dict[str, Path]) -> Iterator[Callable[..., Iterator[RliteTrainEngine]]]:
    """engines(make_module): the same model in every layout, one after the other."""

    built: list[RliteTrainEngine] = []

    def build_each(make_module: Callable[..., Any]) -> Iterator[RliteTrainEngine]:
        options = OptimizerOptions(lr=1e-3, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=1)
        for size, max_tokens in LAYOUTS:
            built.append(engine := RliteTrainEngine(make_module(models["qwen2"], options)))
            engine.build(tensor_parallel_size=size, param_dtype="float64", max_tokens_per_microbatch=max_tokens)
            yield engine
            built.pop().release()

    yield build_each
    for engine in built:
        engine.release()


def rollouts() -> TensorDict:
    """Rows whose drift grows with their length, so that means over rows and over tokens differ."""
    batch = make_batch(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    batch["loss_mask"] = batch["attention_mask"].clone()
    batch["loss_mask"][:, :2] = 0
    scale = torch.tensor(LENGTHS)[:, None] / 10
    shape = batch["loss_mask"].shape
    for key in ("old_logprobs", "logprobs", "ref_logprobs", "advantages", "values", "returns"):
        batch[key] = torch.randn(shape, generator=generator, dtype=torch.float64) * scale * batch["loss_mask"]
    return TensorDict(batch, batch_size=[len(LENGTHS)])


@pytest.mark.parametrize("kind", ["actor", "critic"])
def test_metrics_are_token_means_for_any_split_and_average(engines: Any, kind: str) -> None:
    batch = rollouts()
    mask = batch["loss_mask"].bool()
    losses: list[Any] = [
        PolicyLoss(kl_coef=0.1, avg_level=level, max_new_tokens=8)
        if kind == "actor"
        else ValueLoss(avg_level=level, max_new_tokens=8)
        for level in ("token", "sequence", "constant")
    ]
    if kind == "actor":
        losses.append(PolicyLoss(rejection={"upper": 0.5}, off_policy_threshold=0.1, avg_level="sequence"))
    token_means = {"logprob_drift": (batch["old_logprobs"] - batch["logprobs"])[mask].abs().mean().item()}
    if kind == "critic":
        token_means = {key: batch[f"{key}s"][mask].mean().item() for key in ("value", "return")}
    found = []
    for engine in engines(policy_module if kind == "actor" else critic_module):
        stats = [engine.eval_batch(batch, loss, loss.weight) for loss in losses]
        stats.append(engine.train_batch(batch, losses[1], losses[1].weight))
        for own in stats:
            del own["num_microbatches"]
            assert {key: own[key] for key in token_means} == pytest.approx(token_means)
        found.append(stats)
    if kind == "actor":
        assert 0 < found[0][3]["rejected"] < 1
        assert 0 < found[0][3]["off_policy_dropped"] < 1
    for stats in found[1:]:
        for own, expected in zip(stats, found[0], strict=True):
            assert own == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clip_cov", {"share": 0.1, "cov_low": 0.0, "clip_low": 0.99, "clip_high": 99.0}),
        ("kl_cov", {"share": 0.1}),
        ("m2po", {"threshold": 1.0}),
    ],
)
def test_losses_that_choose_tokens_choose_among_the_whole_batch(
    engines: Any, name: str, options: dict[str, float]
) -> None:
    loss = PolicyLoss(policy_loss=name, options=options, avg_level="sequence")
    steps = []
    for engine in engines(policy_module):
        batch = rollouts()
        if engine.dims.num_data_ranks > 1 or engine.options.max_tokens_per_microbatch < 1000:
            batch = with_selected(batch, engine, loss)
            assert 0 < batch["selected"].sum() < batch["loss_mask"].sum()
        stats = engine.train_batch(batch, loss, loss.weight)
        del stats["num_microbatches"]
        steps.append((stats, engine.state_dict()))
    for stats, weights in steps[1:]:
        assert stats == pytest.approx(steps[0][0], rel=1e-6)
        for key, tensor in steps[0][1].items():
            torch.testing.assert_close(weights[key], tensor, atol=1e-8, rtol=0)


def test_token_values_equal_a_forward_pass_for_any_split(engines: Any) -> None:
    batch, loss = rollouts(), PolicyLoss(returns_tokens=True)
    mask, entropies = batch["loss_mask"].bool(), []
    for engine in engines(policy_module):
        expected = torch.where(mask, engine.forward(batch, OwnLogprobs()), 0.0)
        found = engine.train_batch(batch, loss, loss.weight)
        torch.testing.assert_close(found["trained_logprobs"], expected)
        assert torch.equal(found["entropies"] > 0, mask)
        assert found["entropies"][mask].mean().item() == pytest.approx(found["entropy"])
        entropies.append(found["entropies"])
    for other in entropies[1:]:
        torch.testing.assert_close(other, entropies[0])


@pytest.mark.parametrize("method", ["forward", "forward_backward"])
def test_workers_send_the_values_of_tokens_and_no_padding(models: dict[str, Path], method: str) -> None:
    batch, loss = dict(rollouts()), PolicyLoss(returns_tokens=True)
    arguments = (OwnLogprobs(), False) if method == "forward" else (loss, loss.weight)
    engine = RliteTrainEngine(policy_module(models["qwen2"]))
    engine.build(tensor_parallel_size=2, max_tokens_per_microbatch=1000)
    shares = split_batch(method, batch, 2, 1000)
    found = engine.group.call(method, [((share, *arguments), {}) for share in shares])
    engine.release()
    sent = found if method == "forward" else [result["entropies"] for result in found]
    assert sum(map(len, sent)) == sum(LENGTHS)
    assert sum(values.untyped_storage().nbytes() for values in sent) == sum(LENGTHS) * sent[0].element_size()


def test_a_hook_that_drops_tokens_is_refused(models: dict[str, Path]) -> None:
    engine = RliteTrainEngine(policy_module(models["qwen2"]))
    engine.build(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"forward: found values .* expected one value for each token of every pack"):
        engine.forward(rollouts(), without_the_first_token)
    engine.release()


def without_the_first_token(outputs: torch.Tensor, data: Any) -> torch.Tensor:
    return outputs[1:, 0]


def sizes(outputs: torch.Tensor, data: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The tokens of a microbatch, and their square."""
    return outputs.sum() * 0 + len(outputs), {"squared": float(len(outputs)) ** 2}


def test_karmarkar_karp_packs_as_many_microbatches_of_even_size(models: dict[str, Path]) -> None:
    found = {}
    for method in ("first_fit_decreasing", "karmarkar_karp"):
        engine = RliteTrainEngine(policy_module(models["qwen2"]))
        engine.build(data_parallel_size=1, max_tokens_per_microbatch=45, packing_method=method)
        found[method] = engine.eval_batch(rollouts(), sizes, lambda data: torch.ones(()))
        engine.release()
    assert {stats["num_microbatches"] for stats in found.values()} == {2.0}
    assert found["first_fit_decreasing"]["squared"] == (45**2 + 35**2) / 2
    assert found["karmarkar_karp"]["squared"] == (41**2 + 39**2) / 2
    with pytest.raises(ConfigError, match="packing_method=karmarkar"):
        RliteTrainEngine(policy_module(models["qwen2"])).build(packing_method="karmarkar")
