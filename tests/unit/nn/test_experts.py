"""Mixtures of experts: their form, adapters, balance and optimizer, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine, gathered
from rlite.backends.models import experts
from rlite.backends.models.architecture import miniature, refusal
from rlite.backends.models.experts import check_expert_parallel, corrects, expert_plan
from rlite.backends.models.lora import merge_adapter
from rlite.backends.models.routing import DROPPED_STEPS, score_kind
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.nn.pretrained import causal_lm_class, load_model
from rlite.runtime.parallel.tensor import split_layers
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.wording import warn_once
from tests.integration.modules import Policy, make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.marks import nightly
from tests.mixtures import KINDS, build_mixture_dir, config_of, random_model
from tests.tiny import build_model_dir

LENGTHS = [9, 4, 13, 1, 7, 6, 5]
EXACT = {"param_dtype": "float64", "max_grad_norm": 1e9}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class MixturePolicy(Policy):
    @gathered("first")
    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def repel(self, name: str, expert: int) -> None:
        """Let a router choose an expert never."""
        with torch.no_grad():
            gate = self.get_parameter(name)
            gate[expert] = -100 * gate.mean(0)
            self.optimizer.param_groups[0]["lr"] = 0.0


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    rlite.init(device="cpu", num_devices=1)
    yield
    rlite.shutdown()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixture_dir(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


def options(**changes: Any) -> OptimizerOptions:
    plain = {"lr": 1e-2, "weight_decay": 0.0, "scheduler": "constant", "warmup_steps": 0, "total_steps": 10}
    return OptimizerOptions(**{**plain, **changes})


def engine_of(path: Path, lora: LoraOptions | None = None, name: str = "adamw", **build: Any) -> RliteTrainEngine:
    engine = RliteTrainEngine(policy_module(path, options(name=name), lora))
    engine.build(tensor_parallel_size=1, data_parallel_size=1, **build)
    return engine


def logprobs_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    found = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (0, 1)) * batch["loss_mask"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_linear_adapts_every_linear_layer_of_a_mixture_and_nothing_else(kind: str, tmp_path: Path) -> None:
    path = build_mixture_dir(tmp_path / kind, kind)
    plain, adapted = policy_module(path), policy_module(path, lora=LoraOptions(rank=4))
    linear = {name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)}
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert {name.partition(".lora_")[0] for name in trained} == linear - {"lm_head"}


MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTED = [
    ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    ("mixtral", {}),
    ("deepseek_v3", {"dropout": 0.1}),
    ("glm4_moe", {"target_modules": ["model.layers.1.mlp.shared_experts.up_proj"], "target_parameters": STACKS}),
]
MORE_ADAPTED = [
    ("mixtral", {"target_modules": ["o_proj"]}),
    ("mixtral", {"target_parameters": STACKS}),
    ("deepseek_v3", {"target_modules": MLP, "target_parameters": STACKS}),
    ("glm4_moe", {}),
    ("qwen3_moe", {"target_modules": MLP}),
    ("qwen2_moe", {}),
    ("ernie4_5_moe", {"target_parameters": STACKS}),
    ("minimax_m2", {}),
]


@pytest.mark.parametrize(
    ("kind", "fields"), [*ADAPTED, *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE_ADAPTED)]
)
def test_adapters_of_a_mixture_are_trained_and_open_with_peft_and_merge(
    kind: str, fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    path = build_mixture_dir(tmp_path / kind, kind)
    engine = engine_of(path, LoraOptions(rank=4, **fields), gradient_checkpointing=True)
    batch = make_batch(LENGTHS)
    before = engine.forward(batch, next_token_logprobs)
    for _ in range(3):
        engine.train_batch(batch, token_loss, num_counted)
    served, base = engine.forward(batch, next_token_logprobs), engine.forward(batch, next_token_logprobs, None, True)
    engine.save(tmp_path / "model")
    engine.release()
    assert ("exports have lora_dropout=0: PEFT has none for" in caplog.text) == ("dropout" in fields)
    assert torch.equal(base, before)
    assert (served - before).abs().max() > 0.01
    adapter = tmp_path / "model" / "adapter"
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(adapter)).eval()
    expected = served * batch["loss_mask"]
    with torch.no_grad():
        torch.testing.assert_close(logprobs_of(peft, batch), expected, atol=1e-5, rtol=0)
        exported = load_model(AutoModelForCausalLM, tmp_path / "model").eval()
        torch.testing.assert_close(logprobs_of(exported, batch), expected, atol=1e-5, rtol=0)
        merge_adapter(adapter, str(path), tmp_path / "merged")
        merged = load_model(AutoModelForCausalLM, tmp_path / "merged").eval()
        torch.testing.assert_close(logprobs_of(merged, batch), expected, atol=1e-5, rtol=0)


def test_a_target_that_names_no_stack_of_experts_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target_parameters: 'experts.up_proj' names no stack .* did you mean"):
        policy_module(path, options(), LoraOptions(target_parameters=["experts.up_proj"]))
    with pytest.raises(ConfigError, match="dropout"):
        LoraOptions(target_parameters=STACKS, dropout=0.1)


def test_muon_updates_each_experts_matrix_as_a_matrix_of_its_own(path: Path) -> None:
    engine = engine_of(path, name="muon", max_grad_norm=float("inf"))
    name = "model.layers.1.mlp.experts.down_proj"
    batch, before = make_batch(LENGTHS), engine.state_dict()[name]
    engine.train_batch(batch, token_loss, num_counted)
    after = engine.state_dict()[name]
    engine.release()
    model = random_model("qwen3_moe")
    loss = -(logprobs_of(model, batch).sum() / batch["loss_mask"].sum())
    loss.backward()
    for number, gradient in enumerate(model.get_parameter(name).grad):
        alone = torch.nn.Parameter(before[number].clone())
        alone.grad = gradient.clone()
        torch.optim.Muon([alone], lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        update, expected = after[number] - before[number], alone.detach() - before[number]
        # Muon orthogonalises in bfloat16, whose rounding differs between processors
        assert (update - expected).norm() < 0.05 * expected.norm()


def gate_gradient(path: Path, coef: float, **build: Any) -> tuple[Tensor, dict[str, float]]:
    """Gradient of the routers' weights of one batch, and its statistics."""
    engine: Any = RliteTrainEngine(on_meta(causal_lm_class(path, MixturePolicy), path))
    engine.build(tensor_parallel_size=1, data_parallel_size=1, router_aux_loss_coef=coef, **EXACT, **build)
    stats = engine.forward_backward(make_batch(LENGTHS), token_loss, num_counted)
    gradients = engine.gradients()
    engine.release()
    return torch.stack([g for name, g in gradients.items() if name.endswith("mlp.gate.weight")]), stats


