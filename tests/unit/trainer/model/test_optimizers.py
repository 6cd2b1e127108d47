from dataclasses import replace

import pytest
import torch

from rlite.errors import ConfigError
from rlite.nn.options import LoraOptions
from rlite.runtime.parallel.fsdp import CombinedOptimizer
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.model.optimizers import make_optimizer, parameter_groups
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions
from tests.tiny import build_model_dir

ADAMW = OptimizerOptions(lr=1e-2, weight_decay=0.1, scheduler="constant", warmup_steps=0, total_steps=9)
MUON = replace(ADAMW, name="muon")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model_dir(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tie=True, hidden=64)


def groups(**patterns):
    return {name: ParameterGroupOptions(pattern=pattern) for name, pattern in patterns.items()}


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(model):
    muon, adamw = policy_module(model, MUON).parameter_groups
    assert (muon.is_muon, adamw.is_muon) == (True, False)
    assert all(name.endswith("proj.weight") for name in muon.names)
    assert len(muon.names) == 2 * 7
    assert "model.embed_tokens.weight" in adamw.names  # the head, too: it is tied
    assert all("norm" in name or "bias" in name or "embed" in name for name in adamw.names)
    assert len(muon.names) + len(adamw.names) == len(dict(policy_module(model, ADAMW).named_parameters()))


def test_the_head_of_a_critic_is_adamws(model):
    muon, adamw = critic_module(model, MUON).parameter_groups
    assert "score.weight" in adamw.names
    assert not any("score" in name for name in muon.names)


def test_the_first_group_whose_pattern_matches_has_a_parameter(model):
    options = replace(ADAMW, parameter_groups=groups(queries=r"q_proj", biases="bias"))
    rest, queries, biases = (group.names for group in policy_module(model, options).parameter_groups)
    assert "model.layers.0.self_attn.q_proj.bias" in queries
    assert biases == [f"model.layers.{n}.self_attn.{kind}_proj.bias" for n in range(2) for kind in "kv"]
    assert not any("bias" in name or "q_proj" in name for name in rest)


def test_a_group_has_a_rate_and_a_decay_of_its_own(model):
    own = {"norms": ParameterGroupOptions(pattern="norm", lr_factor=0.5, weight_decay=0.0)}
    rest, norms = policy_module(model, replace(ADAMW, parameter_groups=own)).parameter_groups
    assert (rest.lr, rest.weight_decay) == (1e-2, 0.1)
    assert (norms.lr, norms.weight_decay) == (5e-3, 0.0)


def test_frozen_parameters_are_in_no_group_and_have_no_gradient(model):
    own = {"lower": ParameterGroupOptions(pattern=r"embed|layers\.0\.", freeze=True)}
    module = policy_module(model, replace(MUON, parameter_groups=own))
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in module.named_parameters() if "embed" in name or "layers.0." in name}
    assert not frozen & {name for group in module.parameter_groups for name in group.names}


@pytest.mark.parametrize(
    ("options", "lora", "message"),
    [
        (replace(ADAMW, parameter_groups=groups(own="head")), None, r"own\.pattern=head: no trained .*embed_tokens"),
        (replace(ADAMW, parameter_groups=groups(one="norm", two="norm")), None, r"two\.pattern=norm: .* of earlier"),
        (replace(ADAMW, parameter_groups=groups(own="embed")), LoraOptions(rank=4), r"lora_A.default.weight"),
        (
            replace(ADAMW, parameter_groups={"all": ParameterGroupOptions(pattern="", freeze=True)}),
            None,
            "nothing is left to train",
        ),
        (
            replace(MUON, parameter_groups={"own": ParameterGroupOptions(pattern="proj", freeze=True)}),
            None,
            "optimizer=muon: no matrix inside of layers",
        ),
    ],
)
def test_groups_that_cannot_be_trained_are_refused_before_anything_is_built(model, options, lora, message):
    with pytest.raises(ConfigError, match=message):
        policy_module(model, options, lora)


class Layered(torch.nn.Module):
    """A matrix inside of a layer, and a bias."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 4)])

    def fsdp_units(self):
        return list(self.layers)


def test_combined_optimizers_continue_from_a_loaded_state_dict():
    runs = []
    for is_reloaded in (False, True):
        torch.manual_seed(0)
        module = Layered()
        optimizer = make_optimizer(module, parameter_groups(module, MUON))
        assert isinstance(optimizer, CombinedOptimizer)
        for step in range(4):
            if is_reloaded and step == 2:
                state = optimizer.state_dict()
                optimizer = make_optimizer(module, parameter_groups(module, MUON))
                optimizer.load_state_dict(state)
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, step + 1.0) + torch.randn_like(parameter)
            optimizer.step()
        runs.append(module.state_dict())
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name
