"""The train engine on real processes: four CPU slots over gloo, rank 0 in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from rlite import NeedParallel, RliteTrainEngine, stats_tracker
from rlite.data.packs import lazy_pack as pack
from rlite.errors import CheckpointError, ConfigError, DataError, PlacementError, ResidencyError, RliteError
from rlite.nn import BaseTrainModule, HuggingFaceFsdp2TrainModule
from rlite.runtime.cluster.group import apply_on_processes
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import frozen_build_options
from rlite.trainer.rl.objective import OwnLogprobs
from tests.integration.modules import (
    LlamaPolicy,
    Policy,
    Qwen2Policy,
    make_batch,
    next_token_logprobs,
    num_counted,
    on_meta,
    token_loss,
)
from tests.integration.redefinition import run_cell
from tests.integration.worlds import world
from tests.tiny import build_model_dir

Build = Callable[..., RliteTrainEngine]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture
def build(models: dict[str, Path]) -> Iterator[Build]:
    """build(module or class, size=, copies=, **options): an engine that is released after the test."""
    built = []

    def build_engine(module: Any = Qwen2Policy, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
        if isinstance(module, type):
            module = on_meta(module, models["llama" if issubclass(module, LlamaPolicy) else "qwen2"])
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


# -- calls -------------------------------------------------------------------------------------------------------------


def test_rows_are_split_over_ranks_unevenly_and_the_rest_is_copied(build: Build) -> None:
    engine = build(size=2)
    assert engine.first_tokens(NeedParallel([[i] for i in range(5)])) == [[0, 1, 2], [3, 4]]
    assert engine.first_tokens([[7], [8]]) == [[7, 8], [7, 8]]
    assert [result["rows"] for result in engine.train_step(NeedParallel([[1, 2, 3]] * 7))] == [4, 3]
    assert engine.all_first_tokens(NeedParallel([[i] for i in range(5)])) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 rows for 2 data-parallel ranks"):
        engine.first_tokens(NeedParallel([[1]]))


def test_a_module_keeps_its_state_between_calls(build: Build) -> None:
    engine = build()
    engine.counter(by=2)
    engine.counter(by=3)
    assert engine.counter() == 5


def test_only_the_modules_own_public_methods_are_callable(build: Build) -> None:
    engine = build()
    for name in ("train_stepp", "_private", "model", "config"):
        with pytest.raises(AttributeError, match=name):
            getattr(engine, name)


def test_a_remote_exception_keeps_its_type_and_shows_where_it_was_raised(build: Build) -> None:
    engine = build(size=2)
    with pytest.raises(TypeError, match="takes") as caught:
        engine.first_tokens([[1]], [[2]])
    assert "raised in worker train-" in str(caught.value.__cause__)
    assert engine.counter(by=1) == 1, "the engine goes on"


# -- other modules -----------------------------------------------------------------------------------------------------


class TwoLayers(BaseTrainModule):
    """Not a Hugging Face model, and its weights come from a dict."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6, bias=False), nn.Linear(6, 3)])
        self.weights = weights

    def materialization_source(self) -> dict[str, Tensor]:
        return self.weights

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def fit_to_zero(self, x: Tensor) -> float:
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("size", [1, 2])
def test_an_ordinary_torch_module_trains_as_it_does_alone(build: Build, size: int) -> None:
    torch.manual_seed(0)
    alone = TwoLayers({})
    weights = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    with init_empty_weights():
        module = TwoLayers(weights)
    engine = build(module, size=size)
    x = torch.randn(6, 4)
    alone.on_weights_materialized()
    for _ in range(2):
        losses = engine.fit_to_zero(NeedParallel(x))
        assert sum(losses) / size == pytest.approx(alone.fit_to_zero(x), rel=1e-5)
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(tensor, alone.state_dict()[name])


