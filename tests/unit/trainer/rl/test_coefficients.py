"""Coefficients of a step: schedules, the adapted weight of the KL, and what callbacks set."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlite.config import load, to_container
from rlite.errors import ConfigError, UnknownOptionError
from rlite.trainer.rl.coefficients import Coefficients, coefficients_at
from rlite.trainer.rl.options import KlOptions, PpoConfig

NEEDED = ["actor.model_name=x", "train_data.path=x", "reward.path=my.py:f"]


def options(*argv: str) -> PpoConfig:
    return load(PpoConfig, [*NEEDED, *argv])


def adaptive(**kl: Any) -> Coefficients:
    return Coefficients(options().replace(kl=KlOptions(**kl)))


def test_a_schedule_is_a_line_between_its_points_and_constant_outside() -> None:
    clip = Coefficients(options("schedule.clip={500: 0.0, 1: 0.01, 301: 0.005}"))
    assert [clip.at(step)["clip"] for step in (0, 1, 301, 500, 9999)] == [0.01, 0.01, 0.005, 0.0, 0.0]
    assert clip.at(151) == {"clip": pytest.approx(0.0075)}
    jump = Coefficients(options("schedule.clip={99: 1, 100: 2}"))
    assert [jump.at(step)["clip"] for step in (99, 100)] == [1.0, 2.0], "two steps beside each other are a jump"


def test_schedules_are_read_from_the_command_line_and_from_json() -> None:
    given = options("schedule.entropy_coef={1: 1e-2, 501: 0}", "schedule.clip.7=0.3")
    assert given.schedule.entropy_coef == {1: 0.01, 501: 0.0}
    assert Coefficients(given).at(251) == {"entropy_coef": pytest.approx(0.005), "clip": 0.3}
    kept = json.loads(json.dumps(to_container(given)))
    assert load(PpoConfig, [], given=kept) == given, "a chain of hashes keeps steps as texts"
    assert Coefficients(options()).at(251) == {}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("schedule.entropy={1: 0}", "did you mean 'schedule.entropy_coef'"),
        ("schedule.kl_coef={1: 0.1, 9: -0.1}", r"schedule\.kl_coef.*-0\.1"),
        ("schedule.temperature={1: 0}", r"schedule\.temperature"),
        ("schedule.clip={0: 0.2}", r"schedule\.clip"),
        ("schedule.clip={soon: 0.2}", r"schedule\.clip"),
        ("schedule.kl_coef={1: 0.1}", r"schedule\.kl_coef: kl\.type=null has no KL"),
    ],
)
def test_a_schedule_that_cannot_hold_is_refused_before_work_starts(argument: str, message: str) -> None:
    with pytest.raises((ConfigError, UnknownOptionError), match=message):
        options(argument)


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        ("schedule.kl_coef={1: 0.1}", ["kl.type=loss", "kl.adaptive_target=1"]),
        ("schedule.clip={1: 0.1}", ["actor.policy_loss.name=reinforce"]),
        ("schedule.clip={1: 0.1}", ["actor.policy_loss.options.clip_low=0.1"]),
        ("schedule.temperature={1: 0.5}", ["rollout.max_head_offpolicyness=1"]),
    ],
)
def test_a_schedule_that_nothing_would_read_is_refused(argument: str, other: list[str]) -> None:
    options(*other)
    with pytest.raises(ConfigError, match=argument.partition("=")[0].replace(".", r"\.")):
        options(argument, *other)


def test_what_a_callback_sets_wins_is_checked_and_is_named_in_the_metrics() -> None:
    coefficients = Coefficients(options("schedule.entropy_coef={1: 0.1}", "kl.type=loss"))
    coefficients.choose({"entropy_coef": 0.5, "kl_coef": 0})
    assert coefficients.at(9) == {"entropy_coef": 0.5, "kl_coef": 0.0}
    line = coefficients.end_step(9, None, 8)
    assert line == {"entropy_coef": 0.5, "kl_coef": 0.0, "set/entropy_coef": 0.5, "set/kl_coef": 0.0}
    for name, value, message in [
        ("entropy_coeff", 1.0, "did you mean 'entropy_coef'"),
        ("kl_coef", -1.0, "at least 0"),
        ("entropy_coef", float("nan"), "finite"),
        ("clip", "wide", "wide"),
    ]:
        with pytest.raises((ValueError, UnknownOptionError), match=message):
            coefficients.choose({name: value})  # type: ignore[dict-item]
    assert coefficients.at(9) == {"entropy_coef": 0.5, "kl_coef": 0.0}, "nothing of a refused call counts"
    with pytest.raises(ConfigError, match=r"kl_coef=1\.0: kl\.type=null has no KL"):
        Coefficients(options()).choose({"kl_coef": 1})
    resumed = Coefficients(options("schedule.entropy_coef={1: 0.1}", "kl.type=loss"))
    resumed.load_state_dict(json.loads(json.dumps(coefficients.state_dict())))
    assert resumed.at(9) == coefficients.at(9)
    assert coefficients_at(options("schedule.entropy_coef={1: 0.1}"), 9, line) == coefficients.at(9)


def test_options_with_coefficients_are_what_the_loss_reads() -> None:
    changed = options().with_coefficients({"clip": 0.3, "entropy_coef": -0.1, "temperature": 0.5, "loss": 1.0})
    assert (changed.actor.clip, changed.actor.entropy_coef, changed.temperature) == (0.3, -0.1, 0.5)
    assert changed.kl == options().kl


def test_the_weight_of_the_kl_closes_in_on_the_target_by_bounded_steps() -> None:
    kl = adaptive(type="loss", coef=0.1, adaptive_target=2.0, adaptive_horizon=100.0)
    assert kl.end_step(1, 2.2, num_sequences=10) == {"kl_coef": 0.1}
    assert kl.at(2) == {"kl_coef": pytest.approx(0.1 * (1 + 0.1 * 10 / 100))}
    assert kl.end_step(2, 1e9, num_sequences=50) == {"kl_coef": pytest.approx(0.101)}
    assert kl.at(3) == {"kl_coef": pytest.approx(0.101 * 1.1)}
    kl.end_step(3, 0.0, num_sequences=50)
    kl.end_step(4, None, num_sequences=50)  # the policy was frozen: nothing was measured
    assert kl.at(5) == {"kl_coef": pytest.approx(0.101 * 1.1 * 0.9)}


def test_without_a_target_the_weight_of_the_kl_stays_and_is_no_metric() -> None:
    for kl in (adaptive(type="loss"), adaptive(adaptive_target=1.0)):
        assert kl.end_step(1, 5.0, num_sequences=10) == {}
        assert kl.at(2) == {}


def test_a_resumed_run_goes_on_from_the_adapted_weight_and_obeys_a_new_constant() -> None:
    own: dict[str, Any] = {"type": "reward", "coef": 0.1, "adaptive_target": 1.0}
    first, resumed, constant = adaptive(**own), adaptive(**own), adaptive(coef=0.7)
    first.end_step(1, 9.0, num_sequences=100)
    for later in (resumed, constant):
        later.load_state_dict({"coef": first.at(2)["kl_coef"]})  # what earlier versions saved
    assert resumed.at(2) == first.at(2)
    assert constant.at(2) == {}
    resumed.load_state_dict({})  # a checkpoint from before
    assert resumed.at(2) == first.at(2)


@pytest.mark.parametrize("name", ["adaptive_target", "adaptive_horizon"])
def test_a_target_or_horizon_that_is_not_positive_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0"):
        KlOptions(**{name: 0.0})  # type: ignore[arg-type]
