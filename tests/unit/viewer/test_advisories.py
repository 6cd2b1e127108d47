from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlite.assembly.observers import LearningFacts
from rlite.trainer.rl.options import PpoConfig
from rlite.viewer.metrics import Advice, MetricsLog, advisories, do_equal_rewards_teach_nothing

CALM = {"uniform_groups": 0.5, "truncated": 0.25, "logprob_drift": 0.1, "seconds": 10.0, "seconds_sync": 1.0}


def log(folder: Path, **changes: float) -> MetricsLog:
    """Nine calm steps and one with changes."""
    return log_of(folder, [{"step": step, **CALM} for step in range(1, 10)] + [{"step": 10, **CALM, **changes}])


def log_of(folder: Path, rows: list[dict[str, float]]) -> MetricsLog:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = MetricsLog(folder / "metrics.jsonl")
    made.refresh()
    return made


def told(metrics: MetricsLog, statuses: dict[str, int] | None = None) -> list[Advice]:
    return advisories(metrics, statuses or {}, 10, is_uniform_useless=True)


def test_a_calm_run_has_no_advice(tmp_path: Path) -> None:
    assert told(log(tmp_path), {"trained": 95, "failed": 5}) == []


@pytest.mark.parametrize(
    ("change", "title", "reason"),
    [
        ({"uniform_groups": 0.6}, "Most groups teach nothing", "51% of the groups of the last 10 steps"),
        ({"truncated": 0.9}, "Many answers are cut off", "32% of the answers"),
        ({"logprob_drift": 0.2}, "Trainer and engine disagree", "0.200 nats per token"),
        ({"seconds_sync": 6.5}, "A phase stalled: sync", "6 times its median of 1 s once, in step 10: 6.5 s"),
    ],
)
def test_each_threshold_has_an_advice_with_its_reason(
    tmp_path: Path, change: dict[str, float], title: str, reason: str
) -> None:
    [advice] = told(log(tmp_path, **change))
    assert advice["title"] == title
    assert reason in advice["reason"]
    assert advice["metric"] == next(iter(change))


def test_a_phase_that_is_short_beside_its_step_does_not_stall(tmp_path: Path) -> None:
    assert told(log(tmp_path, seconds_sync=6.5, seconds=200.0)) == []


@pytest.mark.parametrize(("num_steps", "number"), [(4, 1), (3, 0)])
def test_a_short_phase_stalls_beside_three_other_steps(tmp_path: Path, num_steps: int, number: int) -> None:
    times = {step: 0.9 if step == num_steps else 0.1 for step in range(1, num_steps + 1)}
    rows = [{"step": step, "seconds": 2.0, "seconds_sync": time} for step, time in times.items()]
    assert len(told(log_of(tmp_path, rows))) == number


@pytest.mark.parametrize(("slow", "is_told"), [(1, False), (30, False), (31, True), (40, True)])
def test_a_stall_is_told_while_it_is_new_and_never_of_the_first_steps(tmp_path: Path, slow: int, is_told: bool) -> None:
    rows = [{"step": step, "seconds": 90.0, "seconds_sync": 80.0 if step == slow else 5.0} for step in range(1, 41)]
    assert bool(told(log_of(tmp_path, rows))) == is_told
    assert told(log_of(tmp_path, rows[:9])) == [], "its first steps are slow"


@pytest.mark.parametrize(
    "options",
    [
        {},
        *({"adv": {"estimator": name}} for name in ("gae", "dr_grpo", "grpo", "rloo", "normalized", "gpg", "opo")),
        {"adv": {"estimator": "pass_at_k"}},
        {"adv": {"estimator": "normalized", "options": {"mean": "batch"}}},
        {"adv": {"estimator": "normalized", "options": {"mean": None}}},
        {"adv": {"estimator": "normalized", "options": {"std": "group"}}},
        {"adv": {"global_norm": True}},
        {"adv": {"gamma": 0.9}},
        *({"kl": {"type": place}} for place in ("reward", "loss", "advantage")),
        {"train_data": {"responses_per_prompt": 1}},
    ],
)
def test_equal_rewards_are_no_matter_if_the_run_learns_from_them(tmp_path: Path, options: dict[str, Any]) -> None:
    given = PpoConfig(actor={"model_name": "x"}, **options)  # type: ignore[arg-type]
    metrics = log(tmp_path, uniform_groups=1.0)
    run: Any = SimpleNamespace(folder=tmp_path)
    LearningFacts(given.equal_rewards).on_start(run, {})
    is_useless = do_equal_rewards_teach_nothing(tmp_path)
    assert bool(advisories(metrics, {}, 10, is_useless)) == is_useless == (not given.equal_rewards.can_teach)


def test_lost_rollouts_lead_to_the_ledger(tmp_path: Path) -> None:
    [advice] = told(log(tmp_path), {"trained": 90, "failed": 6, "timed_out": 4})
    assert advice["reason"].startswith("6 failed, 4 timed out of 100 rollouts of the last 10 steps")


def test_alarms_come_first(tmp_path: Path) -> None:
    found = told(log(tmp_path, truncated=0.9, logprob_drift=0.2))
    assert [advice["level"] for advice in found] == ["alarm", "warning"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "link", "nested", "long"])
def test_a_hostile_answer_about_equal_rewards_gives_no_advice_and_blocks_nothing(tmp_path: Path, kind: str) -> None:
    path, useless = tmp_path / "run" / "learning.json", '{"equal_rewards": {"can_teach": false}}'
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "outside.json").write_text(useless)
        path.symlink_to(tmp_path / "outside.json")
    else:
        path.write_text('{"a":' * 20_000 if kind == "nested" else f'{{"a": "{"x" * (1 << 17)}", {useless[1:]}')
    assert not do_equal_rewards_teach_nothing(path.parent)
