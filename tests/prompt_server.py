"""A server that returns log-probabilities of a prompt's tokens, as vLLM, SGLang or OpenAI do, from a real model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_LOGPROBS = 20
"""as vLLM's default"""


@contextmanager
def prompt_server(path: Path, kind: str = "vLLM", tokenizer: Any = None) -> Iterator[str]:
    """The address of a server of the model, of one kind. Another tokenizer reads texts otherwise than the model's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    reader = tokenizer or AutoTokenizer.from_pretrained(path)
    lock = threading.Lock()

    def logprobs(ids: Sequence[int]) -> Tensor:
        with lock, torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, answer = 200, ANSWERS[kind](self.path, body, reader, logprobs)
            except ValueError as error:
                status, answer = 400, {"error": {"message": str(error)}}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _ids(prompt: Any, reader: Any) -> list[int]:
    return reader(prompt)["input_ids"] if isinstance(prompt, str) else prompt


def _vllm(path: str, body: Any, reader: Any, logprobs: Any) -> Any:
    if path != "/v1/completions":
        raise ValueError(f"no route {path}")
    ids, k = _ids(body["prompt"], reader), body.get("prompt_logprobs", 0)
    if k > MAX_LOGPROBS:
        raise ValueError(f"Requested prompt logprobs of {k}, which is greater than max allowed: {MAX_LOGPROBS}")
    said: list[Any] = [None]
    for row, token in zip(logprobs(ids), ids[1:], strict=False):
        order = row.argsort(descending=True).tolist()
        tokens = dict.fromkeys([token, *order[:k]])
        said.append({str(x): {"logprob": row[x].item(), "rank": order.index(x) + 1} for x in tokens})
    return {"choices": [{"prompt_logprobs": said}]}


def _sglang(path: str, body: Any, reader: Any, logprobs: Any) -> Any:
    if path != "/generate":
        raise ValueError(f"no route {path}")
    ids, k = body["input_ids"] if "input_ids" in body else _ids(body["text"], reader), body["top_logprobs_num"]
    rows = logprobs(ids)
    own = [[None, ids[0], None], *([rows[n, token].item(), token, None] for n, token in enumerate(ids[1:]))]
    tops = [
        None,
        *([[value, x, None] for value, x in zip(*map(Tensor.tolist, row.topk(k)), strict=True)] for row in rows[:-1]),
    ]
    return {"meta_info": {"input_token_logprobs": own, **({"input_top_logprobs": tops} if k else {})}}


def _openai(path: str, body: Any, reader: Any, logprobs: Any) -> Any:
    if path != "/v1/completions":
        raise ValueError(f"no route {path}")
    ids = _ids(body["prompt"], reader)
    rows = logprobs(ids)
    new = int(rows[-1].argmax())
    values = [None, *(rows[n, token].item() for n, token in enumerate([*ids[1:], new]))]
    return {"choices": [{"logprobs": {"tokens": [reader.decode([x]) for x in (*ids, new)], "token_logprobs": values}}]}


ANSWERS = {"vLLM": _vllm, "SGLang": _sglang, "OpenAI": _openai}
