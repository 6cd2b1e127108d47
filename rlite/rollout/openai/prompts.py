"""Prompts in tokens: those of an earlier turn as they were, and only what is new from its text.

A chat template renders a whole conversation. Where a request goes on from an answer as it was returned, and the
template renders everything up to that answer as the model has read and written it, the prompt is the recorded tokens
and those of the rest. Where the template writes history anew (it drops earlier thoughts, say), everything is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from rlite.data.raw import raw_prompts, raw_tokens
from rlite.errors import DataError
from rlite.rollout.openai.recording import Message, Turn
from rlite.rollout.workflow import Tokenizer

_STAND_IN = "\ue00d\uf3a7\ue9b1"  # private characters: in no text, and no template changes them


class Prompt(NamedTuple):
    """What the model is asked with."""

    token_ids: list[int]
    text: str
    parent: Turn | None


class ChatPrompts:
    """Renders and tokenises prompts for one tokenizer.

    Args:
        tokenizer: with a chat template, if there are conversations.
        chat_template_options: further keyword arguments for `apply_chat_template`.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template_options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._options = dict(chat_template_options or {})
        self._closing: str | None = None
        self._is_learnt = False

    def chat(self, messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> Prompt:
        """The prompt for the answer to `messages`, continuing one of `turns` if it does.

        Raises: DataError if the template refuses the conversation, or leaves out its tools or calls.
        """
        text = self._render(messages, tools, add_generation_prompt=True)
        self._check_shown(messages, tools, text)
        for turn in _continued(messages, tools, turns):
            rest = self._rest(turn, messages, text)
            if rest is not None:
                return Prompt(turn.sequence + self._tokens_after(turn, rest), text, turn)
        return Prompt(raw_tokens(self.tokenizer, [text])[0], text, None)

    def text(self, prompt: str | list[int], turns: Sequence[Turn]) -> Prompt:
        """A prompt without a template. It continues a turn whose text, or tokens, it begins with."""
        raw = [turn for turn in reversed(turns) if turn.messages is None and not turn.is_aborted]
        if isinstance(prompt, str):
            for turn in sorted(raw, key=lambda turn: -len(turn.prompt_text + turn.text)):
                said = turn.prompt_text + turn.text
                if turn.prompt_text and len(prompt) > len(said) and prompt.startswith(said):
                    return Prompt(turn.sequence + self._tokens_after(turn, prompt[len(said) :]), prompt, turn)
            return Prompt(raw_prompts(self.tokenizer, [prompt])[0], prompt, None)
        for turn in sorted(raw, key=lambda turn: -len(turn.sequence)):
            if prompt[: len(turn.sequence)] == turn.sequence:
                return Prompt(prompt, "", turn)
        return Prompt(prompt, "", None)

    def _rest(self, turn: Turn, messages: Sequence[Message], text: str) -> str | None:
        """What follows the answer of `turn` in the rendered `text`, from the end of what the model says; None if the
        text before it is not what the model has read and written."""
        closing = self._learn_closing()
        assert turn.messages is not None
        before = self._render(messages[: len(turn.messages) + 1], turn.tools, add_generation_prompt=False)
        if closing is None or not before.endswith(closing) or not text.startswith(before):
            return None
        said = _squeezed(before[: len(before) - len(closing)])
        asked = _squeezed(turn.prompt_text)
        if not said.startswith(asked) or not _is_answer(said[len(asked) :], turn):
            return None
        return closing + text[len(before) :]

    def _tokens_after(self, turn: Turn, text: str) -> list[int]:
        """The tokens of `text`, without the end token that it begins with if the model has written that itself."""
        tokens = raw_tokens(self.tokenizer, [text])[0]
        last = turn.output_ids[-1:]
        ends = turn.finish_reason == "stop" and not self.tokenizer.decode(last, skip_special_tokens=True)
        return tokens[1:] if ends and tokens[:1] == last else tokens

    def _learn_closing(self) -> str | None:
        """What the template puts after an answer; None if it cannot be told."""
        if not self._is_learnt:
            exchange = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _STAND_IN}]
            try:
                parts = self._render(exchange, None, add_generation_prompt=False).split(_STAND_IN)
            except DataError:
                parts = []
            self._closing = parts[1] if len(parts) == 2 else None
            self._is_learnt = True
        return self._closing

    def _check_shown(self, messages: Sequence[Message], tools: Any, text: str) -> None:
        for number, message in enumerate(messages):
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise DataError(f"messages[{number}]: the model's chat template leaves out calls of tools")
        for tool in tools or ():
            if tool["function"]["name"] not in text:
                raise DataError(f"tools: the model's chat template leaves out {tool['function']['name']!r}")

    def _render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        # a template without {% raise_exception %} fails in any way that Jinja's expressions can
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"messages: the model's chat template refuses this conversation ({roles}): {error}"
            ) from error


def _continued(messages: Sequence[Message], tools: Any, turns: Sequence[Turn]) -> list[Turn]:
    """The turns whose conversation, with the answer as it was returned, `messages` begins with; the longest first."""

    def is_continued(turn: Turn) -> bool:
        if turn.messages is None or turn.answer is None or turn.is_aborted or turn.tools != tools:
            return False
        count = len(turn.messages)
        return count < len(messages) and messages[count] == turn.answer and list(messages[:count]) == [*turn.messages]

    found = [turn for turn in reversed(turns) if is_continued(turn)]
    return sorted(found, key=lambda turn: -len(turn.messages or ()))


def _is_answer(said: str, turn: Turn) -> bool:
    """Whether the template renders what the model has written, white space apart; calls it writes in its own way."""
    assert turn.answer is not None
    content = _squeezed(turn.answer["content"])
    calls = turn.answer.get("tool_calls", ())
    if not calls:
        return said == content
    return said.startswith(content) and all(call["function"]["name"] in said[len(content) :] for call in calls)


def _squeezed(text: str) -> str:
    return "".join(text.split())
