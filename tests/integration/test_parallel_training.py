"""Tensor and context parallel training on four CPU processes gives the weights of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlite.algorithms import TokenLogprobs, on_logprobs
from rlite.backends.models.huggingface import HuggingFaceFsdp2ScoreModule
from rlite.data.packs import lazy_pack as pack
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.nn.options import ALL_LINEAR
from rlite.nn.pretrained import score_class
from rlite.runtime.parallel.fsdp import local_tensor
from rlite.trainer.losses import DpoLoss, RewardModelLoss
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.integration.modules import POLICIES, make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.integration.worlds import world
from tests.marks import nightly
from tests.tiny import build_model_dir

Build = Callable[..., RliteTrainEngine]
LENGTHS = [9, 4, 13, 1, 7, 6, 5]
LAYOUTS = [
    {"size": 2, "tp_size": 2},
    {"size": 2, "sp_size": 2},
    {"size": 4, "tp_size": 2},
    {"size": 4, "sp_size": 2},
    {"size": 4, "tp_size": 2, "sp_size": 2},
    {"size": 4, "sp_size": 4},
    {"size": 2, "copies": 2, "tp_size": 2},
    {"size": 2, "copies": 2, "sp_size": 2},
]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(4):
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Qwen2 and Qwen3 are tied. Two ranks can share the vocabulary of Qwen2 and Llama, and not that of Qwen3 (259)."""
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2": build_model_dir(root / "qwen2", "qwen2", tie=True, hidden=64, vocab_size=264),
        "qwen3": build_model_dir(root / "qwen3", "qwen3", tie=True, hidden=64),
        "llama": build_model_dir(root / "llama", "llama", tie=False, hidden=64, vocab_size=264),
    }


@pytest.fixture
def build(models: dict[str, Path]) -> Iterator[Build]:
    """build(kind, size=, copies=, **options): an engine that is released after the test."""
    built = []

    def build_engine(kind: str, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(on_meta(POLICIES[kind], models[kind]))
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


@on_logprobs(temperature=0.8)
def logprob_loss(tokens: TokenLogprobs, data: dict[str, Any]) -> Tensor:
    """Loss without logits: a mean over counted tokens of log-probability and entropy."""
    counted = data["loss_mask"].bool()
    return (-tokens.logprobs - 0.1 * tokens.entropy)[counted].sum() / counted.sum()


def trained(engine: RliteTrainEngine) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights after two AdamW steps on two kinds of loss, and the last step's statistics."""
    for seed, loss in enumerate((token_loss, logprob_loss)):
        stats = engine.train_batch(make_batch(LENGTHS, seed), loss, num_counted)
    return engine.state_dict(), stats


@pytest.mark.parametrize("kind", ["qwen3", *nightly("qwen2", "llama")])
def test_any_product_of_parallelisms_gives_the_weights_of_one_device(build: Build, kind: str) -> None:
    options = {"param_dtype": "float64", "max_grad_norm": 0.05}
    alone = build(kind, **options)
    expected, expected_stats = trained(alone)
    batch = make_batch(LENGTHS)
    logprobs = alone.forward(batch, next_token_logprobs) * batch["loss_mask"]
    alone.release()
    for layout in LAYOUTS:
        for more in ({"max_tokens_per_microbatch": 14}, {"gradient_checkpointing": True}):
            engine = build(kind, **layout, **options, **more)
            weights, stats = trained(engine)
            assert weights.keys() == expected.keys()
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-9, rtol=0, msg=f"{layout} {name}")
            for key in ("loss", "grad_norm", "weight"):
                assert stats[key] == pytest.approx(expected_stats[key], abs=1e-9), (layout, key)
            found = engine.forward(batch, next_token_logprobs) * batch["loss_mask"]
            torch.testing.assert_close(found, logprobs, atol=1e-9, rtol=0)
            engine.release()


def test_each_rank_holds_its_part_alone(build: Build) -> None:
    whole = build("llama").memory_bytes()[0]["weights"]
    for layout in ({"size": 2, "tp_size": 2}, {"size": 2, "sp_size": 2}):
        engine = build("llama", **layout)
        trained(engine)
        for held in engine.memory_bytes():
            assert held["weights"] <= 0.6 * whole
            assert held["optimizer"] <= 2.1 * held["weights"]
        engine.release()


