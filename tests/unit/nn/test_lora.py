from __future__ import annotations

import importlib.util

import pytest
import torch
import transformers
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from rlite.backends.fsdp2.learners import check_adapter
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.models.architecture import miniature, saved
from rlite.backends.models.lora import merge
from rlite.errors import ConfigError
from rlite.nn import LoraOptions
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.rl.options import ActorOptions
from tests.tiny import build_model_dir


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", hidden=64)


def trained(module):
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def test_only_adapters_are_trained_and_every_other_name_is_the_checkpoints(path):
    plain, module = policy_module(path), policy_module(path, lora=LoraOptions(rank=4))
    names = [name for name, _ in module.named_parameters()]
    adapters = [name for name in names if ".lora_" in name]
    assert trained(module) == adapters
    assert len(adapters) == 2 * 7 * 2  # two factors, seven linear layers, two decoder layers
    left = [name for name in names if name not in adapters]
    assert [module.checkpoint_name(name) for name in left] == [name for name, _ in plain.named_parameters()]
    box = torch.empty(0)
    served = [out[0] for name in names if (out := module.postprocess_named_parameter(name, box))]
    assert served == [name for name, _ in plain.named_parameters()]


def test_only_the_named_layers_get_adapters(path):
    module = policy_module(path, lora=LoraOptions(target_modules=["q_proj", "model.layers.1.mlp.up_proj"]))
    layers = {name.rpartition(".lora_")[0] for name in trained(module)}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_the_new_head_of_a_critic_is_trained_beside_its_adapters(path):
    module = critic_module(path, lora=LoraOptions())
    assert [name for name in trained(module) if ".lora_" not in name] == ["score.weight"]
    head = module.missing_parameter("score.weight", (1, 64))
    assert torch.equal(head, critic_module(path).missing_parameter("score.weight", (1, 64)))


def test_adapters_begin_as_those_of_peft_and_change_nothing(path):
    module = policy_module(path, lora=LoraOptions(rank=4))
    first, second = (name for name in trained(module) if name.endswith("q_proj.lora_A.default.weight"))
    draws = module.missing_parameter(first, (512, 64))
    assert torch.equal(draws, module.missing_parameter(first, (512, 64)))
    assert not torch.equal(draws, module.missing_parameter(second, (512, 64)))
    bound = 1 / 64**0.5
    assert 0.999 * bound < draws.abs().max() <= bound
    assert draws.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not module.missing_parameter(first.replace("lora_A", "lora_B"), (64, 4)).any()


TARGETS = {
    "ctrl": {"n_layer": 2},  # projections "0" in layers "0"
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},  # layers 1 and 3 are tied
    "laguna": {"num_hidden_layers": 2, "layer_types": None, "mlp_layer_types": None},  # PEFT renames its shared experts
}


@pytest.mark.parametrize("kind", [kind for kind in TARGETS if kind in transformers.CONFIG_MAPPING])
def test_exported_adapters_open_with_peft_whatever_a_model_calls_its_layers(kind, tmp_path):
    config = AutoConfig.for_model(kind, **TARGETS[kind])
    with saved(miniature(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)) as base:
        module = policy_module(base, lora=LoraOptions(rank=4))
        tensors = {name: torch.randn(module.get_parameter(name).shape) for name in trained(module)}
        module.save_adapter(tmp_path, tensors)
        opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    found = {
        name: p for name, p in opened.base_model.model.named_parameters(remove_duplicate=False) if ".lora_" in name
    }
    module_names = [name for name, _ in module.named_parameters(remove_duplicate=False) if ".lora_" in name]
    assert sorted(found) == sorted(module_names)
    held = {id(module.get_parameter(name)): tensor for name, tensor in tensors.items()}
    assert all(torch.equal(found[name], held[id(module.get_parameter(name))]) for name in found)


def test_exported_adapters_of_ordinary_models_name_their_layers_by_one_word(path, tmp_path):
    module = policy_module(path, lora=LoraOptions(rank=4))
    module.save_adapter(tmp_path, {name: torch.zeros(module.get_parameter(name).shape) for name in trained(module)})
    targets = PeftConfig.from_pretrained(tmp_path).target_modules
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_merged_weight_computes_what_layer_and_adapter_compute(dtype):
    weight, down, up = (torch.randn(shape, dtype=dtype) for shape in ((5, 7), (3, 7), (5, 3)))
    x = torch.randn(4, 7, dtype=torch.float64)
    wide = [tensor.double() for tensor in (weight, down, up)]
    expected = x @ wide[0].T + 0.5 * (x @ wide[1].T @ wide[2].T)
    merged = merge(weight, down, up, 0.5)
    assert merged.dtype == dtype
    # bfloat16 rounds once, at the end
    tolerance = 1e-12 if dtype == torch.float64 else 2**-8
    exact = wide[0] + 0.5 * wide[2] @ wide[1]
    torch.testing.assert_close(merged.double(), exact, rtol=tolerance, atol=1e-6 if dtype != torch.float64 else 1e-12)
    if dtype == torch.float64:
        torch.testing.assert_close(nn.functional.linear(x, merged), expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": 0}, "rank=0"),
        ({"alpha": 0.0}, "alpha=0"),
        ({"dropout": 1.0}, "dropout=1"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["all-linear", "q_proj"]}, "target_modules"),
    ],
)
def test_options_that_mean_nothing_are_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        LoraOptions(**changes)


@pytest.mark.parametrize(
    ("target", "reason"),
    [("q_prj", "q_proj"), ("embed_tokens", "no linear layer"), ("self_attn", "no linear layer"), ("lm_head", "shares")],
)
def test_adapters_need_untied_linear_layers(path, target, reason):
    with pytest.raises(ConfigError, match=reason):
        policy_module(path, lora=LoraOptions(target_modules=["k_proj", target]))


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rlite\[lora\]"):
        ActorOptions(model_name="model", lora=LoraOptions())


@pytest.mark.parametrize(
    ("options", "adapter", "reason"),
    [
        ({"compile": "layers"}, {}, "has compiled the layers without adapters"),
        ({"router_aux_loss_coef": 0.1}, {}, "trains the whole module"),
        ({"tp_size": 2, "deterministic": True}, {}, "with tp_size=2 training adds products in another order"),
        ({}, {"dropout": 0.1}, "would draw from other adapters' numbers"),
        ({}, {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}, "experts have no adapters by name"),
        ({}, {"target_modules": ["lm_head"]}, "lm_head is the output embedding"),
    ],
)
def test_adapters_by_name_that_cannot_be_trained_are_refused_before_they_are_made(tmp_path, options, adapter, reason):
    module = policy_module(build_model_dir(tmp_path / "model", "llama", tie=False, hidden=64))
    assert len(check_adapter(module, Fsdp2Options(), LoraOptions()).target_modules) == 14
    with pytest.raises(ConfigError, match=f"adapters by name: .*{reason}"):
        check_adapter(module, Fsdp2Options(**options), LoraOptions(**adapter))
