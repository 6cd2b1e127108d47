"""The metrics of a run, read from `metrics.jsonl` while it grows, and advice on the run with its reasons."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypedDict

from rlite import files
from rlite.trainer.run.folder import LEARNING
from rlite.trainer.run.observer import DRIFT_LIMIT
from rlite.wording import counted

FILE = "metrics.jsonl"
MAX_STEP = 2**31 - 1
"""largest step of a record, whose steps are 32-bit integers"""
MAX_POINTS = 2000
"""largest number of points of one series on a page"""
MAX_NAMES = 20_000
"""largest number of metrics"""
SPEED = "tokens_per_second"
PACE = 20
"""last steps whose mean length tells how long the others will take"""
PHASE = "seconds_"
"""prefix of the metrics of phases"""


class MetricsLog:
    """Series of metrics: name -> step -> value. Values that are not finite are None.

    Args:
        path: the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = files.GrowingFile(path)
        self._begin()

    def _begin(self) -> None:
        self.series: dict[str, dict[int, float | None]] = {}
        self.num_torn = 0
        """lines that are no metrics"""
        self._failure = ""
        self._has_more = False
        self.first_step, self.last_step = MAX_STEP, 0

    def refresh(self) -> bool:
        """Read the lines that are new. A file that was replaced is read again.

        Returns:
            True if there are new lines.
        """
        has_news, before, self._failure = False, self._failure, ""
        try:
            for line in self._file.new_lines(self._begin):
                has_news = True
                self._add(line)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._failure = f"{FILE}: {error.strerror or error}"
        return has_news or self._failure != before

    @property
    def problems(self) -> list[str]:
        """Reasons why some of the metrics are not shown."""
        torn = f"{FILE}: {counted(self.num_torn, 'line')} without metrics" if self.num_torn else ""
        more = f"{FILE}: it has more than {MAX_NAMES} metrics; the others are not shown" if self._has_more else ""
        return [text for text in (self._failure, torn, more) if text]

    def points(self, name: str) -> dict[str, list[Any]]:
        """Return the steps and values of one metric. Of a long run, the newest step of each stride is kept."""
        kept = {self._stride_of(step): (step, value) for step, value in sorted(self.series.get(name, {}).items())}
        return {"steps": [step for step, _ in kept.values()], "values": [value for _, value in kept.values()]}

    def phases(self) -> dict[str, Any]:
        """Return the seconds of each phase, which belong on top of each other. Of a long run, the mean of each stride.

        Returns:
            The steps, the seconds of each phase at each of them, and the number of steps of a stride.
        """
        own = {name: values for name, values in self.series.items() if name.startswith(PHASE)}
        steps = sorted({step for values in own.values() for step in values})
        last, numbers = {self._stride_of(step): step for step in steps}, Counter(map(self._stride_of, steps))
        seconds = {}
        for name, values in own.items():
            sums: defaultdict[int, float] = defaultdict(float)
            for step, value in values.items():
                sums[self._stride_of(step)] += value or 0.0
            seconds[name.removeprefix(PHASE)] = [sums[stride] / numbers[stride] for stride in last]
        return {"steps": list(last.values()), "seconds": seconds, "stride": self._stride}

    def clock(self) -> dict[str, Any]:
        """Return the seconds and the trained tokens up to each step; of a long run, up to the newest of each stride.

        Returns:
            The steps, seconds of steps and evaluations, tokens, and `pace`, the seconds of a recent step.
        """
        taken, judged, speed = (self.series.get(name, {}) for name in ("seconds", "seconds_evaluate", SPEED))
        steps = sorted(step for step in {*taken, *judged} if step >= 0)
        seconds = [(taken.get(step) or 0.0) + (judged.get(step) or 0.0) for step in steps]
        tokens = [(taken.get(step) or 0.0) * (speed.get(step) or 0.0) for step in steps]
        sums = zip(steps, accumulate(seconds), accumulate(tokens), strict=True)
        kept = [*{self._stride_of(place[0]): place for place in sums}.values()]
        at, spent, made = ([place[column] for place in kept] for column in range(3))
        return {"steps": at, "seconds": spent, "tokens": made, "pace": fmean(seconds[-PACE:]) if seconds else None}

    @property
    def _stride(self) -> int:
        """Steps of which a page shows one; the same for all metrics."""
        return max(1, math.ceil((self.last_step - self.first_step + 1) / MAX_POINTS))

    def _stride_of(self, step: int) -> int:
        return (self.last_step - step) // self._stride

    def recent(self, name: str, number: int) -> list[float]:
        """Return the finite values of the last steps that have a metric."""
        values = [value for _, value in sorted(self.series.get(name, {}).items())[-number:]]
        return [value for value in values if value is not None]

    def _add(self, line: bytes) -> None:
        try:
            row: Mapping[str, Any] = json.loads(line)
            if abs(step := int(row["step"])) > MAX_STEP:
                raise ValueError(f"step={step}")
            values = {name: _finite(value) for name, value in row.items() if name != "step"}
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            self.num_torn += 1
            return
        self.first_step, self.last_step = min(self.first_step, step), max(self.last_step, step)
        for name, value in values.items():
            if name in self.series or len(self.series) < MAX_NAMES:
                self.series.setdefault(name, {})[step] = value
            else:
                self._has_more = True


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


