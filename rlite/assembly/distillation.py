"""On-policy distillation put together: the checks of its teachers, what they are shown, and the parts of a trainer."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlite.algorithms.divergence import Divergence
from rlite.data.rows import Rows, rows_digest
from rlite.errors import ConfigError, DataError
from rlite.imports import find_function
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RewardFunction, RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.workflow import PromptWorkflow, prompt_ids
from rlite.runtime.storage.secrets import read_secret
from rlite.trainer.model.prompt_lengths import vocab_size_of
from rlite.trainer.rl.distillation import (
    Context,
    DistillationLoss,
    TaughtAdvantages,
    TaughtPasses,
    Teachers,
    TeacherServer,
)
from rlite.trainer.rl.distillation_options import DistillationOptions, TeacherOptions, teacher_key
from rlite.trainer.rl.engines import LogprobPasses
from rlite.trainer.rl.objective import PolicyLoss
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.training_run import TrainingRun
from rlite.types import AsyncInference


def loss_class(options: DistillationOptions) -> Callable[..., PolicyLoss]:
    """Return a maker of the policy's loss: with a divergence as a term, if a teacher teaches so."""
    if not options.teacher or options.use_as != "loss":
        return PolicyLoss
    divergence = Divergence(options.divergence_beta, options.support, options.k)
    given: dict[str, Any] = {"distill_coef": options.coef, "learns_rewards": options.task_rewards}
    return partial(DistillationLoss, divergence=divergence, **given)


def taught(advantages: Callable[..., TensorDict], options: DistillationOptions) -> Callable[..., TensorDict]:
    """Return the function that computes advantages, with what teachers and missing rewards change."""
    if not options.teacher:
        return advantages
    return TaughtAdvantages(advantages, options.coef if options.use_as == "advantage" else 0.0, options.task_rewards)


def no_reward(**answer: Any) -> float:
    """Return 0: the reward of an answer that only a teacher judges."""
    return 0.0


def unrewarded() -> Callable[..., RolloutWorkflow]:
    """Return a maker of workflows of single turns without a reward."""
    return partial(SingleTurnWorkflow, RewardFunction(no_reward, in_process=True, what="no reward"))


class Distillation:
    """The teachers of a run.

    Args:
        options: the run's config, with a teacher.
        workflow: makes the rollouts.
        data: the training data.

    Raises:
        ConfigError: a teacher cannot judge the student's tokens.
    """

    def __init__(self, options: PpoConfig, workflow: RolloutWorkflow, data: Rows) -> None:
        self._options, own = options, options.distill
        path = options.actor.model_name
        self._tokenizer = workflow.tokenizer if isinstance(workflow, PromptWorkflow) else load_tokenizer(path)
        self._servers: dict[int, TeacherServer] = {}
        for number, (name, teacher) in enumerate(own.teacher.items()):
            if teacher.url is not None:
                self._servers[number] = served_teacher(teacher, teacher_key(name), self._tokenizer, own)
            elif teacher.has_engine:
                check_same_tokens(path, str(teacher.model_name), f"{teacher_key(name)}.model_name")
        self._functions = {
            name: find_function(teacher.context, f"{teacher_key(name)}.context={teacher.context}")
            for name, teacher in own.teacher.items()
            if teacher.context is not None
        }
        self._rows: Mapping[int, Mapping[str, Any]] = {}
        """rows of the training data by their keys, if a teacher depends on them"""
        if own.by is not None or self._functions:
            self._rows = {row_key(row): row for row in data.rows}

    def keyed(self, workflow: RolloutWorkflow) -> RolloutWorkflow:
        """Return a copy of a workflow whose trajectories have the key of their row, if a teacher depends on it."""
        if not self._rows:
            return workflow
        own: Any = copy.copy(workflow)
        own.arun_episode = partial(_run_keyed, workflow)
        return own

    def passes(self, base: LogprobPasses, run: TrainingRun) -> TaughtPasses:
        """Return the forward passes of a run, with those of its teachers."""
        own, engines = self._options.distill, base.engines
        limits = [self._limit(teacher) for teacher in own.teacher.values()]
        longest = [teacher.inference_length(self._options.actor) for teacher in own.teacher.values()]
        context = None
        if self._rows:
            encode = partial(_encoded, self._tokenizer, self._options.train_data.chat_template_options)
            decode = partial(self._tokenizer.decode, skip_special_tokens=True)
            context = Context(own, self._functions, self._row, encode, decode)
        teachers = Teachers(own, engines, base.temperature, limits, longest, context, self._servers, run)
        given = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        return TaughtPasses(**given, teachers=teachers)

    def _row(self, key: int) -> Mapping[str, Any]:
        if key not in self._rows:
            raise DataError(
                f"distill: a rollout is of a row that {self._options.train_data.paths} does not hold (any more)"
            )
        return self._rows[key]

    def _limit(self, teacher: TeacherOptions) -> int:
        if teacher.url is not None:
            return sys.maxsize
        model = teacher.as_model(self._options.actor) if teacher.has_engine else self._options.actor
        longest = teacher.inference_length(self._options.actor) or model.max_length_per_device
        return longest * model.tp_size * model.sp_size

    def topic(self) -> dict[str, str]:
        """Return what the teachers are and what is learnt, as a topic of the plan."""
        own = self._options.distill
        names = [f"{name or 'teacher'} {_place(teacher)}" for name, teacher in own.teacher.items()]
        what = own.support if own.support in ("full", "sampled") else f"{own.support} of {own.k}"
        rewards = "rewards as well" if own.task_rewards else "no rewards"
        told = f"{own.direction} divergence over {what}, as {own.use_as} x {own.coef:g}, {rewards}"
        return {"teachers": f"{', '.join(names)}: {told}"}


