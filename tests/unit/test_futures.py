"""Results of other threads' futures arrive in the event loop, in one wake-up if they come together."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from rlite.runtime.event_loop import result_of


def test_results_and_exceptions_arrive() -> None:
    async def main() -> list[object]:
        futures: list[Future[int]] = [Future() for _ in range(100)]

        def end() -> None:
            for number, future in enumerate(futures):
                if number % 10 == 7:
                    future.set_exception(ValueError(number))
                else:
                    future.set_result(number)

        thread = threading.Thread(target=end)
        waiting = asyncio.gather(*map(result_of, futures), return_exceptions=True)
        await asyncio.sleep(0)
        thread.start()
        found = await asyncio.wait_for(waiting, 30)
        thread.join()
        return list(found)

    found = asyncio.run(main())
    assert [repr(one) for one in found] == [f"ValueError({i})" if i % 10 == 7 else repr(i) for i in range(100)]


def test_many_threads_lose_nothing() -> None:
    async def main() -> int:
        futures: list[Future[int]] = [Future() for _ in range(4000)]
        threads = [
            threading.Thread(target=lambda first=first: [one.set_result(1) for one in futures[first::4]])
            for first in range(4)
        ]
        for thread in threads:
            thread.start()
        total = sum(await asyncio.wait_for(asyncio.gather(*map(result_of, futures)), 30))
        for thread in threads:
            thread.join()
        return total

    assert asyncio.run(main()) == 4000


def test_futures_that_end_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        wakes: list[object] = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (wakes.append(args), wake(*args))[1])
        futures: list[Future[int]] = [Future() for _ in range(50)]
        waiting = asyncio.gather(*map(result_of, futures))
        await asyncio.sleep(0)
        for future in futures:
            future.set_result(1)
        await waiting
        return len(wakes)

    assert asyncio.run(main()) == 1


def test_cancelling_the_task_cancels_the_future_and_the_reverse() -> None:
    async def main() -> None:
        future: Future[int] = Future()
        task = asyncio.ensure_future(result_of(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert future.cancelled()
        other: Future[int] = Future()
        waiting = asyncio.ensure_future(result_of(other))
        await asyncio.sleep(0)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 30)
        with pytest.raises(CancelledError):
            other.result()

    asyncio.run(main())


def test_a_future_that_ends_after_its_loop_has_closed_raises_nothing() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(result_of(future))), 0.01)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    future.set_result(1)
