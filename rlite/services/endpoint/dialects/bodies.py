"""Bodies of requests: JSON values that several dialects share, read strictly.

A parameter that cannot be honoured is refused by its name. A parameter at the value that means "off" is treated as
absent. So is a parameter that is JSON null.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, from_json
from pydantic_core.core_schema import custom_error_schema

from rlite.errors import ParameterError
from rlite.services.endpoint.requests import UNSUPPORTED, ApiError, invalid, unknown_model, unsupported
from rlite.types import GenerationHyperparameters

RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""parameters of a request that GenerationHyperparameters names differently"""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""stop strings of a request, and characters of one: they are searched after each token in the event loop"""
MAX_DEPTH = 100
"""levels of a body, including schemas of tools"""
STOPS = f"a text or a list of texts, at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters"
TOOL_CHOICE = "'auto' or 'none': nothing makes the model call a tool"
WORDS = {"list_type": "a list", "dict_type": "an object", "model_type": "an object", "too_short": "a list, not empty"}


@dataclass(frozen=True)
class Expected:
    """Annotation that says in words what a value must be: one error replaces all errors of the value."""

    words: str
    code: str = "invalid_value"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return custom_error_schema(handler(source), custom_error_type=self.code, custom_error_message=self.words)


ABSENT: Any = Field(default=None)
"""the default of a required value: a missing value and null are the same error"""
Text = Annotated[str, Expected("a text")]
Name = Annotated[str, Field(min_length=1), Expected("a text, not empty")]
Integer = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63), Expected("an integer of 64 bits")]
Number = Annotated[int | float, Expected("a number")]
Flag = Annotated[bool, Expected("true or false")]
Function = Annotated[Literal["function"], Expected("'function'", UNSUPPORTED)]
One = Annotated[Literal[1], Expected("1, since this interface has one answer", UNSUPPORTED)]
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class JsonObject(BaseModel):
    """A JSON object. JSON null is the same as an absent key."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value


def as_parts(content: Any) -> Any:
    """Return a content as a list of parts; a text is one part."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("invalid_value", "a text")
    return content


class TextPart(JsonObject):
    """A part of a message that is text, in any dialect's words."""

    type: Literal["text", "input_text", "output_text"] = ABSENT
    text: str = ABSENT


Part = Annotated[TextPart, Expected("parts of type 'text', with a text", UNSUPPORTED)]
Parts = Annotated[list[Part], Field(fail_fast=True), BeforeValidator(as_parts)]


def text_of(parts: Iterable[TextPart] | None) -> str:
    """Return the text of a content."""
    return "\n".join(part.text for part in parts or ())


