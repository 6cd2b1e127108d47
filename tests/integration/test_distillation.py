"""On-policy distillation: divergences in any layout, and runs with teachers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


def of_server(batch: dict[str, Tensor], teacher: RliteTrainEngine, k: int) -> dict[str, Tensor]:
    """The batch with what a teacher on a server says: of the token itself, or of the k likeliest ones."""
    logprobs = (teacher.forward(batch, whole) / Distilled.temperature).log_softmax(-1).roll(1, dims=1)
    teachers = torch.where(batch["attention_mask"].bool(), 0, -1)
    if not k:
        own = logprobs.gather(2, batch["input_ids"][..., None])[..., 0]
        return {**batch, "teacher": teachers, "teacher_logprobs": own}
    likeliest = logprobs.topk(k)
    return {**batch, "teacher": teachers, "teacher_ids": likeliest.indices, "teacher_logprobs": likeliest.values}


SUPPORTS: list[Any] = ["sampled", "served", "full", "student_topk", "teacher_topk", "union"]
LAYOUTS: list[dict[str, Any]] = [
    {"max_tokens_per_microbatch": 200},  # one pack
    {"max_tokens_per_microbatch": 30},
    {"size": 2},
    {"size": 2, "tp_size": 2},
    {"size": 2, "sp_size": 2},
]


def test_every_divergence_is_the_same_in_any_layout(build: Build, models: dict[str, Path]) -> None:
    found = []
    for layout in LAYOUTS:
        options = {"size": 1, "param_dtype": "float64", "max_tokens_per_microbatch": 40, **layout}
        engine = build(on_meta(LlamaPolicy, models["llama"]), **options)
        teacher = build(on_meta(Qwen2Policy, models["qwen2"]), colocate_with=engine, **options)
        batch, own = make_batch(LENGTHS), {}
        for support, beta in product(SUPPORTS, [0.0, 0.3, 1.0]):
            if support in ("sampled", "served"):
                columns, divergence = of_server(batch, teacher, 7 * (support == "served")), Divergence(beta)
            else:
                columns, divergence = taught(batch, teacher, [engine]), Divergence(beta, support, 7)
            stats = engine.forward_backward(columns, Distilled(divergence), num_counted)
            own[support, beta] = stats["loss"], engine.optimizer_step(lr=0.0)["grad_norm"]
        found.append(own)
        for each in (engine, teacher):
            each.release()
    assert min(min(case) for case in found[0].values()) > 1e-5
    for layout, each in zip(LAYOUTS, found, strict=True):
        for case, values in found[0].items():
            assert each[case] == pytest.approx(values, rel=1e-9), (layout, case)


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
