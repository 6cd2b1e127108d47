"""Conversations of several turns: the tokens that a model has seen and written, and a workflow that retries."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, get_args

from tensordict import TensorDict

from rlite.data.chat.forms import Message
from rlite.data.chat.stops import split_at_stop, tokens_after
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, Tokenizer
from rlite.data.packs import TokenHistory
from rlite.data.prompts import TooManyTokens, bounded_tokens, raw_prompts
from rlite.errors import ConfigError, DataError, RolloutError
from rlite.rollout import workflow
from rlite.rollout.joined import join_histories
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.weighted import as_reward_function
from rlite.rollout.workflow import PromptWorkflow
from rlite.runtime.event_loop import beside_loop
from rlite.types import AsyncInference, GenerationHyperparameters, LLMRequest, LLMResponse


class Transcript:
    """The sequences of one episode without branches. Tokens that were generated are never tokenised again.

        begin ──> generate ──> read ──> generate ──> ...      one sequence
                                └──> begin ──> generate ...   history was rewritten: another sequence

    Args:
        prompt: the tokens that the first sequence begins with.
        max_length: tokens of one sequence at which generation stops; None means the engine's limit.

    Raises:
        DataError: the prompt is empty, or leaves no room for an answer.
    """

    def __init__(self, prompt: Sequence[int], max_length: int | None = None) -> None:
        if max_length is not None and len(prompt) >= max_length:
            raise DataError(f"a prompt has {len(prompt)} tokens: no room for an answer in {max_length}")
        self.max_length = max_length
        self.num_turns = 0
        self._sequences: list[TokenHistory] = []
        self._rid = uuid.uuid4().hex
        self.begin(prompt)

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens of the current sequence."""
        return list(self._sequences[-1].tokens)

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin another sequence of the same trajectory, because history was rewritten.

        Raises:
            DataError: the prompt is empty.
        """
        if not prompt:
            raise DataError("a prompt has no tokens: there is nothing to continue")
        self._sequences.append(TokenHistory())
        self.read(prompt)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of the prompt, the environment or a tool."""
        self._sequences[-1].read(tokens)

    def write(self, response: LLMResponse) -> None:
        """Append a turn of the model."""
        self._sequences[-1].add(response)
        self.num_turns += 1

    async def generate(self, engine: AsyncInference, gconfig: GenerationHyperparameters) -> LLMResponse | None:
        """Generate and append the model's next turn.

        Returns:
            The turn; None if the sequence has no room for one. Such a sequence counts as truncated, and the tokens that
            it cannot answer are dropped.

        Raises:
            RolloutError: the engine aborts the turn, or writes nothing.
        """
        sequence = self._sequences[-1]
        if self.max_length is not None:
            room = self.max_length - len(sequence.tokens)
            if room < 1:
                self.give_up()
                return None
            if gconfig.max_new_tokens > room:
                gconfig = gconfig.new(max_new_tokens=room, min_new_tokens=min(gconfig.min_new_tokens, room))
        # one rid for the episode: its turns find their cache
        response = await engine.agenerate(LLMRequest(input_ids=self.tokens, gconfig=gconfig, rid=self._rid))
        workflow.check_completed(response)
        if not response.output_len:
            raise RolloutError("the engine ended the completion after 0 tokens")
        self.write(response)
        return response

    def give_up(self) -> None:
        """End the current sequence as truncated, and drop the tokens that the model cannot answer."""
        self._sequences[-1].drop_unanswered()
        if not self._sequences[-1].tokens:
            self._sequences.pop()
        self._sequences[-1].is_truncated = True

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last.

        Raises:
            RolloutError: the last tokens are not the model's.
        """
        if not self._sequences[-1].loss_mask[-1]:
            raise RolloutError("a reward belongs to a turn of the model, and the last tokens are not the model's")
        self._sequences[-1].reward(reward)

    def trajectory(self, reward: float | None = None, **values: float) -> TensorDict:
        """Return the episode as rows of one trajectory, [k], one for each sequence in which the model has written.

        Args:
            reward: the reward of the episode. If None, `rewards` is the sum of the rewards of turns, and
                `token_rewards` [k, L] has each of them on the last token of its turn.
            values: further columns [k] of the whole trajectory.

        Returns:
            The keys of `join_histories`, and `values`.

        Raises:
            RolloutError: the model has written nothing.
        """
        written = [sequence for sequence in self._sequences if any(sequence.loss_mask)]
        if not written:
            raise RolloutError("the model has written nothing: there is nothing to train on")
        rows = join_histories(written, self.num_turns)
        if reward is not None:
            rows, values = rows.exclude("token_rewards"), {"rewards": reward, **values}
        return rows.update(workflow.of_trajectory(len(written), **values))


def check_turn_discount(turn_discount: float) -> None:
    """Check that a discount is in [0, 1]."""
    if not 0 <= turn_discount <= 1:
        raise ConfigError(f"turn_discount={turn_discount!r}: expected a number in [0, 1]")


History = Literal["tokens", "template"]


class Conversation:
    """Asks a model several times, and records the turns in a transcript.

        conversation = Conversation(tokenizer, {"messages": [...]})
        while (response := await conversation.ask(engine, gconfig)) is not None:
            conversation.reply({"role": "user", "content": "..."})

    With `history="tokens"` the model keeps reading all tokens that it has read and written, including its thoughts. The
    text that the template puts between two answers is appended: one sequence. With `history="template"` the model reads
    the conversation as the template renders it, as it does when it is served. If the rendered text continues the tokens
    so far, the new tokens are appended. If the template rewrites history (it drops earlier thoughts, or formats a call
    of a tool in its own way), another sequence of the same trajectory begins.

    Args:
        tokenizer: the model's tokenizer.
        item: has a prompt as `prompt_ids` takes it. The chat template renders messages. After a raw prompt, replies are
            raw texts, too.
        chat_template_options: further keyword arguments for `apply_chat_template`, such as `tools`.
        history: "tokens" or "template".
        max_length: tokens of one sequence at which generation stops; None means the engine's limit.

    Text is tokenised when the model is asked (long text in a thread), or earlier when `transcript` is read.

    Raises:
        ConfigError: `history` has another value.
        DataError: the item has no prompt.
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
        self._options = workflow.template_options(item, chat_template_options)
        self._template = ChatTemplate(tokenizer, self._options)
        self._is_rendered_anew = history == "template"
        self.prompt = workflow.prompt_text(item, tokenizer, self._options)
        """first prompt of the model, as text"""
        self._max_length = max_length
        self._transcript: Transcript | None = None
        self._unread: Callable[[int | None], None] | None = partial(self._begin, item)
        self._num_unread = len(self.prompt)
        messages = None if "input_ids" in item else item.get("messages", item.get("prompt"))
        self.messages: list[Message] = list(messages) if isinstance(messages, list) else []
        """all of them so far; empty for a raw prompt"""
        self.is_chat = bool(self.messages)
        self.text = self.prompt
        """latest prompt of the model, from its beginning; answers in it are without special tokens"""
        self._response: LLMResponse | None = None
        self._end_ids: frozenset[int] = frozenset()
        self._end_text = ""
        """stop string at the end of the latest answer with which the template, too, ends an answer"""

    async def ask(self, engine: AsyncInference, gconfig: GenerationHyperparameters) -> LLMResponse | None:
        """Generate the model's next turn.

        Returns:
            The turn; None if there is no room for one.

        Raises:
            RolloutError: the engine aborts the turn, or writes nothing.
            DataError: the prompt leaves no room.
            TooManyTokens: a text is far too long, and `max_length` is None.
        """
        limit = workflow.context_length(engine, self._max_length)
        try:
            await beside_loop(self._num_unread, self._read, limit)
        except TooManyTokens:
            if self._transcript is None or self._max_length is None:
                raise
            self._unread = self._response = None
            self._transcript.give_up()
            return None
        self._response = await self.transcript.generate(engine, gconfig)
        self._end_ids = workflow.end_ids(engine, self._tokenizer)
        self._end_text = self._written_end(gconfig.stop)
        return self._response

    def _written_end(self, stops: Sequence[str]) -> str:
        if self._response is None or not self.is_chat or not stops or self._template.ending is None:
            return ""
        _, rest = split_at_stop(self._tokenizer, self._response.output_tokens, stops)
        return rest if self._template.ending.closing.lstrip().startswith(rest) else ""

    @property
    def transcript(self) -> Transcript:
        """The tokens so far, as a Transcript. Reading it raises DataError if the prompt leaves no room."""
        self._read(self._max_length)
        assert self._transcript is not None
        return self._transcript

    def _read(self, limit: int | None) -> None:
        """Tokenise the text that has not been read yet."""
        if self._unread is not None:
            self._unread(limit)
            self._unread, self._num_unread = None, 0

    def _begin(self, item: Mapping[str, Any], limit: int | None) -> None:
        prompt = workflow.prompt_ids(item, self._tokenizer, self._options, limit)
        self._transcript = Transcript(prompt, self._max_length)

    @property
    def is_answered(self) -> bool:
        """True if the model has answered the last time it was asked."""
        return self._response is not None

    @property
    def answer(self) -> str:
        """The text of the latest turn, without its end and special tokens.

        A stop string is part of the text, unless the template writes it after each answer. Reading the property raises
        RolloutError if there is no turn.
        """
        return self._tokenizer.decode(self.said, skip_special_tokens=True).removesuffix(self._end_text)

    @property
    def said(self) -> list[int]:
        """The tokens of the latest turn without the end token. Reading it raises RolloutError if there is no turn."""
        return workflow.said_tokens(self._latest(), self._end_ids)

    def reply(self, *messages: Message, answer: Message | None = None) -> None:
        """Append messages, after which the model is asked again.

        Args:
            messages: messages of a user or of tools, with text as content.
            answer: the model's latest turn as a message; default: its text.

        Raises:
            ConfigError: the chat template does not render the messages after an answer.
        """
        answer = answer or {"role": "assistant", "content": self.answer}
        if not self.is_chat:
            self._read_later("".join(message["content"] for message in messages))
            return
        self.messages += [answer, *messages]
        try:
            if self._is_rendered_anew:
                self.rewrite(self._template.render(self.messages, add_generation_prompt=True))
            else:
                self._read_later(self._template.between(messages))
        except TemplateRefusal as error:
            raise ConfigError(str(error)) from error

    def rewrite(self, text: str) -> None:
        """Let the model read this whole text next. Another sequence begins, unless the text continues the current one.

        Args:
            text: continues the current sequence if it begins with `self.text` and the answer.
        """
        said = self.text + self.answer
        if text.startswith(said):
            self._read_later(text[len(said) :])
            return
        transcript, self.text, self._num_unread = self.transcript, text, len(text)
        self._unread = lambda limit: transcript.begin(self._first_tokens(text, limit))

    def _first_tokens(self, text: str, limit: int | None) -> list[int]:
        if self._is_rendered_anew:  # the template writes what a text begins with
            return bounded_tokens(self._tokenizer, text, limit)
        return raw_prompts(self._tokenizer, [text], limit)[0]

    def _read_later(self, text: str) -> None:
        """Append the text to the tokens when the model is asked."""
        transcript, response = self.transcript, self._latest()
        self.text += self.answer + text
        self._num_unread = len(text)
        unread = text.lstrip().removeprefix(self._end_text) if self._end_text else text
        said, reason, ends = response.output_tokens, response.stop_reason, self._end_ids

        def read(limit: int | None) -> None:  # of its own, a reply to a raw prompt repeats no token of the answer
            tokens, _ = tokens_after(self._tokenizer, unread, said, reason, limit, ends, has_end=self.is_chat)
            transcript.read(tokens)

        self._unread = read

    def _latest(self) -> LLMResponse:
        if self._response is None:
            raise RolloutError("a reply follows an answer, and the model has given none")
        return self._response


