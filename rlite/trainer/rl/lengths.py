"""Context lengths: how long sequences may get, and how long they can get with the prompts of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import track

from rlite.data.prompts import check_prompts
from rlite.data.rows import stream_of
from rlite.errors import ConfigError
from rlite.rollout import RolloutWorkflow
from rlite.trainer.prompt_lengths import Rows, longest_prompt, model_limit, vocab_size_of
from rlite.trainer.rl.options import PpoConfig

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
        prompts = (
            f"prompts of at most {self.longest_prompt}" if self.longest_prompt else "prompts that are not known yet"
        )
        if room >= max_new_tokens:
            return f"at most {self.length} tokens; {prompts}"
        return f"at most {self.length} tokens; {prompts}, after which {room} of {max_new_tokens} new tokens fit"


def context_limit(options: PpoConfig) -> int:
    """Return the longest sequence, in tokens, that devices, models and `rollout.max_model_len` allow."""
    limits = [limit for model in options.models if (limit := model_limit(model.model_name)) is not None]
    return min([options.max_length, *limits])


def check_lengths(options: PpoConfig, sources: Iterable[tuple[RolloutWorkflow, Rows, str]]) -> Context:
    """Return the context to serve, after a check of all prompts.

    Args:
        options: the run's config.
        sources: each workflow with its rows, which may be none, and their option, for messages.

    Raises:
        ConfigError: the sequences of a step do not fit into the memory of this machine.
    """
    limit, longest = context_limit(options), []
    vocab_size = min(vocab_size_of(model.model_name) for model in options.models)
    for workflow, rows, where in sources:
        how: Any = {"workflow": workflow, "max_length": limit, "where": where, "vocab_size": vocab_size}
        if (stream := stream_of(rows)) is not None:
            stream.check("prompts", partial(check_openings, **how))
            longest.append((workflow, 0))  # of prompts that are not read yet
        elif rows:
            longest.append((workflow, check_openings(rows, **how)))
    context, num = make_context(options, limit, longest), options.num_sequences
    least = context.host_gib(num, context.longest_prompt)
    if least > (gib := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30):
        what = f"train_data.prompts_per_rollout x train_data.responses_per_prompt = {num:,} sequences in a step"
        raise ConfigError(f"{what} take at least {least:,.0f} GiB of host memory, and the machine has {gib:,.0f}")
    return context


def make_context(options: PpoConfig, limit: int, prompts: Iterable[tuple[RolloutWorkflow, int]]) -> Context:
    """Return the context to serve: what prompts and new tokens need, at most the limit.

    Args:
        options: the run's config; its `rollout.max_model_len`, if set, is the answer.
        limit: what `context_limit` returns.
        prompts: each workflow with the length of its longest prompt in tokens, 0 if that is unknown.
    """
    pairs = list(prompts)
    needs = [workflow.longest_sequence(longest) if longest else None for workflow, longest in pairs]
    longest_prompt = max(longest for _, longest in pairs)
    if options.rollout.max_model_len is not None:
        return Context(options.rollout.max_model_len, longest_prompt)
    return Context(min([limit, *([] if None in needs else [max(need for need in needs if need)])]), longest_prompt)


def check_openings(
    rows: Rows, workflow: RolloutWorkflow, max_length: int, where: str, vocab_size: int = sys.maxsize
) -> int:
    """Return the length of the longest prompt in tokens; 0 if the workflow does not know the prompts beforehand.

    Args:
        rows: the items.
        workflow: its `opening` makes an item's prompt.
        max_length: tokens of prompt and answer together.
        where: the rows' option, for messages.
        vocab_size: size of the models' vocabulary.
    """
    if not workflow.needs_prompt:
        return 0
    check_prompts(rows, where)
    console = Console(file=sys.stderr)
    is_quiet = len(rows) < MANY_ROWS or not console.is_terminal
    text = f"looking at the prompts of {where}"
    read = partial(track, description=text, console=console, transient=True, disable=is_quiet)
    return longest_prompt(rows, workflow, max_length, where, LIMITS, read, vocab_size)
