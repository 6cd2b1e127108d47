from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from rlite.runtime.event_loop import LoopThread


def test_a_workflow_that_blocks_the_loop_is_pointed_at(caplog: pytest.LogCaptureFixture) -> None:
    def compute_instead_of_await() -> None:
        time.sleep(1)

    loop = LoopThread("blocked")
    loop.look_interval = 0.1
    changed = threading.Condition()
    loop.call(compute_instead_of_await)
    with caplog.at_level(logging.WARNING), changed:
        loop.look()
        changed.wait(loop.look_interval)
        loop.look()
    loop.stop()
    loop.join()
    assert "blocked the rollouts' event loop" in caplog.text
    assert "compute_instead_of_await" in caplog.text


def test_a_workflow_that_swallows_its_cancellation_is_pointed_at(caplog: pytest.LogCaptureFixture) -> None:
    is_running, is_over = threading.Event(), False

    async def sleep_on() -> None:
        while not is_over:
            try:
                is_running.set()
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def episode() -> None:
        await sleep_on()

    loop = LoopThread("stubborn")
    loop.close_timeout = 0.1
    loop.call(lambda: loop.start_task(episode()))
    assert is_running.wait(timeout=100)
    with caplog.at_level(logging.WARNING):
        loop.stop()
        loop._thread.join(timeout=100)  # `join` gives up after twice the limit
    is_over = True
    assert "1 task did not end in 0.1 s" in caplog.text
    assert "in sleep_on" in caplog.text
