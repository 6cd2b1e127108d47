"""Every recipe that ships can be loaded, with what it leaves to its user given on the command line."""

from pathlib import Path

import pytest

from rlite.config import load
from rlite.errors import ConfigError
from rlite.trainer.dpo import DpoConfig
from rlite.trainer.rl.config import PpoConfig
from rlite.trainer.rm import RmConfig
from rlite.trainer.sft import SftConfig

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


def test_grpo_is_what_its_name_says():
    config = load(PpoConfig, ["--config", str(BASE), "--config", str(CONFIGS / "grpo.yaml"), *USERS])
    assert config.adv.norm_var
    assert config.actor.avg_level == "sequence"