def test_the_auxiliary_loss_is_that_of_its_definition_for_any_microbatches(path: Path) -> None:
    coef = 0.5
    plain, _ = gate_gradient(path, 0.0)
    whole, stats = gate_gradient(path, coef)
    parts, stats_of_parts = gate_gradient(path, coef, max_tokens_per_microbatch=14)
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=0)
    batch, model = make_batch(LENGTHS), random_model("qwen3_moe").double()
    seen: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers[1:]]
    for gate in gates:
        gate.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    is_token = batch["attention_mask"].flatten().bool()
    losses = []
    for logits in (each[is_token] for each in seen):
        chosen = torch.nn.functional.one_hot(logits.topk(2).indices, 8).sum(1).double().mean(0) / 2
        losses.append(8 * (chosen * logits.softmax(-1).mean(0)).sum())
    loss = torch.stack(losses).mean()
    expected = torch.stack(torch.autograd.grad(coef * loss, [gate.weight for gate in gates]))
    torch.testing.assert_close(whole - plain, expected, atol=1e-8, rtol=0)
    assert stats["moe/auxiliary_loss"] == pytest.approx(loss.item(), abs=1e-7)
    assert stats_of_parts["moe/auxiliary_loss"] == pytest.approx(loss.item(), abs=1e-7)


