"""The contract of train executors, for every registered one: two data ranks of two workers each, over gloo."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from rlite import NeedParallel, RliteTrainEngine
from rlite.algorithms import TokenLogprobs, on_logprobs
from rlite.engine.registry import TrainBackend, TrainWorker, find_backend, register_executor, registered_executors
from rlite.errors import ConfigError, ResidencyError, RliteError
from rlite.runtime.parallel.dims import ParallelDims
from tests import third_party_pipeline as pipeline
from tests.integration.modules import Policy, make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.tiny import build_model_dir

pytestmark = pytest.mark.slow
pipeline.register()
EXECUTORS = registered_executors("train")
LENGTHS = [9, 4, 17, 2, 30, 11, 5]
Build = Callable[..., RliteTrainEngine]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "llama", "llama", tie=False, hidden=32)


class Learner(Policy, LlamaForCausalLM):
    """AdamW with a schedule."""

    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=10)

    def draw(self) -> float:
        return torch.rand(1).item()


@pytest.fixture
def build(model: Path) -> Iterator[Build]:
    """build(executor, **options): an engine of two copies on two workers each, released after the test."""
    built = []

    def build_engine(executor: str, module: type = Learner, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(on_meta(module, model), executor=executor)
        others = [other for other in built if other.is_built]
        settings: dict[str, Any] = {"param_dtype": "float64", "colocate_with": others or None, **options}
        engine.build(tensor_parallel_size=2, data_parallel_size=2, **settings)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=name)


def rows_of(batch: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


def without_counts(stats: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in stats.items() if key not in ("num_microbatches", "num_tokens")}


every_executor = pytest.mark.parametrize("executor", EXECUTORS)


# -- training ----------------------------------------------------------------------------------------------------------


@every_executor
def test_train_batch_is_bit_identical_to_forward_backward_and_a_step(build: Build, executor: str) -> None:
    whole, halves = build(executor), build(executor, max_tokens_per_microbatch=16384)
    for seed in range(2):
        batch = make_batch(LENGTHS, seed)
        expected = whole.train_batch(batch, token_loss, num_counted)
        found = halves.forward_backward(batch, token_loss, num_counted)
        assert {**found, **halves.optimizer_step()} == expected
        assert whole.step_lr_scheduler() == halves.step_lr_scheduler()
    assert_equal(halves.state_dict(), whole.state_dict())
    assert halves.optimizer_step()["is_skipped"] == 1, "there is nothing left to step with"
    assert_equal(halves.state_dict(), whole.state_dict())


@every_executor
def test_several_forward_backwards_accumulate_the_gradient_of_one_batch(build: Build, executor: str) -> None:
    batch = make_batch(LENGTHS)
    whole, parts = build(executor), build(executor, max_tokens_per_microbatch=32)
    expected = whole.train_batch(batch, token_loss, num_counted)
    weight = 0.0
    for rows in ([4], [0, 1, 2], [3, 6, 5]):
        weight += parts.forward_backward(rows_of(batch, rows), token_loss, num_counted)["weight"]
        parts.eval_batch(batch, token_loss, num_counted)  # disturbs nothing
    nothing = {**rows_of(batch, [0, 1]), "loss_mask": torch.zeros(2, batch["loss_mask"].shape[1])}
    assert parts.forward_backward(nothing, token_loss, num_counted)["weight"] == 0
    found = parts.optimizer_step()
    assert found["weight"] == expected["weight"] == weight
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    assert_equal(parts.state_dict(), whole.state_dict(), 1e-6)  # RMSNorm's gradients are rounded to float32


@every_executor
def test_weights_are_those_of_plain_torch_for_any_order_of_rows_and_microbatches(
    build: Build, executor: str, model: Path
) -> None:
    batch = make_batch(LENGTHS)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        row = ids[: mask.sum()]
        logits = plain(row[None]).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
        (loss / batch["loss_mask"].sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    for rows, max_tokens in [(range(7), 16384), (range(7), 30), (reversed(range(7)), 32)]:
        engine = build(executor, max_tokens_per_microbatch=max_tokens)
        stats = engine.train_batch(rows_of(batch, list(rows)), token_loss, num_counted)
        assert stats["weight"] == sum(LENGTHS) - len(LENGTHS)
        assert stats["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        assert_equal(engine.state_dict(), expected, 1e-9)
        engine.release()


@on_logprobs(temperature=0.8)
def logprob_loss(tokens: TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    counted = data["loss_mask"].bool()
    return -tokens.logprobs[counted].sum() / counted.sum(), {"entropy": tokens.entropy[counted].sum() / counted.sum()}


@every_executor
def test_a_loss_on_logprobs_reports_means_over_the_whole_batch(build: Build, executor: str) -> None:
    batch = make_batch(LENGTHS)
    stats = [
        engine.train_batch(batch, logprob_loss, num_counted)
        for engine in (build(executor), build(executor, max_tokens_per_microbatch=30), build("fsdp2"))
    ]
    for found in stats[1:]:
        assert without_counts(found) == pytest.approx(without_counts(stats[0]), rel=1e-9)
    assert 0 < stats[0]["entropy"] < math.log(300)


@every_executor
def test_a_batch_without_weight_makes_no_step(build: Build, executor: str) -> None:
    engine = build(executor)
    before, batch = engine.state_dict(), make_batch(LENGTHS)
    batch["loss_mask"][:] = 0
    assert engine.train_batch(batch, token_loss, num_counted)["is_skipped"] == 1
    assert_equal(engine.state_dict(), before)


@every_executor
def test_microbatches_without_weight_change_nothing_though_their_mean_is_not_a_number(
    build: Build, executor: str
) -> None:
    batch = make_batch([8] * 6)
    batch["loss_mask"][2:] = 0
    expected, engine = build(executor), build(executor, max_tokens_per_microbatch=8)
    expected.train_batch(rows_of(batch, [0, 1]), token_loss, num_counted)
    assert engine.train_batch(batch, token_loss, num_counted)["is_skipped"] == 0
    assert_equal(engine.state_dict(), expected.state_dict(), 1e-9)


def infinite_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return token_loss(logits, data) + math.inf


def loss_of_infinite_gradient(logits: Tensor, data: dict[str, Any]) -> Tensor:
    zero = (logits * 0).mean().abs()
    return token_loss(logits, data) + (zero + 1 - 1).sqrt()  # 0, with an infinite slope


@every_executor
@pytest.mark.parametrize("loss", [infinite_loss, loss_of_infinite_gradient])
def test_a_loss_or_gradient_that_is_not_finite_makes_no_step_and_leaves_nothing(
    build: Build, executor: str, loss: Any
) -> None:
    engine, expected = build(executor), build(executor)
    before = engine.state_dict()
    assert engine.train_batch(make_batch(LENGTHS), loss, num_counted)["is_skipped"] == 1
    engine.forward_backward(make_batch(LENGTHS), loss, num_counted)
    engine.forward_backward(make_batch(LENGTHS), token_loss, num_counted)
    assert engine.optimizer_step()["is_skipped"] == 1
    assert_equal(engine.state_dict(), before)
    for each in (engine, expected):
        assert each.train_batch(make_batch(LENGTHS, 1), token_loss, num_counted)["is_skipped"] == 0
    assert_equal(engine.state_dict(), expected.state_dict())


# -- without gradients -------------------------------------------------------------------------------------------------


@every_executor
def test_forward_returns_the_rows_in_their_order(build: Build, executor: str, model: Path) -> None:
    batch, plain = make_batch(LENGTHS), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    values = build(executor, max_tokens_per_microbatch=32).forward(batch, next_token_logprobs)
    assert values.shape == batch["input_ids"].shape
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row, :length]
        with torch.no_grad():
            logprobs = plain(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(values[row, : length - 1], logprobs, atol=1e-9, rtol=0)
        assert not values[row, length:].any()


@every_executor
def test_evaluation_reports_the_loss_and_changes_nothing(build: Build, executor: str) -> None:
    engine, batch = build(executor), make_batch(LENGTHS)
    before = engine.state_dict()
    evaluated = engine.eval_batch(batch, token_loss, num_counted)
    assert_equal(engine.state_dict(), before)
    trained = engine.train_batch(batch, token_loss, num_counted)
    assert {key: trained[key] for key in evaluated} == pytest.approx(evaluated, rel=1e-9)


# -- the module's methods ----------------------------------------------------------------------------------------------


@every_executor
def test_the_modules_methods_get_their_rows_once_and_answer_in_order(build: Build, executor: str) -> None:
    engine = build(executor)
    num_ranks = engine.num_data_ranks
    assert engine.all_first_tokens(NeedParallel([[i] for i in range(9)])) == list(range(9))
    assert engine.first_tokens([[7], [8]]) == [[7, 8]] * num_ranks
    engine.counter(by=2)
    assert engine.counter(by=3) == 5
    with pytest.raises(AttributeError, match="first_token"):
        engine.first_token([[1]])
    with pytest.raises(TypeError, match="takes"):
        engine.first_tokens([[1]], [[2]])
    assert engine.counter() == 5, "the engine goes on"


class OwnStep(Learner):
    def optimizer_step(self) -> str:
        self.optimizer.zero_grad()
        return "mine"


@every_executor
def test_a_module_may_define_optimizer_step_itself(build: Build, executor: str) -> None:
    engine, expected = build(executor, OwnStep), build(executor)
    assert engine.optimizer_step() == ["mine"] * engine.num_data_ranks
    for each in (engine, expected):
        each.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    assert_equal(engine.state_dict(), expected.state_dict())


# -- weights and state -------------------------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("is_in_the_midst", [False, True])
def test_a_resumed_engine_goes_on_exactly(build: Build, executor: str, tmp_path: Path, is_in_the_midst: bool) -> None:
    engine = build(executor)
    engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    engine.step_lr_scheduler()
    if is_in_the_midst:
        engine.forward_backward(make_batch(LENGTHS, 1), token_loss, num_counted)
    engine.save_state(tmp_path / "state", step=1, kept={"a": 2})
    drawn = engine.draw()
    resumed = build(executor)
    resumed.forward_backward(make_batch(LENGTHS, 5), token_loss, num_counted)  # what it was before must not matter
    facts = resumed.load_state(tmp_path / "state")
    assert (facts["step"], facts["a"]) == (1, 2)
    assert resumed.draw() == drawn
    for each in (engine, resumed):
        each.forward_backward(make_batch([5, 3, 8], 2), token_loss, num_counted)
    assert resumed.optimizer_step() == engine.optimizer_step()
    assert_equal(resumed.state_dict(), engine.state_dict())


@every_executor
def test_a_saved_model_opens_in_transformers_and_is_read_again(build: Build, executor: str, tmp_path: Path) -> None:
    engine = build(executor, param_dtype="float32")
    original = engine.state_dict()
    engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    engine.save(tmp_path / "model")
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    trained = engine.state_dict()
    assert_equal({name: parameter.detach() for name, parameter in opened.named_parameters()}, trained)
    engine.load()
    assert_equal(engine.state_dict(), original)
    engine.load(tmp_path / "model")
    assert_equal(engine.state_dict(), trained)


@every_executor
@pytest.mark.parametrize("target", EXECUTORS)
def test_weights_are_synced_into_any_executor(build: Build, executor: str, target: str) -> None:
    source, other = build(executor), build(target)
    source.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    report = source.p2p_weight_sync(other, verify_checksums=True)
    assert report.version == 1
    assert_equal(other.state_dict(), source.state_dict())


# -- residency and health ----------------------------------------------------------------------------------------------


@every_executor
def test_released_weights_are_read_again_or_synced_and_are_not_served_meanwhile(build: Build, executor: str) -> None:
    engine = build(executor)
    before = engine.state_dict()
    engine.cpu()
    engine.cuda()
    assert_equal(engine.state_dict(), before)
    engine.meta()
    assert all(not held["weights"] for held in engine.memory_bytes())
    with pytest.raises(ResidencyError, match="released"):
        engine.optimizer_step()
    engine.load()
    assert_equal(engine.state_dict(), before)
    assert sum(held["weights"] for held in engine.memory_bytes()) > 0
    assert engine.nonfinite_parameters() == []
    assert len(engine.device_usage()) == 4
    engine.train()
    engine.eval()


@every_executor
def test_release_gives_the_devices_back(build: Build, executor: str) -> None:
    engine = build(executor, exclusive=True)
    engine.release()
    with pytest.raises(RliteError, match="not built"):
        engine.train_batch(make_batch([3]), token_loss, num_counted)
    build(executor, exclusive=True).counter(by=1)


# -- what is declared --------------------------------------------------------------------------------------------------


def declared() -> set[str]:
    optional = {"stage", "gather_into", "digest"}  # of protocols that sync asks for, such as `StagingWorker`
    return {name for name in dir(TrainWorker) if not name.startswith("_")} | {"arena", "staged"} | optional


class Guarded:
    """A worker that has nothing but what the protocol declares."""

    def __init__(self, worker: Any, names: set[str]) -> None:
        vars(self).update(_worker=worker, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AssertionError(f"{name} is not declared in TrainWorker")
        return getattr(self._worker, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name == "staged", name
        setattr(self._worker, name, value)


@every_executor
def test_engine_and_weight_sync_call_nothing_that_is_not_declared(build: Build, executor: str, tmp_path: Path) -> None:
    backend = find_backend("train", executor, TrainBackend)
    make, names = backend.worker, declared()
    guarded = dataclasses.replace(backend, worker=lambda *args: Guarded(make(*args), names))
    register_executor("train", "guarded", guarded)
    engine, batch = build("guarded"), make_batch(LENGTHS)
    engine.train_batch(batch, token_loss, num_counted)
    engine.eval_batch(batch, token_loss, num_counted)
    engine.forward(batch, next_token_logprobs)
    engine.forward_backward(batch, token_loss, num_counted)
    engine.optimizer_step()
    engine.step_lr_scheduler()
    engine.train()
    engine.eval()
    engine.counter(by=1)
    engine.save(tmp_path / "model")
    writing = engine.save_state(tmp_path / "state", asynchronous=True)
    assert writing.done() in (True, False)
    writing.result()
    engine.load_state(tmp_path / "state")
    engine.load(tmp_path / "model")
    engine.p2p_weight_sync(build("guarded"), verify_checksums=True)
    engine.nonfinite_parameters()
    engine.device_usage()
    engine.state_dict()
    engine.cpu()
    engine.cuda()
    engine.meta()
    engine.cuda("weights")
    engine.memory_bytes()


def test_every_declared_operation_says_what_it_does() -> None:
    members = inspect.getmembers(TrainWorker, inspect.isfunction)
    assert [name for name, member in members if not name.startswith("_") and not member.__doc__] == []


@every_executor
def test_every_declared_operation_is_there_with_its_parameters(executor: str) -> None:
    worker: Any = find_backend("train", executor, TrainBackend).worker
    for name, member in inspect.getmembers(TrainWorker, inspect.isfunction):
        if not name.startswith("_"):
            assert list(inspect.signature(getattr(worker, name)).parameters) == list(
                inspect.signature(member).parameters
            ), name


def test_an_executor_that_was_registered_as_something_else_is_refused(model: Path) -> None:
    register_executor("train", "wrong", "rlite.backends.embedded.worker:BACKEND")
    with pytest.raises(ConfigError, match="expected a TrainBackend"):
        RliteTrainEngine(on_meta(Learner, model), executor="wrong")


def test_a_layout_says_how_a_batch_is_divided() -> None:
    """One that is no ParallelDims will do: nothing in the engine assumes a mesh."""
    for layout in (ParallelDims.of(4, 2, 1, 2), pipeline.PipelineLayout(2, 2)):
        assert (layout.num_data_ranks, layout.num_peers, layout.seq) == (2, 2, 1)