def served_teacher(teacher: TeacherOptions, what: str, tokenizer: Any, options: DistillationOptions) -> TeacherServer:
    """Return the teacher on a server. Errors are those of `ServedTeacher`.

    Args:
        teacher: its address and key.
        what: key of these options, for messages.
        tokenizer: the student's.
        options: say what it is asked for.

    Raises:
        ConfigError: the key is missing, or others can read its file.
    """
    from rlite.backends.remote.teacher import ServedTeacher  # of an optional package
    from rlite.backends.serving.http import Endpoint

    key = None
    if teacher.key_file is not None:
        key = read_secret(Path(teacher.key_file).expanduser(), f"{what}.key_file")
    elif teacher.key_env is not None and not (key := os.environ.get(teacher.key_env, "").strip()):
        raise ConfigError(f"{what}.key_env={teacher.key_env}: the variable is not set, or empty")
    endpoint = Endpoint(str(teacher.url).rstrip("/").removesuffix("/v1"), key, kind="teacher")
    k = options.k if options.support == "teacher_topk" else 0
    where = f"{what}.url={teacher.url}"
    return ServedTeacher(endpoint, str(teacher.model_name), where, tokenizer, k, teacher.max_concurrent)


def check_same_tokens(student: str, teacher: str, what: str) -> None:
    """Check that a teacher reads and writes the student's token ids.

    Args:
        student: folder or hub name of the student.
        teacher: folder or hub name of the teacher.
        what: option that names the teacher, for messages.

    Raises:
        ConfigError: it has other tokens.
    """
    ours, theirs = (load_tokenizer(path).get_vocab() for path in (student, teacher))
    if ours != theirs:
        odd = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        ids = f"{odd[0]!r} is {ours.get(odd[0])} for the student and {theirs.get(odd[0])} for the teacher"
        told = f"its tokenizer is another one: {len(odd)} tokens differ, such as {ids}"
        raise ConfigError(f"{what}={teacher}: {told}. A teacher must have the student's token ids")
    sizes, needed = [vocab_size_of(path) for path in (student, teacher)], max(ours.values()) + 1
    if min(sizes) < needed:
        told = f"vocabularies of {sizes[0]} (student) and {sizes[1]} (teacher) ids, and the tokenizer has {needed}"
        raise ConfigError(f"{what}={teacher}: {told}")


def row_key(row: Mapping[str, Any]) -> int:
    """Return a hash of a row of the training data, which a batch can hold."""
    return int(rows_digest([row])[:15], 16)


def _run_keyed(workflow: RolloutWorkflow, engine: AsyncInference, data: dict[str, Any]) -> Awaitable[Any] | Any:
    key = row_key(data)
    episode: Any = workflow.arun_episode(engine, data)
    return _with_key(episode, key) if inspect.isawaitable(episode) else episode


async def _with_key(episode: Awaitable[Any], key: int) -> Any:
    rows = await episode
    if isinstance(rows, TensorDict):
        rows["row_key"] = torch.full((len(rows),), key)
    return rows


def _encoded(tokenizer: Any, template_options: Mapping[str, Any], prompt: Any) -> list[int]:
    return prompt_ids({"prompt": prompt}, tokenizer, template_options)


def _place(teacher: TeacherOptions) -> str:
    if teacher.url is not None:
        return f"{teacher.model_name} at {teacher.url}"
    places = {"frozen": str(teacher.model_name), "current": "the student", "average": "the student's average"}
    return places[teacher.weights] + ("" if teacher.context is None else f" shown {teacher.context}")
