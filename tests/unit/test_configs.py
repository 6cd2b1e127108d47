"""Every recipe that ships can be loaded, with what it leaves to its user given on the command line."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from rlite.assembly.presets import GrpoConfig
from rlite.config import load, schema
from rlite.errors import ConfigError
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import DpoConfig, RmConfig, SftConfig

CONFIGS = Path(__file__).parents[2] / "configs"
BASE = CONFIGS / "dr_grpo.yaml"
USERS = ["actor.model_name=model", "train_data.path=rows.jsonl", "rollout.env_path=env.py"]
SUPERVISED = {"sft.yaml": (SftConfig, "actor"), "rm.yaml": (RmConfig, "critic"), "dpo.yaml": (DpoConfig, "actor")}
OF_PPO = [path for path in sorted(CONFIGS.glob("*.yaml")) if path.name not in SUPERVISED]


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_recipe_for_learning_from_rows_loads(name):
    cls, key = SUPERVISED[name]
    config = load(cls, ["--config", str(CONFIGS / name), f"{key}.model_name=model", "data.path=rows.jsonl"])
    assert getattr(config, key).model_name == "model"
    with pytest.raises(ConfigError, match=rf"{key}\.model_name"):
        load(cls, ["--config", str(CONFIGS / name), "data.path=rows.jsonl"])


@pytest.mark.parametrize("path", OF_PPO, ids=lambda path: path.name)
def test_a_recipe_loads_on_top_of_the_default(path):
    config = load(PpoConfig, ["--config", str(BASE), "--config", str(path), *USERS])
    assert config.actor.model_name == "model"
    assert config.train_data.responses_per_prompt == 8


def test_a_recipe_names_what_its_user_has_to_give():
    with pytest.raises(ConfigError, match=r"actor\.model_name"):
        load(PpoConfig, ["--config", str(BASE)])


def test_grpo_recipe_has_the_settings_of_the_command():
    recipe = load(PpoConfig, ["--config", str(BASE), "--config", str(CONFIGS / "grpo.yaml"), *USERS])
    command = load(GrpoConfig, USERS)
    assert (recipe.adv, recipe.kl, recipe.actor.avg_level) == (command.adv, command.kl, command.actor.avg_level)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_recipe_fits_the_schema_that_editors_get(path):
    cls = SUPERVISED[path.name][0] if path.name in SUPERVISED else PpoConfig
    jsonschema.Draft202012Validator(schema(cls)).validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"actor": {"modle_name": "a"}},
        {"actor": {"lr": "fast"}},
        {"actor": {"lr": -1}},
        {"actor": {"lora": {"rank": 0}}},
        {"kl": {"type": "loss", "coef": True}},
        {"rollout": {"on_stale": "forget"}},
        {"train_data": {"prompts_per_rollout": 1.5}},
    ],
)
def test_the_schema_refuses_what_the_trainer_refuses(wrong):
    validator = jsonschema.Draft202012Validator(schema(PpoConfig))
    assert not validator.is_valid(wrong)


def test_the_schema_takes_interpolations_and_what_a_file_leaves_open():
    values = {"actor": {"lr": "${critic.lr}", "lora": None}, "critic": {"lr": "???"}, "adv": {"options": {"std": 1}}}
    jsonschema.Draft202012Validator(schema(PpoConfig)).validate(values)
