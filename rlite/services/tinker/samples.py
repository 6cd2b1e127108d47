"""Samples under way: one task for each request, whose result clients ask for until it gives way to newer ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import DataError, RliteError
from rlite.generation import GenerationHyperparameters
from rlite.services.endpoint.exchange import log_failure
from rlite.services.tinker.bodies import Sample
from rlite.services.tinker.sampling import ServedAdapters, served_name
from rlite.services.tinker.tenants import Result, Sampler, Tenants, UnknownName
from rlite.services.tinker.wire import prompt_tokens, write_samples
from rlite.types import LLMRequest, LLMResponse

MAX_KEPT = 16384
"""results that are kept"""
_UNSUPPORTED = {
    "topk_sample_logprobs": "leave it out",
    "target_prompt_logprobs": "take topk_prompt_logprobs, or forward with cross_entropy",
    "prompt_alt_tokens_k": "leave it out",
    "record_stability_info": "train with loss_fn importance_sampling, ppo or cispo",
}


class Samples:
    """Draws samples.

    Args:
        engine: the inference engine.
        served: its adapters.
        tenants: all sessions.
        max_running: requests at a time.
        max_new_tokens: longest answer of requests that set none.
    """

    def __init__(
        self,
        engine: RliteInferenceEngine,
        served: ServedAdapters,
        tenants: Tenants,
        max_running: int,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._served, self._tenants = engine, served, tenants
        self._max_running, self._max_new_tokens = max_running, max_new_tokens
        self._tasks: OrderedDict[str, asyncio.Task[Result]] = OrderedDict()
        self.versions: OrderedDict[str, list[list[int]]] = OrderedDict()
        """versions of the tokens of each sample, by request"""

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return sum(not task.done() for task in self._tasks.values())

    def submit(self, request_id: str, sampler: Sampler, asked: Sample) -> bool:
        """Begin a request. A retry of one under way changes nothing.

        Args:
            request_id: its id.
            sampler: the source of its samples.
            asked: its body.

        Returns:
            False if too many are under way.

        Raises:
            DataError: the request cannot be answered.
        """
        if request_id in self._tasks:
            return True
        for name, remedy in _UNSUPPORTED.items():
            if getattr(asked, name):
                raise DataError(f"{name}: this server does not have it; {remedy}")
        tokens = prompt_tokens(asked.prompt)
        if len(tokens) >= self._engine.context_length:
            raise DataError(f"prompt: has {len(tokens)} tokens; expected fewer than {self._engine.context_length}")
        if self.num_running >= self._max_running:
            return False
        draws = self._draws(asked)
        self._tasks[request_id] = asyncio.create_task(self._answer(request_id, sampler, tokens, asked, draws))
        while len(self._tasks) > MAX_KEPT and next(iter(self._tasks.values())).done():
            self.versions.pop(self._tasks.popitem(last=False)[0], None)
        return True

    def cancel(self, request_id: str) -> None:
        """End a request whose result nobody waits for."""
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def result(self, request_id: str, seconds: float) -> Result | None:
        """Return a result, or None if it is not there in time.

        Raises:
            UnknownName: there is no such request; the client may give it again.
        """
        if (task := self._tasks.get(request_id)) is None:
            raise UnknownName(f"request {request_id[:80]!r} does not exist")
        done, _ = await asyncio.wait([task], timeout=seconds)
        return task.result() if done and not task.cancelled() else None

    def finished(self, prefix: str, after: int) -> tuple[list[str], int]:
        """Return ids of finished requests of a sampler from a place on, and the place after them.

        Args:
            prefix: beginning of their ids.
            after: the place.
        """
        own = [name for name, task in self._tasks.items() if name.startswith(prefix) and task.done()]
        return own[after:] if after <= len(own) else own, len(own)

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
            max_new_tokens=params.max_tokens or self._max_new_tokens,
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

    async def _answer(
        self,
        request_id: str,
        sampler: Sampler,
        tokens: list[int],
        asked: Sample,
        draws: Sequence[GenerationHyperparameters],
    ) -> Result:
        try:
            name, using = self._adapter(sampler)
            async with using:
                made = [self._one(tokens, draw, name, sampler.sampler_id) for draw in draws]
                answers = await asyncio.gather(*made)
                scored = None
                if asked.prompt_logprobs or asked.topk_prompt_logprobs:
                    (scored,) = await self._engine.ascore([tokens], asked.topk_prompt_logprobs, name)
            self.versions[request_id] = [answer.output_versions for answer in answers]
            last = asked.prompt_logprobs_last_n or 0
            return Result(write_samples(answers, scored, asked.topk_prompt_logprobs, last), is_proto=True)
        except DataError as error:
            return Result.failed(str(error))
        except RliteError as error:
            log_failure("a sample failed", error)
            return Result.failed(f"the server failed with {type(error).__name__}; its log has more", "server")

    def _adapter(self, sampler: Sampler) -> tuple[str | None, AbstractAsyncContextManager[None]]:
        """Return the name of a sampler's adapter, and a context in which it is served.

        Raises:
            DataError: its weights were deleted.
        """
        if sampler.model_id is None or sampler.name is None:
            return None, nullcontext()
        session = self._tenants.sessions[sampler.model_id.partition(":")[0]]
        model = session.models[int(sampler.model_id.rpartition(":")[2])]
        folder = model.folder / "sampler_weights" / sampler.name
        if not folder.is_dir():
            raise DataError(
                f"sampler {sampler.sampler_id}: its weights were deleted, as they were too old (keep_samplers)"
            )
        name = served_name(sampler.model_id, sampler.name)
        return name, self._served.using(name, folder)

    async def _one(
        self, tokens: list[int], draw: GenerationHyperparameters, adapter: str | None, affinity: str
    ) -> LLMResponse:
        return await self._engine.agenerate(LLMRequest(input_ids=tokens, gconfig=draw, rid=affinity, adapter=adapter))


def sequence_ids(request_id: str, num: int) -> list[str]:
    """Return the names of a request's samples."""
    return [f"{request_id}:{number}" for number in range(num)]
