"""The chat template of a tokenizer: the one place that renders conversations and finds messages in the text.

The time that templates write is that of the clock, or a fixed time, so that a run has one date.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from rlite import files
from rlite.data.chat import forms
from rlite.data.chat.forms import Marks, Message, Messages, Part, Places
from rlite.data.prompts import TextTokenizer
from rlite.errors import ConfigError, DataError

_FUNCTION = "strftime_now"
"""function of the clock in templates"""
_FORMATS = [f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFGhHIjmMnpSTuUVwWxXyYzZf"]


class TemplateClock:
    """The time that chat templates of this process write."""

    def __init__(self) -> None:
        self._fixed: datetime | None = None

    def now(self) -> datetime:
        """Return the fixed time, or the present if no time is fixed."""
        return self._fixed or datetime.now()

    @contextmanager
    def fixed(self, time: datetime) -> Iterator[None]:
        """Fix the time inside the `with` block, in all threads."""
        before, self._fixed = self._fixed, time
        try:
            yield
        finally:
            self._fixed = before

    def in_template(self, source: str) -> str:
        """Return a template that writes the fixed time. A template that writes no time, or the present, is unchanged.

        `source`: the template. transformers lets a template see plain data alone, so a macro replaces the function.
        """
        if self._fixed is None or _FUNCTION not in source:
            return source
        values = {form: self._fixed.strftime(form) for form in _FORMATS}
        filters = "".join(f"|replace({form!r}, {value!r})" for form, value in values.items())
        # The newline after a tag is not written, so the template begins as it does without the macro.
        return f"{{%- macro {_FUNCTION}(form) %}}{{{{- form{filters} -}}}}{{%- endmacro %}}\n{source}"


CLOCK = TemplateClock()


STAND_IN = f"\ue00d{secrets.randbits(64)}\ue00e"
"""shows where a template puts a content; random, so that no content holds it, and no filter of a template changes it"""
QUESTION: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": "answer"}
OPTIONAL = tuple(map(repr, forms.THOUGHTS))
"""names of the parts of earlier answers that a prompt may lack, because they are not learnt"""
KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", *forms.WEIGHTS}
"""keys of messages that are read without the chat template, or checked elsewhere, or that no model needs to see"""


class Tokenizer(TextTokenizer, Protocol):
    """A Hugging Face tokenizer, as far as conversations need one."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render messages as text, or as tokens."""

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """Return the text of tokens."""


class TemplateRefusal(DataError):
    """A chat template does not render a conversation, or leaves a part of it out."""


class Ending(NamedTuple):
    """Text that a template writes after an answer."""

    closing: str
    """follows every answer"""
    tail: str
    """follows the closing if the conversation ends there: some templates end a conversation with its own token"""


