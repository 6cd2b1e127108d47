"""Tokens of several steps in one message from vLLM's engine core to its frontend.

Each message wakes vLLM's frontend, rlite's worker and the program. On a small model, these three together take as long
as the model. On a machine without a spare core, they delay the model. Tokens are therefore held back for a few steps.
They leave at once if their request ends, if it has stop strings (the frontend searches for them), and before generation
pauses.

vLLM also slices the table of log-probabilities into three arrays for each token, and its frontend makes a dictionary of
each slice. Requests of rlite therefore ask vLLM for none, and one table travels with the first output of a message.

Tokens of some steps of vLLM's engine, in one message from the server to rlite's worker.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlite.backends.vllm.requests import SAMPLING
from rlite.types import TokenChunk

HOLD_STEPS = 8
HOLD_S = 0.1
"""limits of the steps and of the seconds for which tokens are held back"""


class Held:
    """Tokens of several steps that were not sent yet.

    Attributes:
        message: vLLM's EngineCoreOutputs of the latest step, with which they leave.
        num_steps: number of the steps.
        since: time of the first step, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.message: Any = None
        self.num_steps = 0
        self.since = time.monotonic()
        self._outputs: dict[str, Any] = {}
        self._rows: dict[str, list[int]] = {}
        """rows in the table of each request's tokens"""
        self._tables: list[Any] = []
        self._num_rows = 0

    def add(self, message: Any, logprobs: Any, rows: Mapping[str, int]) -> None:
        """Take the outputs of one step.

        Args:
            message: vLLM's EngineCoreOutputs.
            logprobs: vLLM's LogprobsLists of the batch, or None.
            rows: row of each request in the batch.
        """
        self.message = message
        self.num_steps += 1
        for output in message.outputs:
            name = output.request_id
            if logprobs is not None and output.new_token_ids:
                self._rows.setdefault(name, []).append(self._num_rows + rows[name])
            if (earlier := self._outputs.get(name)) is not None:
                output.new_token_ids = earlier.new_token_ids + output.new_token_ids
            self._outputs[name] = output
        if logprobs is not None:
            self._tables.append(logprobs)
            self._num_rows += len(logprobs.logprobs)

    def take(self, names: Iterable[str] | None = None) -> Any:
        """Return the message with one output for each request, or for some. The first one with tokens has the table."""
        outputs = [self._outputs.pop(name) for name in list(self._outputs if names is None else names)]
        made = [output for output in outputs if output.new_token_ids]
        if self._tables and made:
            chosen = [row for output in made for row in self._rows.pop(output.request_id)]
            width = max(table.logprob_token_ids.shape[1] for table in self._tables)
            ids = [_widened(table.logprob_token_ids, width) for table in self._tables]
            made[0].new_logprobs = type(self._tables[0])(
                np.concatenate(ids)[chosen],
                np.concatenate([table.logprobs for table in self._tables])[chosen],
                np.concatenate([table.sampled_token_ranks for table in self._tables])[chosen],
            )
        message = copy.copy(self.message)  # the last one may not have been encoded yet
        message.outputs = outputs
        return message


class Holding:
    """Mixin of vLLM's schedulers. Outputs of requests that came from the same frontend are held together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[int, Held] = {}
        self._urgent: set[str] = set()
        """requests whose tokens leave at once"""

    def add_request(self, request: Any) -> None:
        """Queue a request."""
        params = request.sampling_params
        asked = (params.extra_args or {}).get(SAMPLING) if params is not None else None
        if asked is None or asked["is_urgent"]:
            self._urgent.add(request.request_id)
        super().add_request(request)  # type: ignore[misc]

    def has_requests(self) -> bool:
        """Return whether work is left: the engine is neither idle nor at rest before all tokens are sent."""
        return bool(self._held) or super().has_requests()  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Return vLLM's outputs of the last steps for each client, or nothing yet."""
        by_client = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        logprobs, rows = model_runner_output.logprobs, model_runner_output.req_id_to_index
        leaving = {}
        for client, message in by_client.items():
            leaving[client] = [each.request_id for each in message.outputs if self._must_leave(each)]
            self._held.setdefault(client, Held()).add(message, logprobs, rows)
        if self._are_all_due(scheduler_output):
            self._urgent.intersection_update(self.requests)  # type: ignore[attr-defined]
            held, self._held = self._held, {}
            return {client: each.take() for client, each in held.items()}
        messages = {client: self._held[client].take(names) for client, names in leaving.items()}
        return {client: message for client, message in messages.items() if _has_content(message)}

    def _must_leave(self, output: Any) -> bool:
        return output.finish_reason is not None or output.request_id in self._urgent

    def _are_all_due(self, scheduler_output: Any) -> bool:
        if self.pause_state.name != "UNPAUSED" or not scheduler_output.total_num_scheduled_tokens:  # type: ignore[attr-defined]
            return True
        latest = time.monotonic() - HOLD_S
        return any(each.num_steps >= HOLD_STEPS or each.since < latest for each in self._held.values())


def _has_content(message: Any) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats is not None)


def _widened(ids: np.ndarray, width: int) -> np.ndarray:
    """Return a table of ids with as many columns, padded with -1."""
    return np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenStep:
    """Tokens of all requests from some steps, in columns: a chunk per token would cost more than the token."""

    version: int
    """policy version that made the tokens"""
    request_ids: list[int] = field(default_factory=list)
    """requests that made tokens"""
    counts: list[int] = field(default_factory=list)
    """number of tokens of each of these requests"""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    kept_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    """kept ids of the tokens of each request that asks for them"""
    last: list[TokenChunk] = field(default_factory=list)
    """a chunk without tokens for each request that ended, after its tokens in this step"""


def chunks_of(steps: Iterable[TokenStep]) -> list[TokenChunk]:
    """Return one chunk for each request and policy version in these steps."""
    chunks: dict[tuple[int, int], TokenChunk] = {}
    for step in steps:
        end = 0
        for number, count in zip(step.request_ids, step.counts, strict=True):
            chunk = chunks.get((number, step.version))
            if chunk is None:
                chunk = chunks[number, step.version] = TokenChunk(request_id=number, version=step.version)
            own = slice(end, end := end + count)
            chunk.token_ids.extend(step.token_ids[own])
            chunk.logprobs.extend(step.logprobs[own])
            chunk.sampling_logprobs.extend(step.sampling_logprobs[own])
        for number, kept_ids in step.kept_ids.items():
            chunks[number, step.version].extras.setdefault("kept_ids", []).extend(kept_ids)
        for last in step.last:
            made = chunks.get((last.request_id, last.version), last)
            chunks[last.request_id, last.version] = replace(
                made, finish_reason=last.finish_reason, error=last.error, is_nonfinite=last.is_nonfinite
            )
    return list(chunks.values())
