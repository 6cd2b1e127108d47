"""The client of an SGLang server: bodies of its requests, and events of its streams of tokens.

Log-probabilities: SGLang returns log_softmax(logits / temperature) of the unfiltered distribution, at temperature 1 for
greedy requests, as rlite does. If sampling truncates, the log-probability under the truncated distribution comes with
SGLang's sampling mask, which needs a finite top_k.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlite.backends.serving.http import Endpoint, ServerClient
from rlite.backends.serving.sampler import num_left
from rlite.backends.serving.streams import AnswerStream, version_of
from rlite.data.routing import ROUTED, RoutingTable
from rlite.errors import DataError
from rlite.types import MAX_KEPT_IDS, PromptLogprobs, SequenceRequest, StopReason, TokenChunk

MAX_KEPT = 4000
"""most token ids in a sampling mask; SGLang's default limit is 4096, and ties at the limit count too"""
REASONS: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}
MAX_SCORED = 64
"""prompts that the server scores at a time, each over a connection of its own"""


def generate_body(request: SequenceRequest, name: str, max_model_len: int, vocab_size: int) -> dict[str, Any]:
    """Return the body of `/generate` for a request that continues after its `output_ids`.

    `name`: unique id of the request on the server; no id may be a prefix of another.
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
    return body | {"return_routed_experts": True} if ROUTED in request.extras else body


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
class TokenStream(AnswerStream):
    """An answer whose events may be cumulative or incremental, as the server is set up."""

    routing: RoutingTable | None = None
    """form of the table of chosen experts, which comes with the last event"""
    num_taken: int = 0
    """tokens that earlier events brought"""

    def chunk(self, line: str | bytes, version: int) -> TokenChunk:
        """Return the new tokens of one event.

        `line`: JSON text of the event.
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
        extras: dict[str, list[Any]] = {}
        if "kept_ids" in self.request.extras:
            extras["kept_ids"] = masks[:num] or [[] for _ in pairs[:num]]
        if ROUTED in self.request.extras and self.routing is not None:
            try:
                table = self._table(meta.get(ROUTED))
                extras[ROUTED] = self.routing.entries(table, len(pairs))[:num]
            except DataError as error:
                return self.refusal(str(error))
        pairs, kept = pairs[:num], kept[:num]
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
            extras=extras,
        )

    def _new(self, column: list[Any], total: int) -> list[Any]:
        """Return a column's entries for the tokens that no earlier event brought."""
        num_new = total - self.num_taken
        if num_new <= 0:
            return []  # the last event of an aborted request repeats a token
        return column[self.num_taken : total] if len(column) >= total else column[-num_new:]

    def _table(self, encoded: str | None) -> np.ndarray | None:
        """Return the experts of all tokens of the sequence but the last one, which nobody read."""
        if encoded is None or self.routing is None:
            return None
        flat, top_k = np.frombuffer(base64.b64decode(encoded), np.int32), self.routing.shape.top_k
        num = len(self.request.input_ids) + len(self.request.output_ids) + self.num_taken - 1
        return flat if flat.size % max(num * top_k, 1) else flat.reshape(num, -1, top_k)

    def _num_until_stop(self, made: list[int]) -> int | None:
        """Return the number of tokens up to the first stop token that SGLang has overlooked, None without one.

        SGLang overlooks stop tokens if it ignores end tokens.
        """
        gconfig = self.request.gconfig
        stops = gconfig.stop_token_ids if gconfig.ignore_eos else ()
        least = gconfig.min_new_tokens - len(self.request.output_ids) - self.num_taken + len(made)
        return next((num for num, token in enumerate(made, start=1) if num > least and token in stops), None)


class ScoringClient(ServerClient):
    """A client that lets the server score prompts."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self._places = asyncio.Semaphore(MAX_SCORED)

    async def score(self, prompt: list[int], num_top: int) -> PromptLogprobs:
        """Return the log-probabilities of a prompt, and of `num_top` tokens at each place."""
        if len(prompt) < 2:
            return PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
        async with self._places, self.post("/generate", scoring_body(prompt, num_top)) as response:
            return scored_prompt((await response.json())["meta_info"], num_top)