class ChatTemplate:
    """Renders conversations with the chat template of one tokenizer.

    `options`: further keyword arguments for `apply_chat_template`, such as {"enable_thinking": False}.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer: Any = tokenizer
        self._options = dict(options or {})

    def apply(self, messages: Messages, **options: Any) -> Any:
        """Call `apply_chat_template` of the tokenizer.

        `options`: keyword arguments. They take precedence over the options of this template. Returns text or tokens,
        depending on the options.
        """
        options = {**self._options, **options}
        messages = self.fitted(messages, tools=options.get("tools"))
        if (source := self._source(options)) and (dated := CLOCK.in_template(source)) != source:
            options["chat_template"] = dated
        try:
            return forms.limited(lambda: self.tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # a template is a program of others: it may fail in any way on what it is given
            roles = ", ".join(str(message.get("role")) for message in messages)
            told = f"the model's chat template {refusal(error)} a conversation of the roles {roles}"
            raise TemplateRefusal(f"{told}: {cause(error)}") from error

    def fitted(self, messages: Messages, where: str = "", tools: Any = None) -> list[Message]:
        """Return messages in the forms that the template takes; see `MessageForms`."""
        source = self._source({**self._options, "tools": tools or self._options.get("tools")})
        return forms.forms_of(source).fitted(messages, where) if source else list(messages)

    def _source(self, options: Mapping[str, Any]) -> str | None:
        """Return the source of the template; None if the tokenizer renders conversations without a template."""
        if not has_chat_template(self.tokenizer) or not hasattr(self.tokenizer, "get_chat_template"):
            return None
        with suppress(ValueError):  # several templates without a default: rendering reports it
            return self.tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        return None

    def render(self, messages: Messages, **options: Any) -> str:
        """Return a conversation as text. Arguments and errors are those of `apply`."""
        return self.apply(messages, tokenize=False, **options)

    def around(self, messages: Messages, number: int, **options: Any) -> list[str]:
        """Render a conversation and split the text at the content of one message.

        `number`: the index of the message. Of an answer, calls and thoughts are left out as well as the content.
        Returns the parts between the places where the content stands: two if the template writes it once.
        """
        message = messages[number]
        kept = {"role": "assistant"} if message["role"] == "assistant" else message
        variant = [*messages[:number], {**kept, "content": STAND_IN}, *messages[number + 1 :]]
        return self.render(variant, **options).split(STAND_IN)

    def places(self, messages: Messages, text: str, only: int | None = None, **options: Any) -> Places:
        """Return the parts of messages in a rendered conversation.

        `only`: index of the message whose parts are wanted; None wants all.
        """
        tools = {**self._options, **options}.get("tools")

        def render(marks: Marks) -> str | None:
            try:
                return self.render(marks.messages, **options | ({"tools": marks.tools} if tools else {}))
            except TemplateRefusal:
                return None

        return Places(text, render, messages, tools, only)

    def alone(self, answer: Message, **options: Any) -> Places | None:
        """Return the parts of an answer that ends a conversation; None if the template does not render it there."""
        try:
            exchange = [QUESTION, answer]
            return self.places(exchange, self.render(exchange, **options), 1, **options)
        except TemplateRefusal:
            return None

    def check(
        self, messages: Messages, text: str, where: str = "", optional: Collection[str] = (), **options: Any
    ) -> Places:
        """Check that a rendered conversation holds each part of its messages at its own place, and each tool.

        Earlier thoughts may be left out, if the template shows them in an answer that ends a conversation.

        Returns the places of the parts.
        """
        messages = self.fitted(messages, where, options.get("tools"))
        places = self.places(messages, text, **options)
        for number, message in enumerate(messages):
            missing, role = places.missing(number), message["role"]
            if number not in places.parts and str(message.get("content") or "").strip() not in text:
                is_shown = len(self.around(messages, number, **options)) > 1
                missing = [] if is_shown else [Part(number, "'content'", "", None, None, 0)]
            if role == "assistant":
                missing = [part for part in missing if part.name not in optional and not (optional and part.places)]
                if missing and message is not messages[-1] and (alone := self.alone(message, **options)):
                    # history lacks what the template writes in an answer that ends a conversation
                    missing = [] if 1 in alone.parts and not alone.missing(1) else missing
            if missing:
                what = f"a part of {missing[0].name}" if missing[0].places else missing[0].name
                if role != "assistant" and not missing[0].places:
                    what = f"the role {role!r}, whose content would be lost"
                place = f"{where}messages[{number}]"
                raise DataError(f"{place}: the chat template leaves out {what}", place)
        if missing := places.missing(forms.TOOLS):
            raise DataError(f"{where}tools: the model's chat template leaves out {missing[0].name}", f"{where}tools")
        return places

    def between(self, replies: Messages) -> str:
        """Return the text from the end of an answer's content to the beginning of the next answer."""
        exchange = [QUESTION, ANSWER, *replies]
        _, *found = self.around(exchange, 1, add_generation_prompt=True)
        if len(found) != 1:
            roles = ", ".join(dict.fromkeys(message["role"] for message in replies))
            raise TemplateRefusal(f"the chat template renders an answer {len(found)} times if there follow: {roles}")
        for number, message in enumerate(replies, start=2):
            content = message.get("content")
            is_shown = not isinstance(content, str) or content.strip() in found[0]
            if not is_shown and len(self.around(exchange, number, add_generation_prompt=True)) == 1:
                raise TemplateRefusal(f"the chat template leaves out messages of the role {message['role']!r}")
        return found[0]

    @cached_property
    def ending(self) -> Ending | None:
        """Text that the template writes after an answer; None if the template does not show where an answer ends."""
        try:
            last = self.around_last_answer
            inner = self.around([QUESTION, ANSWER, QUESTION], 1, add_generation_prompt=True)
        except TemplateRefusal:
            return None
        if len(last) != 2 or len(inner) != 2:
            return None
        size = num_shared(last[1], inner[1])
        return Ending(last[1][:size], last[1][size:])

    @cached_property
    def around_last_answer(self) -> list[str]:
        """Text before and after the answer that ends a conversation; see `around`. May raise TemplateRefusal."""
        return self.around([QUESTION, ANSWER], 1, add_generation_prompt=False)

    def written(self, answer: Message) -> tuple[str, str]:
        """Return the prompt for an answer to a question, and the text that the template writes for the answer."""
        prompt = self.render([QUESTION], add_generation_prompt=True)
        whole = self.render([QUESTION, answer], add_generation_prompt=False)
        # what opens an answer and the answer may begin alike, such as <think> and <tool_call>
        other = self.render([QUESTION, ANSWER], add_generation_prompt=False)
        return prompt, whole[num_shared(prompt, whole, other) :]


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def with_template(tokenizer: Any, path: str | None, key: str) -> Any:
    """Return a tokenizer, whose chat template is from now on the text of a file that the user names.

    `path`: the file; None changes nothing.
    """
    if path is not None:
        try:
            with files.reading(Path(path).expanduser()) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
                tokenizer.chat_template = text.read(forms.MAX_TEMPLATE + 1)
            check_template_limits(tokenizer)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}={path}: expected a text file with a chat template: {error}") from error
    return tokenizer


