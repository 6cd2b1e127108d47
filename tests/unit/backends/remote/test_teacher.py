"""A teacher on a server that answers wrongly amid a run: each wrong answer is refused, and none is learnt."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.remote.teacher import ATTEMPTS, ServedTeacher
from rlite.backends.serving.http import Endpoint
from rlite.errors import RliteError, WorkerError

K = 3
ROW = [5, 6, 7, 8]
Spoil = Callable[[list[Any]], Any]


def said(ids: list[int]) -> list[Any]:
    """What vLLM says of a prompt: each token, and the K likeliest ones."""
    places = [None]
    for token in ids[1:]:
        tokens = [token, *(100 + number for number in range(K))]
        places.append({str(x): {"logprob": -1.0 - rank, "rank": rank} for rank, x in enumerate(tokens, start=1)})
    return places


@contextmanager
def server(spoil: Spoil) -> Iterator[tuple[str, list[int]]]:
    """The address of a server whose answers to rows of tokens are spoilt, and their numbers of tokens."""
    tokenizer, asked = byte_tokenizer(), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            answer: Any = {"choices": [{"prompt_logprobs": said(ids)}]}
            if not isinstance(prompt, str):
                asked.append(len(prompt))
                answer = spoil(answer["choices"][0]["prompt_logprobs"])
            if answer is None:  # the connection ends
                return
            text = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            return

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}", asked
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def teacher(url: str, k: int = K) -> ServedTeacher:
    return ServedTeacher(Endpoint(url, None), "model", f"distill.teacher.url={url}", byte_tokenizer(), k, 1)


def answer(places: list[Any]) -> dict[str, Any]:
    return {"choices": [{"prompt_logprobs": places}]}


def with_logprob(value: float) -> Spoil:
    def spoil(places: list[Any]) -> Any:
        places[2]["100"]["logprob"] = value
        return answer(places)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda places: answer(places[:-1]), "3 tokens in it, and the prompt has 4"),
        (lambda places: answer([None, *said([0, 9, 7, 8])[1:]]), "it has token 9 where the prompt has 6"),
        (lambda places: answer([None, None, *places[2:]]), "a token after the first has no log-probability"),
        (lambda places: answer([each and dict([*each.items()][:2]) for each in places]), "2 likeliest tokens in it"),
        (with_logprob(math.nan), "are no ids with log-probabilities"),
        (with_logprob(0.5), "are no ids with log-probabilities"),
        (lambda places: {"choices": []}, "an answer cannot be used: IndexError"),
        (lambda places: "busy", "an answer cannot be used: TypeError"),
    ],
)
def test_a_wrong_answer_ends_the_run_with_its_reason(spoil: Spoil, reason: str) -> None:
    with server(spoil) as (url, _), pytest.raises(RliteError, match=f"distill.teacher.url={url}: .*{reason}"):
        teacher(url).logprobs([ROW])


def test_tokens_that_no_tokenizer_has_count_with_the_rest_of_the_vocabulary() -> None:
    padded = {"100": {"logprob": -0.5, "rank": 1}, "151900": {"logprob": -1.0, "rank": 2}}
    places = [None, *({str(x): {"logprob": -math.inf, "rank": 3}, **padded} for x in ROW[1:])]
    with server(lambda _: answer(places)) as (url, _):
        (ids,), (logprobs,) = teacher(url).logprobs([ROW])
    assert ids.tolist() == [[-1] * 3, *([100, -1, token] for token in ROW[1:])]
    assert logprobs[1:].tolist() == [[-0.5, -1.0, -1e4]] * 3


def test_a_server_that_is_gone_is_not_asked_for_the_other_rows() -> None:
    with server(lambda places: None) as (url, asked):
        with pytest.raises(WorkerError, match="did not answer /v1/completions"):
            teacher(url).logprobs([ROW] * 6)
        assert len(asked) <= 2 * ATTEMPTS, "the row that failed, and at most one that had begun"
