"""The way of requests through a set of replicas: send them, wait for their ends, and cancel what is not awaited."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait

from rlite.errors import CallTimeout, ConfigError, DataError
from rlite.observability import trace
from rlite.runtime.futures import result_of
from rlite.runtime.replicas.replica import InFlightRequest, check_lengths
from rlite.runtime.replicas.replica_set import ReplicaSet
from rlite.runtime.replicas.workers import together
from rlite.types import MAX_TOP_LOGPROBS, PromptLogprobs


async def complete(replicas: ReplicaSet, request: InFlightRequest, affinity: str | None) -> None:
    """Send a request to a replica, and wait beside the event loop until it has ended. A cancelled task ends it.

    Args:
        replicas: the replicas.
        request: the request.
        affinity: key of requests that should share a replica.

    Raises:
        CancelledError: the task was cancelled.
    """
    with trace.task("generate", engine=replicas.name, prompt_tokens=len(request.request.input_ids)):
        replicas.router.route([[request]], affinity)
        try:
            await result_of(request.done)
        except asyncio.CancelledError:
            replicas.router.cancel([request])
            raise
    replicas.note_truncation(request)


def complete_all(replicas: ReplicaSet, groups: Sequence[Sequence[InFlightRequest]], timeout: float) -> None:
    """Send groups of siblings to replicas, and wait until all have ended. On an error or a time-out, cancel the rest.

    Args:
        replicas: the replicas.
        groups: requests that share a prompt.
        timeout: seconds.

    Raises:
        CallTimeout: a request did not end within `timeout` seconds.
    """
    with trace.span("generate", num_prompts=len(groups)):
        replicas.router.route(groups)
        requests = list(itertools.chain(*groups))
        done, late = wait([request.done for request in requests], timeout=timeout, return_when=FIRST_EXCEPTION)
        if late:
            replicas.router.cancel([request for request in requests if request.done in late])
        for request in requests:
            if request.done in done:
                request.done.result()
        if late:
            at_work = [replica.workers for replica in replicas.all if replica.num_in_flight]
            busy = tuple(workers.group.describe(workers.ranks[0]) for workers in at_work)
            raise CallTimeout(
                f"generate: {len(late)} of {len(requests)} completions were not done within {timeout:g} s, on "
                f"{'; '.join(busy)}. Give it more time (timeout=) or ask for fewer tokens (max_new_tokens).",
                busy,
            )
    for request in requests:
        replicas.note_truncation(request)


def score(replicas: ReplicaSet, prompts: Sequence[list[int]], num_top: int, max_tokens: int) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens. Prompts are distributed to the replicas in turn.

    Args:
        replicas: the replicas.
        prompts: token ids.
        num_top: number of most likely tokens at each place.
        max_tokens: most tokens of a prompt.

    Raises:
        ConfigError: `num_top` is out of range.
        DataError: a prompt is too long.
    """
    if not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ConfigError(f"num_top={num_top}: expected a number from 0 to {MAX_TOP_LOGPROBS}")
    check_lengths(prompts, max_tokens)
    serving = replicas.serving
    num = len(serving)
    shares = {replica: prompts[index::num] for index, replica in enumerate(serving)}
    results = together(serving, lambda replica: replica.prompt_logprobs(shares[replica], num_top))
    return [results[index % num][index // num] for index in range(len(prompts))]


def checked_tokens(ids: Sequence[int], where: str, vocab_size: int) -> list[int]:
    """Return the tokens of a prompt if it has some, all of the model's vocabulary.

    Args:
        ids: token ids.
        where: name of the prompt for messages.
        vocab_size: size of the vocabulary.

    Raises:
        DataError: it has not.
    """
    if not ids:
        raise DataError(f"{where} is empty: expected at least one token")
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise DataError(f"{where} holds token id {wrong[0]}; the model's vocabulary has {vocab_size} tokens")
    return list(ids)
