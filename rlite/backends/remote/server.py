"""Servers that the user owns: the options of the executor, and what is compared when the engine is built."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Gt

from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.backends.serving.streams import version_of
from rlite.data.prompts import raw_prompts
from rlite.errors import ConfigError, WorkerError, shortened
from rlite.nn.pretrained import load_config, load_tokenizer
from rlite.runtime.replicas.replica import ExecutorOptions
from rlite.runtime.storage.secrets import find_secret

KEY_VARIABLE = "RLITE_REMOTE_KEY"
ADMIN_VARIABLE = "RLITE_ADMIN_TOKEN"
GENERATE = "/inference/v1/generate"
WEIGHTS = "/admin/weights"
PROBE = "Zwölf naïve geese\tcount: 3, 17, 1024 🙂 != 0x7F;\n\n    def f(x): return 'ok'"
"""text whose ids differ between tokenizers: accents, digits, white space, code, a character of four bytes"""
NUM_PROBED = 8
"""tokens whose log-probabilities are compared"""
LOOK_S = 0.5
"""seconds between two looks at a server that does not answer yet"""


class RemoteOptions(ExecutorOptions):
    """Options of `executor="remote"`. Memory belongs to the servers: its options have no effect.

    `dtype` is the type of the weights that a sync writes, by default the checkpoint's.
    """

    addresses: Sequence[str] = ()
    """URLs of running servers, one for each replica, such as http://10.0.0.1:8000"""
    model: str | None = None
    """name of the model on the servers; default: the only one that a server has"""
    api_key_file: str | None = None
    """file of mode 0600 with the servers' key. The variable RLITE_REMOTE_KEY takes precedence"""
    weights_folder: str | None = None
    """folder on a disk of this program and of the servers, of this run alone, into which a weight sync writes; default:
    the servers keep their weights"""
    admin_token_file: str | None = None
    """file of mode 0600 with the token that opens /admin/weights of the servers, for `weights_folder`. The variable
    RLITE_ADMIN_TOKEN takes precedence"""
    logprobs: Literal["exact", "as_served"] = "exact"
    """exact: refuse requests whose log-probabilities the servers compute otherwise than rlite. as_served: take them as
    they are, for evaluations and judges, which do not train on them"""
    start_timeout_s: Annotated[float, Gt(0)] = 10.0
    """seconds that a server may not answer, when the engine is built and when a lost server shall join again"""
    stall_timeout_s: Annotated[float, Gt(0)] = 300.0
    """seconds without any token, with requests in flight, after which a server counts as lost; seconds in which it must
    load weights"""

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
        if self.weights_folder is None and self.admin_token_file is not None:
            yield "admin_token_file: it is for weights_folder, which is not set"
        if self.weights_folder is not None and not Path(self.weights_folder).expanduser().is_absolute():
            yield f"weights_folder={self.weights_folder}: expected an absolute path, which the servers have too"
        if self.weights_folder is not None and self.admin_token_file is None and ADMIN_VARIABLE not in os.environ:
            yield f"weights_folder: the servers take weights with a token, from {ADMIN_VARIABLE} or admin_token_file"

    @property
    def urls(self) -> list[str]:
        """The addresses without /v1."""
        return [address.rstrip("/").removesuffix("/v1") for address in self.addresses]

    def key(self) -> str | None:
        """Return the servers' key, None without one."""
        return find_secret(KEY_VARIABLE, self.api_key_file, "api_key_file")

    def admin_token(self) -> str | None:
        """Return the administrator's token of the servers, None if they keep their weights."""
        return self.weights_folder and find_secret(ADMIN_VARIABLE, self.admin_token_file, "admin_token_file")


@dataclass(frozen=True)
class Served:
    """A model on a server."""

    endpoint: Endpoint
    model: str
    is_scaled: bool
    """true: log-probabilities are those at the temperature of the request"""
    administered: Endpoint | None
    """the server with the administrator's token; None if it keeps its weights"""
    version: int
    """policy version that the server reports; 0 if it reports none"""

    def load(self, folder: str, version: int, timeout: float) -> None:
        """Let the server read weights, which are then those of a version.

        `timeout`: seconds.
        """
        assert self.administered is not None
        try:
            answer = self.administered.call(WEIGHTS, {"path": folder, "version": version}, timeout)
            if answer["version"] != version:
                raise WorkerError(f"the server at {self.endpoint.url} answers version {answer['version']}")
        except (WorkerError, KeyError, TypeError) as error:
            raise WorkerError(f"version {version} of the weights is not served: {error}") from error


def attach(url: str, options: RemoteOptions, path: str) -> Served:
    """Return the model of a server, after comparing it with a checkpoint."""
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
        administered = None if (token := options.admin_token()) is None else replace(endpoint, api_key=token)
        if administered is not None:
            check_administered(administered)
        is_exact = options.logprobs == "exact" and is_scaled(endpoint, name, ids)
        version = 0 if administered is None else served_version(endpoint, name, ids)
        return Served(endpoint, name, is_exact, administered, version)
    except CallRefused as error:
        remedy = f". The key comes from {KEY_VARIABLE} or api_key_file" if error.status == 401 else ""
        raise ConfigError(f"addresses: {error}{remedy}") from error
    except WorkerError as error:
        raise ConfigError(f"addresses: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        what = "/v1/models, /v1/completions and /inference/v1/generate as vLLM and `rlite serve` have them"
        raise ConfigError(f"addresses: the server at {url} does not answer {what} ({error!r})") from error


def _answer(endpoint: Endpoint, path: str, timeout: float) -> Any:
    """Return the answer of a server that may still start."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return endpoint.call(path)
        except WorkerError as error:
            if isinstance(error, CallRefused) or time.monotonic() > deadline:
                raise
        time.sleep(LOOK_S)


def check_tokenizer(endpoint: Endpoint, model: str, path: str) -> list[int]:
    """Return the ids of a probe text, which a server's tokenizer and a checkpoint's agree on."""
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


def check_administered(server: Endpoint) -> None:
    """Check that a server takes weights from this program: it refuses a body without a folder, and nothing else."""
    try:
        server.call(WEIGHTS, {})
    except CallRefused as error:
        if error.status not in (400, 422):
            remedy = f"`rlite serve` has it with admin_token_file. The token comes from {ADMIN_VARIABLE} or a file"
            raise ConfigError(f"weights_folder: {error}; {remedy}") from error


def served_version(endpoint: Endpoint, model: str, ids: list[int]) -> int:
    """Return the policy version that a server reports with a token; 0 if it reports none."""
    body = {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 1}}
    spans = endpoint.call(GENERATE, body)["choices"][0].get("weight_versions") or [{"version": 0}]
    return version_of(spans[-1]["version"], 0)


def is_scaled(endpoint: Endpoint, model: str, ids: list[int]) -> bool:
    """Return whether a server's log-probabilities are those at the temperature of a request.

    The most likely tokens are asked for twice, the second time at a low temperature: only then are they near 0.
    """

    def total(**sampling: float) -> float:
        common = {"max_tokens": NUM_PROBED, "ignore_eos": True, "logprobs": 0, "seed": 0}
        body = {"model": model, "token_ids": ids, "sampling_params": {**common, **sampling}}
        return sum(each["logprob"] for each in endpoint.call(GENERATE, body)["choices"][0]["logprobs"]["content"])

    plain, sharp = total(temperature=0.0), total(temperature=0.01, top_k=1)
    return abs(sharp - plain) > 0.2 * abs(plain)
