"""The replica of the SGLang executor: the driver's streams of tokens from one server.

An event loop in a thread of its own holds a stream for each request, and hands tokens to their requests. While the
replica is paused, requests wait here, and so do tokens that were on their way: callers see a token boundary.

Log-probabilities: SGLang returns log_softmax(logits / temperature) of the unfiltered distribution, at temperature 1 for
greedy requests, as rlite does. If sampling truncates, the log-probability under the truncated distribution comes with
SGLang's sampling mask, which needs a finite top_k.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

from rlite.backends.serving.sampling import num_left, objection
from rlite.backends.sglang.server import CALL_S, CallRefused, Endpoint, SglangOptions
from rlite.backends.sglang.worker import SglangWorker
from rlite.errors import RliteError, WorkerError
from rlite.imports import optional
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, InFlightRequest, OnFailure, WorkerReplica
from rlite.runtime.replicas.workers import RankChoice, T, WorkerSet
from rlite.types import MAX_KEPT_IDS, PromptLogprobs, SequenceRequest, StopReason, TokenChunk

MAX_KEPT = 4000
"""most token ids in a sampling mask; SGLang's default limit is 4096, and ties at the limit count too"""
REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def generate_body(request: SequenceRequest, name: str, max_model_len: int, vocab_size: int) -> dict[str, Any]:
    """Return the body of `/generate` for a request that continues after its `output_ids`.

    Args:
        request: the request.
        name: unique id of the request on the server; no id may be a prefix of another.
        max_model_len: longest sequence of the server.
        vocab_size: size of the model's vocabulary.
    """
    gconfig, num_done = request.gconfig, len(request.output_ids)
    ids = [*request.input_ids, *request.output_ids]
    num_new = num_left(request, max_model_len)
    sampling: dict[str, Any] = {
        "max_new_tokens": num_new,
        "min_new_tokens": min(max(gconfig.min_new_tokens - num_done, 0), num_new),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": gconfig.top_k if gconfig.top_k > 0 and not gconfig.greedy else -1,
        "stop": list(gconfig.stop),
        "stop_token_ids": list(gconfig.stop_token_ids),
        "ignore_eos": gconfig.ignore_eos,
        "sampling_seed": request.seed % 2**63,
    }
    body = {"rid": name, "input_ids": ids, "stream": True, "return_logprob": True, "sampling_params": sampling}
    if gconfig.is_truncating:  # the server returns the token ids that it keeps
        most = MAX_KEPT_IDS if "kept_ids" in request.extras else MAX_KEPT
        sampling["top_k"] = min(sampling["top_k"] if sampling["top_k"] > 0 else vocab_size, most)
        body["return_sampling_mask"] = True
    return body


