"""Tokens of several steps in one message from vLLM's engine core to its frontend.

Each message wakes vLLM's frontend, rlite's worker and the program. On a small model, these three together take as long
as the model. On a machine without a spare core, they delay the model. Tokens are therefore held back for a few steps.
They leave at once if their request ends, if it has stop strings (the frontend searches for them), and before generation
pauses.

vLLM also slices the table of log-probabilities into three arrays for each token, and its frontend makes a dictionary of
each slice. Requests of rlite therefore ask vLLM for none, and one table travels with the first output of a message.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlite.backends.vllm.release import SAMPLING

Table = tuple[list[float], list[float], list[list[int]]]
"""log-probabilities before and after truncation, and kept ids, with an entry for each token"""
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


def take_table(outputs: Sequence[Any]) -> Table:
    """Remove the table of log-probabilities from the outputs of one message.

    Returns:
        The table of all tokens, in the order of the outputs. A token whose request does not ask for kept ids has none.
    """
    first = next((output for output in outputs if output.new_token_ids), None)
    if first is None:
        return [], [], []
    table = first.new_logprobs
    first.new_logprobs = None
    whole, kept = table.logprobs.T.tolist()
    padded = table.logprob_token_ids[:, 2:]
    return whole, kept, [ids[ids >= 0].tolist() for ids in padded] if padded.size else [[]] * len(whole)
