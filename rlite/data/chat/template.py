"""The chat template of a tokenizer: the one place that renders conversations and finds messages in the text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

from rlite.data.chat.clock import CLOCK
from rlite.data.chat.forms import Message, forms_of
from rlite.data.chat.raw import TextTokenizer
from rlite.errors import ConfigError, DataError

STAND_IN = f"\ue00d{secrets.randbits(64)}\ue00e"
"""shows where a template puts a content; random, so that no content holds it, and no filter of a template changes it"""
QUESTION: Message = {"role": "user", "content": "question"}
ANSWER: Message = {"role": "assistant", "content": "answer"}
KNOWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", "weight", "train", "loss_mask"}
"""keys of messages that are read without the chat template, or checked elsewhere, or that no model needs to see"""
THOUGHTS = {"reasoning_content", "thinking", "reasoning"}
"""keys of messages that hold thoughts: transformers gives a template each of them by the names of all"""


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

    Args:
        tokenizer: the model's tokenizer, with a chat template.
        options: further keyword arguments for `apply_chat_template`, such as {"enable_thinking": False}.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer: Any = tokenizer
        self._options = dict(options or {})

    def apply(self, messages: Sequence[Message], **options: Any) -> Any:
        """Call `apply_chat_template` of the tokenizer.

        Args:
            messages: the conversation.
            options: keyword arguments. They take precedence over the options of this template.

        Returns:
            Text or tokens, depending on the options.

        Raises:
            TemplateRefusal: the template fails. The cause is the template's own error.
        """
        options = {**self._options, **options}
        messages = self.fitted(messages, tools=options.get("tools"))
        if (source := self._source(options)) and (dated := CLOCK.in_template(source)) != source:
            options["chat_template"] = dated
        try:
            return self.tokenizer.apply_chat_template(messages, **options)
        except Exception as error:  # a template is a program of others: it may fail in any way on what it is given
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = str(error) or type(error).__name__
            raise TemplateRefusal(
                f"the model's chat template refuses a conversation of the roles {roles}: {reason}"
            ) from error

    def fitted(self, messages: Sequence[Message], where: str = "", tools: Any = None) -> list[Message]:
        """Return messages in the forms that the template takes; see `MessageForms`.

        Args:
            messages: the conversation.
            where: stands before the name of a message in errors, such as "data.path=x.json, row 3, ".
            tools: the tools of the conversation, which may have a template of their own.

        Raises:
            DataError: a part of a content, or the arguments of a call, have a form that the template does not take.
        """
        source = self._source({**self._options, "tools": tools or self._options.get("tools")})
        return forms_of(source).fitted(messages, where) if source else list(messages)

    def _source(self, options: Mapping[str, Any]) -> str | None:
        """Return the source of the template; None if the tokenizer renders conversations without a template."""
        if not has_chat_template(self.tokenizer) or not hasattr(self.tokenizer, "get_chat_template"):
            return None
        with suppress(ValueError):  # several templates without a default: rendering reports it
            return self.tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        return None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Return a conversation as text. Arguments and errors are those of `apply`."""
        return self.apply(messages, tokenize=False, **options)

    def around(self, messages: Sequence[Message], number: int, **options: Any) -> list[str]:
        """Render a conversation and split the text at the content of one message.

        Args:
            messages: the conversation.
            number: the index of the message. Of an answer, calls and thoughts are left out as well as the content.
            options: keyword arguments for `apply`.

        Returns:
            The parts between the places where the content stands: two if the template writes it once.
        """
        message = messages[number]
        kept = {"role": "assistant"} if message["role"] == "assistant" else message
        variant = [*messages[:number], {**kept, "content": STAND_IN}, *messages[number + 1 :]]
        return self.render(variant, **options).split(STAND_IN)

    def shows(self, messages: Sequence[Message], number: int, text: str, **options: Any) -> bool:
        """Return whether a rendered text has the content of one message, unchanged or in another form such as JSON.

        Args:
            messages: the conversation.
            number: the index of the message.
            text: the rendered conversation, or the part of it in which the content is expected.
            options: keyword arguments for `apply`.
        """
        content = messages[number].get("content")
        if not isinstance(content, str) or content.strip() in text:
            return True
        return len(self.around(messages, number, **options)) > 1

    def between(self, replies: Sequence[Message]) -> str:
        """Return the text from the end of an answer's content to the beginning of the next answer.

        Args:
            replies: the messages that follow the answer.

        Raises:
            TemplateRefusal: the template does not render the replies after an answer, or leaves one out.
        """
        exchange = [QUESTION, ANSWER, *replies]
        _, *found = self.around(exchange, 1, add_generation_prompt=True)
        if len(found) != 1:
            roles = ", ".join(dict.fromkeys(message["role"] for message in replies))
            raise TemplateRefusal(f"the chat template renders an answer {len(found)} times if there follow: {roles}")
        for number, message in enumerate(replies, start=2):
            if not self.shows(exchange, number, found[0], add_generation_prompt=True):
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
        """Return the prompt for an answer to a question, and the text that the template writes for the answer.

        Raises:
            TemplateRefusal: the template does not render the question, or the answer.
        """
        prompt = self.render([QUESTION], add_generation_prompt=True)
        whole = self.render([QUESTION, answer], add_generation_prompt=False)
        return prompt, whole[num_shared(prompt, whole) :]


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def check_template_options(tokenizer: Any, options: Mapping[str, Any], key: str) -> None:
    """Check that the tokenizer's chat template reads every option.

    Args:
        tokenizer: the model's tokenizer.
        options: keyword arguments for `apply_chat_template`.
        key: name of the options in messages.

    Raises:
        ConfigError: there is no chat template, or it reads no variable of an option's name.
    """
    if not options:
        return
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise ConfigError(f"{key}: the model's tokenizer has no chat template") from error
    read = _names_in(template)
    for name in options:
        if name not in read:
            raise ConfigError(
                f"{key}.{name}: the model's chat template reads no such variable; leave it out{_near(name, read)}"
            )


