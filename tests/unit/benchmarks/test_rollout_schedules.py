"""Random schedules of a job keep its promises, and bugs of the kinds that real systems had are found."""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout_schedules import Plant, Violation, run_schedule
from rlite.rollout import LLMResponse, RolloutLedger, trajectory
from rlite.rollout.collector import ahead, calls, collector, runner
from rlite.rollout.collector.lost_groups import Loss
from rlite.rollout.collector.runner import Episodes, GroupRunner

NUM = 2000
"""schedules of the gate"""


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Leave what torch has loaded out of garbage collections, and thousands of expected warnings out of the log."""
    logging.disable(logging.WARNING)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if the machine has one: a disk that is really synced takes most of the time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "run"


@contextmanager
def substituted(module: Any, name: str, value: Any) -> Iterator[None]:
    """Let a module use another class or function."""
    kept = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, kept)


# -- bugs of real systems ------------------------------------------------------------------------------------------


def restore_without_running(queue: Any, state: Mapping[str, Any], *arguments: Any) -> None:
    """Groups that ran when the state was saved are forgotten at a resume."""
    groups = [each for each in state["groups"] if each["trajectories"] is not None or each["version"] is None]
    restore_queue(queue, {**state, "groups": groups}, *arguments)


restore_queue = calls.restore_queue


class ForgetsLate(GroupRunner):
    """The queue forgets a consumed group at the next batch, so a checkpoint in between still holds it as ready."""

    held: Any = None

    def consume(self, queue: Any, groups: Sequence[Any]) -> None:
        if self.held is not None:
            queue.groups.pop(self.held.id, None)
        super().consume(queue, groups)
        self.held = groups[-1]
        queue.groups[self.held.id] = self.held


class AdmitsEarly(RolloutLedger):
    """Admission counts with the version after the next update."""

    def room(self, version: int) -> int:
        return super().room(version + 1)


class WakesTooFew(GroupRunner):
    """The end of a lost group wakes no caller, and starts no other group."""

    is_losing = False

    def _settle(self, queue: Any, group: Any, end: Any, stopping: Any = None) -> None:
        self.is_losing = isinstance(end, Loss)
        super()._settle(queue, group, end, stopping)
        self.is_losing = False

    def _admit(self) -> None:
        if not self.is_losing:
            super()._admit()


class Forgiving(Episodes):
    """A failed episode counts as one with reward 0."""

    async def _attempt(self, inference: Any) -> Any:
        try:
            return await super()._attempt(inference)
        except LookupError:
            version = self.engine.get_version()
            response = LLMResponse(
                input_tokens=[1, self.group.data["number"]],
                output_tokens=[5],
                output_logprobs=[-1.0],
                output_versions=[version],
                stop_reason="stop",
                latency=0.0,
                ttft=0.0,
            )
            return trajectory(response, reward=0.0)


BUGS: Mapping[str, tuple[Any, str, Any, Sequence[str]]] = {
    "a group is lost at resume": (calls, "restore_queue", restore_without_running, ["nowhere in the record"]),
    "a group is consumed twice": (
        *(collector, "GroupRunner", ForgetsLate),
        ["more than once", "differ between checkpoint and record"],
    ),
    "groups are admitted too early": (ahead, "RolloutLedger", AdmitsEarly, ["more groups than"]),
    "a wake-up is lost": (collector, "GroupRunner", WakesTooFew, ["lost wake-up", "had not ended"]),
    "a failure counts as zero": (runner, "Episodes", Forgiving, ["with reward 0.0"]),
}
"""module, name and substitute; what the checker may say"""


def first_violation(plant: Plant, folder: Path) -> str:
    """The first violation; "" if no schedule finds one."""
    for seed in range(NUM):
        try:
            run_schedule(seed, folder, plant)
        except Violation as violation:
            return str(violation)
    return ""


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str, disk: Path) -> None:
    module, name, value, told = BUGS[bug]
    violation = first_violation(lambda: substituted(module, name, value), disk)
    assert any(each in violation for each in told), violation
    print(f"{bug}: {violation}")


def test_a_seed_always_gives_the_same_run(disk: Path) -> None:
    for seed in (3, 17, 44):
        first, second = (run_schedule(seed, disk) for _ in range(2))
        assert first.log == second.log
        assert first.record == second.record


def test_every_schedule_keeps_the_promises_of_a_job(disk: Path) -> None:
    failed = []
    for seed in range(NUM):
        try:
            run_schedule(seed, disk)
        except Violation as violation:
            failed.append(str(violation))
    assert not failed, "again: python -m benchmarks.rollout_schedules --only SEED"
