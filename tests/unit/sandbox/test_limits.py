"""The decision that a sandbox process is over time is a function of the process and the time."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import pytest

from rlite.runtime.sandbox.calls import Call, Code
from rlite.runtime.sandbox.child import READY
from rlite.runtime.sandbox.pool import LOAD_TIMEOUT, Worker, seconds_to_next_check, time_failure


def worker(**state: Any) -> Worker:
    return Worker(cast(Any, None), cast(Any, None), None, -1, since=100.0, **state)


def call() -> Call:
    return Call(Code(b"key", b"blob", "the reward"), b"", timeout=2.0)


def test_a_reward_is_killed_when_it_has_computed_for_its_time() -> None:
    busy = worker(is_ready=True, is_computing=True, calls=deque([call()]))
    assert time_failure(busy, 101.5) is None
    assert seconds_to_next_check([busy], 101.5) == 0.5
    failure = time_failure(busy, 102.0)
    assert failure is not None
    assert failure == ("timeout", "the reward ran for more than 2 s; its process was killed")


def test_a_process_that_does_not_start_in_time_fails_no_call() -> None:
    starting = worker()
    assert time_failure(starting, 100.0 + LOAD_TIMEOUT - 1) is None
    failure = time_failure(starting, 100.0 + LOAD_TIMEOUT)
    assert failure is not None
    assert failure[0] == ""


def test_an_idle_process_has_no_limit() -> None:
    idle = worker(is_ready=True)
    assert time_failure(idle, 1e9) is None
    assert seconds_to_next_check([idle], 1e9) is None


def test_protections_that_the_kernel_lacks_are_told_once_and_not_for_each_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for lacking in ("", "Landlock", "Landlock"):
        starting = worker()
        assert starting.take(["ready", 0, lacking]) == READY
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no Landlock here"]
