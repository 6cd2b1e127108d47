"""The replica of the remote executor: requests to one server that the user owns, and their streams of tokens.

A request that a busy or interrupted server does not finish is sent again, from its tokens so far. If the server does
not answer at all, the replica is lost, and its requests continue on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from rlite.backends.remote.server import GENERATE, RemoteOptions, attach
from rlite.backends.remote.worker import RemoteWorker
from rlite.backends.serving.http import ANSWER_S, LOST, CallRefused
from rlite.backends.serving.sampler import num_left
from rlite.backends.serving.streams import AnswerStream, StreamedReplica, version_of
from rlite.errors import ConfigError
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, InFlightRequest, OnFailure
from rlite.runtime.replicas.workers import WorkerSet
from rlite.types import GenerationHyperparameters, SequenceRequest, StopReason, TokenChunk
from rlite.wording import warn_once

logger = logging.getLogger(__name__)
REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length"}
BUSY = 429
WRONG = (400, 404, 413, 422)
"""statuses of a request that no server would take"""
FIXED = "executor 'remote': the policy is that of the servers, and fixed: no new weights reach them"
RETRY_S = 1.0
"""seconds until a request is sent again"""
MAX_ATTEMPTS = 5
"""interruptions of a request by a server that is well"""


def generate_body(request: SequenceRequest, model: str, name: str, max_model_len: int) -> dict[str, Any]:
    """Return the body of /inference/v1/generate for a request that continues after its `output_ids`."""
    gconfig, num_done, num_new = request.gconfig, len(request.output_ids), num_left(request, max_model_len)
    sampling = {
        "max_tokens": num_new,
        "min_tokens": min(max(gconfig.min_new_tokens - num_done, 0), num_new),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": 1.0 if gconfig.greedy else gconfig.top_p,
        "top_k": 0 if gconfig.greedy else max(gconfig.top_k, 0),
        "stop": list(gconfig.stop),
        "stop_token_ids": list(gconfig.stop_token_ids),
        "ignore_eos": gconfig.ignore_eos,
        "seed": unmixed(request.seed),
        "logprobs": 0,
    }
    ids = [*request.input_ids, *request.output_ids]
    return {"request_id": name, "model": model, "token_ids": ids, "stream": True, "sampling_params": sampling}


def unmixed(seed: int) -> int:
    """Return the seed of 64 bits from which an engine of rlite makes this one: `mix(unmixed(seed), 0) == seed`."""
    mask, z = 2**64 - 1, seed << 1 & 2**64 - 1
    z = z ^ z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) & mask
    z = z ^ z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
    z = z ^ z >> 30 ^ z >> 60
    z = (z - 0x632BE59BD9B4E019) * pow(0x9E3779B97F4A7C15, -1, 2**64) & mask
    return z - 2**64 if z >= 2**63 else z


class RemoteStream(AnswerStream):
    """An answer whose events hold new tokens."""

    def chunk(self, line: str | bytes, version: int) -> TokenChunk:
        """Return the new tokens of one event.

        `line`: JSON text of the event.
        """
        event, number = json.loads(line), self.request.request_id
        if (error := event.get("error")) is not None:
            code = error.get("code") if isinstance(error, dict) else None
            raise CallRefused("the server", GENERATE, code if isinstance(code, int) else 500, json.dumps(event))
        if not event["choices"]:
            return TokenChunk(request_id=number, version=version)
        (choice,) = event["choices"]
        reason, ids = choice.get("finish_reason"), list(choice.get("token_ids") or ())
        if reason is not None and reason not in REASONS:
            raise OSError(f"the server ended a request with {reason!r}")
        content = (choice.get("logprobs") or {}).get("content") or ()
        logprobs = [float(entry["logprob"]) for _, entry in zip(ids, content, strict=True)]
        if not all(map(math.isfinite, logprobs)):
            return self.refusal("the model computes NaN or infinity for this request", is_nonfinite=True)
        self.is_finished = reason is not None
        spans = choice.get("weight_versions") or ()
        self.spans = [(version_of(span["version"], version), span["end"]) for span in spans]
        return TokenChunk(
            request_id=number,
            token_ids=ids,
            logprobs=logprobs,
            sampling_logprobs=list(logprobs),
            version=version,
            finish_reason=None if reason is None else REASONS[reason],
        )


class RemoteReplica(StreamedReplica):
    """Sends requests to one server.

    `workers`: the worker in the server's place; its index is that of the address. `on_failure`: called with the
    requests in flight when the server is lost.
    """

    def __init__(self, workers: WorkerSet, options: RemoteOptions, on_failure: OnFailure) -> None:
        path = workers.ask(RemoteWorker.checkpoint)
        self._served = attach(options.urls[workers.index], options, path)
        self._is_exact, self._places = options.logprobs == "exact", asyncio.Semaphore(options.max_num_seqs)
        super().__init__(workers, self._served.endpoint, options.stall_timeout_s, on_failure)
        if self._served.administered is None:
            warn_once(logger, FIXED)
        elif self._served.version and workers.ask(RemoteWorker.folder_of, 0) == path:
            self._load(0)  # the server has weights of an earlier run

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on, also on a server that reports another."""
        if self._served.administered is not None and version != self._version:
            self._load(version)
        super().set_version(version)

    def weights_changed(self, version: int) -> None:
        """Let the server read the newest weights. The first replica that does writes them."""
        self._load(version)
        self._version = version

    def _load(self, version: int) -> None:
        folder = self.workers.ask(RemoteWorker.folder_of, version)
        self._served.load(folder, version, self._stall_timeout_s)

    def _stream_of(self, request: InFlightRequest) -> RemoteStream:
        return RemoteStream(request.remaining_request(), request.versions)

    async def _ask(self, stream: AnswerStream) -> None:
        if self._is_exact and (told := self._inexact(stream.request.gconfig)):
            return self._deliver(stream.refusal(told), stream)
        body = generate_body(stream.request, self._served.model, stream.name, self._endpoint.max_model_len)
        async with self._places, self._client.post(GENERATE, body) as response:
            await self._receive(response.content, stream)
            with contextlib.suppress(*LOST):  # its end, so that the connection serves the next request
                async with asyncio.timeout(ANSWER_S):
                    await response.content.read()

    def _inexact(self, gconfig: GenerationHyperparameters) -> str:
        """Return why the server's log-probabilities are those of another distribution; "" if they are not."""
        if gconfig.is_truncating:
            asked, why = f"top_p={gconfig.top_p:g} top_k={gconfig.top_k}", "does not tell what truncation left"
        elif not gconfig.greedy and gconfig.temperature != 1 and not self._served.is_scaled:
            asked, why = f"temperature={gconfig.temperature:g}", "returns log-probabilities at temperature 1"
        else:
            return ""
        remedy = "vLLM has --logprobs-mode processed_logprobs; logprobs=as_served is for what is not trained on"
        return f"{asked}: the server at {self._endpoint.url} {why}; {remedy}"

    async def _interrupted(
        self, request: InFlightRequest, stream: AnswerStream, attempt: int, error: Exception
    ) -> None:
        """Refuse what no server would take; send the request again, unless the server is lost."""
        status = error.status if isinstance(error, CallRefused) else 0
        if status in WRONG:
            return await super()._interrupted(request, stream, attempt, error)
        try:
            await self._look()
        except LOST as gone:
            return await self._lose(gone)
        if attempt < MAX_ATTEMPTS:
            asked_s = error.retry_after_s if isinstance(error, CallRefused) else 0.0
            await asyncio.sleep(max(RETRY_S, min(asked_s, self._stall_timeout_s)))
            self._start([request], attempt + (status != BUSY))
        elif status >= 500:  # the other requests are served
            await super()._interrupted(request, stream, attempt, error)
        else:
            await self._lose(error)

    async def _look(self) -> None:
        if (status := await self._client.look("/health")) >= 500:
            raise OSError(f"its health check answers {status}")


def check(path: str, num_workers: int) -> None:
    """Refuse shares of a model."""
    if num_workers > 1:
        raise ConfigError(f"tensor_parallel_size={num_workers}: with executor 'remote' a replica is a running server")


def sync_obstacle(options: Mapping[str, Any]) -> str:
    """Return why no new weights reach the servers; "" if they do."""
    return "" if options.get("weights_folder") else "the policy of its servers is fixed without weights_folder"


BACKEND = InferenceBackend(
    options=RemoteOptions,
    worker=RemoteWorker,
    replica=RemoteReplica,
    check=check,
    num_replicas=lambda options: len(options.addresses),
    is_elsewhere=True,
    capabilities=Capabilities(has_residency=False, has_shared_weights=True, sync_obstacle=sync_obstacle),
)