RECENT = 10
"""steps that count as now"""
MAX_UNIFORM = 0.5
MAX_TRUNCATED = 0.25
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


MAX_LEARNING = 1 << 16
"""bytes of a run's `learning.json` that are read; a longer one is no JSON"""


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
    return [*_drift(metrics), *_shares(metrics, is_uniform_useless), *_stalls(metrics), *_lost(statuses, num_steps)]


def do_equal_rewards_teach_nothing(folder: Path) -> bool:
    """Return whether a run says that it learns nothing from a group of equal rewards."""
    try:
        with files.reading(folder / LEARNING, folder) as file:
            return json.loads(file.read(MAX_LEARNING))["equal_rewards"]["can_teach"] is False
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _shares(metrics: MetricsLog, is_uniform_useless: bool) -> Iterator[Advice]:
    """Yield the advisories on shares that are large on average."""
    uniform = "In {:.0%} of the groups of the last {} steps all rewards are equal. "
    uniform += "The prompts may be too easy or too hard, or the reward too coarse."
    cut = "{:.0%} of the answers of the last {} steps reached a limit. "
    cut += "Raise max_new_tokens, or reward answers that end."
    rules = [("uniform_groups", MAX_UNIFORM, "Most groups teach nothing", uniform)] if is_uniform_useless else []
    rules.append(("truncated", MAX_TRUNCATED, "Many answers are cut off", cut))
    for metric, most, title, reason in rules:
        values = metrics.recent(metric, RECENT)
        if values and (share := fmean(values)) > most:
            yield Advice(level="warning", title=title, reason=reason.format(share, len(values)), metric=metric)


def _drift(metrics: MetricsLog) -> Iterator[Advice]:
    values = metrics.recent("logprob_drift", RECENT)
    if values and (drift := max(values)) > DRIFT_LIMIT:
        reason = f"Their log-probabilities differed by up to {drift:.3f} nats per token in the last {len(values)} "
        reason += f"steps (limit {DRIFT_LIMIT}). The engine does not serve the policy, or the rollouts are too old."
        yield Advice(level="alarm", title="Trainer and engine disagree", reason=reason, metric="logprob_drift")


def _stalls(metrics: MetricsLog) -> Iterator[Advice]:
    whole = metrics.series.get("seconds", {})
    for name in metrics.series:
        if not name.startswith(PHASE):
            continue
        times = {step: value for step, value in sorted(metrics.series[name].items()) if value is not None}
        if len(times) < MIN_STEPS or not (usual := median([*times.values()][-MAX_STEPS:])):
            continue
        recent = [step for step in islice(times, WARM_UP, None) if step > metrics.last_step - RECENT]
        long = [step for step in recent if times[step] > STALL * usual]
        slow = [step for step in long if times[step] > MIN_PHASE * (whole.get(step) or times[step])]
        if slow:
            worst = max(slow, key=times.__getitem__)
            often = f"in {len(slow)} of the last {RECENT} steps, worst" if len(slow) > 1 else "once,"
            reason = f"It took over {STALL:.0f} times its median of {usual:.2g} s {often} in step {worst}: "
            reason += f"{times[worst]:.3g} s. A machine, a reward or a disk may have been slow."
            title = f"A phase stalled: {name.removeprefix(PHASE)}"
            yield Advice(level="warning", title=title, reason=reason, metric=name)


def _lost(statuses: Mapping[str, int], num_steps: int) -> Iterator[Advice]:
    broken = {status: statuses.get(status, 0) for status in ("failed", "timed_out", "reward_killed", "aborted")}
    total = sum(statuses.values())
    if total and sum(broken.values()) > MAX_LOST * total:
        told = ", ".join(f"{count:,} {status.replace('_', ' ')}" for status, count in broken.items() if count)
        where = f" of the last {num_steps} steps" if num_steps > 1 else ""
        reason = f"{told} of {total:,} rollouts{where}. The ledger lists them by reason."
        yield Advice(level="warning", title="Many rollouts were lost", reason=reason, metric="")
