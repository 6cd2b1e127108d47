"""Translation between rlite's requests and SGLang's: sampling parameters, and the events of a token stream.

Log-probabilities: SGLang returns log_softmax(logits / temperature) of the unfiltered distribution, at temperature 1 for
greedy requests, as rlite does. If sampling truncates, the log-probability under the truncated distribution comes with
SGLang's sampling mask, which needs a finite top_k.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from rlite.backends.serving.sampling import num_left
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
        if "error" in event:
            return self.refusal(_text(event["error"]))
        meta = event["meta_info"]
        reason = meta.get("finish_reason")
        self.is_finished = reason is not None
        if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
            return self.refusal(str(reason.get("message")))
        total = meta.get("completion_tokens", self.num_taken)
        pairs = self._new(meta.get("output_token_logprobs"), total)
        masks = self._new(meta.get("output_token_sampling_mask"), total)
        kept = self._new(meta.get("output_token_sampling_logprobs"), total)
        self.num_taken = max(total, self.num_taken)
        if any(pair[0] is None for pair in pairs):
            return self.refusal("the model computes NaN or infinity for this request", is_nonfinite=True)
        logprobs = [float(pair[0]) for pair in pairs]
        chunk = TokenChunk(
            request_id=self.request.request_id,
            token_ids=[int(pair[1]) for pair in pairs],
            logprobs=logprobs,
            sampling_logprobs=[float(value) for value in kept]
            if self.request.gconfig.is_truncating
            else list(logprobs),
            version=version_of(meta.get("weight_version"), version),
            finish_reason=None if reason is None else REASONS[reason["type"]],
            extras={"kept_ids": masks or [[] for _ in pairs]} if "kept_ids" in self.request.extras else {},
        )
        self.spans = [(version_of(span["version"], version), span["end"]) for span in meta.get("weight_versions", ())]
        return self._cut(chunk)

    def refusal(self, error: str, is_nonfinite: bool = False) -> TokenChunk:
        """Return the last chunk of a request that the server does not serve."""
        self.is_finished = True
        return TokenChunk(request_id=self.request.request_id, version=0, error=error, is_nonfinite=is_nonfinite)

    def restamp(self) -> None:
        """Correct the versions of tokens that were on their way while the version changed."""
        start = len(self.request.output_ids)
        for index in range(start, len(self.versions)):
            self.versions[index] = next((v for v, end in self.spans if index - start < end), self.versions[index])

    def _new(self, column: list[Any] | None, total: int) -> list[Any]:
        """Return a column's entries for the tokens that no earlier event brought."""
        column = column or []
        num_new = total - self.num_taken
        if num_new <= 0:
            return []  # the last event of an aborted request repeats a token
        return column[self.num_taken : total] if len(column) >= total else column[-num_new:]

    def _cut(self, chunk: TokenChunk) -> TokenChunk:
        """Return a chunk up to its first stop token. SGLang overlooks stop tokens if it ignores end tokens."""
        gconfig = self.request.gconfig
        if not gconfig.ignore_eos or not gconfig.stop_token_ids:
            return chunk
        first = len(self.request.output_ids) + self.num_taken - len(chunk.token_ids)
        for num, token in enumerate(chunk.token_ids, start=1):
            if token in gconfig.stop_token_ids and first + num > gconfig.min_new_tokens:
                return replace(
                    chunk,
                    token_ids=chunk.token_ids[:num],
                    logprobs=chunk.logprobs[:num],
                    sampling_logprobs=chunk.sampling_logprobs[:num],
                    finish_reason="stop",
                    extras={name: column[:num] for name, column in chunk.extras.items()},
                )
        return chunk


def is_last(chunk: TokenChunk) -> bool:
    """Return whether a chunk ends its request."""
    return chunk.finish_reason is not None or chunk.error is not None


def version_of(reported: Any, otherwise: int) -> int:
    """Return the policy version that a server reports as text, or the other one if the text is no number."""
    return int(reported) if str(reported).isdecimal() else otherwise


def _text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
