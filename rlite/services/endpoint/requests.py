"""Requests in OpenAI's interface, read strictly: a parameter that cannot be honoured is refused by its name.

A parameter at the value that means "off" is treated as absent. So is a parameter that is JSON null.

Prompts as tokens: the tokens of an earlier turn unchanged, and the tokens of the text that is new.

A chat template renders a whole conversation. Suppose a request continues an answer as it was returned, and the template
renders everything up to that answer as the model has read and written it. Then the prompt is the recorded tokens and
the tokens of the rest. If the template rewrites history (it drops earlier thoughts, say), the whole text is tokenised.

Bounds on the second pass of the model, which computes log-probabilities of prompts and the most likely tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, from_json
from pydantic_core.core_schema import custom_error_schema

from rlite.data.chat.forms import Message
from rlite.data.chat.stops import text_after, tokens_after
from rlite.data.chat.template import OPTIONAL, ChatTemplate, Tokenizer
from rlite.data.prompts import bounded_tokens, raw_prompts
from rlite.errors import DataError, ParameterError, RliteError, shortened
from rlite.services.endpoint.recording import Turn
from rlite.types import GenerationHyperparameters

RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""parameters of a request that GenerationHyperparameters names differently"""
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
"""parameters that can be honoured only at these values"""
NOTES = ("user", "safety_identifier", "prompt_cache_key", "metadata")
"""parameters that do not change the answer"""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
"""stop strings of a request, and characters of one: they are searched after each token in the event loop"""
MAX_DEPTH = 100
"""levels of a body, including schemas of tools"""
UNSUPPORTED = "unsupported_value"
STOPS = f"a text or a list of texts, at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters"
TOOL_CHOICE = "'auto' or 'none': nothing makes the model call a tool"
MAX_CHOICES = 1024
"""choices of a request, of all its prompts together"""
MAX_SHOWN_LOGPROBS = 5
"""most likely tokens that a completion shows at each place: OpenAI's limit"""
PROMPT = f"a text, a list of token ids, or a list of at most {MAX_CHOICES} of them, none empty"
WORDS = {"list_type": "a list", "dict_type": "an object", "model_type": "an object", "too_short": "a list, not empty"}
MAX_TOKENS = "at least 1; or 0 with echo=true and logprobs, which scores the prompt alone"
LOGPROBS = f"an integer from 0 to {MAX_SHOWN_LOGPROBS}"


class ApiError(RliteError, RuntimeError):
    """A request that cannot be served, with a message for the client.

    Args:
        message: says what is wrong, and what is expected.
        status: the HTTP status.
        param: the path of the parameter, such as "messages[0].role".
        code: OpenAI's code of the error.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status, param, code)
        self.message, self.status, self.param, self.code = message, status, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unexpected(error: Exception) -> ApiError:
    """Return the error for a request that failed unexpectedly."""
    return ApiError(f"{type(error).__name__}: {error}", 500)


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
    has_logprobs: bool
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
    """True if the model answers; False scores the prompts alone"""

    @property
    def is_chat(self) -> bool:
        """True for a conversation."""
        return self.messages is not None

    @property
    def needs_scores(self) -> bool:
        """True if the response shows log-probabilities that generation does not return."""
        return self.has_logprobs and (self.is_echo or self.num_top > 0)


# -- bodies ------------------------------------------------------------------------------------------------------------


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
Role = Literal["system", "developer", "user", "assistant", "tool"]
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class _Object(BaseModel):
    """A JSON object. JSON null is the same as an absent key."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        return {key: part for key, part in value.items() if part is not None} if isinstance(value, dict) else value


def _as_parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is not None and not isinstance(content, list):
        raise PydanticCustomError("invalid_value", "a text")
    return content


class _Part(_Object):
    type: Literal["text"] = ABSENT
    text: str = ABSENT


Part = Annotated[_Part, Expected("parts of type 'text', with a text", UNSUPPORTED)]


class _CalledFunction(_Object):
    name: Text = ABSENT
    arguments: Text = ABSENT


