"""Retries: after a wrong answer the model reads feedback and continues from its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from tensordict import TensorDict

from rlite.errors import ConfigError
from rlite.rollout.chat.conversation import ConversationOptions, ConversationWorkflow
from rlite.rollout.chat.transcript import check_turn_discount
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.workflow import Tokenizer, as_reward_function, reward_arguments
from rlite.types import AsyncInference, GenerationHyperparameters

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
        self.turn_discount = turn_discount
        self.feedback = feedback
        self.solved = solved

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectory of an episode: ask, verify and give feedback until an attempt is right."""
        conversation, score = self.begin(data), 0.0
        while (response := await conversation.ask(engine, self.gconfig)) is not None:
            answer = conversation.answer
            read, written = response.input_tokens, response.output_tokens
            score = await self.reward_fn(**reward_arguments(data, conversation.prompt, answer, read, written))
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