class Frozen(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Sets no optimizer."""


def test_a_module_without_an_optimizer_scores_and_says_what_training_needs(build: Build, tmp_path: Path) -> None:
    engine = build(Frozen, size=2)
    batch = make_batch([5, 3])
    assert engine.eval_batch(batch, token_loss, num_counted)["loss"] > 1
    with pytest.raises(ConfigError, match=r"self\.optimizer"):
        engine.train_batch(batch, token_loss, num_counted)
    engine.save_state(tmp_path / "state")
    engine.load_state(tmp_path / "state")


class Hidden(Qwen2Policy):
    def save(self, path: str) -> None:
        raise AssertionError("never called")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_module_whose_method_the_engine_would_hide_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="Hidden defines save, which the engine has itself"):
        RliteTrainEngine(on_meta(Hidden, models["qwen2"]))


def test_a_module_with_real_weights_or_of_another_kind_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="init_empty_weights"):
        RliteTrainEngine(Qwen2Policy(AutoConfig.from_pretrained(models["qwen2"])))
    with pytest.raises(ConfigError, match="BaseTrainModule, found Linear"):
        RliteTrainEngine(nn.Linear(1, 1, device="meta"))


def test_more_shards_than_devices_are_refused_and_nothing_is_taken(build: Build) -> None:
    with pytest.raises(PlacementError, match="5 devices"):
        build(size=5)
    build(size=2, copies=2)


# -- sharding ----------------------------------------------------------------------------------------------------------


def test_each_of_two_ranks_holds_about_half_of_the_parameters(build: Build) -> None:
    whole, halves = build(size=1).memory_bytes(), build(size=2).memory_bytes()
    assert all(half["weights"] <= 0.6 * whole[0]["weights"] for half in halves)
    assert sum(half["weights"] for half in halves) >= whole[0]["weights"]


@pytest.mark.parametrize("size", [1, 2])
def test_tied_embeddings_stay_tied(build: Build, size: int) -> None:
    engine = build(size=size)
    assert engine.is_tied()
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    assert engine.is_tied()
    assert "lm_head.weight" not in engine.state_dict()
    assert "lm_head.weight" in build(LlamaPolicy, size=size).state_dict()


LENGTHS = [9, 4, 17, 2, 30, 11, 5]


@pytest.mark.parametrize(("kind", "size"), [("qwen2", 1), ("qwen3", 1), ("llama", 2)])
def test_a_model_that_is_not_trained_needs_no_master_weights(models: dict[str, Path], kind: str, size: int) -> None:
    given = {"seed": 1, "router_aux_loss_coef": 0.01}
    assert frozen_build_options(given, "cuda") == {**given, "router_aux_loss_coef": 0.0, "param_dtype": "bfloat16"}
    assert frozen_build_options({"seed": 1}, "cpu") == {"seed": 1, "param_dtype": "float32"}
    found, held = [], []
    for options in ({"compute_dtype": "bfloat16"}, {"param_dtype": "bfloat16"}):
        engine = RliteTrainEngine(policy_module(models[kind]))
        engine.build(tensor_parallel_size=size, data_parallel_size=1, **options)
        found.append(engine.forward(make_batch([9, 4, 7]), OwnLogprobs()))
        held.append(engine.memory_bytes()[0]["weights"])
        engine.release()
    assert torch.equal(*found)
    assert held[0] == 2 * held[1]


def reference_weights(path: Path, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the weights after a step of transformers and torch alone: one sequence at a time, float64, one device."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        total = batch["loss_mask"].sum()
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            row = ids[: mask.sum()][None]
            logits = model(row).logits[0, :-1]
            (nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum") / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("module", [Qwen2Policy, LlamaPolicy])
def test_train_batch_equals_plain_torch_for_any_ranks_copies_and_microbatches(
    build: Build, models: dict[str, Path], module: type
) -> None:
    batches = [make_batch(LENGTHS, seed) for seed in range(2)]
    expected = reference_weights(models["qwen2" if module is Qwen2Policy else "llama"], batches)
    for size, copies, max_tokens in [(1, 1, 1000), (1, 1, 30), (2, 1, 40), (2, 2, 1000)]:
        engine = build(module, size, copies, param_dtype="float64", max_tokens_per_microbatch=max_tokens)
        for batch in batches:
            stats = engine.train_batch(batch, token_loss, num_counted)
        assert stats["weight"] == sum(LENGTHS) - len(LENGTHS)
        assert stats["is_skipped"] == 0
        for name, tensor in engine.state_dict().items():
            torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-9, rtol=0)
        engine.release()


def test_a_batch_with_fewer_rows_than_ranks_trains_as_on_one_rank(build: Build) -> None:
    batch = make_batch([6])
    weights = []
    for size in (1, 2):
        engine = build(size=size, param_dtype="float64")
        engine.train_batch(batch, token_loss, num_counted)
        weights.append(engine.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-9, rtol=0)


def test_rows_that_count_nothing_change_nothing_though_their_mean_is_not_a_number(build: Build) -> None:
    batch = make_batch([8, 8, 8, 8])
    batch["loss_mask"][2:] = 0
    part = {key: value[:2] for key, value in batch.items()}
    expected = build(param_dtype="float64")
    expected.train_batch(part, token_loss, num_counted)
    engine = build(size=2, param_dtype="float64", max_tokens_per_microbatch=8)  # every row is a microbatch
    stats = engine.train_batch(batch, token_loss, num_counted)
    assert stats["is_skipped"] == 0
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(engine.state_dict()[name], tensor, atol=1e-9, rtol=0)
    batch["loss_mask"][:] = 0
    assert engine.train_batch(batch, token_loss, num_counted)["is_skipped"] == 1


def loss_that_fails_in_the_second_microbatch(logits: Tensor, data: dict[str, Any]) -> Tensor:
    if data["is_second"].any():
        raise LookupError("second")
    return token_loss(logits, data)


def counted_rows(logits: Tensor, data: dict[str, Any]) -> Tensor:
    num_rows = torch.tensor([len(data["cu_seqlens"]) - 1])
    stats_tracker.denominator(packs=torch.ones(1, dtype=torch.bool))
    stats_tracker.stat(denominator="packs", num_rows=num_rows)
    return token_loss(logits, data)


@pytest.mark.parametrize(("balance_by", "most"), [("tokens", 3), ("flops", 4)])
def test_ranks_share_tokens_or_operations(build: Build, balance_by: str, most: int) -> None:
    """Two of 1,024 tokens take less than one of 2,048, though there are as many."""
    engine = build(size=2, max_tokens_per_microbatch=8192, balance_by=balance_by)
    stats_tracker.export()
    engine.train_batch(make_batch([2048, 1024, 1024, 1024, 1024]), counted_rows, num_counted)
    assert stats_tracker.export()["num_rows/max"] == most


def each_token(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return logits.sum(-1)


def test_a_loss_that_is_no_mean_is_named_with_its_shape(build: Build) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_fn each_token \(.*py:\d+\) returned a tensor of shape \[\d+\]; expected a mean"
    ):
        build(size=1).train_batch(make_batch([9, 9]), each_token, num_counted)


def three_things(logits: Tensor, data: dict[str, Any]) -> Any:
    return logits.mean(), {}, 1.0


def test_a_loss_that_returns_something_else_than_a_mean_and_a_dict_is_named_with_it(build: Build) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_fn three_things \(.*\) returned \(tensor\(.*; expected a mean, one number"
    ):
        build(size=1).train_batch(make_batch([9, 9]), three_things, num_counted)


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "bfloat16"}])
def test_a_loss_that_raises_leaves_nothing_to_the_next_step(build: Build, options: dict[str, Any]) -> None:
    batch = make_batch([9, 9, 8, 8])
    weights = []
    for fails in (False, True):
        engine = build(size=2, max_tokens_per_microbatch=9, **options)
        if fails:
            wrong = {**make_batch([9, 9, 8, 8], seed=1), "is_second": torch.tensor([0, 0, 1, 1])}
            with pytest.raises(LookupError, match="second"):
                engine.train_batch(wrong, loss_that_fails_in_the_second_microbatch, num_counted)
        engine.train_batch(batch, token_loss, num_counted)
        engine.train_step(NeedParallel([[1, 2, 3]] * 2))  # a method of the user's: its gradients are reduced again
        weights.append(engine.state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name


class Bigrams(BaseTrainModule):
    """A model without a float32 step in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(256, 6), nn.Linear(6, 256)])

    def materialization_source(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {name: torch.randn(p.shape, generator=generator) for name, p in Bigrams().named_parameters()}

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=10.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](ids))

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        return self(data["input_ids"])

    def backward_of(self, ids: list[int]) -> None:
        self(torch.tensor(ids)).mean().backward()


