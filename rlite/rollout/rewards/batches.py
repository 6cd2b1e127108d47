"""Rewards of several completions at a time: calls that are joined, and their scores.

Sandbox processes load this module: it imports no torch.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlite.rollout.rewards.score import Score, read_score, score, text_of_value
from rlite.runtime.sandbox.child import printable

Result = float | str
Rows = dict["asyncio.Future[Result]", dict[str, Any]]
"""calls of a batch: keyword arguments by the future of the result"""


class JoinedCalls:
    """Joins calls that come one after another into batches. If a batch fails, its calls are repeated one by one.

    `size`: maximum number of calls in a batch; None: calls are not joined. `wait`: seconds that the first call of a
    batch waits for others.
    """

    def __init__(
        self, call: Callable[[Sequence[Mapping[str, Any]]], Awaitable[Sequence[Result]]], size: int | None, wait: float
    ) -> None:
        self._call, self.size, self._wait = call, size, wait
        self._joining: weakref.WeakKeyDictionary[Any, Rows] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def result(self, keywords: dict[str, Any]) -> Result:
        """Return the result of one call."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()
        rows = self._joining.setdefault(loop, {})
        rows[result] = keywords
        if len(rows) == 1:
            loop.call_later(self._wait, self._send, loop, rows)
        if len(rows) == self.size:
            self._send(loop, rows)
        return await result

    def _send(self, loop: asyncio.AbstractEventLoop, rows: Rows) -> None:
        if self._joining.get(loop) is rows:  # else it was full before its time was up
            del self._joining[loop]
            task = loop.create_task(self._run(rows))
            self._tasks.add(task)  # the loop itself holds tasks weakly
            task.add_done_callback(self._tasks.discard)

    async def _run(self, rows: Rows) -> None:
        rows = {result: keywords for result, keywords in rows.items() if not result.done()}  # else it was cancelled
        if not rows:
            return
        found: Sequence[Result | BaseException]
        try:
            found = await self._call([*rows.values()])
        except BaseException as error:  # whatever it is, the callers wait for it
            task = asyncio.current_task()
            if len(rows) > 1 and not (task and task.cancelling()):
                await asyncio.gather(*(self._run({result: rows[result]}) for result in rows))
                return
            found = [error] * len(rows)
        for result, value in zip(rows, found, strict=True):
            if result.done():
                continue
            if isinstance(value, BaseException):
                result.set_exception(value)
            else:
                result.set_result(value)


def score_batch(values: Any) -> str | list[Score]:
    """Return the scores of a batch function's result."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        return f"{text_of_value(values)} for a batch, where a list of numbers was expected"
    return [score(value) for value in values]


def read_batch(answer: Any, count: int, names: Sequence[str] = ()) -> list[float | str] | str | None:
    """Return the rewards in the answer of a batch, each as by `read_score`.

    Returns the rewards, or the text that says why there are none. None if the answer has another form.
    """
    if isinstance(answer, str):
        return printable(answer)
    if not isinstance(answer, list):
        return None
    if len(answer) != count:
        return f"{len(answer)} values for a batch of {count}"
    results = [read_score(one, names) for one in answer]
    return None if None in results else results  # type: ignore[return-value]