NIGHTLY = nightly("glm4_moe", "minimax_m2")


@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe", *NIGHTLY])
def test_correction_biases_are_read_balanced_saved_synced_and_resumed(kind: str, tmp_path: Path) -> None:
    folder = build_mixture_dir(tmp_path / "model", kind)
    engine: Any = RliteTrainEngine(on_meta(causal_lm_class(folder, MixturePolicy), folder))
    sizes = {"tensor_parallel_size": 1, "data_parallel_size": 1}
    engine.build(**sizes, router_bias_update_rate=0.25)
    before, stored = engine.state_dict(), load_file(folder / "model.safetensors")
    name, stored_name = (min(filter(corrects, names)) for names in (before, stored))
    assert torch.equal(before[name], stored[stored_name])
    stats = engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    assert stats["moe/load_max"] > 1 > stats["moe/load_min"]
    after = engine.state_dict()[name]
    change = (after - before[name]).flatten()
    assert set(change.round(decimals=4).abs().tolist()) <= {0.0, 0.25}
    assert change.min() < 0 < change.max()
    engine.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")[stored_name]
    assert torch.equal(saved, after)
    engine.save_state(tmp_path / "state")
    served = RliteInferenceEngine(folder)
    served.build(data_parallel_size=1, colocate_with=engine, max_model_len=64, max_num_seqs=2)
    engine.p2p_weight_sync(served, verify_checksums=True)
    answer = served.generate([[1, 2, 3]], {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True})[0].outputs[0]
    batch = {"input_ids": torch.tensor([[1, 2, 3, *answer.token_ids]])}
    batch |= {"attention_mask": torch.ones_like(batch["input_ids"])}
    expected = engine.forward(batch, next_token_logprobs)[0, 2:-1]
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
    served.release()
    following = engine.train_batch(make_batch(LENGTHS, 1), token_loss, num_counted), engine.state_dict()
    engine.release()
    resumed: Any = RliteTrainEngine(on_meta(causal_lm_class(folder, MixturePolicy), folder))
    resumed.build(**sizes, router_bias_update_rate=0.25)
    resumed.load_state(tmp_path / "state")
    assert resumed.train_batch(make_batch(LENGTHS, 1), token_loss, num_counted) == following[0]
    assert all(torch.equal(tensor, following[1][key]) for key, tensor in resumed.state_dict().items())
    resumed.release()


def test_a_poisoned_router_and_a_dropped_expert_are_seen(path: Path) -> None:
    engine: Any = RliteTrainEngine(on_meta(causal_lm_class(path, MixturePolicy), path))
    engine.build(tensor_parallel_size=1, data_parallel_size=1)
    gate = "model.layers.2.mlp.gate.weight"
    engine.repel(gate, 3)
    for _ in range(DROPPED_STEPS):
        stats = engine.train_batch(make_batch([9, 4]), token_loss, num_counted)
        assert stats["is_skipped"] == 0
    assert stats["moe/dropped_share"] >= 1 / 16
    assert stats["moe/idle_share"] >= stats["moe/dropped_share"]
    engine.fill(gate, float("nan"))
    stats = engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    assert stats["moe/nonfinite_tokens"] == sum(LENGTHS)
    assert stats["is_skipped"] == 1
    engine.release()


