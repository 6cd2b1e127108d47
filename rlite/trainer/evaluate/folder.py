"""The folder of an evaluation: its lock, and the samples and results that it holds."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from rlite.errors import ConfigError, FolderInUse, writing
from rlite.evaluation.journal import is_journal
from rlite.evaluation.rows import remove_record
from rlite.trainer.evaluate.options import check_name

RESULTS = "results.json"
SAMPLES = "samples"
"""folder of the journals"""
CACHE = "cache"
"""folder of answers to tasks that have not ended"""
LOCK = ".eval.lock"
_OF_OTHERS = {
    "config.yaml": "training run",
    "metrics.jsonl": "training run",
    "state": "training run",
    "config.json": "model",
}
"""files of the folder of a run or a model, where results would hide its curves or count as its files"""


class ModelResults(BaseModel):
    """One model in results.json."""

    model_config = ConfigDict(strict=True)
    model: str
    """folder or hub name"""
    metrics: dict[str, FiniteFloat] = {}


class Results(BaseModel):
    """The content of results.json."""

    model_config = ConfigDict(strict=True)
    models: Annotated[dict[Annotated[str, AfterValidator(check_name)], ModelResults], Field(min_length=1)]
    """by name, which is also that of the journal"""
    comparison: dict[str, Any] | None = None
    settings: dict[str, dict[str, Any]] = {}
    """settings that decided the samples, by the model's name"""


def read_results(file: Path) -> Results:
    """Return the content of results.json.

    Raises:
        ConfigError: it cannot be read, or it is not of an evaluation.
    """
    try:
        return Results.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    except ValidationError as error:
        raise ConfigError(f"{file}: not the results of an evaluation: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a value of JSON, with its place."""
    found = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, found["loc"])), found["msg"]]))


def check_no_run(folder: Path) -> None:
    """Check that a folder does not belong to a training run or a model.

    Args:
        folder: folder of the evaluation; it need not exist.

    Raises:
        ConfigError: the folder belongs to a run or a model.
    """
    for name, whose in _OF_OTHERS.items():
        if (folder / name).exists():
            raise ConfigError(
                f"out={folder}: it is the folder of a {whose}, which holds {name}; an evaluation needs a folder of its "
                f"own, such as out={folder.parent / f'eval-{folder.resolve().name}'}"
            )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other evaluations out of a folder until the end of the block, which removes the lock.

    The lock is of an open file, not of the process (`flock`): it also excludes other evaluations of this process, and
    lasts however often the file is opened and closed. New folders are removed if the block writes nothing.

    Args:
        folder: is made if it does not exist.

    Yields:
        None.

    Raises:
        FolderInUse: another evaluation is under way there.
        StorageError: the folder cannot be written.
    """
    with writing(folder):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    with file:
        in_use = FolderInUse(f"out={folder}: another evaluation is under way there; choose another folder")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise in_use from error
            # a file system without locks
        if not os.fstat(file.fileno()).st_nlink:  # its holder has removed it since it was opened
            raise in_use
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # until a folder that is not empty
                for path in new:
                    path.rmdir()
            with suppress(OSError):  # a file system without locks; else at once, also if a forked child has a copy
                fcntl.flock(file, fcntl.LOCK_UN)


def check_alone(folder: Path, names: Collection[str]) -> None:
    """Check that a folder holds no samples or results of other models than these.

    Args:
        folder: folder of the evaluation; it need not exist.
        names: names of the models that are evaluated.

    Raises:
        ConfigError: it holds those of another model, or a results.json that cannot be read.
    """
    if others := _others(folder, names):
        raise ConfigError(
            f"out={folder}: it holds samples or results of {', '.join(others)}. Choose another folder (out=FOLDER), "
            "replace them (overwrite=true), or compare two models in one command (rlite eval MODEL MODEL2)"
        )


def remove_others(folder: Path, names: Collection[str]) -> None:
    """Remove samples and records of other models than these, and results.json if it contains them.

    Args:
        folder: folder of the evaluation.
        names: names of the models that are evaluated.

    Raises:
        StorageError: a file cannot be removed.
    """
    for name in _others(folder, names, is_lenient=True):
        remove_model(folder, name)
        with writing(folder / SAMPLES):
            (folder / SAMPLES / f"{name}.jsonl").unlink(missing_ok=True)


def remove_model(folder: Path, name: str) -> None:
    """Remove what is made of a model's samples: results.json, the record, and answers to tasks under way.

    Args:
        folder: folder of the evaluation.
        name: name of the model.

    Raises:
        StorageError: a file cannot be removed.
    """
    with writing(folder / RESULTS):
        (folder / RESULTS).unlink(missing_ok=True)
    remove_record(folder, name)
    shutil.rmtree(folder / CACHE / name, ignore_errors=True)


def _others(folder: Path, names: Collection[str], is_lenient: bool = False) -> list[str]:
    """Return the names of other models whose samples or results a folder holds.

    Args:
        folder: folder of the evaluation.
        names: names of the models that are evaluated.
        is_lenient: treat an unreadable results.json as one without names.

    Raises:
        ConfigError: results.json cannot be read.
    """
    journals = sorted((folder / SAMPLES).glob("*.jsonl"))
    found = [path.stem for path in journals if path.is_file() and is_journal(path)]
    try:
        found += read_results(folder / RESULTS).models if (folder / RESULTS).is_file() else []
    except ConfigError:
        if not is_lenient:
            raise
    return [name for name in dict.fromkeys(found) if name not in names]
