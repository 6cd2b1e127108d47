"""The folder of an evaluation: its lock, and the samples and results that it holds.

Samples that were written earlier are checked before they count: samples of other settings, or of other code that
scores, are not mixed with them.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import inspect
import json
import marshal
import os
import secrets
import shutil
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from rlite import config
from rlite.assembly.commands.generate import check_writes, model_folder
from rlite.assembly.evaluate.options import EvalConfig, check_name
from rlite.data.chat.template import CLOCK
from rlite.errors import ConfigError, FolderInUse, writing
from rlite.evaluation.journal import Journal, is_journal, read_journal, time_of
from rlite.evaluation.sets import Row, remove_record
from rlite.nn.pretrained import local_checkpoint
from rlite.rollout.registry import WORKFLOWS, find_reward
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.function import RewardFunction
from rlite.trainer.run.program_objects import ProgramObjects

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


_OF_MODELS = ("config.json", "config.yaml")
"""files of a model, and of a run, which may also hold results"""
Lines = Sequence[Mapping[str, Any]]
"""lines of a journal after its settings"""


class _Shape(BaseModel):
    """A value of a journal. Further keys are not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Row(_Shape):
    """A sample."""

    group: NonNegativeInt
    sample: NonNegativeInt
    item: str
    status: str
    reason: str
    score: FiniteFloat | None = None
    reward: FiniteFloat | None = None
    reward_parts: list[Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = None
    truncated: bool | None = None
    answer: str | None = None
    response_tokens: int | None = None
    segments: list[dict[str, Any]] | None = None
    tokens: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _has_a_score_or_a_reason(self) -> Self:
        if self.score is None and self.reward is None and not self.reason:
            raise ValueError("expected a score, or a reason why there is none")
        return self

    @property
    def places(self) -> list[Hashable]:
        """Group and sample."""
        return [(self.group, self.sample)]


class _Task(_Shape):
    """A task that has ended, or one sample of its answers."""

    task: str
    sample: NonNegativeInt = 0
    samples: PositiveInt = 1
    metrics: dict[str, FiniteFloat]
    values: dict[str, list[FiniteFloat]] = {}
    higher_is_better: dict[str, bool] = {}
    lower_is_better: list[str] = []
    rows: list[_Row]

    @property
    def places(self) -> list[Hashable]:
        """The task and the sample; the first sample also gives the places of the further ones."""
        further = () if self.sample else range(1, self.samples)
        return [f"{self.task}, sample {sample}" if sample else self.task for sample in (self.sample, *further)]


class _Questions(_Shape):
    number: NonNegativeInt = 0


class _Sampling(_Shape):
    samples: PositiveInt
    temperature: FiniteFloat
    max_new_tokens: PositiveInt


class _Tasks(_Shape):
    tasks: list[str] = []


class _Settings(_Shape):
    """Settings that decide how many samples there are."""

    questions: _Questions
    sampling: _Sampling
    tasks: _Tasks

    @property
    def places(self) -> set[Hashable]:
        """Places of a complete journal: group and sample, or names of tasks, whose lines give further samples."""
        if self.tasks.tasks:
            return set(self.tasks.tasks)
        return set(product(range(self.questions.number), range(self.sampling.samples)))


@dataclass(frozen=True)
class EarlierResult:
    """One model's samples of an evaluation that has ended."""

    name: str
    model: str
    settings: Mapping[str, Any]
    lines: Lines
    """lines of the journal"""
    time: datetime | None = None
    """time that chat templates wrote"""


def earlier_result(given: str) -> EarlierResult | None:
    """Return the result in a folder; None if the path is no folder of results.

    Args:
        given: path of the folder.

    Raises:
        ConfigError: the folder holds results of two models, they cannot be read, or samples are missing.
    """
    file = Path(given).expanduser() / RESULTS
    if not file.is_file() or any((file.parent / name).exists() for name in _OF_MODELS):
        return None
    models = read_results(file).models
    if len(models) != 1:
        raise ConfigError(
            f"{file.parent}: an evaluation of two models ({' and '.join(models)}), compared in {RESULTS}. To compare "
            "one of them with others, evaluate it alone, into another folder"
        )
    [(name, found)] = models.items()
    journal = file.parent / SAMPLES / f"{name}.jsonl"
    settings, lines = read_journal(journal)
    if missing := missing_places(settings, lines, journal):
        num_expected = len(lines) + len(missing)
        what = "tasks" if settings["tasks"] else "samples"
        raise ConfigError(
            f"{file.parent}: an unfinished evaluation: {len(missing)} of {num_expected} {what} are missing; "
            "finish it first, by the command that began it (without overwrite=true)"
        )
    return EarlierResult(name, found.model, settings, lines, time_of(journal))


def missing_places(settings: Mapping[str, Any], lines: Lines, path: Path) -> set[Hashable]:
    """Return the places without a line, after a check of settings and lines.

    Args:
        settings: settings of the journal.
        lines: lines of the journal.
        path: the journal.

    Returns:
        Names of tasks with the numbers of their samples, or (group, sample).

    Raises:
        ConfigError: settings or lines have another form, or a line occurs twice.
    """
    try:
        expected = _Settings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(f"{path}: settings: {first_problem(error)}; choose another folder") from error
    shape, missing = _Task if expected.tasks.tasks else _Row, expected.places
    for number, line in enumerate(lines, 2):
        try:
            place, *further = shape.model_validate(line).places
        except ValidationError as error:
            raise ConfigError(f"{path}, line {number}: {first_problem(error)}; choose another folder") from error
        if place not in missing:
            raise ConfigError(
                f"{path}, line {number}: {place} occurs twice, or is not of this evaluation; remove the line, or "
                "choose another folder"
            )
        missing.remove(place)
        missing.update(further)
    return missing


def code_of(options: EvalConfig, given: ProgramObjects) -> dict[str, str]:
    """Return a digest of the code behind each source of scores, by the file or the name of the source.

    Args:
        options: options of the command.
        given: rewards of a program, in place of those that the paths name.

    Raises:
        ConfigError: a reward does not exist.
        ImportFailed: the file or module of a reward does not exist, or raised an exception.
    """
    found: dict[str, str] = {}
    functions = given.functions()
    for name, own in options.reward.items():
        file = Path(own.path.rpartition(":")[0])
        if file.is_file() and name not in functions:
            found[str(file)] = digest([file.read_bytes()])
        else:
            found[own.path] = digest_of(functions.get(name) or find_reward(own.path, f"reward.{name}.path"))
    if options.env_path is not None and Path(options.env_path).is_file():
        found[options.env_path] = digest([Path(options.env_path).read_bytes()])
    if options.workflow is not None:
        found[options.workflow] = digest_of(WORKFLOWS[options.workflow])
    return found


def digest_of(scorer: Any) -> str:
    """Return a digest of the code of a function, a class or a callable object.

    The code is the whole file of the definition. For code of the program itself (`__main__`) and code without a file it
    is the function alone. An object without any Python code gets a digest that equals no other.

    Args:
        scorer: a reward or the maker of a workflow.
    """
    contents = {_content(function) for function in _functions(scorer)}
    return digest(sorted(contents)) if contents else f"unknown {secrets.token_hex(8)}"


def digest(parts: Iterable[str | bytes]) -> str:
    """Return a short digest of texts or bytes, in this order."""
    made = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        made.update(hashlib.sha256(content).digest())
    return made.hexdigest()[:16]


def _functions(scorer: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a callable object, or those of its class."""
    if isinstance(scorer, functools.partial):
        yield from _functions(scorer.func)
    elif isinstance(scorer, RewardFunction):
        yield from _functions(scorer.fn)
    elif isinstance(scorer, TrlReward):
        for each in scorer.fns:
            yield from _functions(each)
    else:
        yield from _own_functions(inspect.unwrap(getattr(scorer, "__func__", scorer)))


def _own_functions(scorer: Any) -> Iterator[FunctionType]:
    if isinstance(scorer, FunctionType):
        yield scorer
        return
    kind = scorer if isinstance(scorer, type) else type(scorer)
    yield from (own for own in vars(kind).values() if isinstance(own, FunctionType))


def _content(function: FunctionType) -> bytes:
    file = Path(function.__code__.co_filename)
    if function.__module__ != "__main__" and file.is_file():
        return file.read_bytes()
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):
        return marshal.dumps(function.__code__, 2)  # the later formats depend on reference counts


WEIGHTS = (".safetensors", ".bin", ".json", ".jinja", ".model")
"""files of a checkpoint that decide its answers"""
TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl")
"""files of a folder with tasks that decide its questions"""
_SCORED_BY = ("env_path", "env_timeout", "env_memory_limit_gib", "max_turns", "workflow")
_TASKS = ("tasks", "num_fewshot", "chat", "limit")
_SAMPLED_BY = ("samples", "seed", "executor", "dtype", "deterministic", "max_model_len")
_REWARD = ("path", "weight", "timeout", "memory_limit_gib", "in_process")


def settings_of(options: EvalConfig, given: ProgramObjects, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that decide the samples, except for the model's, as values of JSON.

    Args:
        options: options of the command.
        given: rewards of a program, in place of those that the paths name.
        rows: the prompts, as they are asked.
    """
    plain = config.to_container(options)
    sampling = {name: getattr(options.sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    if options.stop_token_ids:  # absent from settings of older versions
        sampling["stop_token_ids"] = options.stop_token_ids
    rewards = {name: {key: own[key] for key in _REWARD} for name, own in plain["reward"].items()}
    return {
        "questions": {"number": len(rows), "content": digest(_text(row) for row in rows)} if rows else {},
        "chat_template_options": plain["data"]["chat_template_options"],
        "scores": {"reward": rewards, **{name: plain[name] for name in _SCORED_BY}, "code": code_of(options, given)},
        "tasks": _tasks(plain, options.sampling_of_tasks) if options.tasks else {},
        "sampling": {**sampling, "stop": plain["stop"], **{name: plain[name] for name in _SAMPLED_BY}},
    }


def model_settings(folder: str) -> dict[str, str]:
    """Return the identity of a checkpoint: its folder, and sizes and times of its files."""
    path = local_checkpoint(folder).resolve()
    files = sorted(file for file in path.iterdir() if file.suffix in WEIGHTS and file.is_file())
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return {"folder": str(path), "files": digest(stamps)}


def _tasks(plain: Mapping[str, Any], sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    files = sorted(Path(plain["task_path"]).rglob("*")) if plain["task_path"] else []
    own = [file.read_bytes() for file in files if file.suffix in TASK_FILES]
    generation = {} if sampling is None else {"generation": dict(sampling)}
    return {**{name: plain[name] for name in _TASKS}, "task_path": digest(own), **generation}


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


@dataclass(frozen=True)
class Candidate:
    """A model that answers now, or whose evaluation continues."""

    name: str
    model: str
    """folder or hub name of the checkpoint"""
    settings: Mapping[str, Any]
    journal: Journal

    @property
    def lines(self) -> Sequence[Mapping[str, Any]]:
        """Lines of the journal."""
        return self.journal.lines

    @property
    def time(self) -> datetime | None:
        """Time that chat templates wrote in the prompts of the lines."""
        return None if self.journal.is_new else time_of(self.journal.path)


Answered = Candidate | EarlierResult


def rows_of(model: Answered) -> list[Row]:
    """Return the rows of a model's samples. A line of the journal is a row, or a task with many."""
    if not is_of_tasks(model):
        return [dict(row) for row in model.lines]
    groups: dict[tuple[str, str], int] = {}
    keyed = [((line["task"], each["item"]), each) for line in model.lines for each in line["rows"]]
    return [{**each, "group": groups.setdefault(key, len(groups))} for key, each in keyed]


def is_of_tasks(model: Answered) -> bool:
    """Return whether a model has answered tasks."""
    return bool(model.settings.get("tasks"))


def candidate(
    given: str, name: str, settings: Mapping[str, Any], folder: Path, options: EvalConfig, journals: ExitStack
) -> Candidate:
    """Return a model with the samples that its journal holds.

    Args:
        given: folder of a model or of a run, or hub name.
        name: name of the model in the record.
        settings: further settings that decide the samples.
        folder: holds the journals.
        options: options of the command.
        journals: closes the journal at its end.

    Raises:
        ConfigError: there is no such model, it writes no text, or the journal holds samples of other settings,
            or lines that are no samples.
    """
    model = model_folder(given)
    check_writes(model)
    own = {"model": model_settings(model), **settings}
    journal = Journal(folder / SAMPLES / f"{name}.jsonl", own, options.overwrite)
    journals.callback(journal.close)
    missing_places(own, journal.lines, journal.path)
    return Candidate(name, model, own, journal)


def begin(candidates: Sequence[Candidate], folder: Path) -> None:
    """Begin the journals, after all checks. A restart removes earlier results.

    Args:
        candidates: models that answer now.
        folder: folder of the evaluation.

    Raises:
        StorageError: a file cannot be written.
    """
    for each in candidates:
        if each.journal.is_new:
            remove_model(folder, each.name)
        each.journal.begin(CLOCK.now())
