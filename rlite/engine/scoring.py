"""Log-probabilities of prompts, computed by all replicas of an inference engine."""

from __future__ import annotations

from collections.abc import Sequence

from rlite.engine.inference_executor import Replica
from rlite.engine.workers import together
from rlite.errors import ConfigError, DataError
from rlite.types import MAX_TOP_LOGPROBS, PromptLogprobs


def score_prompts(
    replicas: Sequence[Replica], prompts: Sequence[list[int]], num_top: int, max_tokens: int
) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens. Prompts are distributed to the replicas in turn.

    Args:
        replicas: the replicas that serve.
        prompts: token ids.
        num_top: number of most likely tokens at each place.
        max_tokens: most tokens of a prompt.

    Returns:
        One entry per prompt, in the order of the prompts.

    Raises:
        ConfigError: `num_top` is out of range.
        DataError: a prompt is too long.
    """
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ConfigError(f"num_top={num_top}: expected a number from 0 to {MAX_TOP_LOGPROBS}")
    check_lengths(prompts, max_tokens)
    num = len(replicas)
    shares = {replica: prompts[index::num] for index, replica in enumerate(replicas)}
    results = together(replicas, lambda replica: replica.prompt_logprobs(shares[replica], num_top))
    return [results[index % num][index // num] for index in range(len(prompts))]


def check_lengths(prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Check that no prompt is too long.

    Args:
        prompts: token ids.
        max_tokens: most tokens of a prompt.

    Raises:
        DataError: a prompt is too long.
    """
    for index, ids in enumerate(prompts):
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt {index} has {len(ids)} tokens, max_model_len={max_tokens + 1} leaves room for {max_tokens}"
            )
