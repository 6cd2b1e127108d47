"""The error tree.

Every error that rlite raises on purpose is an `RliteError` and also one of Python's standard errors, so that
`except ValueError` keeps its meaning. All errors pickle, because they cross process boundaries. A message says what was
expected, what was found, where, and what to do.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class RliteError(Exception):
    """Root of all errors that rlite raises on purpose. The first argument is the message, further ones are data."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


FORKED = (
    "cannot be used in a forked child of the process that called rlite.init(): its workers answer the parent alone. "
    "Start the child afresh (multiprocessing.get_context('spawn'), or subprocess), or make the call in the parent."
)


REBUILD = "Build the engine again."
"""advice for programs at the end of messages; a command replaces it by its own"""


class ConfigError(RliteError, ValueError):
    """An option, a config file or an argument has a value that cannot work."""


class FolderInUse(ConfigError):
    """Another process has a run in the folder at this moment."""


class UnknownOptionError(RliteError, TypeError):
    """An unknown option, most often a typo."""


class ImportFailed(RliteError, ImportError):
    """The user's file or module of `imports` is missing, or raised an exception while it was imported."""


class CallbackError(RliteError, RuntimeError):
    """A callback raised an exception. The message names the callback and holds the traceback in its own code."""


class OwnCodeError(RliteError, RuntimeError):
    """A function of the user's, such as a loss, raised an exception.

    The message names the function, its file and its line, and holds the traceback in the user's own code.
    """


class PlacementError(RliteError, ValueError):
    """Devices were requested that do not exist or are taken."""


class ParameterError(ConfigError):
    """A sampling parameter has a value that cannot work. `name` is its name."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, name)
        self.name = name


class DataError(RliteError, ValueError):
    """A prompt, a row or a file cannot be used; the message names the row and the key."""

    @property
    def place(self) -> str:
        """Name of the part that cannot be used, such as "messages[0]"; "" if the error does not tell."""
        return self.args[1] if len(self.args) > 1 else ""


class StreamedDataError(DataError):
    """A row of streamed data that is read while a run trains cannot be used."""


class EvaluationInterrupted(RliteError, RuntimeError):
    """The caller of an evaluation has asked it to end early. What it has found so far is dropped."""


class RolloutError(RliteError, RuntimeError):
    """Rollouts cannot continue, or one of them cannot be finished; the message has the reason."""


class EngineAborted(RolloutError):
    """The engine ended a completion before its end."""


class NonFiniteError(DataError):
    """A model computes NaN or infinity for one request, though its weights are finite."""


class ResidencyError(RliteError, RuntimeError):
    """The engine is offloaded, released or without weights, so the call cannot run."""


class WeightSyncError(RliteError, RuntimeError):
    """Weights could not be moved completely; the target must not be used until a sync succeeds."""


class StorageError(RliteError, OSError):
    """A file could not be written because of a full disk, a quota or a limit."""


class CheckpointError(RliteError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is missing, cut short or changed since it was written."""


class DivergedError(RliteError, ArithmeticError):
    """Training no longer learns: losses, gradients, or weights that are trained or served, are not finite."""


class WorkerError(RliteError, RuntimeError):
    """A worker can no longer serve calls; the engine has to be built again."""


class WorkerDied(WorkerError):
    """A worker process ended. `workers` names every process that is gone."""

    def __init__(self, message: str, workers: tuple[str, ...] = ()) -> None:
        super().__init__(message, workers)
        self.workers = workers


class SnapshotLost(WorkerError):
    """A part of a snapshot in memory was lost with its node; a checkpoint on disk is left."""


class CallTimeout(RliteError, TimeoutError):
    """A call did not end in time. `late` names the workers that had not answered."""

    def __init__(self, message: str, late: tuple[str, ...] = ()) -> None:
        super().__init__(message, late)
        self.late = late


class JobNotFound(RliteError):
    """A job has no master on the cluster: it has ended, or was never submitted."""


class RemoteTraceback(RliteError):
    """Cause of an exception that a worker raised: the worker's name and its traceback as text."""


def refuse(problems: Mapping[str, object], error: Callable[[str], Exception] = ConfigError) -> None:
    """Check a list of conditions, in order.

    Args:
        problems: whether each message applies.
        error: class of the exception.

    Raises:
        Exception: of the given class, with the first message that applies.
    """
    for message, applies in problems.items():
        if applies:
            raise error(message)


MAX_SHOWN = 400
"""characters of a value in a message"""
_ASYNCIO = Path(os.__file__).parent / "asyncio"
_INTERNAL = (f"{Path(__file__).parent}{os.sep}", f"{_ASYNCIO}{os.sep}", "<frozen importlib")
_INSTALLED = (*_INTERNAL, *(sysconfig.get_path(place) for place in ("stdlib", "purelib", "platlib")))


def own_traceback(error: BaseException) -> str:
    """Return the traceback of an exception as text, without the frames of rlite, asyncio and Python's import system."""
    told = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [told]
    while chain:
        if (link := chain.pop()) is not None:
            frames = [frame for frame in link.stack if not frame.filename.startswith(_INTERNAL)]
            link.stack = traceback.StackSummary.from_list(frames)
            chain += [link.__cause__, link.__context__]
    return "".join(told.format()).rstrip()


def has_own_frames(error: BaseException) -> bool:
    """Return whether an exception was raised in or below code that is neither rlite's nor of an installed package."""
    return not all(frame.filename.startswith(_INSTALLED) for frame in traceback.extract_tb(error.__traceback__))


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Name the function under way if the block raises an exception in the user's own code.

    Args:
        what: description of the function.

    Yields:
        None.

    Raises:
        OwnCodeError: the block raised an exception. The message holds the user's own frames.
    """
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        if isinstance(error, RliteError) or not has_own_frames(error):
            raise
        raise OwnCodeError(f"{what} raised {type(error).__name__}\n{own_traceback(error)}") from error


_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is larger than this process may write (ulimit -f) or than the file system can hold",
}


def why_not_written(error: BaseException) -> str:
    """Return why a write failed; a full disk, an exhausted quota and a file-size limit are named."""
    cause: BaseException | None = error
    while cause is not None:
        told = re.search(r"os error (\d+)", str(cause))
        number = cause.errno if isinstance(cause, OSError) else int(told[1]) if told else None
        if number in _NO_ROOM:
            return f"{_NO_ROOM[number]} ({os.strerror(number)})"
        cause = cause.__cause__ or cause.__context__
    return str(error)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert OSError inside the block to StorageError with the path.

    Yields:
        None.

    Raises:
        StorageError: something inside the block could not be written.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: could not be written: {why_not_written(error)}") from error


def shortened(value: object, limit: int = MAX_SHOWN) -> str:
    """Return a value for a message, without its middle if it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for the end of a message: the nearest known name, or all names if none is near.

    Args:
        name: the unknown name.
        known: the valid names.
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def similar_file(path: Path) -> str:
    """Return a hint for the end of a message on a missing file: a file of nearly the same name beside it, else "".

    Args:
        path: the missing file.
    """
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""
