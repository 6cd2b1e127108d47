"""A teacher on a server: log-probabilities of the tokens of a prompt, from vLLM, SGLang or OpenAI's completions.

A server is asked once before work starts, with a text: its token ids must be those of the student's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.errors import ConfigError, RliteError, WorkerError

PROBE = "Six boxes: 3.14159 + \u00bd \u2192 na\u00efve \u6f22\u5b57\n\tif x == 10:\n\t\treturn  'no'"
"""text of words, numbers, white space and several scripts, which two tokenizers hardly cut alike"""
CALL_S = 600.0
"""time limit of a call, which a busy server may need"""
ATTEMPTS = 3
"""calls until a server that does not answer ends the run"""
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
        self._max_concurrent = max_concurrent
        self._form = self._probed(tokenizer)

    def logprobs(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return ids and their log-probabilities at each token of each row, both [M, k], or [M, 1] of the token itself.

        Raises:
            RliteError: the server gave no answer, or an answer that does not fit its request.
        """
        with ThreadPoolExecutor(self._max_concurrent) as pool:
            found = list(pool.map(self._row, rows))
        return [ids for ids, _ in found], [logprobs for _, logprobs in found]

    def _row(self, row: Sequence[int]) -> tuple[Tensor, Tensor]:
        said = self._ask(self._form, row)
        if len(said) != len(row):
            raise RliteError(f"{self._what}: {len(said)} tokens in the answer, and the prompt has {len(row)}")
        ids = torch.full((len(row), max(self._k, 1)), -1)
        logprobs = torch.zeros(ids.shape)
        for number, (token, each) in enumerate(zip(row, said, strict=True)):
            if each is None:
                continue
            if self._form.tells_ids and each.own != token:
                raise RliteError(f"{self._what}: the answer has token {each.own} where the prompt has {token}")
            pairs = each.likeliest[: self._k] if self._k else [(token, each.logprob)]
            if len(pairs) < self._k:
                raise RliteError(f"{self._what}: {len(pairs)} likeliest tokens in the answer, and distill.k={self._k}")
            ids[number] = torch.tensor([token for token, _ in pairs])
            logprobs[number] = torch.tensor([logprob for _, logprob in pairs])
        return ids, logprobs

    def _ask(self, form: Form, prompt: Prompt) -> list[Said | None]:
        for attempt in range(ATTEMPTS):
            try:
                answer = self._endpoint.call(form.path, form.body(self._model, prompt, self._k), CALL_S)
                return form.read(answer)
            except CallRefused:
                raise
            except WorkerError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _probed(self, tokenizer: Any) -> Form:
        """Return the interface of the server.

        Raises:
            ConfigError: it has none of those known here, or other tokens.
        """
        expected, refusals = tokenizer(PROBE)["input_ids"], []
        for kind, form in FORMS.items():
            try:
                said = self._ask(form, PROBE)
            except CallRefused as error:
                refusals.append(f"{kind}: {error.message}")
            except (LookupError, TypeError, ValueError) as error:
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