class _Call(_Object):
    id: Text = ABSENT
    type: Function = "function"
    function: _CalledFunction = ABSENT

    def plain(self) -> dict[str, Any]:
        """Return the call as templates take it."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError):  # a template gets text that is not a JSON object as it is
            values = from_json(arguments)
            arguments = values if isinstance(values, dict) else arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class _Message(_Object):
    role: Annotated[Role, Expected(f"one of {', '.join(get_args(Role))}")] = ABSENT
    content: Annotated[list[Part] | None, Field(fail_fast=True), BeforeValidator(_as_parts)] = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True), BeforeValidator(lambda calls: calls or [])] = ABSENT
    name: Text | None = None
    tool_call_id: Text | None = None

    def plain(self, at: str) -> Message:
        """Return the message as templates take it: text, and the arguments of calls as values."""
        is_answer = self.role == "assistant"
        if self.content is None and not is_answer:
            raise _invalid(f"{at}.content", None, "a text")
        if self.role == "tool" and self.tool_call_id is None:
            raise _invalid(f"{at}.tool_call_id", None, "the id of the call that this answers")
        for key, value in {**(self.model_extra or {}), "tool_calls": () if is_answer else self.tool_calls}.items():
            if value:  # such as audio; empty ones come from the client's own types
                raise _unsupported(f"{at}.{key}", value, "nothing")
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": "\n".join(part.text for part in self.content or ())}
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message | {key: name for key in ("name", "tool_call_id") if (name := getattr(self, key)) is not None}


JsonType = Literal["object", "array", "string", "number", "integer", "boolean", "null"]
JsonTypes = Annotated[JsonType | list[JsonType], Expected(f"one of {', '.join(get_args(JsonType))}, or a list of them")]
Names = Annotated[list[str], Field(fail_fast=True), Expected("a list of names")]
Inner = Annotated["_Schema | None", BeforeValidator(lambda schema: None if isinstance(schema, bool) else schema)]


class _Schema(_Object):
    """A JSON schema, as far as templates look into it."""

    type: JsonTypes | None = None
    properties: dict[str, Inner] | None = None
    required: Names | None = None
    items: Inner = None


class _Function(_Object):
    name: Name = ABSENT
    description: Text | None = None
    parameters: _Schema | None = None


class _Tool(_Object):
    type: Function = ABSENT
    function: _Function = ABSENT


class _StreamOptions(_Object):
    model_config = ConfigDict(extra="forbid")
    include_usage: Any = False
    include_obfuscation: Any = False


def _check_stops(stop: str | list[Any]) -> str | list[Any]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS or any(isinstance(text, str) and len(text) > MAX_STOP_LENGTH for text in stops):
        raise ValueError
    return stop


class _Sampling(_Object):
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
        """Return the sampling parameters of a request, completed by the session's.

        Raises:
            ApiError: a value is out of range, or two values contradict each other.
        """
        changes: dict[str, Any] = {}
        for key in _Sampling.model_fields:
            name = RENAMED.get(key, key)
            if (value := getattr(self, key)) is not None and changes.setdefault(name, value) != value:
                raise _invalid(key, value, f"{changes[name]!r}, which max_tokens says")
        if changes.get("temperature", 0) > 0:
            changes["greedy"] = False
        if "max_new_tokens" in changes:  # the session's own lower bound gives way
            changes.setdefault("min_new_tokens", min(defaults.min_new_tokens, max(changes["max_new_tokens"], 0)))
        try:
            return defaults.new(n_samples=1, **changes)
        except ParameterError as error:
            names = (key for key in _Sampling.model_fields if RENAMED.get(key, key) == error.name)
            raise ApiError(str(error), param=next(names, None), code="invalid_value") from error


class _Body(_Sampling):
    """Parameters that both kinds of requests have."""

    stream: Flag = False
    stream_options: Annotated[_StreamOptions, Expected("include_usage", UNSUPPORTED)] = _StreamOptions()
    n: Annotated[int, Field(ge=1, le=128), Expected("an integer from 1 to 128")] = 1

    def common(self, defaults: GenerationHyperparameters) -> dict[str, Any]:
        """Return the fields of a ModelRequest that both kinds of requests have."""
        gconfig = self.applied_to(defaults)
        for key, value in (self.model_extra or {}).items():
            if key not in OFF and key not in NOTES:
                raise ApiError(f"the parameter {key!r} is not supported", param=key, code="unsupported_parameter")
            if key in OFF and value not in OFF[key]:
                raise _unsupported(key, value, " or ".join(map(repr, OFF[key])))
        has_usage = bool(self.stream_options.include_usage)
        return {"gconfig": gconfig, "num_choices": self.n, "is_stream": self.stream, "has_usage": has_usage}


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)] = ABSENT
    tools: Annotated[list[_Tool], Field(fail_fast=True), BeforeValidator(lambda tools: tools or [])] = ABSENT
    tool_choice: Annotated[Literal["auto", "none"], Expected(TOOL_CHOICE, UNSUPPORTED)] = "auto"
    logprobs: Flag = False


def _as_prompts(prompt: Any) -> list[Any]:
    is_several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    return prompt if is_several else [prompt]


Prompts = Annotated[list[Name | Tokens], Field(max_length=MAX_CHOICES, fail_fast=True)]


class _CompletionBody(_Body):
    prompt: Annotated[Prompts, BeforeValidator(_as_prompts), Expected(PROMPT)] = ABSENT
    logprobs: Annotated[int, Field(ge=0, le=MAX_SHOWN_LOGPROBS), Expected(LOGPROBS, UNSUPPORTED)] | None = None
    echo: Flag = False


# -- reading -----------------------------------------------------------------------------------------------------------


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a body.

    Raises:
        ApiError: the body is not JSON. The message says where.
    """
    try:
        return from_json(body.decode(), allow_inf_nan=False)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def read_chat(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /chat/completions.

    Args:
        body: a JSON value.
        model: the name of the session's model.
        defaults: sampling parameters that the body does not set.

    Returns:
        The request.

    Raises:
        ApiError: the body cannot be honoured. The error names the parameter.
    """
    read = _validated(_ChatBody, body, model)
    return ModelRequest(
        messages=[message.plain(f"messages[{number}]") for number, message in enumerate(read.messages)],
        tools=body["tools"] if read.tools else None,
        may_call=bool(read.tools) and read.tool_choice == "auto",
        has_logprobs=read.logprobs,
        **read.common(defaults),
    )


def read_completion(body: Any, model: str, defaults: GenerationHyperparameters) -> ModelRequest:
    """Read a body of /completions. Arguments and errors are those of `read_chat`.

    Args:
        body: a JSON value.
        model: the name of the session's model.
        defaults: sampling parameters that the body does not set.

    Returns:
        The request.
    """
    read = _validated(_CompletionBody, body, model)
    if read.n * len(read.prompt) > MAX_CHOICES:
        raise _invalid("n", read.n, f"at most {MAX_CHOICES} choices, and there are {len(read.prompt)} prompts")
    if read.stream and (read.echo or read.logprobs):
        raise _unsupported("stream", True, "false, for a request with echo or logprobs")
    if is_scoring := {read.max_tokens, read.max_completion_tokens} - {None} == {0}:
        if not read.echo or read.logprobs is None:
            name = "max_tokens" if read.max_tokens == 0 else "max_completion_tokens"
            raise _invalid(name, 0, MAX_TOKENS)
        read = read.model_copy(update={"max_tokens": 1, "max_completion_tokens": None})
    return ModelRequest(
        prompts=read.prompt,
        is_generating=not is_scoring,
        has_logprobs=read.logprobs is not None,
        num_top=read.logprobs or 0,
        is_echo=read.echo,
        **read.common(defaults),
    )


AnyBody = TypeVar("AnyBody", bound=_Body)


def _validated(kind: type[AnyBody], body: Any, model: str) -> AnyBody:
    """Return a body as its class. The error names the first invalid parameter by its path."""
    if not isinstance(body, Mapping):
        raise ApiError(f"the body is {type(body).__name__}; expected a JSON object", code="invalid_json")
    _check_depth(body)
    values = dict(body)
    asked = values.pop("model", None)
    if asked is None:
        raise ApiError("the body has no model", param="model", code="missing_required_parameter")
    if asked != model:
        raise unknown_model(asked, model)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        refused = _unsupported if first["type"] == UNSUPPORTED else _invalid
        raise refused(param, first["input"], WORDS.get(first["type"], first["msg"])) from error


def _check_depth(body: Any) -> None:
    """Check that code which looks into the body does not recurse too far.

    Raises:
        ApiError: the body is nested too deeply.
    """
    level = [body]
    for _ in range(MAX_DEPTH):
        inner = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [part for values in inner for part in values if isinstance(part, Mapping | list)]
        if not level:
            return
    raise ApiError(f"the body is nested more than {MAX_DEPTH} levels deep", code="invalid_value")


def _invalid(param: str, value: Any, expected: str) -> ApiError:
    return ApiError(f"{param} is {shortened(value)}; expected {expected}", param=param, code="invalid_value")


def _unsupported(param: str, value: Any, supported: str) -> ApiError:
    message = f"{param} is {shortened(value)}, which is not supported; supported: {supported}"
    return ApiError(message, param=param, code=UNSUPPORTED)


class Prompt(NamedTuple):
    """Input of one generation."""

    token_ids: list[int]
    text: str
    parent: Turn | None
    """the turn that the prompt continues"""


class ChatPrompts:
    """Renders and tokenises prompts for one tokenizer.

    Args:
        tokenizer: the model's tokenizer, with a chat template if there are conversations.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        limit: tokens that fit into the model's context; None does not bound texts.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template_options: Mapping[str, Any] | None = None, limit: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._limit = limit
        self._template = ChatTemplate(tokenizer, chat_template_options)

    def of(self, request: ModelRequest, turns: Sequence[Turn]) -> list[Prompt]:
        """Return the prompts of a request. A conversation is one prompt. Errors are those of `chat`."""
        if request.messages is not None:
            return [self.chat(request.messages, request.tools, turns)]
        # an echoed text is scored with the tokens of the text, not with the tokens that an earlier turn sampled, and
        # prompts of a list are not searched for earlier turns: that would take prompts times turns
        is_continuing = len(request.prompts) == 1 and not request.is_echo
        return [self.text(prompt, turns if is_continuing else ()) for prompt in request.prompts]

    def chat(self, messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> Prompt:
        """Return the prompt for the answer to a conversation.

        Args:
            messages: the conversation.
            tools: JSON schemas, or None.
            turns: the recorded turns. The prompt continues the longest one that the conversation begins with.

        Raises:
            TemplateRefusal: the chat template does not render the conversation.
            DataError: the chat template leaves out a tool or a part of a message, or the text is not valid Unicode.
            TooManyTokens: the text is far longer than the limit.
        """
        text = self._template.render(messages, tools=tools, add_generation_prompt=True)
        _check_text(text, "messages")
        optional = (*OPTIONAL, "'content'")  # a client may send any history; the model reads what the template shows
        self._template.check(messages, text, optional=optional, tools=tools, add_generation_prompt=True)
        for turn in _continued(messages, tools, turns):
            if (rest := text_after(self._template, turn, messages, text)) is None:
                continue
            tokens, has_same_end = self._after(turn, rest)
            if has_same_end:
                return Prompt(turn.sequence + tokens, text, turn)
        return Prompt(bounded_tokens(self.tokenizer, text, self._limit), text, None)

    def text(self, prompt: str | list[int], turns: Sequence[Turn]) -> Prompt:
        """Return a prompt without a template. It continues a turn if it begins with its text or its tokens."""
        raw = [turn for turn in reversed(turns) if turn.messages is None and not turn.is_aborted]
        if isinstance(prompt, str):
            _check_text(prompt, "prompt")
            begun = [turn for turn in raw if _begins_with(prompt, turn)]
            if longest := max(begun, key=lambda turn: len(turn.prompt_text) + len(turn.text), default=None):
                said = len(longest.prompt_text) + len(longest.text)
                rest, _ = self._after(longest, prompt[said:])
                return Prompt(longest.sequence + rest, prompt, longest)
            return Prompt(raw_prompts(self.tokenizer, [prompt], self._limit)[0], prompt, None)
        begun = [turn for turn in raw if prompt[: len(turn.sequence)] == turn.sequence]
        return Prompt(prompt, "", max(begun, key=lambda turn: len(turn.sequence), default=None))

    def _after(self, turn: Turn, rest: str) -> tuple[list[int], bool]:
        """Return the tokens of text after an answer that the model has not written, and whether both end it alike."""
        rest = rest.removeprefix(turn.stop_text)  # the answer as it was returned lacks it, and its tokens have it
        has_end = turn.messages is not None and not turn.stop_text
        said, reason = turn.output_ids, turn.finish_reason
        return tokens_after(self.tokenizer, rest, said, reason, self._limit, turn.end_ids, has_end)


def _begins_with(prompt: str, turn: Turn) -> bool:
    """Return whether a prompt is a turn's text, with the stop string that ended it, and more."""
    whole = turn.prompt_text + turn.text + turn.stop_text
    return bool(turn.prompt_text) and len(prompt) > len(whole) and prompt.startswith(whole)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{what}: half of a surrogate pair, {error.object[error.start]!r}, is no text", what) from error


def _continued(messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose conversation and answer `messages` begins with, the longest first."""

    def is_continued(turn: Turn) -> bool:
        if turn.messages is None or turn.answer is None or turn.is_aborted or turn.tools != tools:
            return False
        *before, said = messages[: len(turn.messages) + 1]
        return before == [*turn.messages] and _unspaced(said) == _unspaced(turn.answer)

    return sorted(filter(is_continued, reversed(turns)), key=lambda turn: -len(turn.messages or ()))


def _unspaced(message: Message) -> Message:
    """Return a message without the white space of its content: frameworks strip it or move it."""
    return {**message, "content": message["content"].split()}


MAX_SCORED_TOKENS = 1 << 17
"""largest number of scored tokens in a request: prompts and longest answers of all choices"""
SLICE_TOKENS = 1 << 14
"""scored at a time: between two slices, a request whose client has left ends"""


def check_scores(request: ModelRequest, can_score: bool) -> None:
    """Check that the engine computes the log-probabilities that a request wants.

    Args:
        request: the request.
        can_score: the engine computes log-probabilities of prompts.

    Raises:
        ApiError: the engine lacks them; or the most likely tokens would have another temperature than the answer.
    """
    if request.needs_scores and not can_score:
        message = "logprobs: this engine has no log-probabilities of prompts, nor the most likely tokens"
        raise ApiError(message, param="logprobs", code=UNSUPPORTED)
    gconfig = request.gconfig
    if request.needs_scores and request.is_generating and not gconfig.greedy and gconfig.temperature != 1:
        message = f"logprobs with echo, or above 0, at temperature {gconfig.temperature:g}; supported: 0 and 1"
        raise ApiError(message, param="temperature", code=UNSUPPORTED)


def check_num_scored(request: ModelRequest, lengths: Sequence[int], limit: int | None) -> None:
    """Check that a request does not want more scores than one request may.

    Args:
        request: the request.
        lengths: tokens of each prompt.
        limit: tokens of the model's context, None if unknown.

    Raises:
        ApiError: the request wants more scores; or a prompt that is scored alone fills the context.
    """
    if not request.needs_scores:
        return
    if not request.is_generating and limit is not None and (longest := max(lengths)) >= limit:
        message = f"the prompt has {longest} tokens; at most {limit - 1} are scored"
        raise ApiError(message, param="prompt", code="context_length_exceeded")
    num_new = request.gconfig.max_new_tokens if request.is_generating else 0
    num_scored = request.num_choices * sum(min(num + num_new, limit or num + num_new) for num in lengths)
    if num_scored > MAX_SCORED_TOKENS:
        message = (
            f"logprobs with echo, or above 0: {request.num_choices * len(lengths)} choices may have {num_scored} "
            f"tokens of prompt and answer; at most {MAX_SCORED_TOKENS} are scored per request: "
            "send fewer prompts, or set n or max_tokens lower"
        )
        raise ApiError(message, param="logprobs", code="invalid_value")


def slices(prompts: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Yield the prompts in their order, in lists of at most `SLICE_TOKENS` tokens; a longer prompt is alone."""
    part: list[list[int]] = []
    for ids in prompts:
        if part and sum(map(len, part)) + len(ids) > SLICE_TOKENS:
            yield part
            part = []
        part.append(ids)
    yield part