def scoring_body(prompt: list[int], num_top: int) -> dict[str, Any]:
    """Return the body of `/generate` for the log-probabilities of a prompt and of `num_top` tokens at each place."""
    sampling = {"max_new_tokens": 0, "temperature": 0.0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return body | {"top_logprobs_num": num_top} if num_top else body


def scored_prompt(meta: dict[str, Any], num_top: int) -> PromptLogprobs:
    """Return the log-probabilities of a prompt from the `meta_info` of the answer to `scoring_body`."""
    places = meta["input_token_logprobs"][1:]
    top = meta["input_top_logprobs"][1:] if num_top else [[] for _ in places]
    return PromptLogprobs(
        logprobs=[float(value) for value, *_ in places],
        top_ids=[[int(token) for _, token, *_ in entries] for entries in top],
        top_logprobs=[[float(value) for value, *_ in entries] for entries in top],
    )


@dataclass
class TokenStream:
    """State of one request's stream of events. Events may be cumulative or incremental, as the server is set up."""

    request: SequenceRequest
    versions: list[int]
    """versions of the completion's tokens so far, which may be corrected"""
    num_taken: int = 0
    """tokens that earlier events brought"""
    is_finished: bool = False
    """the server has ended the request, or never had it"""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, end) of this stream's tokens, as the server reports them at its end"""

    def chunk(self, line: str | bytes, version: int) -> TokenChunk:
        """Return the new tokens of one event.

        Args:
            line: JSON text of the event.
            version: policy version for a server that does not know its version.
        """
        event = json.loads(line)
        if (error := event.get("error")) is not None:
            return self.refusal(str(error.get("message", error) if isinstance(error, dict) else error))
        meta = event["meta_info"]
        reason: dict[str, Any] = meta.get("finish_reason") or {}
        self.is_finished = bool(reason)
        if reason.get("type") == "abort" and reason.get("status_code"):
            return self.refusal(str(reason.get("message")))
        total = meta.get("completion_tokens", self.num_taken)
        columns = ("output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs")
        pairs, masks, kept = (self._new(meta.get(name) or [], total) for name in columns)
        self.num_taken = max(total, self.num_taken)
        if any(pair[0] is None for pair in pairs):
            return self.refusal("the model computes NaN or infinity for this request", is_nonfinite=True)
        self.spans = [(version_of(span["version"], version), span["end"]) for span in meta.get("weight_versions", ())]
        num = self._num_until_stop([pair[1] for pair in pairs])
        pairs, masks, kept = pairs[:num], masks[:num], kept[:num]
        logprobs = [float(pair[0]) for pair in pairs]
        is_truncating = self.request.gconfig.is_truncating
        finished = REASONS[reason["type"]] if reason else None
        return TokenChunk(
            request_id=self.request.request_id,
            token_ids=[int(pair[1]) for pair in pairs],
            logprobs=logprobs,
            sampling_logprobs=[float(value) for value in kept] if is_truncating else list(logprobs),
            version=version_of(meta.get("weight_version"), version),
            finish_reason=finished if num is None else "stop",
            extras={"kept_ids": masks or [[] for _ in pairs]} if "kept_ids" in self.request.extras else {},
        )

    def refusal(self, error: str, is_nonfinite: bool = False) -> TokenChunk:
        """Return the last chunk of a request that the server does not serve."""
        self.is_finished = True
        return TokenChunk(request_id=self.request.request_id, version=0, error=error, is_nonfinite=is_nonfinite)

    def restamp(self) -> None:
        """Correct the versions of tokens that were on their way while the version changed."""
        start = len(self.request.output_ids)
        for index in range(start, len(self.versions)):
            self.versions[index] = next((v for v, end in self.spans if index - start < end), self.versions[index])

    def _new(self, column: list[Any], total: int) -> list[Any]:
        """Return a column's entries for the tokens that no earlier event brought."""
        num_new = total - self.num_taken
        if num_new <= 0:
            return []  # the last event of an aborted request repeats a token
        return column[self.num_taken : total] if len(column) >= total else column[-num_new:]

    def _num_until_stop(self, made: list[int]) -> int | None:
        """Return the number of tokens up to the first stop token that SGLang has overlooked, None without one.

        SGLang overlooks stop tokens if it ignores end tokens.
        """
        gconfig = self.request.gconfig
        stops = gconfig.stop_token_ids if gconfig.ignore_eos else ()
        least = gconfig.min_new_tokens - len(self.request.output_ids) - self.num_taken + len(made)
        return next((num for num, token in enumerate(made, start=1) if num > least and token in stops), None)


def version_of(reported: Any, otherwise: int) -> int:
    """Return the policy version that a server reports as text, or the other one if the text is no number."""
    return int(reported) if str(reported).isdecimal() else otherwise


with optional("executor 'sglang' needs", "sglang"):
    import aiohttp

LOOK_S = 1.0
"""seconds between two looks at the server"""
ANSWER_S = 6.0
"""seconds in which the server must answer a look; then it counts as lost"""
LINE_BYTES = 2**24
"""half of the longest event of a stream"""
MAX_SCORED = 64
"""prompts that the server scores at a time, each over a connection of its own"""
STOPPED_S = 3.0
"""seconds for a worker to tell why its server ended"""


