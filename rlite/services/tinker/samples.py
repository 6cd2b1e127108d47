"""Samples under way: one task for each request, whose result clients ask for until it gives way to newer ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import AbstractAsyncContextManager, nullcontext

from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import DataError
from rlite.generation import GenerationHyperparameters
from rlite.services.endpoint.exchange import log_failure
from rlite.services.tinker.bodies import Sample
from rlite.services.tinker.options import TinkerLimits
from rlite.services.tinker.sampling import Served, ServedAdapters, served_name
from rlite.services.tinker.tenants import Result, Sampler, Tenants, UnknownName
from rlite.services.tinker.weights import read_facts
from rlite.services.tinker.wire import write_samples
from rlite.types import LLMRequest

MAX_KEPT, MAX_KEPT_BYTES = 16384, 1 << 30
"""results that are kept"""
_UNSUPPORTED = {
    "topk_sample_logprobs": "leave it out",
    "target_prompt_logprobs": "take topk_prompt_logprobs, or forward with cross_entropy",
    "prompt_alt_tokens_k": "leave it out",
    "record_stability_info": "train with loss_fn importance_sampling, ppo or cispo",
}


_Using = AbstractAsyncContextManager[Served | None]


class Samples:
    """Draws samples.

    Args:
        engine: the inference engine.
        served: its adapters.
        tenants: all sessions.
        limits: limits of tenants.
    """

    def __init__(
        self, engine: RliteInferenceEngine, served: ServedAdapters, tenants: Tenants, limits: TinkerLimits
    ) -> None:
        self._engine, self._served, self._tenants, self._limits = engine, served, tenants, limits
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self._ended: OrderedDict[str, int] = OrderedDict()
        """bytes of results, by request, in the order of their ends"""
        self.versions: dict[str, list[list[int]]] = {}
        """versions of the tokens of each sample, by request"""

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._tasks) - len(self._ended)

    def submit(self, request_id: str, sampler: Sampler, asked: Sample) -> bool:
        """Begin a request. A retry of one under way changes nothing.

        Args:
            request_id: its id.
            sampler: the source of its samples.
            asked: its body.

        Returns:
            False if too many are under way.

        Raises:
            DataError: the request cannot be answered, or the sampler's weights were deleted.
        """
        if request_id in self._tasks:
            return True
        for name, remedy in _UNSUPPORTED.items():
            if getattr(asked, name):
                raise DataError(f"{name}: this server does not have it; {remedy}")
        tokens = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
        if not 0 < len(tokens) < (most := self._engine.context_length):
            raise DataError(f"prompt: has {len(tokens)} tokens; expected from 1 to {most - 1}")
        if self.num_running >= self._limits.max_running:
            return False
        draws, (adapter, using) = self._draws(asked), self._adapter(sampler)
        given = [LLMRequest(input_ids=tokens, gconfig=draw, rid=sampler.sampler_id, adapter=adapter) for draw in draws]
        self._tasks[request_id] = asyncio.create_task(self._run(request_id, using, given, asked))
        return True

    def cancel(self, request_id: str) -> None:
        """End a request whose result nobody waits for."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()
            self._forget(request_id)

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """Return a result, or None if it is not there in time.

        Raises:
            UnknownName: there is no such request; the client may give it again.
        """
        if (task := self._tasks.get(request_id)) is None:
            raise UnknownName(f"request {request_id[:80]!r} does not exist")
        done, _ = await asyncio.wait([task], timeout=seconds)
        return task.result() if done and not task.cancelled() else None

    async def close(self) -> None:
        """End all requests."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _draws(self, asked: Sample) -> list[GenerationHyperparameters]:
        """Return the sampling parameters of each sample."""
        params, stop = asked.sampling_params, asked.sampling_params.stop
        words = [stop] if isinstance(stop, str) else stop or []
        given = GenerationHyperparameters(
            max_new_tokens=params.max_tokens or self._limits.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            stop=tuple(word for word in words if isinstance(word, str)),
            stop_token_ids=tuple(word for word in words if isinstance(word, int)),
            ignore_eos=stop == [],
        )
        if params.seed is None:
            return [given] * asked.num_samples
        return [given.new(seed=(params.seed + number) % 2**31) for number in range(asked.num_samples)]

    async def _run(self, request_id: str, using: _Using, given: list[LLMRequest], asked: Sample) -> Result:
        """Return the result of a request, and forget the oldest results beyond the limits."""
        result = await self._answer(request_id, using, given, asked)
        self._ended[request_id] = len(result.body)
        while len(self._ended) > 1 and (len(self._ended) > MAX_KEPT or sum(self._ended.values()) > MAX_KEPT_BYTES):
            self._forget(next(iter(self._ended)))
        return result

    def _forget(self, request_id: str) -> None:
        for kept in (self._tasks, self._ended, self.versions):
            kept.pop(request_id, None)

    async def _answer(self, request_id: str, using: _Using, given: list[LLMRequest], asked: Sample) -> Result:
        try:
            async with using as served:
                answers = await asyncio.gather(*map(self._engine.agenerate, given))
                scored = None
                if asked.prompt_logprobs or asked.topk_prompt_logprobs:
                    tokens = [given[0].input_ids]
                    (scored,) = await self._engine.ascore(tokens, asked.topk_prompt_logprobs, given[0].adapter)
            named = served.versions if served else {}
            self.versions[request_id] = [[named.get(each, 0) for each in one.output_versions] for one in answers]
            last = asked.prompt_logprobs_last_n or 0
            return Result(write_samples(answers, scored, asked.topk_prompt_logprobs, last), is_proto=True)
        except DataError as error:
            return Result.failed(str(error))
        except Exception as error:  # of any engine
            log_failure("a sample failed", error)
            return Result.failed(f"the server failed with {type(error).__name__}; its log has more", "server")

    def _adapter(self, sampler: Sampler) -> tuple[str | None, _Using]:
        """Return the name of a sampler's adapter, and a context in which it is served.

        Raises:
            DataError: its weights were deleted.
        """
        if sampler.model_id is None or sampler.name is None:
            return None, nullcontext()
        session = self._tenants.sessions[sampler.model_id.partition(":")[0]]
        model = session.models[int(sampler.model_id.rpartition(":")[2])]
        folder = model.folder / "sampler_weights" / sampler.name
        if (facts := read_facts(folder)) is None:
            told = "its weights were deleted, or were too old (ttl_seconds, keep_samplers, keep_weights)"
            raise DataError(f"sampler {sampler.sampler_id}: {told}")
        name = served_name(sampler.model_id, sampler.name, None if sampler.is_inflight else facts["seq_id"])
        return name, self._served.using(name, folder)