class ConversationOptions(TypedDict, total=False):
    """Keyword arguments that workflows pass on to `ConversationWorkflow`."""

    chat_template_options: Mapping[str, Any] | None
    """further keyword arguments for `apply_chat_template`, e.g. {"enable_thinking": False}"""
    history: History
    """"tokens" or "template". See `Conversation`"""


class ConversationWorkflow(PromptWorkflow):
    """Base of workflows that hold a `Conversation` in each episode.

    Args:
        gconfig: see `PromptWorkflow`.
        tokenizer: see `PromptWorkflow`.
        max_turns: turns of the model in one episode.
        max_length: tokens of one sequence at which generation stops; None means the engine's limit.
        chat_template_options: see `PromptWorkflow`.
        history: "tokens" or "template". See `Conversation`.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int,
        max_length: int | None,
        chat_template_options: Mapping[str, Any] | None = None,
        history: History = "tokens",
    ) -> None:
        super().__init__(gconfig, tokenizer, chat_template_options)
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns}: expected at least 1")
        check_history(history)
        self.max_turns, self.max_length = max_turns, max_length
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
    """Check that a name is a `History`."""
    if history not in get_args(History):
        raise ConfigError(f"history={history!r}: expected one of {', '.join(get_args(History))}")


Feedback = str | Callable[[Mapping[str, Any], str, float], str]

FEEDBACK = "Your answer is wrong. Check your reasoning and try again."


class MultiTurnWorkflow(ConversationWorkflow):
    """Attempts at one problem, until an answer is right or `max_turns` is reached.

    The item has the form of `SingleTurnWorkflow`. Each attempt is verified like a single answer: by its text
    (`completions`) and its own tokens (`completion_ids`). An attempt that is worth less than `solved` is followed by
    the feedback, a user's message by the chat template, or after a raw prompt a raw text.

    The trajectory has the keys of `trajectory()`, all attempts in one sequence (see `Conversation` for
    history="template"), and `sequence_index`, `num_turns` [k]. Its `rewards` [k] are the last attempt's reward times
    `turn_discount` once for each retry: the discount is included, and is not applied again. `scores` [k] is the last
    attempt's reward itself.

    Args:
        reward_fn: a RewardFunction, or a function to make one from.
        gconfig: see `PromptWorkflow`.
        tokenizer: see `PromptWorkflow`.
        max_turns: the number of attempts.
        turn_discount: in [0, 1].
        feedback: a text, or a function of the item, the answer and its reward that returns one.
        solved: the lowest reward of a right attempt.
        max_length: see `ConversationWorkflow`.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(
        self,
        reward_fn: RewardFunction | Callable[..., Any],
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_turns: int = 3,
        turn_discount: float = 1.0,
        feedback: Feedback = FEEDBACK,
        solved: float = 1.0,
        max_length: int | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        super().__init__(gconfig, tokenizer, max_turns, max_length, **options)
        check_turn_discount(turn_discount)
        self.reward_fn = as_reward_function(reward_fn)
        self.turn_discount, self.feedback, self.solved = turn_discount, feedback, solved

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of an episode: ask, verify and give feedback until an attempt is right."""
        conversation, score = self.begin(data), 0.0
        while (response := await conversation.ask(engine, self.gconfig)) is not None:
            answer = conversation.answer
            read, written = response.input_tokens, response.output_tokens
            score = await self.reward_fn(**workflow.reward_arguments(data, conversation.prompt, answer, read, written))
            if score >= self.solved or conversation.transcript.num_turns == self.max_turns:
                break
            conversation.reply({"role": "user", "content": self._feedback(data, answer, score)})
        transcript = conversation.transcript
        return transcript.trajectory(score * self.turn_discount ** (transcript.num_turns - 1), scores=score)

    def _feedback(self, data: Mapping[str, Any], answer: str, reward: float) -> str:
        if isinstance(self.feedback, str):
            return self.feedback
        text = self.feedback(data, answer, reward)
        if not isinstance(text, str):
            raise ConfigError(f"feedback returned {text!r}; expected a text")
        return text
