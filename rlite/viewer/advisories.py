"""Advice on a run, with its reasons. Advice changes nothing in the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import TypedDict

from rlite.trainer.run.folder import LEARNING
from rlite.viewer.metrics import PHASE, MetricsLog

RECENT = 10
"""steps that count as now"""
MAX_UNIFORM = 0.5
MAX_TRUNCATED = 0.25
MAX_DRIFT = 0.1
"""nats per token; as `rlite.services.console.alarms.DRIFT_LIMIT`"""
MAX_LOST = 0.05
STALL = 6.0
"""times its median"""
MIN_PHASE = 0.05
"""share of a step below which a phase is too short to matter"""
MIN_STEPS = 4
"""steps of a phase before which its median says nothing: the long one, and three others"""
MAX_STEPS = 100
"""last steps of a phase, over which its median is taken"""
WARM_UP = 2
"""first steps of a phase, in which programs compile and caches fill"""


class Advice(TypedDict):
    """One advisory."""

    level: str
    """alarm or warning"""
    title: str
    reason: str
    metric: str
    """metric that shows it; empty for the ledger"""


def advisories(
    metrics: MetricsLog, statuses: Mapping[str, int], num_steps: int, is_uniform_useless: bool
) -> list[Advice]:
    """Return the advisories of a run, alarms first.

    Args:
        metrics: metrics of the run.
        statuses: number of rollouts by status, in the last recorded steps.
        num_steps: number of these steps.
        is_uniform_useless: the run learns nothing from a group of equal rewards.
    """
    found = [
        *(_uniform(metrics) if is_uniform_useless else ()),
        *_truncated(metrics),
        *_drift(metrics),
        *_stalls(metrics),
        *_lost(statuses, num_steps),
    ]
    return sorted(found, key=lambda advice: advice["level"] != "alarm")


def do_equal_rewards_teach_nothing(folder: Path) -> bool:
    """Return whether a run says that it learns nothing from a group of equal rewards."""
    try:
        return json.loads((folder / LEARNING).read_bytes())["equal_rewards"]["can_teach"] is False
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _uniform(metrics: MetricsLog) -> Iterator[Advice]:
    values = metrics.recent("uniform_groups", RECENT)
    if values and (share := fmean(values)) > MAX_UNIFORM:
        yield Advice(
            level="warning",
            title="Most groups teach nothing",
            reason=f"In {share:.0%} of the groups of the last {len(values)} steps all rewards are equal. "
            "The prompts may be too easy or too hard, or the reward too coarse.",
            metric="uniform_groups",
        )


def _truncated(metrics: MetricsLog) -> Iterator[Advice]:
    values = metrics.recent("truncated", RECENT)
    if values and (share := fmean(values)) > MAX_TRUNCATED:
        yield Advice(
            level="warning",
            title="Many answers are cut off",
            reason=f"{share:.0%} of the answers of the last {len(values)} steps reached a limit. "
            "Raise max_new_tokens, or reward answers that end.",
            metric="truncated",
        )


def _drift(metrics: MetricsLog) -> Iterator[Advice]:
    values = metrics.recent("logprob_drift", RECENT)
    if values and (drift := max(values)) > MAX_DRIFT:
        yield Advice(
            level="alarm",
            title="Trainer and engine disagree",
            reason=f"Their log-probabilities differed by up to {drift:.3f} nats per token in the last {len(values)} "
            f"steps (limit {MAX_DRIFT}). The engine does not serve the policy, or the rollouts are too old.",
            metric="logprob_drift",
        )


def _stalls(metrics: MetricsLog) -> Iterator[Advice]:
    whole = metrics.series.get("seconds", {})
    for name in metrics.series:
        if not name.startswith(PHASE):
            continue
        times = {step: value for step, value in sorted(metrics.series[name].items()) if value is not None}
        if len(times) < MIN_STEPS or not (usual := median([*times.values()][-MAX_STEPS:])):
            continue
        recent = {step for step in islice(times, WARM_UP, None) if step > metrics.last_step - RECENT}
        long = {step: times[step] for step in recent if times[step] > STALL * usual}
        slow = [step for step, value in long.items() if value > MIN_PHASE * (whole.get(step) or value)]
        if slow:
            worst = max(slow, key=times.__getitem__)
            often = f"in {len(slow)} of the last {RECENT} steps, worst" if len(slow) > 1 else "once,"
            yield Advice(
                level="warning",
                title=f"A phase stalled: {name.removeprefix(PHASE)}",
                reason=f"It took over {STALL:.0f} times its median of {usual:.2g} s {often} in step {worst}: "
                f"{times[worst]:.3g} s. A machine, a reward or a disk may have been slow.",
                metric=name,
            )


def _lost(statuses: Mapping[str, int], num_steps: int) -> Iterator[Advice]:
    broken = {status: statuses.get(status, 0) for status in ("failed", "timed_out", "reward_killed", "aborted")}
    total = sum(statuses.values())
    if total and sum(broken.values()) > MAX_LOST * total:
        told = ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in broken.items() if count)
        where = f" of the last {num_steps} steps" if num_steps > 1 else ""
        yield Advice(
            level="warning",
            title="Many rollouts were lost",
            reason=f"{told} of {total:,} rollouts{where}. The ledger lists them by reason.",
            metric="",
        )