def reads_alike(one: Any, other: Any) -> bool:
    """Return whether two tokenizers make the same tokens of texts and messages: vocabulary, template, added tokens."""
    first, second = ((each.get_vocab(), each.chat_template, each("a").input_ids) for each in (one, other))
    return first == second


def check_template_limits(tokenizer: Any) -> None:
    """Refuse a tokenizer whose chat templates compute with large numbers; see `rlite.data.chat.forms`."""
    given = tokenizer.chat_template or {}
    for template in given.values() if isinstance(given, Mapping) else [given]:
        forms.check_constants(template)


def check_template_options(tokenizer: Any, options: Mapping[str, Any], key: str) -> None:
    """Check that the tokenizer's chat template reads every option."""
    if not options:
        return
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"{key}: the model's tokenizer has no chat template") from error
    read = _names_in(template)
    for name in options:
        if name not in read:
            near = [f", or did you mean {close!r}?" for close in get_close_matches(name, read, n=1)]
            unread = "the model's chat template reads no such variable; leave it out"
            raise ConfigError(f"{key}.{name}: {unread}{''.join(near)}")


def unread_keys(tokenizer: Any, conversations: Iterable[Sequence[Any]]) -> list[str]:
    """Return the keys of messages that no name of the chat template reads."""
    names = _names_in(str(tokenizer.chat_template)) | KNOWN_KEYS
    keys = {str(key) for messages in conversations for each in messages if isinstance(each, Mapping) for key in each}
    return sorted(keys - names - {*(forms.THOUGHTS if names & {*forms.THOUGHTS} else ())})


def _names_in(template: str) -> set[str]:
    """Return all names and words in the expressions of a template."""
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"\{[%{].*?[%}]\}", template, re.DOTALL))))


def num_shared(*texts: str) -> int:
    """Return how many characters all texts have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))


def refusal(error: BaseException | None) -> str:
    """Return how a template fails: it refuses by its own words, or fails as a program."""
    return "refuses" if type(error) is TemplateError else "fails on"


def cause(error: BaseException | None) -> str:
    """Return the cause of a template's failure in words."""
    return str(error) if type(error) is TemplateError else f"{type(error).__name__}: {error}"


def called_names(message: Message) -> list[str]:
    """Return the names of the tools that a message calls."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = [(call.get("function") or call).get("name") for call in calls]
    return [name for name in names if isinstance(name, str)]
