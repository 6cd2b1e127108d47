"""Bodies of requests in OpenAI's interface, read strictly: what cannot be honoured is refused by its name.

A parameter at the value that means "off" is as good as absent. JSON null is absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlite.data.chat.template import Message
from rlite.errors import RliteError
from rlite.rollout.openai.errors import ApiError, unknown_model
from rlite.types import GenerationHyperparameters

SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    # vLLM's further ones
    "top_k": "top_k",
    "min_tokens": "min_new_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
}
"""parameters of a request by the sampling parameter that each sets"""
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "temperature": ((float, int), "a number"),
    "top_p": ((float, int), "a number"),
    "stop": ((str, list), "a text or a list of texts"),
    "stop_token_ids": ((list,), "a list of integers"),
    "ignore_eos": ((bool,), "true or false"),
}
"""what sampling parameters are, if not integers"""
OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "modalities": (["text"],),
    "functions": ([],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""parameters that are understood and cannot be honoured but at these values"""
NOTES = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""parameters that say nothing about the answer"""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""stop strings of a request, and characters of one: after each token they are looked for in the event loop"""
MAX_DEPTH = 100
"""levels of a body, schemas of tools included"""
JSON_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request that has been read. Of `messages` and `prompt` one is set."""

    gconfig: GenerationHyperparameters
    num_choices: int
    is_stream: bool
    has_usage: bool
    """a stream ends with the usage"""
    has_logprobs: bool
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    may_call: bool = False
    """calls of tools are looked for in the answer"""
    prompt: str | list[int] | None = None


def parse_json(body: bytes) -> Any:
    """Raises: ApiError that says where it is wrong."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ApiError(
            f"the body is not valid JSON: {error.msg}, at line {error.lineno}, column {error.colno}",
            code="invalid_json",
        ) from error
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def read_chat(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """A body of /chat/completions. Raises: ApiError that names the parameter."""
    values = _values(body, model)
    messages = read_messages(values.pop("messages", None))
    tools = _read_tools(values.pop("tools", None))
    choice = values.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _unsupported("tool_choice", choice, "'auto' or 'none': nothing makes the model call a tool")
    has_logprobs = _flag(values, "logprobs")
    common = _common(values, defaults)
    return ModelRequest(
        messages=messages,
        tools=tools,
        may_call=bool(tools) and choice == "auto",
        has_logprobs=has_logprobs,
        **common,
    )


def read_completion(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """A body of /completions. Raises: ApiError that names the parameter."""
    values = _values(body, model)
    prompt = values.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_tokens):
        raise _invalid("prompt", prompt, "one text or one list of token ids, not empty")
    logprobs = values.pop("logprobs", None)
    if logprobs not in (None, 0) or isinstance(logprobs, bool):
        raise _unsupported("logprobs", logprobs, "0, the log-probability of the tokens that were sampled")
    return ModelRequest(prompt=prompt, has_logprobs=logprobs is not None, **_common(values, defaults))


def read_messages(messages: Any) -> list[Message]:
    """Messages as templates take them: texts, and the arguments of calls as values. Raises: ApiError."""
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", messages, "a list of messages, not empty")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, Mapping):
        raise _invalid(at, message, "an object with role and content")
    values = {key: value for key, value in message.items() if value is not None}
    role = values.pop("role", None)
    if role not in ROLES:
        raise _invalid(f"{at}.role", role, f"one of {', '.join(ROLES)}")
    calls = values.pop("tool_calls", None) if role == "assistant" else None
    content = values.pop("content", None)
    if content is None and role != "assistant":
        raise _invalid(f"{at}.content", content, "a text")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    read["content"] = _content(content, f"{at}.content")
    if calls:
        if not isinstance(calls, list):
            raise _invalid(f"{at}.tool_calls", calls, "a list")
        read["tool_calls"] = [_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if key in values:
            read[key] = _text(values.pop(key), f"{at}.{key}")
    if role == "tool" and "tool_call_id" not in read:
        raise _invalid(f"{at}.tool_call_id", None, "the id of the call that this answers")
    for key, value in values.items():
        if value:  # such as audio; empty ones come from the client's own types
            raise _unsupported(f"{at}.{key}", value, "nothing")
    return read


def _content(content: Any, at: str) -> str:
    if isinstance(content, list):
        parts = []
        for number, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise _unsupported(f"{at}[{number}]", part, "parts of type 'text'")
            parts.append(_text(part.get("text"), f"{at}[{number}].text"))
        return "\n".join(parts)
    return "" if content is None else _text(content, at)


def _call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise _invalid(at, call, "an object with id, type 'function' and function")
    arguments = _text(function.get("arguments"), f"{at}.function.arguments")
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        values = None
    return {
        "id": _text(call.get("id"), f"{at}.id"),
        "type": "function",
        # templates write objects as JSON; what is no JSON object they get as it is
        "function": {
            "name": _text(function.get("name"), f"{at}.function.name"),
            "arguments": values if isinstance(values, dict) else arguments,
        },
    }


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _invalid("tools", tools, "a list")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise _unsupported(f"tools[{number}]", tool, "an object with type 'function' and function")
        at = f"tools[{number}].function"
        if not _text(function.get("name"), f"{at}.name"):
            raise _invalid(f"{at}.name", "", "a text, not empty")
        if function.get("description") is not None:
            _text(function["description"], f"{at}.description")
        if function.get("parameters") is not None:
            _check_schema(function["parameters"], f"{at}.parameters")
    return tools


def _check_schema(schema: Any, at: str) -> None:
    """Raise ApiError unless this has the form of a JSON schema, as far as templates look into it."""
    if not isinstance(schema, Mapping):
        raise _invalid(at, schema, "a JSON schema, an object")
    kinds = schema.get("type", "object")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in JSON_TYPES:
            raise _invalid(f"{at}.type", kind, f"one of {', '.join(JSON_TYPES)}")
    properties, required, items = (schema.get(key) for key in ("properties", "required", "items"))
    if properties is not None and not isinstance(properties, Mapping):
        raise _invalid(f"{at}.properties", properties, "an object")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _invalid(f"{at}.required", required, "a list of names")
    inner = {f"properties.{name}": value for name, value in (properties or {}).items()} | {"items": items}
    for name, value in inner.items():
        if value is not None and not isinstance(value, bool):
            _check_schema(value, f"{at}.{name}")


def _values(body: Any, model: str) -> dict[str, Any]:
    """What the body sets. Raises: ApiError for another model."""
    if not isinstance(body, Mapping):
        raise ApiError(f"the body is {type(body).__name__}; expected a JSON object", code="invalid_json")
    _check_depth(body)
    values = {key: value for key, value in body.items() if value is not None}
    asked = values.pop("model", None)
    if asked is None:
        raise ApiError("the body has no model", param="model", code="missing_required_parameter")
    if asked != model:
        raise unknown_model(asked, model)
    return values


def _check_depth(body: Any) -> None:
    """Raise ApiError for a body that is nested so deeply that what looks into it would recurse too far."""
    level = [body]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [part for values in inner for part in values if isinstance(part, Mapping | list)]
        if not level:
            return
    raise ApiError(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_value")


def _common(values: dict[str, Any], defaults: GenerationHyperparameters) -> dict[str, Any]:
    """What both kinds of requests have; `values` must have nothing else. Raises: ApiError."""
    is_stream = _flag(values, "stream")
    options = values.pop("stream_options", {})
    if not isinstance(options, Mapping) or set(options) - {"include_usage", "include_obfuscation"}:
        raise _unsupported("stream_options", options, "include_usage")
    num_choices = values.pop("n", 1)
    if type(num_choices) is not int or not 1 <= num_choices <= 128:
        raise _invalid("n", num_choices, "an integer from 1 to 128")
    gconfig = _sampling(values, defaults)
    for key in NOTES:
        values.pop(key, None)
    for key, value in values.items():
        if key not in OFF:
            raise ApiError(f"the parameter {key!r} is not supported", param=key, code="unsupported_parameter")
        if value not in OFF[key]:
            raise _unsupported(key, value, " or ".join(map(repr, OFF[key])))
    return {
        "gconfig": gconfig,
        "num_choices": num_choices,
        "is_stream": is_stream,
        "has_usage": bool(options.get("include_usage")),
    }


def _sampling(values: dict[str, Any], defaults: GenerationHyperparameters) -> GenerationHyperparameters:
    changes: dict[str, Any] = {}
    for key, name in SAMPLING.items():
        if key not in values:
            continue
        value = values.pop(key)
        wanted, words = KINDS.get(name, ((int,), "an integer"))
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise _invalid(key, value, words)
        if name in changes and changes[name] != value:
            raise _invalid(key, value, f"{changes[name]!r}, which max_tokens says")
        changes[name] = value
    stops = [changes["stop"]] if isinstance(changes.get("stop"), str) else changes.get("stop", [])
    if len(stops) > MAX_STOPS or any(isinstance(stop, str) and len(stop) > MAX_STOP_LENGTH for stop in stops):
        raise _invalid("stop", changes["stop"], f"at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters")
    if "temperature" in changes and changes["temperature"] > 0:
        changes["greedy"] = False
    if "max_new_tokens" in changes:  # the session's own lower bound gives way
        changes.setdefault("min_new_tokens", min(defaults.min_new_tokens, max(changes["max_new_tokens"], 0)))
    try:
        return defaults.new(n_samples=1, **changes)
    except RliteError as error:
        names = [key for key, name in SAMPLING.items() if f"parameter {name}=" in str(error)]
        raise ApiError(str(error), param=names[0] if names else None, code="invalid_value") from error


def _flag(values: dict[str, Any], key: str) -> bool:
    value = values.pop(key, False)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false")
    return value


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise _invalid(at, value, "a text")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _invalid(param: str, value: Any, expected: str) -> ApiError:
    return ApiError(f"{param} is {_short(value)}; expected {expected}", param=param, code="invalid_value")


def _unsupported(param: str, value: Any, supported: str) -> ApiError:
    message = f"{param} is {_short(value)}, which is not supported; supported: {supported}"
    return ApiError(message, param=param, code="unsupported_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
