"""A teacher on a server: log-probabilities of the tokens of a prompt, from vLLM, SGLang or OpenAI's completions.

A server is asked once before work starts, with a text: its token ids must be those of the student's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite.algorithms.divergence import LEAST
from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.errors import ConfigError, DataError, RliteError, WorkerError

PROBE = "Six boxes: 3.14159 + \u00bd \u2192 na\u00efve \u6f22\u5b57\n\tif x == 10:\n\t\treturn  'no'"
"""text of words, numbers, white space and several scripts, which two tokenizers hardly cut alike"""
CALL_S = 600.0
"""time limit of a call, which a busy server may need"""
PROBE_S = 60.0
"""time limit of a call before work starts"""
ATTEMPTS = 3
"""calls until a server that does not answer ends the run"""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
"""errors of reading an answer of another form"""
ROUNDING = 1e-3
"""by which a logarithm of a probability may exceed 0"""
Prompt = str | Sequence[int]


class Said(NamedTuple):
    """Log-probabilities of one token of a prompt."""

    own: int | str
    """id of the token; its text, if the server tells no ids"""
    logprob: float
    likeliest: list[tuple[int, float]]
    """ids and log-probabilities of the likeliest tokens, the likeliest first"""


class Form(NamedTuple):
    """The interface of one kind of server."""

    path: str
    body: Callable[[str, Prompt, int], dict[str, Any]]
    """(model, prompt, number of likeliest tokens) -> body of a request"""
    read: Callable[[Any], list[Said | None]]
    """answer -> each token of the prompt; None for the first"""
    tells_ids: bool


def _vllm_body(model: str, prompt: Prompt, k: int) -> dict[str, Any]:
    given = prompt if isinstance(prompt, str) else list(prompt)
    return {"model": model, "prompt": given, "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}


def _vllm_read(answer: Any) -> list[Said | None]:
    return [None if each is None else _vllm_token(each) for each in answer["choices"][0]["prompt_logprobs"]]


def _vllm_token(each: Mapping[str, Any]) -> Said:
    own, *_ = each  # the prompt's token comes first, and is there beside the likeliest
    ranked = sorted((value["rank"], int(token), value["logprob"]) for token, value in each.items())
    return Said(int(own), each[own]["logprob"], [(token, logprob) for _, token, logprob in ranked])


def _sglang_body(model: str, prompt: Prompt, k: int) -> dict[str, Any]:
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": k}
    return {**given, **asked, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}


def _sglang_read(answer: Any) -> list[Said | None]:
    found = answer["meta_info"]
    own = found["input_token_logprobs"]
    tops = found.get("input_top_logprobs") or [None] * len(own)
    return [
        Said(token, logprob, [(other, value) for value, other, *_ in top or ()]) if number else None
        for number, ((logprob, token, *_), top) in enumerate(zip(own, tops, strict=True))
    ]


def _openai_body(model: str, prompt: Prompt, k: int) -> dict[str, Any]:
    given = prompt if isinstance(prompt, str) else list(prompt)
    return {"model": model, "prompt": given, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": max(k, 1)}


def _openai_read(answer: Any) -> list[Said | None]:
    found = answer["choices"][0]["logprobs"]
    pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))[:-1]  # the last one is new
    return [Said(text, logprob, []) if number else None for number, (text, logprob) in enumerate(pairs)]


FORMS = {
    "vLLM": Form("/v1/completions", _vllm_body, _vllm_read, True),
    "SGLang": Form("/generate", _sglang_body, _sglang_read, True),
    "OpenAI": Form("/v1/completions", _openai_body, _openai_read, False),
}
"""interfaces by the kind of server, in the order in which they are tried"""


class ServedTeacher:
    """A teacher on a server, which is asked here whether it can judge the student's tokens.

    Args:
        endpoint: address and key of the server.
        model: name of the model there.
        what: option of the address with its value, for messages.
        tokenizer: the student's.
        k: number of likeliest tokens; 0 asks for the sampled token alone.
        max_concurrent: requests at the same time.

    Raises:
        ConfigError: the server returns no log-probabilities of a prompt, fewer likeliest tokens, or has other tokens.
        WorkerError: it does not answer.
    """

    def __init__(
        self, endpoint: Endpoint, model: str, what: str, tokenizer: Any, k: int, max_concurrent: int = 32
    ) -> None:
        self._endpoint, self._model, self._what, self._k = endpoint, model, what, k
        self._max_concurrent, self._vocab_size = max_concurrent, len(tokenizer)
        self._form = self._probed(tokenizer)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return ids and their log-probabilities at each token of each row, both [M, k], or [M, 1] of the token itself.

        Raises:
            RliteError: the server gave no answer, or an answer that does not fit its request.
        """
        pool = ThreadPoolExecutor(self._max_concurrent)
        try:
            found = list(pool.map(self._row, rows))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error no further row is asked for
        return [ids for ids, _ in found], [logprobs for _, logprobs in found]

    def _row(self, row: Sequence[int]) -> tuple[Tensor, Tensor]:
        ids = torch.full((len(row), max(self._k, 1)), -1)
        logprobs = torch.zeros(ids.shape)
        try:
            said = self._ask(self._form, row)
            if len(said) != len(row):
                raise DataError(f"{len(said)} tokens in it, and the prompt has {len(row)}")
            for number, (token, each) in enumerate(zip(row[1:], said[1:], strict=True), start=1):
                pairs = self._pairs(token, each)
                ids[number] = torch.tensor([token if token < self._vocab_size else -1 for token, _ in pairs])
                logprobs[number] = torch.tensor([logprob for _, logprob in pairs]).clamp(min=LEAST)
        except MALFORMED as error:
            told = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise RliteError(f"{self._what}: an answer cannot be used: {told}") from error
        return ids, logprobs

    def _pairs(self, token: int, said: Said | None) -> list[tuple[int, float]]:
        """Return the ids and log-probabilities that the answer has at a token of the prompt.

        Raises:
            DataError: the answer has others, or none.
        """
        if said is None:
            raise DataError("a token after the first has no log-probability")
        if self._form.tells_ids and said.own != token:
            raise DataError(f"it has token {said.own} where the prompt has {token}")
        pairs = said.likeliest[: self._k] if self._k else [(token, said.logprob)]
        if len({token for token, _ in pairs}) < self._k:
            raise DataError(f"{len({*pairs})} likeliest tokens in it, and distill.k={self._k}")
        if not all(token >= 0 and logprob <= ROUNDING for token, logprob in pairs):  # NaN is not
            raise DataError(f"{pairs[:3]} are no ids with log-probabilities")
        return pairs

    def _ask(self, form: Form, prompt: Prompt, attempts: int = ATTEMPTS, limit_s: float = CALL_S) -> list[Said | None]:
        try:
            return form.read(self._endpoint.call(form.path, form.body(self._model, prompt, self._k), limit_s))
        except CallRefused:
            raise
        except WorkerError:
            if attempts == 1:
                raise
        return self._ask(form, prompt, attempts - 1, limit_s)

    def _probed(self, tokenizer: Any) -> Form:
        """Return the interface of the server.

        Raises:
            ConfigError: it has none of those known here, or other tokens.
        """
        expected, refusals = tokenizer(PROBE)["input_ids"], []
        for kind, form in FORMS.items():
            try:
                said = self._ask(form, PROBE, limit_s=PROBE_S)
            except CallRefused as error:
                refusals.append(f"{kind}: {error.message}")
            except MALFORMED as error:
                refusals.append(f"{kind}: no log-probabilities of the prompt ({type(error).__name__}: {error})")
            else:
                self._check(kind, form, said, expected, tokenizer)
                return form
        told = "it returns no log-probabilities of a prompt's tokens"
        raise ConfigError(f"{self._what}: {told}. Asked as {'; as '.join(refusals)}")

    def _check(
        self, kind: str, form: Form, said: Sequence[Said | None], expected: Sequence[int], tokenizer: Any
    ) -> None:
        if self._k and not form.tells_ids:
            remedy = "use distill.support=sampled, or a server of vLLM or SGLang"
            raise ConfigError(f"{self._what}: {kind}'s completions tell no ids of the likeliest tokens; {remedy}")
        theirs = [each.own for each in said if each is not None]
        ours: list[Any] = list(expected)[1:]
        if not form.tells_ids:
            ours = [tokenizer.decode([token]) for token in ours]
        if theirs != ours:
            odd = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), "the end")
            told = f"its tokenizer cuts a text otherwise than the student's, from token {odd} on"
            raise ConfigError(f"{self._what}: {told}; a teacher must have the student's token ids")
        if (least := min(len(each.likeliest) for each in said if each is not None)) < self._k:
            raise ConfigError(f"{self._what}: it returns {least} likeliest tokens, and distill.k={self._k}; lower k")
