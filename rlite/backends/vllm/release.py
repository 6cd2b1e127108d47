"""Requests in vLLM's words, and every call into vLLM's frontend that has changed or may change between releases.

rlite supports vLLM from `options.OLDEST` on. `tests/vllm/test_releases.py` checks the signatures that this module and
`extension.py` rely on. A child process may import the server again, so functions import vLLM.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlite.backends.serving.requests import num_left
from rlite.backends.vllm import options
from rlite.types import PromptLogprobs, SequenceRequest

EXTENSION = "rlite.backends.vllm.extension.WorkerExtension"
SCHEDULER = "rlite.backends.vllm.extension.HoldingScheduler"
ASYNC_SCHEDULER = "rlite.backends.vllm.extension.AsyncHoldingScheduler"
SAMPLING = "rlite"
"""key of `SamplingParams.extra_args` under which a request's own sampling parameters travel to the sampler"""
DRAIN_TURNS = 10
"""turns of the event loop in which vLLM's frontend passes on outputs that its engine core has sent"""


def start_engine(arguments: dict[str, Any], take: Callable[[list[Any]], list[Any]]) -> Any:
    """Return a running AsyncLLM.

    Args:
        arguments: fields of AsyncEngineArgs.
        take: receives the outputs of each message, and returns the outputs for vLLM's own frontend.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(worker_extension_cls=EXTENSION, **arguments).create_engine_config()
    config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER if config.scheduler_config.async_scheduling else SCHEDULER
    if options.is_cpu_build():
        # vLLM's CPU platform replaces both. A forked process does not import vLLM again
        config.parallel_config.distributed_executor_backend = arguments["distributed_executor_backend"]
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    receive = engine.engine_core.get_output_async

    async def get_output() -> Any:
        step = await receive()
        step.outputs = take(step.outputs)
        return step

    # a method of this one object: the engine's output handler has begun, and holds the object itself
    engine.engine_core.get_output_async = get_output
    return engine


def sampling_arguments(request: SequenceRequest, stop_ids: Collection[int], max_model_len: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a request.

    vLLM's own temperature, top-p and top-k are set as well, but the sampler of `extension.py` draws the tokens. It
    reads `extra_args`, and so does the scheduler. No argument comes from the model's generation_config.

    Args:
        request: the request. Generation resumes after its `output_ids`.
        stop_ids: tokens that end the request.
        max_model_len: longest sequence in tokens.
    """
    gconfig, ends = request.gconfig, sorted(stop_ids)
    return {
        "n": 1,
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": max(gconfig.top_k, 0),
        "max_tokens": num_left(request, max_model_len),
        "stop_token_ids": ends,
        "ignore_eos": True,  # the end tokens are among the stop tokens
        "detokenize": False,
        "extra_args": {
            SAMPLING: {
                "gconfig": {name: getattr(gconfig, name) for name in ("greedy", "temperature", "top_p", "top_k")},
                "seed": request.seed,
                "stop_ids": ends,
                "min_length": len(request.input_ids) + gconfig.min_new_tokens,
                "has_kept_ids": "kept_ids" in request.extras,
                "is_urgent": bool(gconfig.stop),  # the server ends it, so it has to see each token
            }
        },
    }


def scored_prompt(ids: Sequence[int], entries: Sequence[Mapping[int, Any] | None], num_top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt.

    Args:
        ids: the prompt.
        entries: vLLM's `prompt_logprobs`: for each token but the first, objects with `logprob` and `rank` by token id,
            for the token and the `num_top` most likely tokens.
        num_top: number of most likely tokens at each place.
    """
    places = [entry for entry in entries[1:] if entry is not None]
    top = [sorted(entry, key=lambda token: entry[token].rank)[:num_top] for entry in places]
    return PromptLogprobs(
        logprobs=[entry[token].logprob for token, entry in zip(ids[1:], places, strict=True)],
        top_ids=top,
        top_logprobs=[[entry[token].logprob for token in tokens] for tokens, entry in zip(top, places, strict=True)],
    )


def sampling_params(arguments: dict[str, Any]) -> Any:
    """Return vLLM's SamplingParams of a request with one output at its end."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **arguments)


def name_of(output: Any) -> str:
    """Return the name under which the request of an output was started; it has no hyphen."""
    return output.request_id.partition("-")[0]  # newer releases append a random suffix


def finish_reason(output: Any) -> str | None:
    """Return "stop", "length" or another reason of vLLM; None if the request continues."""
    return None if output.finish_reason is None else str(output.finish_reason)


async def pause(engine: Any) -> None:
    """Hold generation, keep requests, and wait until every token before it has been passed on."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    # the core sends its outputs before it answers; the frontend passes them on in turns of the event loop
    for _ in range(DRAIN_TURNS):
        await asyncio.sleep(0)


async def forget_cache(engine: Any) -> None:
    """Drop all keys and values. Running requests recompute theirs.

    Raises:
        RuntimeError: vLLM kept its prefix cache.
    """
    if not await engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not reset its prefix cache, so keys and values of old weights would be used")


def is_death(error: BaseException) -> bool:
    """Return whether an error says that the engine is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)