def test_weights_are_served_saved_and_resumed_from_any_layout(build: Build, tmp_path: Path, models: Any) -> None:
    engine = build("qwen3", size=4, tp_size=2, param_dtype="float32")
    weights, _ = trained(engine)
    engine.save_state(tmp_path / "state")
    engine.save(tmp_path / "model")
    serve = RliteInferenceEngine(models["qwen3"])
    serve.build(tensor_parallel_size=2, data_parallel_size=1, colocate_with=engine, max_model_len=64, max_num_seqs=2)
    engine.p2p_weight_sync(serve, verify_checksums=True)
    served = serve.generate([[1, 2, 3]], {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True})[0].outputs[0]
    serve.release()
    saved = RliteInferenceEngine(tmp_path / "model")
    saved.build(data_parallel_size=1, colocate_with=engine, max_model_len=64, max_num_seqs=2)
    again = saved.generate([[1, 2, 3]], {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True})[0].outputs[0]
    assert again.token_ids == served.token_ids
    saved.release()
    engine.release()
    resumed = build("qwen3", size=2, sp_size=2)
    resumed.load_state(tmp_path / "state")
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_a_users_method_gets_one_answer_from_ranks_that_share_the_work(build: Build) -> None:
    engine = build("qwen2", size=4, tp_size=2)
    assert engine.first_tokens(NeedParallel([[i] for i in range(5)])) == [[0, 1, 2], [3, 4]]
    assert [result["rows"] for result in engine.train_step(NeedParallel([[1, 2, 3, 4]] * 3))] == [2, 1]


class Recorder(POLICIES["qwen2"]):  # type: ignore[misc]
    def recorded(self, rows: list[list[int]], implementation: str, selection: Any = True) -> list[Any]:
        """Hidden states and attentions, which a loss may use, after a step on it."""
        self.set_attn_implementation(implementation)
        out = self(torch.tensor(rows), output_hidden_states=selection, output_attentions=implementation == "eager")
        states, attentions = out.hidden_states, out.attentions or ()
        given = [*states, *attentions]
        sum((tensor**2).mean() for tensor in given if tensor is not None).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [None if tensor is None else tensor.detach() for tensor in given]


@pytest.mark.parametrize(("implementation", "selection"), [("sdpa", True), ("sdpa", [1, -1]), ("eager", True)])
def test_recorded_outputs_of_a_users_method_are_whole(models: Any, implementation: str, selection: Any) -> None:
    rows = [[11, 12, 13, 14, 200], [7, 91, 4, 77, 8]]  # five tokens, which two ranks do not share evenly
    found, weights = [], []
    for tp_size in (1, 2):
        engine = RliteTrainEngine(on_meta(Recorder, models["qwen2"]))
        engine.build(tensor_parallel_size=tp_size, data_parallel_size=1, tp_size=tp_size, param_dtype="float64")
        found.append(engine.recorded(rows, implementation, selection)[0])
        weights.append(engine.state_dict())
        engine.release()
    assert len(found[0]) == (5 if implementation == "eager" else 3)
    for alone, together in zip(*found, strict=True):
        assert (alone is None) == (together is None)
        if alone is not None:
            torch.testing.assert_close(together, alone, atol=1e-9, rtol=0)
    for name, tensor in weights[1].items():
        torch.testing.assert_close(tensor, weights[0][name], atol=1e-9, rtol=0, msg=name)


class Writer(POLICIES["qwen3"]):  # type: ignore[misc]
    def complete(self, rows: list[tuple[list[int], int]]) -> list[list[int]]:
        """Greedy completions of so many tokens, by transformers."""
        return [self.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)[0].tolist() for ids, n in rows]


