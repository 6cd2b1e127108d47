"""Context lengths: how long sequences may get, and how long they can get in a given run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from transformers import AutoConfig

from rlite.nn.huggingface import local_checkpoint
from rlite.rollout import RolloutWorkflow
from rlite.trainer.rl.config import PpoConfig


@dataclass(frozen=True)
class Context:
    """The context length that a run serves."""

    length: int
    """tokens of prompt and responses together, at most"""
    longest_prompt: int
    """tokens; 0 if the workflow does not know the prompts beforehand"""

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
    names = {options.actor.model_name}
    if options.has_critic:
        names.add(options.critic.as_model(options.actor).model_name)
    if options.has_reference:
        names.add(options.ref_actor.as_model(options.actor).model_name)
    return min([options.max_length, *(limit for name in names if (limit := _model_limit(name)) is not None)])


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


def _model_limit(name: str) -> int | None:
    config = AutoConfig.from_pretrained(local_checkpoint(name, weights=False), trust_remote_code=False)
    return getattr(config.get_text_config(), "max_position_embeddings", None)
