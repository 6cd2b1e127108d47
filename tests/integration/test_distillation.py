"""On-policy distillation: divergences in any layout, and runs with teachers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlite import RliteTrainEngine
from rlite.algorithms.divergence import Divergence, OnDivergence, TaughtLogprobs
from rlite.errors import ConfigError, DataError
from rlite.trainer.rl.distillation import HiddenStates
from tests.integration.modules import LlamaPolicy, Qwen2Policy, make_batch, num_counted, on_meta
from tests.integration.worlds import world

pytestmark = pytest.mark.nightly
Build = Callable[..., RliteTrainEngine]
LENGTHS = [9, 4, 17, 2, 30, 11]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture
def build() -> Iterator[Build]:
    """build(meta module, size, **options): an engine that is released after the test."""
    built = []

    def build_engine(module: nn.Module, size: int, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=size, data_parallel_size=1, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


class Distilled(OnDivergence):
    """The mean divergence over the tokens that count; `loss_mask` is one where a token is predicted."""

    temperature = 0.7

    def __init__(self, divergence: Divergence) -> None:
        self.divergence = divergence

    def positions(self, data: Any) -> Tensor:
        return data["loss_mask"].bool()

    def __call__(self, tokens: TaughtLogprobs, data: Any) -> Tensor:
        return (tokens.divergence * data["loss_mask"]).sum() / data["loss_mask"].sum()


class OfLogits:
    """The same by whole logits, for the whole vocabulary."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, logits: Tensor, data: Any) -> Tensor:
        log_s, log_t = ((x / 0.7).log_softmax(-1) for x in (logits, data["teacher_logits"]))
        forward, reverse = log_t.exp() * (log_t - log_s), log_s.exp() * (log_s - log_t)
        per_token = (forward if self.beta == 0 else reverse).sum(-1)
        return (per_token * data["loss_mask"]).sum() / data["loss_mask"].sum()


def whole(logits: Tensor, data: Any) -> Tensor:
    return logits


def taught(batch: dict[str, Tensor], teacher: RliteTrainEngine, students: list[RliteTrainEngine]) -> dict[str, Tensor]:
    """The batch with what a teacher says; the students have its head."""
    [head] = [each for each in teacher.output_head() if each is not None]
    for student in students:
        student.put_teacher_head(0, *head)
    columns = {
        "teacher_hidden": teacher.forward(batch, HiddenStates()),
        "teacher_logits": teacher.forward(batch, whole),
    }
    return {**batch, **columns, "teacher": torch.where(batch["attention_mask"].bool(), 0, -1)}


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2}, {"tp_size": 2}, {"sp_size": 2}])
def test_divergences_count_in_any_layout_as_by_whole_logits(
    build: Build, models: dict[str, Path], layout: dict[str, int], beta: float
) -> None:
    batch, size = make_batch(LENGTHS), max([1, *layout.values()])
    sizes = {name: value for name, value in layout.items() if name != "fsdp"}
    options = {"param_dtype": "float64", "max_tokens_per_microbatch": 40}
    engine = build(on_meta(LlamaPolicy, models["llama"]), size, **sizes, **options)
    expected = build(
        on_meta(LlamaPolicy, models["llama"]), 1, colocate_with=engine, **{**options, "max_tokens_per_microbatch": 200}
    )
    teacher = build(on_meta(Qwen2Policy, models["qwen2"]), size, colocate_with=engine, **sizes, **options)
    batch = taught(batch, teacher, [engine])
    theirs = expected.train_batch(batch, OfLogits(beta), num_counted)
    ours = engine.train_batch(batch, Distilled(Divergence(beta)), num_counted)
    assert ours["num_microbatches"] > 1 or layout
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, atol=1e-9, rtol=0)


def test_a_loss_without_its_inputs_is_refused(build: Build, models: dict[str, Path]) -> None:
    engine = build(on_meta(LlamaPolicy, models["llama"]), 1)
    teacher = build(on_meta(Qwen2Policy, models["qwen2"]), 1, colocate_with=engine)
    batch, loss = make_batch(LENGTHS), Distilled(Divergence())
    with pytest.raises(DataError, match="the batch has no 'teacher', which the teacher must return"):
        engine.train_batch(batch, loss, num_counted)
    batch = taught(batch, teacher, [engine])
    with pytest.raises(DataError, match="the batch has no 'teacher_hidden'"):
        engine.train_batch({name: x for name, x in batch.items() if name != "teacher_hidden"}, loss, num_counted)
    with pytest.raises(ConfigError, match=r"teachers \[3\] have given no output embedding"):
        engine.train_batch({**batch, "teacher": torch.full_like(batch["teacher"], 3)}, loss, num_counted)
    assert engine.optimizer_step()["is_skipped"] == 1, "nothing was applied"


@pytest.mark.parametrize("support", ["student_topk", "union"])
def test_likeliest_tokens_are_the_same_in_any_layout(build: Build, models: dict[str, Path], support: Any) -> None:
    options, found = {"param_dtype": "float64", "max_tokens_per_microbatch": 40}, []
    for size, sizes in ((1, {}), (2, {}), (2, {"tp_size": 2})):
        engine = build(on_meta(LlamaPolicy, models["llama"]), size, **sizes, **options)
        teacher = build(on_meta(Qwen2Policy, models["qwen2"]), size, colocate_with=engine, **options)
        batch = taught(make_batch(LENGTHS), teacher, [engine])
        found.append(engine.train_batch(batch, Distilled(Divergence(0.5, support, 7)), num_counted))
        for each in (engine, teacher):
            each.release()
    for each in found[1:]:
        for name in ("loss", "grad_norm"):
            assert each[name] == pytest.approx(found[0][name], abs=1e-10), name


@pytest.mark.parametrize(
    ("support", "beta"), [*product(["full", "student_topk", "teacher_topk", "union"], [0.0, 0.5, 1.0])]
)
def test_an_engine_that_equals_its_teacher_has_no_loss_and_no_gradient(
    build: Build, models: dict[str, Path], support: Any, beta: float
) -> None:
    engine = build(on_meta(Qwen2Policy, models["qwen2"]), 1)
    teacher = build(on_meta(Qwen2Policy, models["qwen2"]), 1, colocate_with=engine)
    batch = taught(make_batch(LENGTHS), teacher, [engine])
    stats = engine.forward_backward(batch, Distilled(Divergence(beta, support, 9)), num_counted)
    assert stats["loss"] == 0
    assert engine.optimizer_step()["grad_norm"] == 0
