"""Tokens of some steps of vLLM's engine, in one message from the server to rlite's worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rlite.types import TokenChunk


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
