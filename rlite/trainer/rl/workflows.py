"""The workflow of the command `rlite ppo`: of an environment file, or of a registered reward or workflow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rlite.data.chat.special_tokens import EscapingTokenizer
from rlite.data.chat.template import check_template_options
from rlite.errors import ConfigError
from rlite.rollout import RewardFunction, RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.environments.workflow import environment_workflow
from rlite.rollout.registry import REWARDS, WORKFLOWS
from rlite.trainer.modules import load_tokenizer
from rlite.trainer.rl.config import PpoConfig, RolloutOptions, SamplingOptions
from rlite.trainer.rl.lengths import context_limit

OPTIONS_KEY = "train_data.chat_template_options"


def workflow_maker(options: PpoConfig) -> Callable[[SamplingOptions], RolloutWorkflow]:
    """Return a function that makes the workflow of `rollout.env_path`, `.reward` or `.workflow` with some sampling.

    Args:
        options: the run's config.
    """
    rollout, template_options = options.rollout, options.train_data.chat_template_options
    make = _from_file(rollout, context_limit(options)) if rollout.env_path else _registered(rollout)
    tokenizer: Any = load_tokenizer(options.actor.model_name)
    if template_options:
        check_template_options(tokenizer, template_options, OPTIONS_KEY)
        make = partial(_taking_options(make), chat_template_options=template_options)
    if rollout.escape_special_tokens:
        tokenizer = EscapingTokenizer(tokenizer)
    return lambda sampling: make(sampling.gconfig(), tokenizer)


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


def _from_file(rollout: RolloutOptions, limit: int) -> Callable[..., RolloutWorkflow]:
    assert rollout.env_path is not None
    make = environment_workflow(
        rollout.env_path,
        timeout=rollout.env_timeout,
        num_processes=rollout.env_processes,
        memory_limit_gib=rollout.env_memory_limit_gib,
        env_vars=rollout.env_vars,
    )
    return partial(make, max_turns=rollout.max_turns, max_length=limit)


def _registered(rollout: RolloutOptions) -> Callable[..., RolloutWorkflow]:
    if rollout.workflow is not None:
        return WORKFLOWS[rollout.workflow]
    assert rollout.reward is not None
    reward = REWARDS[rollout.reward]
    if not isinstance(reward, RewardFunction):
        reward = RewardFunction(
            reward,
            timeout=rollout.env_timeout,
            num_processes=rollout.env_processes,
            memory_limit_gib=rollout.env_memory_limit_gib,
            what=f"reward {rollout.reward}",
            env_vars=rollout.env_vars,
        )
    return partial(SingleTurnWorkflow, reward)
