"""The table of trainers."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from rlite.algorithms import ADVANTAGES
from rlite.assembly.presets import CpoConfig, GrpoConfig, OrpoConfig, SimpoConfig
from rlite.assembly.trainers import TRAINERS
from rlite.cli import COMMANDS
from rlite.config import Options, load
from rlite.errors import ConfigError
from rlite.trainer.rl.options import OWN_ESTIMATORS, PpoConfig


@pytest.mark.parametrize("name", TRAINERS)
def test_an_entry_names_a_trainer_with_its_options_and_its_command(name: str) -> None:
    entry = TRAINERS[name]
    module = importlib.import_module(entry.module)
    trainer = getattr(module, entry.trainer)
    assert (trainer.name, trainer.config_class) == (name, COMMANDS[name].find_options())
    assert callable(module.main)


OTHERS = [*("rloo", "dr_grpo", "opo", "gpg", "pass_at_k", "grpo", "normalized"), *OWN_ESTIMATORS]


@pytest.mark.parametrize("estimator", OTHERS)
def test_what_grpo_sets_for_its_estimator_gives_way_to_another(estimator: str) -> None:
    adv = load(GrpoConfig, ["actor.model_name=a", f"adv.estimator={estimator}"]).adv
    assert adv.norm_var is (estimator in ("reinforce", "gae"))
    assert GrpoConfig(actor={"model_name": "a"}, adv={"estimator": estimator}).adv == adv


def test_an_own_estimator_needs_no_other_option_under_grpo() -> None:
    ADVANTAGES["own"] = lambda rewards, group_ids: rewards
    try:
        assert not load(GrpoConfig, ["actor.model_name=a", "adv.estimator=own"]).adv.norm_var
    finally:
        del ADVANTAGES["own"]


def test_grpo_without_a_kl_has_no_option_without_effect_but_those_of_its_user() -> None:
    given = ["actor.model_name=a", "kl.type=null"]
    assert load(GrpoConfig, given).without_effect() == ""
    assert load(GrpoConfig, [*given, "kl.coef=1"]).without_effect().startswith("kl.coef (")


DIVERGES = "actor.preference_loss.divergence=js"
OF_PRESET = r"\(actor.preference_loss.reference_free: the default of this preset\)"


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        (
            GrpoConfig,
            ["adv.norm_var=true", "adv.estimator=rloo"],
            r"rloo: it has no adv.norm_var=true; leave it out or override it$",
        ),
        (GrpoConfig, ["--config", "recipe.yaml", "adv.estimator=rloo"], r"\(adv.norm_var: set by recipe.yaml\)"),
        (PpoConfig, ["--config", "recipe.yaml", "adv.estimator=own"], "unknown estimator"),
        (PpoConfig, ["--config", "recipe.yaml", "adv.estimator=opo"], r"\(adv.norm_var: set by recipe.yaml\)"),
        (OrpoConfig, ["data.path=x", DIVERGES], OF_PRESET),
        (SimpoConfig, ["data.path=x", DIVERGES], OF_PRESET),
        (CpoConfig, ["data.path=x", DIVERGES], OF_PRESET),
        (CpoConfig, ["data.path=x", "ref_actor.model_name=b"], OF_PRESET),
        (OrpoConfig, ["data.path=x", "actor.preference_loss.reference_free=false"], r"name: the default of this pre"),
    ],
)
def test_a_refusal_says_which_file_or_preset_has_set_what_it_names(
    options: type[Options], arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("adv: {norm_var: true}\n")
    with pytest.raises(ConfigError, match=said):
        load(options, ["actor.model_name=a", *arguments])
