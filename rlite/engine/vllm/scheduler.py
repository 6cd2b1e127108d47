"""vLLM's schedulers, which send the log-probabilities of one step as one table. Imported in vLLM's processes alone.

vLLM slices the table of log-probabilities into three arrays for each token, and its frontend makes a dictionary of
each slice. On a small model this takes as long as the model. Requests of rlite therefore ask vLLM for none, and the
table of the whole step travels with the first output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _WithTable:
    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return vLLM's outputs of one step for each client, with the table of log-probabilities."""
        by_client = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if model_runner_output.logprobs is not None:
            for each in by_client.values():
                attach_table(each.outputs, model_runner_output.logprobs, model_runner_output.req_id_to_index)
        return by_client


class TableScheduler(_WithTable, Scheduler):
    """vLLM's scheduler with tables of log-probabilities."""


class AsyncTableScheduler(_WithTable, AsyncScheduler):
    """vLLM's scheduler for overlapping steps with tables of log-probabilities."""


def attach_table(outputs: Sequence[Any], logprobs: Any, rows: Mapping[str, int]) -> None:
    """Put the log-probabilities of all outputs that have a token into the first of them, a row for each.

    Args:
        outputs: vLLM's EngineCoreOutputs.
        logprobs: vLLM's LogprobsLists of the batch.
        rows: row of each request in the batch.
    """
    made = [output for output in outputs if output.new_token_ids]
    if made:
        chosen = [rows[output.request_id] for output in made]
        made[0].new_logprobs = type(logprobs)(
            logprobs.logprob_token_ids[chosen], logprobs.logprobs[chosen], logprobs.sampled_token_ranks[chosen]
        )
