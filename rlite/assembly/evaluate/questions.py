"""The settings that decide the samples of an evaluation: the questions, the code that scores, the model, the sampling.

Samples of other settings, or of other code that scores, are not mixed with those of an earlier command.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import marshal
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite import config
from rlite.assembly.commands.generate import check_writes, model_folder
from rlite.assembly.evaluate.options import EvalConfig
from rlite.data.prompts import check_prompts
from rlite.data.rows import place_of, read_source
from rlite.errors import DataError
from rlite.evaluation.folder import SAMPLES, Candidate, Journal, missing_places, time_of
from rlite.evaluation.sets import EvaluationSet, make_set
from rlite.nn.pretrained import load_tokenizer, local_checkpoint
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.environments.workflow import environment_workflow
from rlite.rollout.registry import WORKFLOWS, find_reward
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.function import RewardFunction
from rlite.trainer.held_out import GeneratedOptions, held_out_sources, key_of
from rlite.trainer.options import SamplingOptions
from rlite.trainer.prompt_lengths import longest_prompt, vocab_size_of
from rlite.trainer.rl.workflows import own_rewards
from rlite.trainer.run.command import ProgramObjects
from rlite.trainer.supervised_options import SftConfig
from rlite.types import GenerationHyperparameters


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
    time = None if journal.is_new else time_of(journal.path)
    return Candidate(name, model, own, journal.lines, time, journal=journal)


NUM_EPISODES = 100
"""episodes of an environment that needs no data"""


Items = Sequence[Mapping[str, Any]]


MakeWorkflow = Callable[[GenerationHyperparameters, PreTrainedTokenizerBase, Callable[[], int]], RolloutWorkflow]
"""makes a workflow of its sampling, the tokenizer, and a function that returns the longest sequence of several turns"""


@dataclass(frozen=True)
class Questions:
    """The items, and how they are asked and scored."""

    items: Items
    ids: Sequence[str]
    """id of each item"""
    make_workflow: MakeWorkflow


def read_questions(options: EvalConfig, given: ProgramObjects) -> Questions:
    """Return the items that the options name, and the maker of their workflow.

    Args:
        options: options of the command.
        given: rows and rewards of a program, in place of those of the paths.

    Raises:
        ConfigError: a source of items is missing, or a source of items or scores cannot be used.
        DataError: some rows cannot be used.
    """
    options.check_complete()
    items, where = _read_items(options, given), f"data.path={options.data.path}"
    make = _workflow_maker(options, given, items, where)
    return Questions(items, item_ids(items, where), make)


def item_ids(items: Items, where: str) -> list[str]:
    """Return the id of each item: its `id`, else its number.

    Args:
        items: rows of the data.
        where: their name in messages.

    Raises:
        DataError: two items have the same id.
    """
    places: dict[str, int] = {}
    for number, item in enumerate(items):
        id = str(number if item.get("id") is None else item["id"])
        if id in places:
            raise DataError(
                f"{place_of(items, number, where)}: its id {id!r} is also that of row index {places[id]}; give each "
                "its own, or number the rows (data.columns.id=null)"
            )
        places[id] = number
    return list(places)


def _read_items(options: EvalConfig, given: ProgramObjects) -> Items:
    """Return the rows of the data, or seeds of an environment."""
    if options.data.path is None:
        return [{"seed": seed} for seed in range(options.limit or NUM_EPISODES)]
    return read_source(given.source(options.data.source()), "prompts")[: options.limit]


def _workflow_maker(options: EvalConfig, given: ProgramObjects, items: Items, where: str) -> MakeWorkflow:
    if (name := options.workflow) is not None:
        return lambda sampling, tokenizer, _: WORKFLOWS[name](sampling, tokenizer)
    own = {"chat_template_options": options.data.chat_template_options}
    if options.env_path is not None:
        make = environment_workflow(options.env_path, **options.process_options)
        turns = options.max_turns
        return lambda sampling, tokenizer, limit: make(sampling, tokenizer, max_turns=turns, max_length=limit(), **own)
    rewards = ChosenRewards(options.reward, given.functions())
    rewards.check_columns(items, where)
    reward = rewards.make()
    return lambda sampling, tokenizer, _: SingleTurnWorkflow(reward, sampling, tokenizer, **own)


def read_generated(options: SftConfig, given: ProgramObjects) -> dict[str, EvaluationSet]:
    """Return the sets that the model answers, by name.

    Args:
        options: the trainer's config.
        given: rows and functions of a program, in place of those of the paths.

    Raises:
        ConfigError: a set samples several answers that are all the same, or a reward cannot be used.
        DataError: a row has no prompt, or lacks a column that a reward needs.
    """
    sets = {name: own for name, own in options.test_data.items() if own.is_generated}
    sources, found = held_out_sources(sets, options.data.columns, options.data.system_prompt), {}
    for name, source in sources.items():
        own = sets[name]
        rows = read_source(given.source(source), "prompts")[: own.limit]
        workflow = _workflow(options, own, rows, key_of(name), given)
        if workflow.needs_prompt:
            check_prompts(rows, key_of(name))
            vocab_size = vocab_size_of(options.actor.model_name)
            longest_prompt(rows, workflow, sys.maxsize, key_of(name), limits="", vocab_size=vocab_size)
        found[name] = make_set(name, rows, workflow, own)
    return found


def _workflow(
    options: SftConfig, own: GeneratedOptions, rows: Sequence[Mapping[str, Any]], key: str, given: ProgramObjects
) -> RolloutWorkflow:
    default = SamplingOptions(temperature=0.0, max_new_tokens=options.generation.max_new_tokens)
    sampling = own.sampling.completed_by(default).gconfig()
    tokenizer = load_tokenizer(options.actor.model_name)
    if own.workflow is not None:
        return WORKFLOWS[own.workflow](sampling, tokenizer)
    rewards = own_rewards(own, key, given)
    rewards.check_columns(rows, key)
    return SingleTurnWorkflow(rewards.make(), sampling, tokenizer, options.data.chat_template_options)
