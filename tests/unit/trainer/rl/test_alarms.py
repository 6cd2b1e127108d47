"""Alarms are raised when a problem begins, and not at every step."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.config import load
from rlite.services.console.alarms import REPEAT_AFTER, Alarms
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.rl.options import PpoConfig


def told(metrics: Mapping[int, Mapping[str, float]], *settings: str) -> list[str]:
    """The first lines of the alarms that steps with these metrics give."""
    return [line for line in shown(metrics, *settings).splitlines() if line.startswith("ALARM")]


def shown(metrics: Mapping[int, Mapping[str, float]], *settings: str) -> str:
    """What steps with these metrics show."""
    out = io.StringIO()
    run: Any = SimpleNamespace(step=0, console=ConsoleReporter(file=out))
    options, engine = load(PpoConfig, ["actor.model_name=x", *settings]), SimpleNamespace()
    can_teach = options.equal_rewards.can_teach
    is_ahead = options.rollout.max_head_offpolicyness > 0
    alarms = Alarms(engine, is_ahead, can_teach, turn_limit="rollout.max_turns=1")  # type: ignore[arg-type]
    for run.step, values in metrics.items():
        alarms.look(run, values, {})
    return out.getvalue()


def equal(reward: float, **more: Any) -> dict[str, float]:
    return {"reward_min": reward, "reward_max": reward, "uniform_groups": 1.0, **more}


@pytest.mark.parametrize("setting", ["adv.estimator=reinforce", "adv.estimator=gae"])
def test_equal_rewards_are_told_at_once_and_again_while_they_last(setting: str) -> None:
    lines = told({step: equal(0.0) for step in range(1, 2 * REPEAT_AFTER)}, setting)
    assert lines == [  # a critic, or the KL, may teach all the same
        f"ALARM at step {step}: all rewards are equal, and no response is better than another"
        for step in (1, 1 + REPEAT_AFTER)
    ]


def test_groups_of_equal_rewards_are_told_only_if_nothing_is_learnt_from_them() -> None:
    steps = {1: {"reward_min": 0.0, "reward_max": 1.0, "uniform_groups": 1.0}}
    assert told(steps) == ["ALARM at step 1: in every group all rewards are equal, and teach nothing"]
    assert told(steps, "adv.global_norm=true") == []
    assert told({1: {"reward_min": 0.0, "reward_max": 1.0, "uniform_groups": 0.9}}) == []


def test_log_probabilities_that_differ_are_told_once_and_then_every_so_many_steps() -> None:
    steps = {step: {"logprob_drift": 0.5 if step % 2 else 0.01} for step in range(1, 2 * REPEAT_AFTER)}
    lines = told(steps, "rollout.max_head_offpolicyness=1")
    assert lines == [
        f"ALARM at step {step}: the rollouts are far from the policy that is trained" for step in (1, 1 + REPEAT_AFTER)
    ]
    assert told({1: {"logprob_drift": 0.5}}) == [
        "ALARM at step 1: the engine does not serve the policy that is trained"
    ]


def test_a_limit_of_turns_that_ends_nearly_every_episode_is_told_with_its_option() -> None:
    lines = shown({1: {"turn_limited": 0.97}}).splitlines()
    assert lines[0] == "ALARM at step 1: the limit of turns cuts off nearly every episode"
    assert [line.split() for line in lines[1:]] == [
        ["turn_limited", "97%", "of", "the", "episodes"],
        ["limit", "rollout.max_turns=1;", "raise", "it"],
    ]
    assert told({1: {"turn_limited": 0.5}}) == []


def test_an_alarm_about_rewards_names_a_page_of_the_documentation() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reading-a-run.md").read_text(encoding="utf-8")
    (line,) = [line for line in shown({1: equal(0.0)}).splitlines() if line.strip().startswith("help ")]
    title, section = line.split("page ")[1].split(": ", 1)
    assert page.startswith(f"# {title}\n")
    assert f"\n## {section}" in page
