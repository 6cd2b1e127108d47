"""Threads for long texts, so that one long message does not freeze the episodes that share an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

T = TypeVar("T")

SHORT_TEXT = 16_384
"""characters that are worked on in the event loop: that takes milliseconds, and keeps requests in their order"""
NUM_THREADS = 4
"""long texts that are worked on at the same time; further ones wait"""


async def beside_loop(num_characters: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, called at once for a short text, else in a thread of a bounded pool.

    Args:
        num_characters: length of the text.
        function: synchronous and thread-safe.
        *arguments: its arguments.
    """
    if num_characters <= SHORT_TEXT:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_pool(os.getpid()), partial(function, *arguments))


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Return the threads of a process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="rlite-text")