def test_generate_in_a_users_method_works_where_ranks_stop_at_different_lengths(models: Any) -> None:
    rows = [([11, 12, 13, 14], 2), ([7, 91, 4], 3), ([200], 9), ([5, 6, 5, 6, 5], 5)]
    alone = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    alone.generation_config.eos_token_id = None
    expected = [alone.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)[0].tolist() for ids, n in rows]
    assert [len(made) for made in expected] == [6, 6, 10, 10]
    for layout in (
        {"size": 1},
        {"size": 2},
        {"size": 4},
        {"size": 2, "copies": 2},
        {"size": 2, "sp_size": 2},
        {"size": 4, "tp_size": 2},
    ):
        size, copies = layout.pop("size"), layout.pop("copies", 1)
        module = on_meta(Writer, models["qwen3"])
        module.generation_config.eos_token_id = None
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **layout)
        parts = engine.complete(NeedParallel(rows), timeout=30)
        assert [made for part in parts for made in part] == expected, (size, copies, layout)
        engine.release()


def test_sizes_that_do_not_multiply_are_refused_with_the_equation(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size=2: .* 2 = fsdp x sp_size=2 x tp_size=2 has no whole"):
        build("qwen2", size=2, tp_size=2, sp_size=2)
    with pytest.raises(ConfigError, match="num_key_value_heads=2"):
        build("qwen2", size=4, tp_size=4)


@pytest.mark.parametrize(
    ("kind", "shape", "changes", "block"),
    [
        ("llama", {}, {"layers.*.self_attn.o_proj": None}, "attn"),
        ("llama", {}, {"layers.*.mlp.down_proj": None}, "mlp"),
        ("llama", {}, {"layers.*.self_attn.q_proj": "colwise_gather_output"}, "attn"),
        ("llama", {}, {"layers.*.self_attn.q_proj": "sequence_parallel"}, "q_proj"),
        ("llama", {}, {"layers.*.input_layernorm.weight": "colwise"}, "input_layernorm.weight"),
    ],
)
def test_a_plan_that_is_not_understood_is_refused_before_any_process_starts(
    tmp_path: Path, kind: Any, shape: dict[str, Any], changes: dict[str, Any], block: str
) -> None:
    module = policy_module(build_model_dir(tmp_path, kind, hidden=64, **shape))
    plan = module.config.base_model_tp_plan | changes
    module.config.base_model_tp_plan = {name: style for name, style in plan.items() if style}
    engine = RliteTrainEngine(module)
    with pytest.raises(ConfigError, match=rf"'{kind}'.*model\.layers\.0\..*{block}.*one device for each copy") as error:
        engine.build(tensor_parallel_size=2, data_parallel_size=1, tp_size=2)
    assert error.value.__cause__ is None, "not from a worker"
    assert not engine.is_built


def test_a_plan_without_the_mlp_leaves_it_whole(models: Any) -> None:
    found = []
    for tp_size in (1, 2):
        module = on_meta(POLICIES["llama"], models["llama"])
        plan = module.config.base_model_tp_plan
        module.config.base_model_tp_plan = {name: style for name, style in plan.items() if "mlp" not in name}
        engine = RliteTrainEngine(module)
        engine.build(tensor_parallel_size=2, data_parallel_size=1, tp_size=tp_size, param_dtype="float64")
        found.append(trained(engine)[0])
        engine.release()
    for name, tensor in found[1].items():
        torch.testing.assert_close(tensor, found[0][name], atol=1e-9, rtol=0, msg=name)


# -- heads and pairs ---------------------------------------------------------------------------------------------------


class Critic(HuggingFaceFsdp2ScoreModule):
    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)


def squared_error(values: Tensor, data: dict[str, Any]) -> Tensor:
    """A value loss: returns are made of the tokens' own numbers."""
    counted = data["loss_mask"].bool()
    return ((values - data["input_ids"] / 256) ** 2)[counted].sum() / counted.sum()


def pairs_batch(seed: int) -> dict[str, Tensor]:
    """Three and a half pairs of rows would not do: four pairs, of different lengths."""
    batch = make_batch([9, 4, 13, 2, 7, 6, 5, 11], seed)
    batch["pair_ids"] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    batch["is_chosen"] = torch.tensor([True, False] * 4)
    batch["ref_logprobs"] = -batch["attention_mask"].double()
    return batch