@pytest.fixture
def bigrams() -> Bigrams:
    with init_empty_weights():
        return Bigrams()


@pytest.mark.parametrize(("size", "copies"), [(1, 1), (2, 1), (2, 2)])
def test_calls_of_forward_backward_accumulate_a_mean_over_all_their_tokens(
    build: Build, bigrams: Bigrams, size: int, copies: int
) -> None:
    batch = make_batch(LENGTHS)
    engine = build(bigrams, size, copies, param_dtype="float64", max_tokens_per_microbatch=40)
    before = engine.state_dict()
    expected = engine.train_batch(batch, token_loss, num_counted)
    weights = engine.state_dict()
    engine.load()
    engine.backward_of([1, 2])  # what it left is no part of the mean
    for rows in ([4], [0, 1, 2], [3, 6, 5]):
        engine.forward_backward({key: value[rows] for key, value in batch.items()}, token_loss, num_counted)
        assert torch.equal(engine.state_dict()["layers.1.bias"], before["layers.1.bias"])
    stats = engine.optimizer_step()
    assert (stats["weight"], stats["is_skipped"]) == (expected["weight"], 0)
    assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-12)
    for name, tensor in engine.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-12, rtol=0)


def test_gradients_that_were_dropped_or_whose_loss_raised_count_nothing(build: Build, bigrams: Bigrams) -> None:
    engine = build(bigrams, 2, param_dtype="float64", max_tokens_per_microbatch=9)
    other, batch = make_batch([9, 9, 8, 8], seed=1), make_batch(LENGTHS[:2])
    expected = engine.train_batch(batch, token_loss, num_counted)
    for is_dropped_by_hand in (False, True):
        engine.load()
        engine.forward_backward(other, token_loss, num_counted)
        if is_dropped_by_hand:
            engine.zero_grad()
        else:
            wrong = {**other, "is_second": torch.tensor([0, 0, 1, 1])}
            with pytest.raises(LookupError, match="second"):
                engine.forward_backward(wrong, loss_that_fails_in_the_second_microbatch, num_counted)
        assert engine.optimizer_step()["is_skipped"] == 1
        engine.forward_backward(batch, token_loss, num_counted)
        assert engine.optimizer_step() == {key: expected[key] for key in ("grad_norm", "lr", "weight", "is_skipped")}


