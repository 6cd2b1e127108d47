"""The inference engine: prompts in, completions out, through replicas that batch continuously.

    generate / agenerate ──> router ──> pump of one replica ──advance(new, cancelled, steps)──> its workers
            ^                                   │
            └────────── tokens, by chunk ───────┘

Each replica has a pump: a thread that sends it new requests and takes its tokens, a few decode steps per call. Workers
are synchronous and know nothing of it. Pausing is not calling: generation rests at a token boundary.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDict
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from rlite.data.raw import raw_prompts
from rlite.engine.base import Engine, Weights
from rlite.engine.pump import Flight, Pump, end_all
from rlite.engine.registry import Backend, Kind
from rlite.engine.replica import InferenceBackend
from rlite.engine.workers import Part
from rlite.errors import (
    CallTimeout,
    ConfigError,
    DataError,
    ResidencyError,
    RliteError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
)
from rlite.nn.huggingface import local_checkpoint
from rlite.observability import trace
from rlite.parallel.tensor import attention_shape
from rlite.rollout.collector.collector import RolloutCollector
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import mix
from rlite.rollout.workflow import RolloutWorkflow
from rlite.types import (
    CompletionOutput,
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    OnChunk,
    RequestOutput,
    SequenceRequest,
    TokenChunk,
    token_ids,
)

logger = logging.getLogger(__name__)

MAX_AFFINITIES = 65536
"""request ids whose replica is remembered"""


@dataclass(frozen=True, kw_only=True)
class ReplicaLost:
    """A replica is gone, the others go on."""

    replica: int
    workers: tuple[str, ...]
    """those that died"""
    num_moved: int
    """requests in flight that go on elsewhere, from the tokens that they had"""
    reason: str


class RliteInferenceEngine(Engine):
    """Serves a causal language model.

    Args:
        path: folder (or hub name) of a Hugging Face checkpoint.
        executor: what computes: "torch" (built in), or a registered one.

    `tensor_parallel_size` in `build` counts the workers of one replica, `data_parallel_size` the replicas.

    When a worker dies its replica is lost; `lost_replicas` says so. Its requests go on at the others from the tokens
    that they had, and who waits for them notices nothing. What needs every replica (a weight sync, `cpu()`, `cuda()`,
    `load()`) raises WorkerDied until the engine is released and built again; so does everything when the last is lost.
    """

    kind: ClassVar[Kind] = "inference"
    backend_type: ClassVar[type[Backend]] = InferenceBackend
    _backend: InferenceBackend
    has_independent_replicas: ClassVar[bool] = True

    def __init__(self, path: str | Path, executor: str = "torch") -> None:
        super().__init__(executor)
        self.path = str(local_checkpoint(path))
        self._config = AutoConfig.from_pretrained(self.path, trust_remote_code=False).get_text_config()
        self._pumps: list[Pump] = []
        self.lost_replicas: list[ReplicaLost] = []
        """since it was built, in their order"""
        self._replica_of: dict[str, int] = {}
        self._may_run = threading.Event()
        self._is_paused = False
        self._is_receiving = False
        self._has_noted_truncation = False
        self._has_cache = False
        self._ids = itertools.count()
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._rollout_options = CollectorOptions()
        self._collector: RolloutCollector | None = None

    # -- generating ----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[str | Sequence[int] | Mapping[str, Any]],
        sampling_params: Mapping[str, Any] | GenerationHyperparameters | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        Args:
            prompts: texts, token ids (lists, arrays or tensors), or mappings with `prompt_token_ids` or `input_ids`, as
                `apply_chat_template(tokenize=True)` returns; or one text or mapping. A text begins, once, with what the
                tokenizer puts before every text.
            sampling_params: in AReaL's or vLLM's names; one for all prompts. Without `max_new_tokens` a completion may
                take 16,384 tokens, or what `max_model_len` leaves, whatever the executor's own default is.
            timeout: seconds for the whole call.

        Raises: DataError for a prompt that cannot be used (one longer than `max_model_len`, or that is too much for the
            model's dtype, is found by the worker, and the other prompts are then cancelled); ConfigError and
            UnknownOptionError for the sampling parameters; ResidencyError; WorkerDied.
        """
        gconfig = GenerationHyperparameters.from_mapping(sampling_params)
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if len(prompts) == 0:
            raise DataError("generate: the list of prompts is empty; expected at least one prompt")
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        tokens = [self._tokens(prompt, index) for index, prompt in enumerate(prompts)]
        self._check_ready("generate")
        flights = [[self._flight(ids, gconfig, sample) for sample in range(gconfig.n_samples)] for ids in tokens]
        with trace.span("generate", num_prompts=len(prompts)):
            self._route(flights)
            self._wait(
                list(itertools.chain.from_iterable(flights)), self.group.call_timeout if timeout is None else timeout
            )
        return [
            RequestOutput(
                prompt=text,
                prompt_token_ids=ids,
                outputs=[self._output(index, flight) for index, flight in enumerate(siblings)],
            )
            for text, ids, siblings in zip(texts, tokens, flights, strict=True)
        ]

    async def agenerate(self, request: LLMRequest, on_chunk: OnChunk | None = None) -> LLMResponse:
        """Complete one request, while others run; every token carries its log-probability and policy version.

        `on_chunk` is called in the pump's thread as tokens arrive; it must not call the engine, and what it raises ends
        this request. Cancelling the task ends the request.
        """
        if request.gconfig.n_samples != 1:
            raise ConfigError(
                f"agenerate makes one completion, not n_samples={request.gconfig.n_samples}; call it again"
            )
        self._check_ready("agenerate", may_wait=True)
        flight = self._flight(self._tokens(request.input_ids, 0), request.gconfig, 0, on_chunk)
        with trace.task("generate", engine=self.name, prompt_tokens=len(request.input_ids)):
            self._route([[flight]], affinity=request.rid)
            try:
                await asyncio.wrap_future(flight.done)
            except asyncio.CancelledError:
                self._cancel([flight])
                raise
        self._note_truncation(flight)
        return LLMResponse(
            input_tokens=list(request.input_ids),
            output_tokens=flight.token_ids,
            output_logprobs=flight.logprobs,
            output_versions=flight.versions,
            stop_reason=flight.finish_reason,
            latency=flight.ended - flight.started,
            ttft=(flight.first_token or flight.ended) - flight.started,
            sampling_logprobs=flight.sampling_logprobs,
            metadata=dict(request.metadata),
        )

    async def stream(self, request: LLMRequest) -> AsyncIterator[TokenChunk]:
        """The tokens of one request as they are made; the last chunk has a finish_reason."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        task = asyncio.ensure_future(
            self.agenerate(request, lambda chunk: loop.call_soon_threadsafe(chunks.put_nowait, chunk))
        )
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if chunk.error is None:
                    yield chunk
            task.result()
        finally:
            task.cancel()

    def pause(self) -> None:
        """Rest at a token boundary; returns when no worker computes. Requests wait until `resume()`."""
        self._is_paused = True
        self._hold()

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._is_paused = False
        self._let_run()

    def abort_all(self) -> None:
        """End every request in flight with stop_reason "abort"; what they have so far is theirs."""
        self._hold()
        try:
            for pump in self._pumps:
                pump.cancel_all()
                pump.flush_cancelled()
        finally:
            self._let_run()

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together; workers may allow fewer. Raises: ConfigError unbuilt."""
        self.group.check()
        return self.options.max_model_len or self._config.max_position_embeddings

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(pump.num_in_flight for pump in self._pumps)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        return self._tokenizer

    # -- rollouts ------------------------------------------------------------------------------------------------

    @property
    def rollout_options(self) -> CollectorOptions:
        """How rollouts are collected; to be set before the first one is asked for. Raises: ConfigError afterwards."""
        return self._rollout_options

    @rollout_options.setter
    def rollout_options(self, options: CollectorOptions) -> None:
        if self._collector is not None:
            raise ConfigError("rollout_options: the engine has already begun with others; set them before its rollouts")
        self._rollout_options = options

    @property
    def collector(self) -> RolloutCollector:
        """Runs this engine's rollouts; made when it is first used, closed with the engine."""
        self.group.check()
        if self._collector is None:
            self._collector = RolloutCollector(self, self.rollout_options)
        return self._collector

    def rollout_batch(
        self,
        data: Sequence[Mapping[str, Any]],
        workflow: RolloutWorkflow,
        group_size: int = 1,
        timeout: float | None = None,
        first_place: int = 0,
    ) -> TensorDict:
        """Run a workflow on every item now; see `RolloutCollector.rollout_batch`."""
        return self.collector.rollout_batch(data, workflow, group_size, timeout, first_place)

    def submit(self, data: Mapping[str, Any], workflow: RolloutWorkflow, group_size: int = 1) -> int:
        """Let one item run when capacity allows; see `RolloutCollector.submit`."""
        return self.collector.submit(data, workflow, group_size)

    def wait(self, count: int, timeout: float | None = None) -> TensorDict:
        """The oldest `count` groups that were submitted; see `RolloutCollector.wait`."""
        return self.collector.wait(count, timeout)

    def prepare_batch(
        self,
        loader: Iterable[Any],
        workflow: RolloutWorkflow,
        should_accept: Callable[[TensorDict], bool] | None = None,
        group_size: int = 1,
        timeout: float | None = None,
    ) -> TensorDict:
        """The next batch, while further items run ahead; see `RolloutCollector.prepare_batch`."""
        return self.collector.prepare_batch(loader, workflow, should_accept, group_size, timeout)

    def _tokens(self, prompt: Any, index: int) -> list[int]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            prompt = prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            ids = raw_prompts(self.tokenizer, [prompt])[0]
        else:
            ids = list(token_ids(prompt, f"prompt {index}"))
        if not ids:
            raise DataError(f"prompt {index} is empty: expected at least one token")
        wrong = [token for token in ids if not 0 <= token < self._config.vocab_size]
        if wrong:
            raise DataError(
                f"prompt {index} holds token id {wrong[0]}; the model's vocabulary has {self._config.vocab_size} tokens"
            )
        return ids

    def _flight(
        self,
        ids: list[int],
        gconfig: GenerationHyperparameters,
        sample: int,
        on_chunk: Callable[[TokenChunk], object] | None = None,
    ) -> Flight:
        number = next(self._ids)
        seed = mix(self.options.seed, number) if gconfig.seed is None else mix(gconfig.seed, sample)
        request = SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=seed)
        return Flight(request, on_chunk=on_chunk)

    def _route(self, flights: Sequence[Sequence[Flight]], affinity: str | None = None) -> None:
        """Siblings, and requests of one `affinity`, go to one replica; otherwise to the one with the least to do.

        Raises: the failure, if no replica is left.
        """
        refused: Sequence[Sequence[Flight]] = flights
        while refused:
            shares = self._shares(refused, affinity)
            refused = [siblings for pump, share in shares for siblings in share if not pump.submit(siblings)]

    def _shares(
        self, flights: Sequence[Sequence[Flight]], affinity: str | None
    ) -> list[tuple[Pump, list[Sequence[Flight]]]]:
        loads = {pump: pump.outstanding for pump in self._pumps if pump.failure is None}
        if not loads:
            self._raise_failure()
        shares: dict[Pump, list[Sequence[Flight]]] = {pump: [] for pump in loads}
        for siblings in flights:
            known = self._replica_of.get(affinity or "")
            chosen = self._pumps[known] if known is not None else None
            if chosen not in loads:
                chosen = min(loads, key=loads.__getitem__)
            if affinity is not None:
                self._replica_of[affinity] = self._pumps.index(chosen)
                if len(self._replica_of) > MAX_AFFINITIES:
                    self._replica_of.pop(next(iter(self._replica_of)))
            shares[chosen].append(siblings)
            loads[chosen] += sum(flight.cost for flight in siblings)
        return list(shares.items())

    def _raise_failure(self) -> None:
        self.group.check()
        failures = [pump.failure for pump in self._pumps if pump.failure is not None]
        # a replica that was lost before did not fail the last one
        failure = next((error for error in failures if not isinstance(error, WorkerError)), failures[0])
        raise type(failure)(*failure.args)

    def _replica_failed(self, pump: Pump, flights: list[Flight], error: Exception) -> None:
        """Let a lost replica's requests go on elsewhere; called in its pump's thread, which ends then."""
        if not isinstance(error, WorkerError) or all(other.failure is not None for other in self._pumps):
            end_all(flights, error)
            return
        died = error.workers if isinstance(error, WorkerDied) else ()
        lost = ReplicaLost(replica=pump.executor.index, workers=died, num_moved=len(flights), reason=str(error))
        self.lost_replicas.append(lost)
        logger.warning(
            "%s lost replica %d (%s): its %d requests in flight go on at the others",
            self.name,
            lost.replica,
            "; ".join(died) or error,
            lost.num_moved,
        )
        trace.instant("replica lost", engine=self.name, replica=lost.replica, workers=died, num_moved=lost.num_moved)
        siblings: dict[tuple[int, ...], list[Flight]] = {}
        for flight in flights:
            siblings.setdefault(tuple(flight.request.input_ids), []).append(flight)
        try:
            self._route(list(siblings.values()))
        except RliteError as failure:  # the others are gone by now
            end_all(flights, failure)

    def _wait(self, flights: Sequence[Flight], timeout: float) -> None:
        """Return when all have ended; raise what the first failed one did, or CallTimeout, and cancel the others."""
        done, late = wait([flight.done for flight in flights], timeout=timeout, return_when=FIRST_EXCEPTION)
        if late:
            self._cancel([flight for flight in flights if flight.done in late])
        for flight in flights:
            if flight.done in done:
                flight.done.result()
        if late:
            busy = tuple(self.group.describe(pump.executor.ranks[0]) for pump in self._pumps if pump.num_in_flight)
            raise CallTimeout(
                f"generate: {len(late)} of {len(flights)} completions were not done within {timeout:g} s, on "
                f"{'; '.join(busy)}. Give it more time (timeout=) or ask for fewer tokens (max_new_tokens).",
                busy,
            )

    def _cancel(self, flights: Sequence[Flight]) -> None:
        for flight in flights:
            flight.is_cancelled = True  # before the pumps are asked: it may be on its way from one to another
        for pump in self._pumps:
            pump.cancel([flight.request.request_id for flight in flights])

    def _output(self, index: int, flight: Flight) -> CompletionOutput:
        self._note_truncation(flight)
        text = self.tokenizer.decode(flight.token_ids, skip_special_tokens=True)
        for stop in flight.request.gconfig.stop:
            text = text.partition(stop)[0]
        return CompletionOutput(
            index=index,
            token_ids=flight.token_ids,
            text=text,
            logprobs=flight.logprobs,
            sampling_logprobs=flight.sampling_logprobs,
            versions=flight.versions,
            finish_reason=flight.finish_reason,
        )

    def _note_truncation(self, flight: Flight) -> None:
        """Warn once if a completion ended at a context length that nobody chose."""
        asked, made = flight.request.gconfig.max_new_tokens, len(flight.token_ids)
        is_known = self._has_noted_truncation or vars(self.options).get("max_model_len") is not None
        if is_known or flight.finish_reason != "length" or made >= asked:
            return
        self._has_noted_truncation = True
        logger.warning(
            "%s: a completion ended after %d of %d new tokens, at the default context length of %d tokens; "
            "build(max_model_len=...) sets another one, up to the model's own limit",
            *(self.name, made, asked, len(flight.request.input_ids) + made),
        )

    def _check_ready(self, what: str, may_wait: bool = False) -> None:
        group = self.group
        group.check()
        if may_wait and self._is_receiving:
            return  # between two weights: the request waits
        self._need_weights(what)
        if not self._has_cache:
            raise ResidencyError(
                f'{what}: the KV cache of {self.name} is not on the device; call cuda("kv_cache") first'
            )
        if self._is_paused and not may_wait:
            raise ResidencyError(f"{what}: {self.name} is paused; call resume() first")

    # -- life ----------------------------------------------------------------------------------------------------

    def _validate(self, executor_size: int) -> None:
        if executor_size > 1 and (heads := attention_shape(self._config)[2]) % executor_size:
            raise ConfigError(
                f"tensor_parallel_size={executor_size} does not divide the model's {heads} key-value heads"
            )
        if self._backend.check is not None:
            self._backend.check(self.path, executor_size)

    def _source(self) -> str:
        return self.path

    def _built(self) -> None:
        self._has_cache = True
        self._version = 0
        self._may_run.set()
        self.lost_replicas = []
        self._pumps = [Pump(executor, self._may_run, self._replica_failed) for executor in self.executors]
        assert self._session is not None
        self._session.before_release(self.name, self._stop_serving)

    def _stop_serving(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None
        for pump in self._pumps:
            pump.close()
        for pump in self._pumps:
            pump.join()
        self._pumps = []

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self._hold()
        try:
            for pump in self._pumps:
                pump.flush_cancelled()  # requests that nobody waits for are not in the way
            if self.num_in_flight:
                raise ResidencyError(
                    f"{self.name} has {self.num_in_flight} requests in flight; wait for them or call abort_all() first"
                )
            yield
        finally:
            self._let_run()

    def _moved(self, what: Part, resident: bool) -> None:
        if what in ("all", "kv_cache"):
            self._has_cache = resident

    def _hold(self) -> None:
        self._may_run.clear()
        for pump in self._pumps:
            with pump.between_calls():
                pass  # wait until the call under way has ended

    def _let_run(self) -> None:
        if not self._is_paused and self._has_cache and self.weights is Weights.DEVICE:
            self._may_run.set()

    # -- weights -------------------------------------------------------------------------------------------------

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a checkpoint of the same model; without a path, from the engine's own: a new version."""
        folder = None if path is None else str(local_checkpoint(path))
        with self.receiving_weights("continue"):
            self.group.broadcast("load_weights", folder)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        self.group.broadcast("set_version", version)
        super().set_version(version)
        if self._collector is not None:
            self._collector.version_changed()

    @contextmanager
    def receiving_weights(self, on_inflight: str) -> Iterator[None]:
        """Hold generation while weights arrive; then let it go on from its tokens so far, or abort it."""
        with trace.span("wait for a token boundary"):
            self._hold()
        if on_inflight == "abort":
            for pump in self._pumps:
                pump.cancel_all()
                pump.flush_cancelled()
        self._is_receiving = True
        try:
            with super().receiving_weights(on_inflight):
                yield
        except Exception as error:
            cause = f"the weights of {self.name} could not be written, so this request was ended: {error}"
            for pump in self._pumps:
                pump.drop_all(WeightSyncError(cause))
            raise
        finally:
            self._is_receiving = False
        self._let_run()
        if self._collector is not None:
            self._collector.version_changed()