class ServerClient:
    """The connections of an event loop to one server. Errors that are no `CallRefused` say that the server is lost."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._places = asyncio.Semaphore(MAX_SCORED)
        self.session = aiohttp.ClientSession(
            headers=endpoint.headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S),  # the replica ends what waits too long
            read_bufsize=LINE_BYTES,
        )

    @contextlib.asynccontextmanager
    async def generate(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response of `/generate`.

        Raises:
            CallRefused: the server refused the request.
        """
        async with self.session.post(f"{self._endpoint.url}/generate", json=body) as response:
            if response.status != 200:
                raise CallRefused(self._endpoint.url, "/generate", response.status, await response.text())
            yield response

    async def score(self, prompt: list[int], num_top: int) -> PromptLogprobs:
        """Return the log-probabilities of a prompt, and of `num_top` tokens at each place."""
        if len(prompt) < 2:
            return PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
        async with self._places, self.generate(scoring_body(prompt, num_top)) as response:
            return scored_prompt((await response.json())["meta_info"], num_top)

    async def look(self) -> None:
        """Return when the server has answered. Any answer will do: a paused server is not ready."""
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        async with self.session.get(f"{self._endpoint.url}/ready", timeout=limit):
            pass


LOST = (aiohttp.ClientError, OSError, ValueError)
"""errors of a connection to a server that is lost"""