def test_a_step_takes_the_gradients_of_a_method(build: Build, bigrams: Bigrams) -> None:
    engine = build(bigrams, 2, param_dtype="float64")
    before = engine.state_dict()
    engine.backward_of([1, 2, 3])
    stats = engine.optimizer_step()
    assert (stats["is_skipped"], stats["weight"]) == (0, 0)
    assert stats["grad_norm"] > 0
    assert not torch.equal(engine.state_dict()["layers.1.bias"], before["layers.1.bias"])


def gradients(worker: Any) -> list[str]:
    return [name for name, parameter in worker.module.named_parameters() if parameter.grad is not None]


def test_gradients_take_no_memory_after_a_step_and_those_of_a_method_stay(build: Build) -> None:
    engine = build(Scored, size=2)
    engine.train_batch(make_batch([5, 6]), token_loss, num_counted)
    group = engine.group
    calls = [(group, rank, (group.key(rank),), ()) for rank in range(2)]
    assert apply_on_processes(calls, gradients, [group], "look", 60) == [[], []]
    engine.gradients_of(pack(make_batch([5]), [0], torch.device("cpu")))
    assert all(apply_on_processes(calls, gradients, [group], "look", 60))


class Scored(Qwen2Policy):
    """A method of its own over a pack, whose backward pass lies outside compute_logits."""

    def gradients_of(self, data: dict[str, Any]) -> dict[str, Tensor]:
        token_loss(self.compute_logits(data), data).backward()
        return {name: parameter.grad.clone() for name, parameter in self.named_parameters()}


def test_recomputed_activations_equal_those_of_the_pack(build: Build) -> None:
    data = pack(make_batch([9, 5, 7]), [0, 1, 2], torch.device("cpu"))
    expected, recomputed = (
        build(Scored, param_dtype="float64", gradient_checkpointing=is_on).gradients_of(data)[0]
        for is_on in (False, True)
    )
    for name, gradient in expected.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-9, rtol=0)


def scaled_in_place_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return token_loss(logits.div_(0.7), data)