@pytest.mark.skipif("zaya" not in transformers.CONFIG_MAPPING, reason="needs a newer transformers")
def test_a_token_that_skips_the_experts_is_no_load(tmp_path: Path) -> None:
    config = AutoConfig.for_model("zaya", num_hidden_layers=2)
    model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    gates = [layer.mlp.gate for layer in model.model.layers]
    gates[0].balancing_biases[-1] = 10.0  # chosen for every token
    gates[1].balancing_biases[-1] = -10.0
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, router_aux_loss_coef=0.1)
    batch = make_batch(LENGTHS)
    stats = engine.train_batch({**batch, "input_ids": batch["input_ids"] % 100}, token_loss, num_counted)
    engine.release()
    assert stats["moe/load_min"] == 0.0
    loads = [value for name, value in stats.items() if name.startswith("moe/load/")]
    assert sum(loads) == pytest.approx(len(loads) / 2)  # the even load of one of two layers
    assert stats["moe/nonfinite_tokens"] == 0.0


def test_the_kind_of_scores_is_found_from_the_tokens_that_skip_no_expert() -> None:
    scores = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [0, 0]])
    weights = scores.softmax(-1).gather(-1, chosen)
    weights[[1, 4]] *= torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    kind, error = score_kind(scores, chosen, weights)
    assert kind == "softmax"
    assert error < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ep_size": 3}, "no whole solution: choose an ep_size that divides 1"),
        ({"ep_size": 3, "tensor_parallel_size": 3}, "ep_size=3 does not divide the 8 experts .* choose a divisor of 8"),
        ({"router_bias_update_rate": 0.1}, "the routers of 'qwen3_moe' have no correction bias"),
        ({"experts_implementation": "grouped_mm", "param_dtype": "float64"}, "does not compute in float64"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_process_starts(path: Path, options: Any, message: str) -> None:
    engine = RliteTrainEngine(policy_module(path))
    with pytest.raises(ConfigError, match=message):
        engine.build(**{"tensor_parallel_size": 1, "data_parallel_size": 1, **options})
    assert not engine.is_built


def test_options_of_experts_are_refused_for_a_dense_model(tmp_path: Path) -> None:
    folder = build_model_dir(tmp_path / "qwen2", hidden=64)
    for option in ({"router_aux_loss_coef": 0.1}, {"experts_implementation": "eager"}):
        engine = RliteTrainEngine(policy_module(folder))
        with pytest.raises(ConfigError, match="has no experts"):
            engine.build(tensor_parallel_size=1, data_parallel_size=1, **option)
    with pytest.raises(ConfigError, match="'qwen2' has no experts to divide"):
        check_expert_parallel(policy_module(folder), 2)


def test_expert_parallelism_needs_a_release_of_transformers_that_has_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "apply_expert_parallelism", None)
    with pytest.raises(
        ConfigError, match=r"ep_size=2: transformers .* pip install 'transformers>=5\.22', or use ep_si"
    ):
        check_expert_parallel(policy_module(path), 2)


def test_expert_parallelism_needs_a_plan_and_a_size_that_divides(path: Path) -> None:
    with pytest.raises(ConfigError, match="ep_size=3 does not divide the 8 experts"):
        check_expert_parallel(policy_module(path), 3)
    module = policy_module(path)
    module.config.base_model_ep_plan = {}
    with pytest.raises(ConfigError, match="no plan of transformers names it"):
        expert_plan(module)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gpt_oss"])
def test_packs_of_a_mixture_are_computed_as_by_transformers_with_gradients(kind: str) -> None:
    config = config_of(kind)
    assert refusal(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config) is None


HUNYUAN_PLAN = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
    "layers.*.mlp.experts": "moe_tp_experts",
}
"""tensor parallel plan of transformers 5.23, which older releases lack"""


def test_a_router_that_knows_the_number_of_its_layer_mixes_no_tokens() -> None:
    config = AutoConfig.for_model("hunyuan_v1_moe", num_hidden_layers=1)
    model = miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    model.config.base_model_tp_plan = HUNYUAN_PLAN
    assert split_layers(model).whole.keys() == {"model.layers.0.self_attn"}
