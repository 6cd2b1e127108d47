"""The workflow of the command `rlite ppo`: of rewards, of an environment file, or of a registered workflow."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import track

from rlite.assembly.distillation import unrewarded
from rlite.data.chat.ends import EscapingTokenizer
from rlite.data.chat.template import check_template_options, with_template
from rlite.data.rows import check_prompts, stream_of
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.services.environments.contracts import contract_workflow
from rlite.trainer.held_out import GeneratedOptions, key_of
from rlite.trainer.model.prompt_lengths import Rows, longest_prompt, model_limit, vocab_size_of
from rlite.trainer.options import SamplingOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.program_objects import REWARD, ProgramObjects

MANY_ROWS = 10_000
"""number of rows from which on a progress bar is shown"""
BYTES_OF_SEQUENCE, BYTES_OF_TOKEN = 4096, 40
"""host memory of a sequence that is generated, and of a token in a row of the batch"""
LIMITS = (
    "(the least of max_length_per_device x tp_size x sp_size of the models, the models' max_position_embeddings, and "
    "rollout.max_model_len); raise those, or drop the row"
)
"""the limits of a sequence, for messages"""


@dataclass(frozen=True)
class Context:
    """The context length that a run serves."""

    length: int
    """tokens of prompt and responses together, at most"""
    longest_prompt: int
    """tokens; 0 if the workflow does not know the prompts beforehand"""

    def host_gib(self, num_sequences: int, length: int) -> float:
        """Return the host memory of a step's rollouts in GiB: of each sequence a request, and a row of the batch."""
        return num_sequences * (BYTES_OF_SEQUENCE + BYTES_OF_TOKEN * length) / 2**30

    def describe(self, max_new_tokens: int) -> str:
        """Return what fits, in words and numbers."""
        room = self.length - self.longest_prompt
        prompts = f"prompts {f'of at most {self.longest_prompt}' if self.longest_prompt else 'that are not known yet'}"
        if room >= max_new_tokens:
            return f"at most {self.length} tokens; {prompts}"
        return f"at most {self.length} tokens; {prompts}, after which {room} of {max_new_tokens} new tokens fit"


def check_openings(
    rows: Rows, workflow: RolloutWorkflow, max_length: int, where: str, vocab_size: int = sys.maxsize
) -> int:
    """Return the length of the longest prompt in tokens; 0 if the workflow does not know the prompts beforehand."""
    if not workflow.needs_prompt:
        return 0
    check_prompts(rows, where)
    console = Console(file=sys.stderr)
    is_quiet = len(rows) < MANY_ROWS or not console.is_terminal
    text = f"looking at the prompts of {where}"
    read = partial(track, description=text, console=console, transient=True, disable=is_quiet)
    return longest_prompt(rows, workflow, max_length, where, LIMITS, read, vocab_size)


OPTIONS_KEY = "train_data.chat_template_options"
Tables = Mapping[str, Sequence[Mapping[str, Any]]]


def _taking_options(make: Callable[..., RolloutWorkflow]) -> Callable[..., RolloutWorkflow]:
    """Return a maker of workflows that takes `chat_template_options`."""
    parameters = inspect.signature(make).parameters.values()
    if any(one.name == "chat_template_options" or one.kind is one.VAR_KEYWORD for one in parameters):
        return make
    told = f"{OPTIONS_KEY}: the workflow of rollout.workflow has no parameter chat_template_options"
    raise ConfigError(f"{told}; give it one, and pass it on to the workflow that renders the prompts")


def _of_rewards(rewards: ChosenRewards, tables: Tables) -> Callable[..., RolloutWorkflow]:
    for where, rows in tables.items():
        if (stream := stream_of(rows)) is None:
            rewards.check_columns(rows, where)
        else:
            stream.check("rewards", partial(rewards.check_columns, where=where))
    return partial(SingleTurnWorkflow, rewards.make())


