import json

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, MptConfig, OPTConfig

import rlite
from rlite.backends.models.huggingface import disable_dropout, disable_dropout_layers, with_dropout
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.trainer.losses import SftLoss
from rlite.trainer.model.modules import critic_module, policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.objective import OwnLogprobs
from tests.integration.modules import Qwen2Policy, make_batch, on_meta
from tests.tiny import build_model_dir

FROZEN_RATE = OptimizerOptions(lr=0.0, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model_dir(tmp_path_factory.mktemp("model") / "m", hidden=64, attention_dropout=0.5)


@pytest.fixture
def build():
    rlite.init(num_devices=1)

    def build_engine(module):
        engine = rlite.RliteTrainEngine(module)
        engine.build()
        return engine

    yield build_engine
    rlite.shutdown()


class ReportsModes(Qwen2Policy):
    def modes(self):
        return [module.training for module in self.modules()]

    def freeze_layer(self):
        self.model.layers[0].eval()


def test_passes_that_infer_run_without_dropout_and_restore_each_mode(build, model):
    engine = build(on_meta(ReportsModes, model))
    assert engine.module.config.attention_dropout == 0.5
    engine.freeze_layer()
    (modes,) = engine.modes()
    assert True in modes
    assert False in modes
    batch = make_batch([9, 14, 5])
    first, second = (engine.forward(batch, OwnLogprobs()) for _ in range(2))
    assert torch.equal(first, second)
    loss = SftLoss()
    assert len({engine.eval_batch(batch, loss, loss.weight)["loss"] for _ in range(3)}) == 1
    assert engine.modes() == [modes]
    assert len({engine.train_batch(batch, loss, loss.weight)["loss"] for _ in range(2)}) == 2, "PyTorch's training mode"


@pytest.mark.parametrize("disable", [True, False])
def test_trainers_train_without_dropout_unless_it_is_asked_for(build, model, disable):
    engine = build(policy_module(model, FROZEN_RATE, disable_dropout=disable))
    batch, loss = make_batch([9, 14, 5]), SftLoss()
    losses = {engine.train_batch(batch, loss, loss.weight)["loss"] for _ in range(3)}
    assert (len(losses) == 1) == disable
    assert (losses == {engine.eval_batch(batch, loss, loss.weight)["loss"]}) == disable


def test_exports_keep_the_dropout_of_the_checkpoint(build, model, tmp_path):
    build(policy_module(model)).save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["attention_dropout"] == 0.5
    assert critic_module(model).config.attention_dropout == 0.0


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        (
            GPT2Config(embd_pdrop=0.2),
            {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.1, "summary_first_dropout": 0.1},
        ),
        (OPTConfig(layerdrop=0.3), {"dropout": 0.1, "layerdrop": 0.3}),
        (LlamaConfig(), {}),
    ],
)
def test_every_rate_of_a_config_is_switched_off_and_comes_back(config, rates):
    before = config.to_dict()
    taken = disable_dropout(config)
    assert taken == {(name,): rate for name, rate in rates.items()}
    assert not any(getattr(config, name) for name in rates)
    assert with_dropout(config, taken).to_dict() == before
    assert not any(getattr(config, name) for name in rates), "a copy"


def test_rates_of_a_config_inside_a_config_are_found():
    config = MptConfig(attn_config={"attn_pdrop": 1})
    taken = disable_dropout(config)
    assert taken == {("attn_config", "attn_pdrop"): 1}
    assert config.attn_config.attn_pdrop == 0
    assert with_dropout(config, taken).attn_config.attn_pdrop == 1


def test_layers_whose_rate_is_no_option_are_switched_off():
    layers = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout1d(0.5)), nn.AlphaDropout(0.5))
    disable_dropout_layers(layers)
    x = torch.randn(4, 3)
    assert torch.equal(layers.train()(x), x)
    assert HuggingFaceFsdp2TrainModule._keeps_dropout, "modules of one's own are as the checkpoint says"