class SglangReplica(WorkerReplica):
    """Listens to one server. Its thread ends when the engine closes the replica or the server is lost.

    Args:
        workers: workers of the replica; the first one owns the server.
        options: options of the executor.
        on_failure: called with the requests in flight when the server is lost.
    """

    def __init__(self, workers: WorkerSet, options: SglangOptions, on_failure: OnFailure) -> None:
        super().__init__(workers)
        self._endpoint = cast(Endpoint, workers.ask(SglangWorker.endpoint))
        self._options, self._on_failure = options, on_failure
        self._version = 0
        # of the event loop's thread alone
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._scoring: set[asyncio.Future[list[PromptLogprobs]]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._is_paused = False
        self._waiting: list[InFlightRequest] = []
        self._held: list[tuple[TokenChunk, TokenStream]] = []
        self._heard = time.monotonic()
        self._closing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        name = f"streams of {workers.group.name} {workers.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._within(self._open())

    # -- called by the engine ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the failure of a worker or a server that no longer serves.

        Raises:
            Exception: the failure.
        """
        super().check()
        if (failure := self.failure) is not None:
            raise type(failure)(*failure.args)

    def submit(self, requests: Sequence[InFlightRequest]) -> bool:
        """Start requests.

        Returns:
            False, with nothing started, if the replica has failed.
        """
        is_added = self._in_flight.add(requests)
        if is_added:
            self._post(self._start, list(requests))
        return is_added

    def cancel(self, request_ids: Collection[int] | None) -> None:
        """End requests with their tokens so far; None ends all."""
        self._post(self._end_cancelled, self._in_flight.cancel(request_ids))

    def pause(self) -> None:
        """Let the server retract its requests. Tokens that arrive from now on wait for `resume`."""
        if self._within(self._hold()):
            self._control("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._is_paused and self.failure is None:
            self._control("/continue_generation", {})
            self._within(self._go_on())

    def drop(self, error: BaseException) -> None:
        """End every request with this error, here and on the server."""
        dropped = self._in_flight.clear()
        self._post(self._forget, [request.request.request_id for request in dropped])
        for request in dropped:
            request.fail(error)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        super().set_version(version)
        self._version = version

    def weights_changed(self, version: int) -> None:
        """Let the server serve newly written weights."""
        super().weights_changed(version)
        self._version = version

    def prompt_logprobs(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens.

        Args:
            prompts: token ids.
            num_top: number of most likely tokens at each place.

        Returns:
            One entry per prompt.

        Raises:
            WorkerError: the server refused a prompt, or was lost meanwhile.
            RliteError: the engine was released meanwhile.
        """
        scoring = asyncio.run_coroutine_threadsafe(self._score_all(prompts, num_top), self._loop)
        try:
            while self._thread.is_alive():
                if scoring in wait([scoring], LOOK_S).done:  # `_watch` ends what takes too long
                    return scoring.result()
        except Exception:
            self.check()
            raise
        finally:
            scoring.cancel()
        raise RliteError("the inference engine was released while prompts were scored")

    def close(self) -> None:
        """Stop listening, end requests in flight with an error, and end a server of rlite's own. Safe to call again."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self.resume()  # an attached server serves others too
            self._within(self._shut(RliteError("the inference engine was released while this request was in flight")))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=CALL_S)
            with contextlib.suppress(RliteError):  # a dead worker has taken its server along
                replace(self.workers, timeout=CALL_S).ask(SglangWorker.stop)

    # -- between the threads -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _post(self, act: Callable[..., object], *args: Any) -> None:
        """Call a function in the event loop, soon."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is left to act on
            self._loop.call_soon_threadsafe(act, *args)

    def _within(self, act: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine in the event loop."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(CALL_S)

    def _control(self, path: str, body: dict[str, Any]) -> None:
        """Call the server. If it does not answer, the replica is lost."""
        try:
            self._endpoint.call(path, body)
        except WorkerError as error:
            self._within(self._lose(error))

    # -- in the event loop ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._client = ServerClient(self._endpoint)
        self._watcher = self._loop.create_task(self._watch())

    @property
    def _is_busy(self) -> bool:
        """True if the server owes tokens or scores."""
        return bool(self._tasks or self._scoring)

    def _start(self, requests: Sequence[InFlightRequest]) -> None:
        for request in requests:
            number = request.request.request_id
            if request.is_cancelled:
                self._end_cancelled([number])
            elif self._is_paused:
                self._waiting.append(request)
            elif self.failure is None:
                self._heard = self._heard if self._is_busy else time.monotonic()
                self._tasks[number] = self._loop.create_task(self._stream(request))

    async def _stream(self, request: InFlightRequest) -> None:
        """Receive one request's tokens until it has ended."""
        sequence, name = request.remaining_request(), uuid.uuid4().hex
        stream = TokenStream(sequence, request.versions)
        limits = self._endpoint.max_model_len, self._endpoint.vocab_size
        try:
            if (told := objection(sequence, *limits)) is not None:
                self._deliver(stream.refusal(told), stream)
            else:
                async with self._client.generate(generate_body(sequence, name, *limits)) as response:
                    await self._receive(response, stream)
        except CallRefused as refused:
            self._deliver(stream.refusal(refused.message), stream)
        except LOST as error:
            await self._lose(error)
        finally:
            if self._tasks.get(sequence.request_id) is asyncio.current_task():
                del self._tasks[sequence.request_id]
            if not stream.is_finished and self.failure is None:
                self._background.add(task := self._loop.create_task(self._abort(name)))
                task.add_done_callback(self._background.discard)

    async def _receive(self, response: aiohttp.ClientResponse, stream: TokenStream) -> None:
        """Hand the events of one response to its request.

        Raises:
            ClientPayloadError: the stream ended before its request.
        """
        async for line in response.content:
            if line.startswith(b"data: {"):
                chunk = stream.chunk(line[len(b"data: ") :], self._version)
                self._deliver(chunk, stream)
                if chunk.finish_reason is not None or chunk.error is not None:
                    return
        raise aiohttp.ClientPayloadError("a stream of tokens broke off")

    def _deliver(self, chunk: TokenChunk, stream: TokenStream) -> None:
        self._heard = time.monotonic()
        if self._is_paused:
            self._held.append((chunk, stream))
        else:
            self._take(chunk, stream)

    def _take(self, chunk: TokenChunk, stream: TokenStream) -> None:
        stream.restamp()
        self._forget(self._in_flight.take([chunk]))

    def _forget(self, numbers: Collection[int]) -> None:
        """End the streams of requests that have ended here."""
        for number in numbers:
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
        self._waiting = [request for request in self._waiting if request.request.request_id not in numbers]
        self._held = [(chunk, stream) for chunk, stream in self._held if chunk.request_id not in numbers]

    def _end_cancelled(self, numbers: Collection[int]) -> None:
        self._forget(numbers)
        self._in_flight.take([TokenChunk(request_id=n, version=self._version, finish_reason="abort") for n in numbers])

    async def _abort(self, name: str) -> None:
        """Ask the server to end a request without a caller. The server would notice the closed stream only later."""
        with contextlib.suppress(WorkerError):  # then it ends with its stream, or with the server
            await asyncio.to_thread(self._endpoint.call, "/abort_request", {"rid": name}, ANSWER_S)

    async def _hold(self) -> bool:
        """Hold tokens that arrive from now on.

        Returns:
            Whether the server has to be paused.
        """
        was_paused, self._is_paused = self._is_paused, True
        return not was_paused and self.failure is None

    async def _go_on(self) -> None:
        self._is_paused, self._heard = False, time.monotonic()
        held, waiting, self._held, self._waiting = self._held, self._waiting, [], []
        for chunk, stream in held:
            self._take(chunk, stream)
        self._start(waiting)

    async def _score_all(self, prompts: Sequence[list[int]], num_top: int) -> list[PromptLogprobs]:
        self._heard = self._heard if self._is_busy else time.monotonic()
        scoring = asyncio.gather(*(self._score(prompt, num_top) for prompt in prompts))
        self._scoring.add(scoring)
        scoring.add_done_callback(self._scoring.discard)
        return await scoring

    async def _score(self, prompt: list[int], num_top: int) -> PromptLogprobs:
        try:
            scored = await self._client.score(prompt, num_top)
        except LOST as error:
            await self._lose(error)
            raise
        self._heard = time.monotonic()
        return scored

    # -- health --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the server again and again, until it is lost."""
        while self.failure is None:
            await asyncio.sleep(LOOK_S)
            try:
                await self._client.look()
            except LOST as error:
                await self._lose(error)
            silent = time.monotonic() - self._heard
            if self._is_busy and not self._is_paused and silent > self._options.stall_timeout_s:
                await self._lose(WorkerError(f"no token, and no scores of a prompt, for {silent:.0f} s"))

    async def _lose(self, error: Exception) -> None:
        """Give up the server. The engine decides about the requests in flight."""
        reason = str(error) or f"no answer within {ANSWER_S:g} s"
        worker = replace(self.workers, timeout=STOPPED_S)
        try:
            asking: Any = asyncio.to_thread(worker.ask, SglangWorker.server_failure)
            reason = await asyncio.wait_for(asking, STOPPED_S) or reason
        except WorkerError as died:
            return self._fail(died)
        except (TimeoutError, RliteError):
            pass  # the worker waits for the server, too, or the engine is being released
        name = self.workers.group.describe(self.workers.ranks[0])
        self._fail(WorkerError(f"{name}: the SGLang server at {self._endpoint.url} is lost: {reason}"))

    def _fail(self, error: Exception) -> None:
        if self.failure is None:
            requests = self._in_flight.fail(error)
            self._forget(list(self._tasks))
            for scoring in self._scoring:
                scoring.cancel()
            self._on_failure(self, requests, error)

    async def _shut(self, error: Exception) -> None:
        ending: list[asyncio.Future[Any]] = [self._watcher, *self._tasks.values(), *self._scoring, *self._background]
        self._fail(error)
        self._watcher.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._client.session.close()


BACKEND = InferenceBackend(
    options=SglangOptions,
    worker=SglangWorker,
    replica=SglangReplica,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of SGLang's processes
    num_replicas=attrgetter("num_replicas"),
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"})),
)