@dataclass(frozen=True)
class RunWorkflows:
    """The workflows of a run, and the lengths of their sequences."""

    options: PpoConfig

    @property
    def context_limit(self) -> int:
        """The longest sequence, in tokens, that devices, models and `rollout.max_model_len` allow."""
        limits = [limit for model in self.options.models if (limit := model_limit(model.model_name)) is not None]
        return min([self.options.max_length, *limits])

    def check_lengths(self, sources: Iterable[tuple[RolloutWorkflow, Rows, str]]) -> Context:
        """Return the context to serve, after a check of all prompts."""
        options, limit, longest = self.options, self.context_limit, []
        vocab_size = min(vocab_size_of(model.model_name) for model in options.models)
        for workflow, rows, where in sources:
            how: Any = {"workflow": workflow, "max_length": limit, "where": where, "vocab_size": vocab_size}
            if (stream := stream_of(rows)) is not None:
                stream.check("prompts", partial(check_openings, **how))
                longest.append((workflow, 0))  # of prompts that are not read yet
            elif rows:
                longest.append((workflow, check_openings(rows, **how)))
        context, num = self.make_context(limit, longest), options.num_sequences
        least = context.host_gib(num, context.longest_prompt)
        if least > (gib := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30):
            what = f"train_data.prompts_per_rollout x train_data.responses_per_prompt = {num:,} sequences in a step"
            raise ConfigError(f"{what} take at least {least:,.0f} GiB of host memory, and the machine has {gib:,.0f}")
        return context

    def make_context(self, limit: int, prompts: Sequence[tuple[RolloutWorkflow, int]]) -> Context:
        """Return the context to serve: `rollout.max_model_len`, or what prompts and new tokens need.

        `prompts`: each workflow with the length of its longest prompt in tokens, 0 if that is unknown.
        """
        needs = [workflow.longest_sequence(longest) if longest else None for workflow, longest in prompts]
        longest_prompt = max(longest for _, longest in prompts)
        length = self.options.rollout.max_model_len
        if length is None:
            length = limit if None in needs else min(limit, max(need for need in needs if need))
        return Context(length, longest_prompt)

    def maker(
        self, rewards: ChosenRewards | None, tables: Tables, workflow: str | None = None
    ) -> Callable[[SamplingOptions], RolloutWorkflow]:
        """Return a function that makes the workflow of a source of rewards with some sampling.

        `rewards`: the rewards of `reward`; None if the options name another source. `workflow`: name of a registered
        workflow; default: the workflow of the run, unless there are rewards.
        """
        options, rollout = self.options, self.options.rollout
        template_options, name = options.train_data.chat_template_options, workflow or rollout.workflow
        if rewards is not None:
            make = _of_rewards(rewards, tables)
        elif name is not None:
            make = WORKFLOWS[name]
        elif rollout.env_path is None:
            make = unrewarded()
        else:
            make = contract_workflow(rollout.env_path, rollout.env_config, **rollout.process_options)
            make = partial(make, max_turns=rollout.max_turns, max_length=self.context_limit)
        tokenizer: Any = load_tokenizer(options.actor.model_name)
        tokenizer = with_template(tokenizer, options.train_data.chat_template_path, "train_data.chat_template_path")
        if template_options:
            check_template_options(tokenizer, template_options, OPTIONS_KEY)
            make = partial(_taking_options(make), chat_template_options=template_options)
        if rollout.escape_special_tokens:
            tokenizer = EscapingTokenizer(tokenizer)
        return lambda sampling: make(sampling.gconfig(), tokenizer)

    def held_out(
        self,
        make: Callable[[SamplingOptions], RolloutWorkflow],
        rewards: ChosenRewards | None,
        tables: Tables,
        given: ProgramObjects,
    ) -> dict[str, RolloutWorkflow]:
        """Return the workflow of each set to evaluate on, by the set's name.

        `rewards`: the rewards of `reward`; None if the options name another source. `given`: reward functions of a
        program, in place of those of the paths.
        """
        found = {}
        for name, rows in tables.items():
            own, key, make_own = self.options.test_data[name], key_of(name), make
            if own.reward:
                make_own = self.maker(own_rewards(own, key, given), {key: rows})
            elif own.workflow is not None:
                make_own = self.maker(None, {}, own.workflow)
            elif rewards is not None:
                rewards.check_columns(rows, key)
            found[name] = make_own(self.options.rollout.sampling_of(own.sampling))
        return found


def own_rewards(options: GeneratedOptions, key: str, given: ProgramObjects) -> ChosenRewards:
    """Return the rewards that a set to evaluate on has of its own.

    `given`: reward functions of a program, in place of those of the paths.
    """
    where = f"{key}.{REWARD}"
    return ChosenRewards(options.reward, given.functions(where), where)
