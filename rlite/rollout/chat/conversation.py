"""A conversation of several turns in tokens: what was generated stays as it is, a chat template says the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

from rlite.data.chat.raw import TooManyTokens, bounded_tokens
from rlite.data.chat.template import ChatTemplate, Message, TemplateRefusal, Tokenizer
from rlite.errors import ConfigError
from rlite.rollout.background import beside_loop
from rlite.rollout.chat.transcript import Transcript, continuation
from rlite.rollout.workflow import PromptWorkflow, RolloutError, context_length, prompt_ids, prompt_text
from rlite.types import AsyncInference, GenerationHyperparameters, LLMResponse

History = Literal["tokens", "template"]


class Conversation:
    """Asks a model again and again, and records it in a transcript.

        conversation = Conversation(tokenizer, {"messages": [...]})
        while (response := await conversation.ask(engine, gconfig)) is not None:
            conversation.reply({"role": "user", "content": "..."})

    With `history="tokens"` everything that the model has read and written stays before its eyes as it was, thoughts
    included, and what the template puts between an answer and the next is appended: one sequence. With
    `history="template"` the model reads what the template renders, as it would when served: where that goes on from
    what it has read and written, tokens are appended, and where it writes history anew (drops earlier thoughts, lays
    out a call of a tool in its own way), another sequence of the same trajectory begins.

    Args:
        tokenizer: of the model.
        item: with a prompt as `prompt_ids` takes it. Messages are answered by the chat template; after a raw prompt
            replies are raw texts, too.
        chat_template_options: further keyword arguments for `apply_chat_template`, such as `tools`.
        history: "tokens" or "template".
        max_length: tokens of one sequence at which generation stops; None is as many as the engine takes.

    Texts become tokens when the model is asked, long ones in a thread, or before that when `transcript` is looked at.

    Raises: ConfigError for another `history`; DataError for an item without a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        item: Mapping[str, Any],
        *,
        chat_template_options: Mapping[str, Any] | None = None,
        history: History = "tokens",
        max_length: int | None = None,
    ) -> None:
        check_history(history)
        self._tokenizer = tokenizer
        self._options = dict(chat_template_options or {})
        self._template = ChatTemplate(tokenizer, self._options)
        self._is_rendered_anew = history == "template"
        self.prompt = prompt_text(item, tokenizer, self._options)
        """what the model was asked first, as text"""
        self._max_length = max_length
        self._transcript: Transcript | None = None
        self._unread: Callable[[int | None], None] | None = partial(self._begin, item)
        self._num_unread = len(self.prompt)
        messages = None if "input_ids" in item else item.get("messages", item.get("prompt"))
        self.messages: list[Message] = list(messages) if isinstance(messages, list) else []
        """all of them so far; empty for a raw prompt"""
        self.is_chat = bool(self.messages)
        self._text = self.prompt
        self._response: LLMResponse | None = None

    async def ask(self, engine: AsyncInference, gconfig: GenerationHyperparameters) -> LLMResponse | None:
        """The model's next turn; None if there is no room for one.

        Raises: as `Transcript.generate`; DataError for a prompt that leaves no room.
        """
        limit = context_length(engine, self._max_length)
        try:
            await beside_loop(self._num_unread, self._read, limit)
        except TooManyTokens:
            if self._transcript is None or self._max_length is None:
                raise
            self._unread = self._response = None
            self._transcript.give_up()
            return None
        self._response = await self.transcript.generate(engine, gconfig)
        return self._response

    @property
    def transcript(self) -> Transcript:
        """What was read and written so far. Raises: DataError for a prompt that leaves no room."""
        self._read(self._max_length)
        assert self._transcript is not None
        return self._transcript

    def _read(self, limit: int | None) -> None:
        """Make tokens of what has not been read yet."""
        if self._unread is not None:
            self._unread(limit)
            self._unread, self._num_unread = None, 0

    def _begin(self, item: Mapping[str, Any], limit: int | None) -> None:
        self._transcript = Transcript(prompt_ids(item, self._tokenizer, self._options, limit), self._max_length)

    @property
    def is_answered(self) -> bool:
        """Whether the model has answered when it was asked last."""
        return self._response is not None

    @property
    def answer(self) -> str:
        """The text of the latest turn, without special tokens. Raises: RolloutError if there was none."""
        return self._tokenizer.decode(self._latest().output_tokens, skip_special_tokens=True)

    def reply(self, *messages: Message, answer: Message | None = None) -> None:
        """Say something, after which the model is asked again.

        Args:
            messages: of a user or of tools; their contents are texts.
            answer: the model's latest turn as a message; default: its text.

        Raises: ConfigError if the chat template cannot say it after an answer.
        """
        answer = answer or {"role": "assistant", "content": self.answer}
        if not self.is_chat:
            self._read_later("".join(message["content"] for message in messages))
            return
        self.messages += [answer, *messages]
        try:
            if self._is_rendered_anew:
                self._read_rendered()
            else:
                self._read_later(self._template.between(messages))
        except TemplateRefusal as error:
            raise ConfigError(str(error)) from error

    def _read_later(self, text: str) -> None:
        """Let the text be appended to the tokens so far."""
        transcript, response = self.transcript, self._latest()
        self._num_unread = len(text)
        self._unread = lambda limit: transcript.read(continuation(self._tokenizer, text, response, limit))

    def _begin_later(self, text: str) -> None:
        """Let another sequence begin with the text."""
        transcript, self._num_unread = self.transcript, len(text)
        self._unread = lambda limit: transcript.begin(bounded_tokens(self._tokenizer, text, limit))

    def _read_rendered(self) -> None:
        """The whole conversation as the template renders it: the rest of it if it goes on, or all of it."""
        text = self._template.render(self.messages, add_generation_prompt=True)
        said = self._text + self.answer
        if text.startswith(said):
            self._read_later(text[len(said) :])
        else:
            self._begin_later(text)
        self._text = text

    def _latest(self) -> LLMResponse:
        if self._response is None:
            raise RolloutError("a reply follows an answer, and the model has given none")
        return self._response


class ConversationWorkflow(PromptWorkflow):
    """Base of workflows that hold a `Conversation` in each episode.

    Args:
        history: "tokens" or "template". See `Conversation`.
        options: arguments of `PromptWorkflow`.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, *, history: History, **options: Any) -> None:
        super().__init__(**options)
        check_history(history)
        self.history: History = history

    def begin(self, data: Mapping[str, Any]) -> Conversation:
        """Return a new conversation that begins with the item's prompt."""
        return Conversation(
            self.tokenizer,
            data,
            chat_template_options=self.chat_template_options,
            history=self.history,
            max_length=self.max_length,
        )


def check_history(history: str) -> None:
    """Check that a name is a `History`.

    Raises:
        ConfigError: the name is another.
    """
    if history not in get_args(History):
        raise ConfigError(f"history={history!r}: expected one of {', '.join(get_args(History))}")