def scaled_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return token_loss(logits / 0.7, data)


def test_logits_may_be_changed_in_place(build: Build) -> None:
    batch = make_batch([6, 9])
    weights = []
    for size, loss in ((1, scaled_loss), (2, scaled_in_place_loss)):
        engine = build(size=size, param_dtype="float64")
        engine.train_batch(batch, loss, num_counted)
        weights.append(engine.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-9, rtol=0)


def test_forward_returns_the_rows_in_their_order(build: Build, models: dict[str, Path]) -> None:
    batch = make_batch(LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(models["qwen2"])
    engine = build(size=2, max_tokens_per_microbatch=32)
    values = engine.forward(batch, next_token_logprobs)
    assert values.shape == batch["input_ids"].shape
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row, :length]
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        torch.testing.assert_close(values[row, : length - 1], logprobs, atol=5e-5, rtol=0)
        assert not values[row, length:].any()


def test_batches_of_another_form_are_refused_by_name(build: Build) -> None:
    engine = build(max_tokens_per_microbatch=16)
    batch = make_batch([4, 6])
    for broken, words in [
        ({"input_ids": batch["input_ids"]}, "missing: attention_mask"),
        ({**batch, "attention_mask": batch["attention_mask"].flip(1)}, "right padding"),
        ({key: value[:0] for key, value in batch.items()}, "no rows"),
        ({**batch, "rewards": [1.0, 2.0]}, "rewards: expected a tensor"),
        ({**batch, "scale": torch.tensor(2.0)}, "scale: expected a tensor"),
        (make_batch([4, 17]), "row 1 has 17 tokens"),
    ]:
        with pytest.raises(DataError, match=words):
            engine.train_batch(broken, token_loss, num_counted)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(build: Build) -> None:
    batch = make_batch([12, 12])
    engine = build(size=2, compute_dtype="bfloat16")
    assert engine.forward(batch, lambda logits, data: logits[:, 0]).dtype == torch.bfloat16
    first = engine.train_batch(batch, token_loss, num_counted)["loss"]
    for _ in range(3):
        last = engine.train_batch(batch, token_loss, num_counted)["loss"]
    assert last < first - 0.1
    assert all(tensor.dtype == torch.float32 for tensor in engine.state_dict().values())


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "architecture"), [(Qwen2Policy, "Qwen2ForCausalLM"), (LlamaPolicy, "LlamaForCausalLM")]
)
def test_a_saved_model_opens_in_transformers_whole(
    build: Build, tmp_path: Path, module: type, architecture: str
) -> None:
    engine = build(module, size=2)
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    engine.save(tmp_path / "model")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.architectures == [architecture]
    assert model.dtype == torch.float32
    for name, tensor in engine.state_dict().items():
        assert torch.equal(model.get_parameter(name), tensor)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a")["input_ids"]
    again = build(module)
    again.load(tmp_path / "model")
    assert all(torch.equal(tensor, engine.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_saved_model_has_the_dtype_of_its_config_and_the_state_has_master_weights(
    build: Build, models: dict[str, Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(models["llama"], dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    engine = build(on_meta(LlamaPolicy, tmp_path / "bf16"), size=2)
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    engine.save(tmp_path / "model")
    engine.save_state(tmp_path / "state")
    masters = engine.state_dict()
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    for name, tensor in saved.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, masters[name].bfloat16())
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    engine.load_state(tmp_path / "state")
    assert all(torch.equal(tensor, masters[name]) for name, tensor in engine.state_dict().items())


class Scheduled(Policy, Qwen2ForCausalLM):
    def on_weights_materialized(self) -> None:
        super().on_weights_materialized()
        self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=10)


def test_a_folder_that_cannot_be_written_is_an_error_of_that_call_alone(build: Build, tmp_path: Path) -> None:
    engine = build(size=2)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/model: could not be written"):
        engine.save(tmp_path / "file" / "model")
    assert engine.first_tokens([[7]]) == [[7], [7]]


@pytest.mark.parametrize(("before", "sizes"), [(2, (2, 2)), (2, (2, 1)), (2, (1, 2)), (0, (1, 1))])
def test_a_resumed_run_goes_on_exactly(build: Build, tmp_path: Path, before: int, sizes: tuple[int, int]) -> None:
    batches = [make_batch([5, 7, 3], seed) for seed in range(before + 2)]
    engine = build(Scheduled, sizes[0], param_dtype="float64")
    for batch in batches[:before]:
        engine.train_batch(batch, token_loss, num_counted)
        engine.step_lr_scheduler()
        engine.average_weights(0.75)
    engine.save_state(tmp_path / "state", step=before)
    resumed = build(Scheduled, sizes[1], param_dtype="float64")
    resumed.train_batch(batches[-1], token_loss, num_counted)  # what it was before must not matter
    resumed.average_weights(0.5)
    assert resumed.load_state(tmp_path / "state")["step"] == before
    for batch in batches[before:]:
        expected = engine.train_batch(batch, token_loss, num_counted)
        stats = resumed.train_batch(batch, token_loss, num_counted)
        assert stats["lr"] == expected["lr"]
        assert engine.step_lr_scheduler() == resumed.step_lr_scheduler()
    tolerance = 0 if sizes[0] == sizes[1] else 1e-12
    assert {*resumed.has_average()} == {before > 0}
    for _ in range(2):
        for name, tensor in engine.state_dict().items():
            torch.testing.assert_close(resumed.state_dict()[name], tensor, atol=tolerance, rtol=0)
        for each in (engine, resumed):
            each.average_weights(0.75)
            each.exchange_average()


def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(build: Build, tmp_path: Path) -> None:
    engine = build()
    engine.save_state(tmp_path / "state")
    before = copy.deepcopy(engine.state_dict())
    engine.train_step([[1, 2, 3]])
    with pytest.raises(CheckpointError, match="saved from Qwen2Policy"):
        build(Scheduled).load_state(tmp_path / "state")
    file = next((tmp_path / "state").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    after = engine.state_dict()
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_state(tmp_path / "state")
    for name, tensor in engine.state_dict().items():
        assert torch.equal(tensor, after[name])
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def test_weights_of_which_a_part_was_read_are_not_served(build: Build, tmp_path: Path) -> None:
    engine = build(size=2)
    other = build_model_dir(tmp_path / "shallower", "qwen2", hidden=64, layers=1)  # what it has fits
    with pytest.raises(ConfigError, match="no such folder"):
        engine.load(tmp_path / "nowhere")
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    with pytest.raises(CheckpointError, match=r"layers\.1"):
        engine.load(other)
    with pytest.raises(ResidencyError, match="not written yet"):
        engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    engine.load()
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))


# -- residency ---------------------------------------------------------------------------------------------------------


def test_weights_leave_and_come_back_and_calls_in_between_name_the_remedy(build: Build) -> None:
    engine = build(size=2)
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    trained = engine.state_dict()
    engine.cpu()
    with pytest.raises(ResidencyError, match=r"call cuda\(\) first"):
        engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    engine.to("cuda")
    assert torch.equal(engine.state_dict()["model.norm.weight"], trained["model.norm.weight"])
    engine.meta()
    assert engine.memory_bytes() == [{"weights": 0, "optimizer": 0}] * 2
    with pytest.raises(ResidencyError, match="released by meta"):
        engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    with pytest.raises(ResidencyError, match=r"load\(\)"):
        engine.cuda()
    engine.cuda("weights")
    with pytest.raises(ResidencyError, match="not written yet"):
        engine.save("nowhere")
    engine.load()
    engine.train_step(NeedParallel([[1, 2, 3]] * 2))
    with pytest.raises(ConfigError, match="cuda:1"):
        engine.to("cuda:1")


def test_a_released_engine_gives_its_devices_back_and_can_be_built_again(build: Build) -> None:
    engine = build(size=4)
    with pytest.raises(ConfigError, match="built already"):
        engine.build()
    engine.release()
    engine.release()
    with pytest.raises(RliteError, match="not built"):
        engine.train_step([[1]])
    engine.build(tensor_parallel_size=2, data_parallel_size=1)
    assert engine.counter(by=1) == 1


def test_evaluation_does_not_change_a_saved_state(build: Build, tmp_path: Path) -> None:
    """After a forward pass alone FSDP keeps its outermost parameters gathered, as others than the optimizer's."""
    batch = make_batch(LENGTHS)
    weights = []
    for evaluates in (False, True):
        engine = build(size=2, param_dtype="float64")
        engine.train_batch(batch, token_loss, num_counted)
        if evaluates:
            engine.eval_batch(batch, token_loss, num_counted)
        engine.save_state(tmp_path / f"state-{evaluates}")
        engine.release()
        resumed = build(size=2, param_dtype="float64")
        resumed.load_state(tmp_path / f"state-{evaluates}")
        resumed.train_batch(batch, token_loss, num_counted)
        weights.append(resumed.state_dict())
        resumed.release()
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name


def test_new_methods_of_a_class_that_is_defined_again_reach_every_rank(
    build: Build, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(on_meta(run_cell(monkeypatch, "1"), models["llama"]), size=2, copies=2)
    engine.train_batch(make_batch([5, 7, 4, 3]), token_loss, num_counted)
    before = engine.state_dict()
    run_cell(monkeypatch, "[str(p.device) for p in super().parameters()][0]")
    assert engine.reload_methods() == ["answer"]
    assert engine.answer() == "cpu"
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.train_batch(make_batch([5, 7, 4, 3]), token_loss, num_counted)


def weight_of_each_token(data: dict[str, Any]) -> Tensor:
    return data["loss_mask"]


def weight_that_is_nan(data: dict[str, Any]) -> float:
    return float("nan")


def negative_weight(data: dict[str, Any]) -> int:
    return -1


def no_weight(data: dict[str, Any]) -> None:
    return None


def weight_beyond_floats(data: dict[str, Any]) -> int:
    return 10**400


@pytest.mark.parametrize(
    "weight", [weight_of_each_token, weight_that_is_nan, negative_weight, no_weight, weight_beyond_floats]
)
def test_a_weight_that_is_no_number_is_named_with_its_place(build: Build, weight: Any) -> None:
    with pytest.raises(ConfigError, match=rf"loss_weight_fn {weight.__name__} \(.*:\d+\) returned .*; expected the w"):
        build(size=1).train_batch(make_batch([9, 9]), token_loss, weight)


def detached_loss(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return logits.detach().mean()


def loss_that_reports_a_text(logits: Tensor, data: dict[str, Any]) -> Any:
    return logits.mean(), {"own": "high"}


def loss_that_reports_without_a_name(logits: Tensor, data: dict[str, Any]) -> Any:
    return logits.mean(), {0: 1.0}


def loss_that_reports_tokens(logits: Tensor, data: dict[str, Any]) -> Any:
    return logits.mean(), {"own": logits.sum(-1)}


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (detached_loss, "returned a loss without a gradient, from which nothing is learnt"),
        (loss_that_reports_a_text, "reports 'high' as 'own'; expected a number"),
        (loss_that_reports_without_a_name, "reports 1.0 as 0; expected a number, .* under a text"),
        (loss_that_reports_tokens, r"reports a tensor of shape \[\d+\] as 'own'; expected a number"),
    ],
)
def test_a_loss_that_teaches_or_reports_nothing_is_named_with_its_place(build: Build, loss: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"loss_fn {loss.__name__} \(.*:\d+\) {said}"):
        build(size=1).train_batch(make_batch([9, 9]), loss, num_counted)


def bad_loss_that_reports_a_good_one(logits: Tensor, data: dict[str, Any]) -> Any:
    return logits.mean() * torch.nan, {"loss": 1.0}


def test_a_report_of_the_name_loss_does_not_hide_that_the_loss_is_bad(build: Build) -> None:
    stats = build(size=1).train_batch(make_batch([9, 9]), bad_loss_that_reports_a_good_one, num_counted)
    assert stats["loss"] != 1
    assert stats["is_skipped"] == 1


def loss_with_a_typo(logits: Tensor, data: dict[str, Any]) -> Tensor:
    return data["loss_msk"].sum()


def test_what_the_users_function_raises_shows_its_own_frames_alone(build: Build) -> None:
    with pytest.raises(KeyError, match="loss_msk") as caught:
        build(size=1).train_batch(make_batch([9, 9]), loss_with_a_typo, num_counted)
    told = str(caught.value.__cause__)
    assert 'return data["loss_msk"].sum()' in told
    assert "batch_runner.py" not in told
