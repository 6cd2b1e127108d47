"""Suggestions for keys that do not exist."""

import itertools
import re

import pytest

from rlite.assembly.trainers import TRAINERS
from rlite.cli import COMMANDS
from rlite.config import describe, load
from rlite.errors import ConfigError, UnknownOptionError
from rlite.help import ELSEWHERE, nearest_key


@pytest.mark.parametrize(
    ("command", "key", "nearest"),
    [
        ("ppo", "trainer.steps", "'trainer.total_steps'"),
        ("ppo", "trainer.max_steps", "'trainer.total_steps'"),
        ("sft", "trainer.max_steps", "'trainer.n_epochs'"),
        ("sft", "trainer.eval_steps", "'trainer.test_freq'"),
        ("grpo", "rollout.n", "'train_data.responses_per_prompt'"),
        ("grpo", "max_completion_length", "'rollout.train_sampling_params.max_new_tokens'"),
        ("sft", "actor.dropout", "'actor.disable_dropout'"),
        *((command, "model", "'actor.model_name'") for command in TRAINERS if command != "rm"),
        ("rm", "model", "'critic.model_name'"),
        ("plan", "model", "'model_name'"),
        ("grpo", "data", "'train_data.path'"),
        ("sft", "train_data", "'data.path'"),
    ],
)
def test_names_of_other_libraries_lead_to_the_usual_key(command: str, key: str, nearest: str) -> None:
    with pytest.raises(UnknownOptionError, match=rf"unknown key '{key}'; did you mean {nearest}\?"):
        load(COMMANDS[command].find_options(), [f"{key}=1"])


@pytest.mark.parametrize(
    ("command", "given", "full"),
    [
        ("sft", "data=rows.jsonl", "data.path=..."),
        ("grpo", "train_data=rows.jsonl", "train_data.path=..."),
        ("grpo", "reward=my.py:f", "reward.path=my.py:f"),
        ("sft", "test_data=rows.jsonl", "test_data.path=rows.jsonl"),
        ("eval", "rewards=my.py:f", "'reward'"),
    ],
)
def test_a_value_for_a_whole_group_is_told_the_full_key(command: str, given: str, full: str) -> None:
    with pytest.raises((ConfigError, UnknownOptionError), match=re.escape(full)):
        load(COMMANDS[command].find_options(), [given])


@pytest.mark.parametrize(
    ("command", "key", "nearest"),
    [
        *[("ppo", "data.path", "train_data.path"), ("grpo", "data.path", "train_data.path")],
        *[("sft", "train_data.path", "data.path"), ("dpo", "train_data.path", "data.path")],
        *[("kto", "train_data.columns", "data.columns"), ("eval", "train_data.path", "data.path")],
        *[("ppo", "trainer.n_epochs", "trainer.total_steps"), ("grpo", "trainer.n_epochs", "trainer.total_steps")],
    ],
)
def test_a_key_of_another_command_leads_to_the_key_with_its_purpose(command: str, key: str, nearest: str) -> None:
    with pytest.raises(UnknownOptionError, match=rf"unknown key '{key}'; did you mean '{nearest}'\?"):
        load(COMMANDS[command].find_options(), [f"{key}=1"])


def test_foreign_option_names_map_to_ours() -> None:
    told = "".join(describe(COMMANDS[command].find_options()) for command in ("ppo", "sft"))
    ours = {key.rpartition(".")[2] for key in re.findall(r"^([\w.]+)=", told, re.MULTILINE)}
    assert set(itertools.chain.from_iterable(ELSEWHERE.values())) <= ours
    other = {"model": "rewards have one", "kl_coef": "schedules have one"}
    assert ELSEWHERE.keys() & ours == other.keys(), "names that are ours, but not of what others mean by them"


def test_without_a_near_key_all_keys_of_the_group_are_listed() -> None:
    assert nearest_key("a.zzz", ["a.one", "a.two", "b.three"]) == "known: a.one, a.two"
