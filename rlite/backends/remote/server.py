"""Servers that the user owns: the options of the executor, and what is compared when the engine is built."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Gt

from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.data.prompts import raw_prompts
from rlite.errors import ConfigError, WorkerError, shortened
from rlite.nn.pretrained import load_config, load_tokenizer
from rlite.runtime.replicas.replica import ExecutorOptions
from rlite.runtime.storage.secrets import read_secret

KEY_VARIABLE = "RLITE_REMOTE_KEY"
GENERATE = "/inference/v1/generate"
PROBE = "Zwölf naïve geese\tcount: 3, 17, 1024 🙂 != 0x7F;\n\n    def f(x): return 'ok'"
"""text whose ids differ between tokenizers: accents, digits, white space, code, a character of four bytes"""
NUM_PROBED = 8
"""tokens whose log-probabilities are compared"""
LOOK_S = 0.5
"""seconds between two looks at a server that does not answer yet"""


class RemoteOptions(ExecutorOptions):
    """Options of `executor="remote"`. Those of memory and of dtypes belong to the servers, and have no effect."""

    addresses: Sequence[str] = ()
    """URLs of running servers, one for each replica, such as http://10.0.0.1:8000"""
    model: str | None = None
    """name of the model on the servers; default: the only one that a server has"""
    api_key_file: str | None = None
    """file of mode 0600 with the servers' key. The variable RLITE_REMOTE_KEY takes precedence"""
    logprobs: Literal["exact", "as_served"] = "exact"
    """exact: refuse requests whose log-probabilities the servers compute otherwise than rlite. as_served: take them as
    they are, for evaluations and judges, which do not train on them"""
    start_timeout_s: Annotated[float, Gt(0)] = 10.0
    """seconds that a server may not answer, when the engine is built and when a lost server shall join again"""
    stall_timeout_s: Annotated[float, Gt(0)] = 300.0
    """seconds without any token, with requests in flight, after which a server counts as lost"""

    def problems(self) -> Iterator[str]:
        """Yield a message for addresses that are none."""
        yield from super().problems()
        if not self.addresses:
            yield "addresses: expected the URLs of running servers, such as addresses=[http://10.0.0.1:8000]"
        for place in map(urlsplit, self.addresses):
            if place.scheme not in ("http", "https") or not place.hostname or "@" in place.netloc:
                yield f"addresses: expected URLs like http://10.0.0.1:8000, without a key; one is of {place.hostname!r}"
        if len(set(self.urls)) < len(self.urls):
            yield "addresses: a server is named twice; expected one server for each replica"

    @property
    def urls(self) -> list[str]:
        """The addresses without /v1."""
        return [address.rstrip("/").removesuffix("/v1") for address in self.addresses]

    def key(self) -> str | None:
        """Return the servers' key, None without one."""
        if (key := os.environ.get(KEY_VARIABLE)) is not None:
            return key.strip()
        file = self.api_key_file
        return None if file is None else read_secret(Path(file).expanduser(), "api_key_file")


@dataclass(frozen=True)
class Served:
    """A model on a server."""

    endpoint: Endpoint
    model: str
    is_scaled: bool
    """true: log-probabilities are those at the temperature of the request"""


def attach(url: str, options: RemoteOptions, path: str) -> Served:
    """Return the model of a server, after comparing it with a checkpoint.

    Args:
        url: address of the server.
        options: options of the executor.
        path: folder of the checkpoint.

    Raises:
        ConfigError: the server does not answer, or serves another model.
    """
    endpoint = Endpoint(url, options.key(), "server")
    try:
        entries = {entry["id"]: entry for entry in _answer(endpoint, "/v1/models", options.start_timeout_s)["data"]}
        if options.model not in entries and (options.model is not None or len(entries) != 1):
            raise ConfigError(f"model={options.model!r}: the server at {url} has {shortened(sorted(entries))}")
        name = options.model or next(iter(entries))
        asked, limit = options.max_model_len, entries[name].get("max_model_len")
        if asked and limit and asked > limit:
            raise ConfigError(f"max_model_len={asked}: the server at {url} takes at most {limit} tokens")
        text = load_config(path).get_text_config()
        length = asked or min(limit or text.max_position_embeddings, text.max_position_embeddings)
        ids = check_tokenizer(endpoint, name, path)
        endpoint = Endpoint(url, endpoint.api_key, endpoint.kind, length, text.vocab_size)
        return Served(endpoint, name, options.logprobs == "exact" and is_scaled(endpoint, name, ids))
    except CallRefused as error:
        remedy = f". The key comes from {KEY_VARIABLE} or api_key_file" if error.status == 401 else ""
        raise ConfigError(f"addresses: {error}{remedy}") from error
    except WorkerError as error:
        raise ConfigError(f"addresses: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        what = "/v1/models, /v1/completions and /inference/v1/generate as vLLM and `rlite serve` have them"
        raise ConfigError(f"addresses: the server at {url} does not answer {what} ({error!r})") from error


def _answer(endpoint: Endpoint, path: str, timeout: float) -> Any:
    """Return the answer of a server that may still start.

    Raises:
        WorkerError: it does not answer in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return endpoint.call(path)
        except WorkerError as error:
            if isinstance(error, CallRefused) or time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)


def check_tokenizer(endpoint: Endpoint, model: str, path: str) -> list[int]:
    """Return the ids of a probe text, which a server's tokenizer and a checkpoint's agree on.

    Args:
        endpoint: the server.
        model: name of its model.
        path: folder of the checkpoint.

    Raises:
        ConfigError: they differ.
    """
    (own,) = raw_prompts(load_tokenizer(path), [PROBE])
    body = {"model": model, "prompt": PROBE, "max_tokens": 1, "return_token_ids": True}
    theirs = endpoint.call("/v1/completions", body)["choices"][0]["prompt_token_ids"]
    if theirs != own:
        place = next((n for n, pair in enumerate(zip(own, theirs, strict=False)) if len(set(pair)) > 1), -1)
        raise ConfigError(
            f"addresses: the tokenizer of the server at {endpoint.url} differs from that of {path}: a probe text has "
            f"{len(theirs)} and {len(own)} tokens, and other ids from place {place} on; serve the same checkpoint"
        )
    return own


def is_scaled(endpoint: Endpoint, model: str, ids: list[int]) -> bool:
    """Return whether a server's log-probabilities are those at the temperature of a request.

    The most likely tokens are asked for twice, the second time at a low temperature: only then are they near 0.

    Args:
        endpoint: the server.
        model: name of its model.
        ids: a prompt.
    """

    def total(**sampling: float) -> float:
        common = {"max_tokens": NUM_PROBED, "ignore_eos": True, "logprobs": 0, "seed": 0}
        body = {"model": model, "token_ids": ids, "sampling_params": {**common, **sampling}}
        return sum(each["logprob"] for each in endpoint.call(GENERATE, body)["choices"][0]["logprobs"]["content"])

    plain, sharp = total(temperature=0.0), total(temperature=0.01, top_k=1)
    return abs(sharp - plain) > 0.2 * abs(plain)