def unread_keys(tokenizer: Any, conversations: Iterable[Sequence[Any]]) -> list[str]:
    """Return the keys of messages that no name of the chat template reads.

    Args:
        tokenizer: has a chat template.
        conversations: lists of messages.
    """
    names = _names_in(str(tokenizer.chat_template)) | KNOWN_KEYS
    keys = {str(key) for messages in conversations for each in messages if isinstance(each, Mapping) for key in each}
    return sorted(keys - names - (THOUGHTS if names & THOUGHTS else set()))


def _names_in(template: str) -> set[str]:
    """Return all names and words in the expressions of a template."""
    return set(re.findall(r"[A-Za-z_]\w*", " ".join(re.findall(r"\{[%{].*?[%}]\}", template, re.DOTALL))))


def _near(name: str, known: Collection[str]) -> str:
    close = get_close_matches(name, known, n=1)
    return f", or did you mean {close[0]!r}?" if close else ""


def num_shared(*texts: str) -> int:
    """Return how many characters all texts have in common at their beginnings."""
    return sum(1 for _ in takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False)))


def called_names(message: Message) -> list[str]:
    """Return the names of the tools that a message calls."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    names = [(call.get("function") or call).get("name") for call in calls]
    return [name for name in names if isinstance(name, str)]


def check_calls(messages: Sequence[Message], text: str, where: str = "") -> None:
    """Check that a rendered text has the calls of tools.

    Args:
        messages: the conversation.
        text: the rendered conversation.
        where: stands before the name of a message in the error.

    Raises:
        DataError: the text has no call of a name.
    """
    for number, message in enumerate(messages):
        for name in called_names(message):
            if name not in text:
                raise DataError(f"{where}messages[{number}]: the chat template leaves out the call of {name!r}")


def check_tools(tools: Sequence[Mapping[str, Any]], text: str) -> None:
    """Check that a rendered text has the tools that a model may call.

    Args:
        tools: JSON schemas.
        text: the rendered conversation.

    Raises:
        DataError: the text has no tool of a name.
    """
    for tool in tools:
        if (name := tool["function"]["name"]) not in text:
            raise DataError(f"tools: the model's chat template leaves out {name!r}")
