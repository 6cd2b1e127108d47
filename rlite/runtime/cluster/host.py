"""Host of workers inside a worker process: it keeps worker objects and serves calls on them.

All launchers use this class. A host never raises. It answers with an `Outcome`, so that an exception keeps its type and
its traceback reaches the caller as text.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import cloudpickle

from rlite.errors import RemoteTraceback, WorkerError, has_own_frames, own_traceback
from rlite.observability import stats_tracker
from rlite.observability.stats_tracker import Recording
from rlite.runtime.cluster.placement import Device

WorkerKey = tuple[str, int]
"""group name and rank"""


@dataclass(frozen=True)
class WorkerContext:
    """A worker's place, passed to it at creation."""

    rank: int
    world_size: int
    device: Device
    torch_device: str
    """the device as this process sees it: "cpu" or "cuda:0" """
    num_threads: int
    world_ranks: tuple[int, ...]
    """ranks of this group's workers in the process's default torch.distributed group"""

    def replica_ranks(self, size: int) -> tuple[int, ...]:
        """Return the part of `world_ranks` of this worker's replica, which has `size` workers."""
        first = self.rank - self.rank % size
        return self.world_ranks[first : first + size]


WorkerFactory = Callable[[WorkerContext], Any]
"""makes a worker from its context, in its process"""


@dataclass(frozen=True)
class Outcome:
    """A call's result or its exception, as a worker process sends it back."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    recorded: Recording | None = None
    """metrics that the call recorded by stats_tracker, if there are some"""
    seconds: float = 0.0
    """duration of the call"""

    def result(self, worker: str) -> Any:
        """Return the value, or raise the remote exception with its own type and the remote traceback as its cause."""
        if self.error is None:
            return self.value
        self.error.__cause__ = RemoteTraceback(f"\n\nraised in worker {worker}:\n{self.trace}")
        raise self.error


@dataclass(frozen=True)
class CallPosition:
    """Position of the call under way in a worker process."""

    place: str = ""
    """ "all_reduce (distributed_c10d.py:3007), called from train_step (policy.py:12)"; empty if there is no call"""
    is_collective: bool = False
    """true if the call communicates, and so may wait for its peers"""
    pid: int = 0
    """id of the process"""
    node: str = ""
    """the launcher's name of the machine, if it says so"""
    stack: str = ""
    """stack of the call's thread, if it was asked for"""


class WorkerHost:
    """Workers of this process by key; applies functions to them, one call at a time."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, Any] = {}
        self._thread: int | None = None
        """id of the thread that runs the current call"""

    def create(self, key: WorkerKey, factory: bytes, context: WorkerContext) -> Outcome:
        """Make the worker `key`.

        Returns an outcome without a value.
        """
        return self._outcome(lambda: self._workers.update({key: cloudpickle.loads(factory)(context)}))

    def call(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Outcome:
        """Call a method of a worker."""
        return self._outcome(lambda: getattr(self._workers[key], method)(*args, **kwargs))

    def apply(self, keys: tuple[WorkerKey | None, ...], function: bytes, args: tuple) -> Outcome:
        """Call a pickled function with this process's workers, then `args`.

        `keys`: the workers; None stays None.
        """
        workers = (None if key is None else self._workers[key] for key in keys)
        return self._outcome(lambda: cloudpickle.loads(function)(*workers, *args))

    def drop(self, key: WorkerKey) -> Outcome:
        """Forget the worker `key` and free its memory.

        Returns an outcome without a value.
        """

        def forget() -> None:
            self._workers.pop(key, None)
            gc.collect()  # modules refer to themselves

        return self._outcome(forget)

    def look(self, with_stack: bool = False) -> CallPosition:
        """Return the position of the call under way. Any thread may ask, except the one that serves calls."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)
        if frame is None:
            return CallPosition(pid=os.getpid())
        stack = "".join(_inside_call(traceback.extract_stack(frame)).format()) if with_stack else ""
        return replace(_position(frame), pid=os.getpid(), stack=stack)

    def put(self, key: WorkerKey, worker: Any) -> None:
        """Take in a worker that was made elsewhere in this process."""
        self._workers[key] = worker

    def only_worker(self) -> Any:
        """Return the worker of a process that has one."""
        (worker,) = self._workers.values()
        return worker

    def aside(self, key: WorkerKey, method: str, args: tuple, kwargs: dict) -> Outcome:
        """Call a worker's method from a thread beside the thread that serves calls. The method locks what it shares."""
        return _answer(lambda: getattr(self._workers[key], method)(*args, **kwargs))

    def _outcome(self, act: Callable[[], Any]) -> Outcome:
        started, self._thread = time.perf_counter(), threading.get_ident()
        with stats_tracker.apart() as recording:
            outcome = _answer(act)
        self._thread = None
        return replace(outcome, recorded=recording if recording.stats else None, seconds=time.perf_counter() - started)


def _answer(act: Callable[[], Any]) -> Outcome:
    parent = os.getpid()
    try:
        try:
            return Outcome(act())
        finally:
            if os.getpid() != parent:  # a process that the call forked must not answer in its parent's name
                _end_child(sys.exc_info()[1])
    except Exception as raised:  # the boundary: everything a worker raises belongs to the caller
        is_own = has_own_frames(raised)
        trace = f"{own_traceback(raised)}\n(without the frames of rlite)" if is_own else traceback.format_exc()
        return Outcome(trace=trace, error=_portable(raised))


def _position(frame: FrameType) -> CallPosition:
    frames = [
        inner for inner, _ in traceback.walk_stack(frame) if not inner.f_code.co_filename.endswith("torch/_ops.py")
    ]
    caller = next((outer for outer in frames if "/torch/" not in outer.f_code.co_filename), frames[0])
    place = _name(frames[0]) if caller is frames[0] else f"{_name(frames[0])}, called from {_name(caller)}"
    return CallPosition(place, is_collective="/torch/distributed/" in frames[0].f_code.co_filename)


def _inside_call(stack: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames inside the worker's method, without those of the host."""
    last = max((index for index, frame in enumerate(stack) if frame.filename == __file__), default=-1)
    return traceback.StackSummary.from_list(stack[last + 1 :])


def _name(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _end_child(raised: BaseException | None) -> NoReturn:
    """End a forked process without the interpreter's own clean-up, which waits for threads that do not exist."""
    code = raised.code if isinstance(raised, SystemExit) else 0 if raised is None else 1
    if raised is not None and not isinstance(raised, SystemExit):
        traceback.print_exception(raised)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _portable(error: Exception) -> Exception:
    """Return the exception if it survives pickling, else a WorkerError with its type and message."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    with suppress(Exception):  # any class of the user's may fail to pickle, in any way
        if type(cloudpickle.loads(cloudpickle.dumps(error))) is type(error):
            return error
    return WorkerError(f"{type(error).__name__}: {error}")