def stepped(engine: RliteTrainEngine, batches: list[dict[str, Tensor]], losses: list[Any]) -> dict[str, Tensor]:
    for batch, (loss, weight) in zip(batches, losses, strict=True):
        engine.train_batch(batch, loss, weight)
    return engine.state_dict()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_value_reward_and_dpo_losses_are_independent_of_the_layout(models: dict[str, Path], kind: str) -> None:
    rm, dpo = RewardModelLoss(), DpoLoss(beta=0.5)
    batches = [make_batch(LENGTHS), pairs_batch(1), pairs_batch(2)]
    score_losses = [(squared_error, num_counted), (rm, rm.weight), (rm, rm.weight)]
    cases = [
        (lambda: on_meta(score_class(models[kind], Critic), models[kind]), batches, score_losses),
        (lambda: on_meta(POLICIES[kind], models[kind]), batches[1:], [(dpo, dpo.weight)] * 2),
    ]
    for make_module, data, losses in cases:
        expected: dict[str, Tensor] = {}
        whole = {"size": 1, "max_tokens_per_microbatch": 1000}
        for layout in [whole, {"size": 1}, *LAYOUTS]:
            more = {"max_tokens_per_microbatch": 17, **layout}
            engine = RliteTrainEngine(make_module())
            size, copies = more.pop("size"), more.pop("copies", 1)
            engine.build(tensor_parallel_size=size, data_parallel_size=copies, param_dtype="float64", **more)
            weights = stepped(engine, data, losses)
            expected = expected or weights
            for name, tensor in weights.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-9, rtol=0, msg=f"{layout} {name}")
            engine.release()


# -- activations -------------------------------------------------------------------------------------------------------


class Measured(POLICIES["llama"]):  # type: ignore[misc]
    def kept_bytes(self, data: dict[str, Any]) -> int:
        """Memory that the forward pass keeps for the backward pass, beside parameters."""
        kept: dict[int, int] = {}
        own = {parameter.untyped_storage().data_ptr() for parameter in map(local_tensor, self.parameters())}

        def keep(tensor: Tensor) -> Tensor:
            storage = local_tensor(tensor.detach()).untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = self.compute_logprobs(data).logprobs.sum()
        loss.backward()
        self.zero_grad()
        return sum(kept.values())


def test_two_ranks_that_share_tokens_keep_about_half_of_the_activations_each(models: dict[str, Path]) -> None:
    data = pack(make_batch([300, 200, 500]), [0, 1, 2], torch.device("cpu"))
    kept = []
    for options in ({}, {"sp_size": 2}):
        engine = RliteTrainEngine(on_meta(Measured, models["llama"]))
        engine.build(tensor_parallel_size=options.get("sp_size", 1), data_parallel_size=1, **options)
        kept.append(engine.kept_bytes(data)[0])
        engine.release()
    assert kept[1] <= 0.65 * kept[0], kept


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("qwen2", [ALL_LINEAR]),
        ("qwen3", ["q_proj", "o_proj", "down_proj"]),
        ("llama", ["lm_head", "v_proj", "o_proj"]),
    ],
)
def test_adapters_are_the_same_under_tensor_parallel(
    models: dict[str, Path], tmp_path: Path, kind: str, targets: list[str]
) -> None:
    options = OptimizerOptions(lr=2e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=10)
    expected: dict[str, Tensor] = {}
    expected_norm = 0.0
    for number, layout in enumerate([{"size": 1}, *(layout for layout in LAYOUTS if "tp_size" in layout)]):
        engine = RliteTrainEngine(policy_module(models[kind], options, LoraOptions(rank=4, target_modules=targets)))
        size, copies = layout.get("size"), layout.get("copies", 1)
        more = {key: value for key, value in layout.items() if key.endswith("p_size")}
        engine.build(
            tensor_parallel_size=size,
            data_parallel_size=copies,
            param_dtype="float64",
            gradient_checkpointing=number % 2 == 1,
            max_grad_norm=0.05,
            **more,
        )
        weights, stats = trained(engine)
        engine.save(tmp_path / str(number))
        engine.release()
        adapter = load_file(tmp_path / str(number) / "adapter" / "adapter_model.safetensors")
        assert all(tensor.any() for tensor in adapter.values())
        found = {**weights, **adapter}
        expected, expected_norm = expected or found, expected_norm or stats["grad_norm"]
        assert stats["grad_norm"] == pytest.approx(expected_norm, abs=1e-9)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-9, rtol=0, msg=f"{layout} {name}")
