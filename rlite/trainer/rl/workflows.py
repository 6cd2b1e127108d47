"""The workflow of the command `rlite ppo`: of rewards, of an environment file, or of a registered workflow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlite.data.chat.special_tokens import EscapingTokenizer
from rlite.data.chat.template import check_template_options
from rlite.data.rows import stream_of
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.environments.workflow import environment_workflow
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.trainer.held_out.options import key_of
from rlite.trainer.held_out.prompt_sets import own_rewards
from rlite.trainer.rl.lengths import context_limit
from rlite.trainer.rl.options import PpoConfig, SamplingOptions
from rlite.trainer.run.program_objects import ProgramObjects

OPTIONS_KEY = "train_data.chat_template_options"
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


def workflow_maker(
    options: PpoConfig, rewards: ChosenRewards | None, tables: Tables, workflow: str | None = None
) -> Callable[[SamplingOptions], RolloutWorkflow]:
    """Return a function that makes the workflow of a source of rewards with some sampling.

    Args:
        options: the run's config.
        rewards: the rewards of `reward`; None if the options name another source.
        tables: rows of the data, by their option.
        workflow: name of a registered workflow; default: the workflow of the run, unless there are rewards.

    Raises:
        DataError: a row lacks a column that a reward needs.
    """
    template_options = options.train_data.chat_template_options
    if rewards is not None:
        make = _of_rewards(rewards, tables)
    else:
        make = _other_source(options) if workflow is None else WORKFLOWS[workflow]
    tokenizer: Any = load_tokenizer(options.actor.model_name)
    if template_options:
        check_template_options(tokenizer, template_options, OPTIONS_KEY)
        make = partial(_taking_options(make), chat_template_options=template_options)
    if options.rollout.escape_special_tokens:
        tokenizer = EscapingTokenizer(tokenizer)
    return lambda sampling: make(sampling.gconfig(), tokenizer)


def held_out_workflows(
    options: PpoConfig,
    make: Callable[[SamplingOptions], RolloutWorkflow],
    rewards: ChosenRewards | None,
    tables: Tables,
    given: ProgramObjects,
) -> dict[str, RolloutWorkflow]:
    """Return the workflow of each set to evaluate on, by the set's name.

    Args:
        options: the run's config.
        make: makes the workflow of the run's source of rewards.
        rewards: the rewards of `reward`; None if the options name another source.
        tables: rows of each set, by its name.
        given: reward functions of a program, in place of those of the paths.

    Raises:
        ConfigError: a reward of a set cannot be used.
        DataError: a row lacks a column that a reward needs.
    """
    found = {}
    for name, rows in tables.items():
        own, key = options.test_data[name], key_of(name)
        make_own = make
        if own.reward:
            make_own = workflow_maker(options, own_rewards(own, key, given), {key: rows})
        elif own.workflow is not None:
            make_own = workflow_maker(options, None, {}, own.workflow)
        elif rewards is not None:
            rewards.check_columns(rows, key)
        found[name] = make_own(options.rollout.sampling_of(own.sampling))
    return found


def _taking_options(make: Callable[..., RolloutWorkflow]) -> Callable[..., RolloutWorkflow]:
    """Return a maker of workflows that takes `chat_template_options`.

    Raises:
        ConfigError: a registered workflow does not take them.
    """
    parameters = inspect.signature(make).parameters.values()
    if any(one.name == "chat_template_options" or one.kind is one.VAR_KEYWORD for one in parameters):
        return make
    raise ConfigError(
        f"{OPTIONS_KEY}: the workflow of rollout.workflow has no parameter chat_template_options; give it one, and "
        "pass it on to the workflow that renders the prompts"
    )


def _of_rewards(rewards: ChosenRewards, tables: Tables) -> Callable[..., RolloutWorkflow]:
    for where, rows in tables.items():
        if (stream := stream_of(rows)) is None:
            rewards.check_columns(rows, where)
        else:
            stream.check("rewards", partial(rewards.check_columns, where=where))
    return partial(SingleTurnWorkflow, rewards.make())


def _other_source(options: PpoConfig) -> Callable[..., RolloutWorkflow]:
    rollout = options.rollout
    if rollout.workflow is not None:
        return WORKFLOWS[rollout.workflow]
    assert rollout.env_path is not None
    make = environment_workflow(rollout.env_path, **rollout.process_options)
    return partial(make, max_turns=rollout.max_turns, max_length=context_limit(options))
