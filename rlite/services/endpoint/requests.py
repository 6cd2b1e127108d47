"""Requests that have been read, and errors of requests, independent of the dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from rlite.data.chat.forms import Message
from rlite.errors import RliteError, shortened
from rlite.types import GenerationHyperparameters

PATH = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:)?(?:[/\\][\w.@+~-]+){2,}[/\\]?")
"""a path of a file in an error text"""
UNSUPPORTED = "unsupported_value"


class ApiError(RliteError, RuntimeError):
    """A request that cannot be served, with a message for the client.

    `param`: the path of the parameter, such as "messages[0].role".
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status, param, code)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def told(self) -> str:
        """The message for a client. A failure of the server is told in its first line, without paths."""
        return self.message if self.status < 500 else PATH.sub("(a path)", self.message.partition("\n")[0])


def unexpected(error: Exception) -> ApiError:
    """Return the error for a request that failed unexpectedly. The exception's text may hold a prompt or a path."""
    return ApiError(f"the server failed with {type(error).__name__}; its log has the traceback", 500)


def unknown_model(asked: Any, model: str) -> ApiError:
    """Return the error for a request that names another model than the session's."""
    return ApiError(f"the model {asked!r} does not exist; there is {model!r}", 404, "model", "model_not_found")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request that has been read, independent of the interface. Either `messages` or `prompts` are set."""

    gconfig: GenerationHyperparameters
    num_choices: int
    """number of answers to each prompt"""
    is_stream: bool
    has_usage: bool
    """a stream ends with the usage"""
    has_logprobs: bool = False
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    may_call: bool = False
    """calls of tools are searched in the answer"""
    prompts: Sequence[str | list[int]] = ()
    is_echo: bool = False
    """the prompt is shown before the answer"""
    num_top: int = 0
    """most likely tokens that are shown at each place"""
    is_generating: bool = True
    """True if the model answers; False scores or counts the tokens of the prompts alone"""
    returns_token_ids: bool = False
    """the response shows the token ids of prompts and answers"""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """parts of the request that the response repeats"""

    @property
    def is_chat(self) -> bool:
        """True for a conversation."""
        return self.messages is not None

    @property
    def needs_scores(self) -> bool:
        """True if the response shows log-probabilities that generation does not return."""
        return self.has_logprobs and (self.is_echo or self.num_top > 0)


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body."""
    try:
        return from_json(body.decode(), allow_inf_nan=False)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def invalid(param: str, value: Any, expected: str) -> ApiError:
    """Return the error for a parameter whose value is wrong."""
    return ApiError(f"{param} is {shortened(value)}; expected {expected}", param=param, code="invalid_value")


def unsupported(param: str, value: Any, supported: str) -> ApiError:
    """Return the error for a parameter that cannot be honoured at its value."""
    message = f"{param} is {shortened(value)}, which is not supported; supported: {supported}"
    return ApiError(message, param=param, code=UNSUPPORTED)