def called(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a tool as chat templates take it.

    `arguments`: values by parameter, or their JSON text. Templates get a text that is no JSON object as it is.
    """
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            values = from_json(arguments)
            arguments = values if isinstance(values, dict) else arguments
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


JsonType = Literal["object", "array", "string", "number", "integer", "boolean", "null"]
JsonTypes = Annotated[JsonType | list[JsonType], Expected(f"one of {', '.join(get_args(JsonType))}, or a list of them")]
Names = Annotated[list[str], Field(fail_fast=True), Expected("a list of names")]
Inner = Annotated["Schema | None", BeforeValidator(lambda schema: None if isinstance(schema, bool) else schema)]


class Schema(JsonObject):
    """A JSON schema, as far as templates look into it."""

    type: JsonTypes | None = None
    properties: dict[str, Inner] | None = None
    required: Names | None = None
    items: Inner = None


class Tool(JsonObject):
    """A tool as OpenAI's newer interface and Anthropic's name its parts."""

    type: Any = None
    """first, because the kind of a tool says more than what else it lacks"""
    name: Name = ABSENT
    description: Text | None = None

    def function(self, parameters: Any) -> dict[str, Any]:
        """Return the tool as chat templates take it.

        `parameters`: the JSON schema, as the request has it.
        """
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def functions(tools: Iterable[Tool], body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the tools of a body as chat templates take them.

    `key`: key of a tool's JSON schema, which is taken as the body has it.
    """
    return [tool.function(raw.get(key)) for tool, raw in zip(tools, body.get("tools") or (), strict=True)]


class StreamOptions(JsonObject):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")
    include_usage: Any = False
    include_obfuscation: Any = False


def _check_stops(stop: str | list[Any]) -> str | list[Any]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or any(isinstance(text, str) and len(text) > MAX_STOP_LENGTH for text in stops):
        raise ValueError
    return stop


class SamplingBody(JsonObject):
    """Sampling parameters, in OpenAI's names, and vLLM's further ones."""

    temperature: Number | None = None
    top_p: Number | None = None
    seed: Integer | None = None
    stop: Annotated[str | list[Any], AfterValidator(_check_stops), Expected(STOPS)] | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    top_k: Integer | None = None
    min_tokens: Integer | None = None
    stop_token_ids: Annotated[list[Any], Expected("a list of integers")] | None = None
    ignore_eos: Flag | None = None

    def applied_to(self, defaults: GenerationHyperparameters) -> GenerationHyperparameters:
        """Return the sampling parameters of a request, completed by the session's."""
        changes: dict[str, Any] = {}
        for key in SamplingBody.model_fields:
            name = RENAMED.get(key, key)
            if (value := getattr(self, key)) is not None and changes.setdefault(name, value) != value:
                raise invalid(key, value, f"{changes[name]!r}, which max_tokens says")
        if changes.get("temperature", 0) > 0:
            changes["greedy"] = False
        if "max_new_tokens" in changes:  # the session's own lower bound gives way
            changes.setdefault("min_new_tokens", min(defaults.min_new_tokens, max(changes["max_new_tokens"], 0)))
        try:
            return defaults.new(n_samples=1, **changes)
        except ParameterError as error:
            names = (key for key in SamplingBody.model_fields if RENAMED.get(key, key) == error.name)
            raise ApiError(str(error), param=next(names, None), code="invalid_value") from error


class StreamBody(JsonObject):
    """A body with the parameters that do not change the answer's tokens."""

    off: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """parameters that can be honoured only at these values"""
    notes: ClassVar[frozenset[str]] = frozenset()
    """parameters that do not change the answer"""
    has_optional_model: ClassVar[bool] = False

    stream: Flag = False
    stream_options: Annotated[StreamOptions, Expected("include_usage", UNSUPPORTED)] = StreamOptions()

    def common(self, defaults: GenerationHyperparameters) -> dict[str, Any]:
        """Return the fields of a ModelRequest that the requests of every dialect have."""
        check_off(self, self.off, self.notes)
        return {"is_stream": self.stream, "has_usage": bool(self.stream_options.include_usage)}


class GenerationBody(StreamBody, SamplingBody):
    """A body with sampling parameters."""

    n: Annotated[int, Field(ge=1, le=128), Expected("an integer from 1 to 128")] = 1

    def common(self, defaults: GenerationHyperparameters) -> dict[str, Any]:
        """Return the fields of a ModelRequest that the requests of every dialect have."""
        return {"gconfig": self.applied_to(defaults), "num_choices": self.n, **super().common(defaults)}


def check_off(body: JsonObject, off: Mapping[str, tuple[Any, ...]], notes: Collection[str]) -> None:
    """Check the parameters of a body that are not among its fields."""
    for key, value in (body.model_extra or {}).items():
        if key not in off and key not in notes:
            raise ApiError(f"the parameter {key!r} is not supported", param=key, code="unsupported_parameter")
        if key in off and value not in off[key]:
            raise unsupported(key, value, " or ".join(map(repr, off[key])))


AnyBody = TypeVar("AnyBody", bound=StreamBody)


def validated(kind: type[AnyBody], body: Any, model: str) -> AnyBody:
    """Return a body as its class."""
    if not isinstance(body, Mapping):
        raise ApiError(f"the body is {type(body).__name__}; expected a JSON object", code="invalid_json")
    _check_depth(body)
    values = dict(body)
    asked = values.pop("model", model if kind.has_optional_model else None)
    if asked is None:
        raise ApiError("the body has no model", param="model", code="missing_required_parameter")
    if asked != model:
        raise unknown_model(asked, model)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        refused = unsupported if first["type"] == UNSUPPORTED else invalid
        raise refused(param, first["input"], WORDS.get(first["type"], first["msg"])) from error


def _check_depth(body: Any) -> None:
    """Check that code which looks into the body does not recurse too far."""
    level = [body]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [part for values in inner for part in values if isinstance(part, Mapping | list)]
        if not level:
            return
    raise ApiError(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_value")
