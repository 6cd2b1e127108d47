"""Several seats in one episode: self-play, debate, author and critic. One policy is trained; others may be frozen.

play ──say──> Seat ──> the policy of the run    trained: rows with `seat_ids`, rewards and a baseline of the seat
                   ──> another engine           frozen: its answers are only read
                   ──> a function, an endpoint  the same
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from tensordict import TensorDict

from rlite.batch import NAMED_REWARD
from rlite.data.chat.forms import Message
from rlite.data.chat.template import Tokenizer
from rlite.errors import ConfigError, DataError, RolloutError
from rlite.rollout.conversation import Conversation, ConversationOptions, ConversationWorkflow
from rlite.rollout.joined import pad_trajectories
from rlite.rollout.rewards.score import as_number
from rlite.types import AsyncInference, GenerationHyperparameters

Reply = Callable[[list[Message]], Awaitable[str]]
Player = Literal["policy", "policy_untrained"] | AsyncInference | Reply
"""who sits there: the policy, trained or not; a frozen engine with the same tokenizer; an async function of the
conversation so far that returns the next answer, such as `endpoint_player`"""
Rewards = Mapping[str, float]


@dataclass(eq=False)
class Seat:
    """One seat of an episode: `say` asks its player, who remembers what it was told and what it answered."""

    name: str
    ask: Callable[[list[Message]], Awaitable[str | None]] = field(repr=False)
    conversation: Conversation | None = field(default=None, repr=False)
    """the conversation of a model of this process"""
    messages: list[Message] = field(default_factory=list)
    """conversation so far"""

    async def say(self, *texts: str | Message) -> str | None:
        """Return the player's answer.

        Returns the answer; None if the player's context has no room left.
        """
        if not texts and self.messages and self.messages[-1]["role"] == "assistant":
            raise ConfigError(f"seat {self.name}: it has answered; say() needs a message that it answers next")
        self.messages += [{"role": "user", "content": text} if isinstance(text, str) else text for text in texts]
        answer = await self.ask(self.messages)
        if answer is not None:
            self.messages.append({"role": "assistant", "content": answer})
        return answer


Play = Callable[[Mapping[str, Seat], dict[str, Any]], Awaitable[Rewards]]


class SeatsWorkflow(ConversationWorkflow):
    """Runs `await play(seats, data)` for each episode; it returns the reward of each trained seat.

        async def debate(seats, data):
            claim = await seats["author"].say(data["question"])
            verdict = await seats["critic"].say(f"Is this right? {claim}")
            right = float(claim == data["answer"])
            return {"author": right, "critic": float(("yes" in verdict) == bool(right))}

    Each trained seat of an episode is a trajectory of its own with the keys of `Transcript.trajectory`, `seat_ids` [k],
    its `rewards` [k], and `reward/SEAT` [k], NaN in rows of other seats. A trainer compares a seat with the same seat
    in the other episodes of its group. A trained seat that was not asked has no rows.

    Args:
        play: async function of the seats by name and the item. Its own calls of `say` may run side by side.
        seats: the player of each seat by name; see `Player`.
        gconfig: sampling parameters of each turn, for engines too.
        tokenizer: the model's tokenizer, with a chat template.
        max_length: see `ConversationWorkflow`.
        system_prompts: system message of each seat by name.
        **options: see `ConversationOptions`.

    Raises:
        ConfigError: no seat is trained, a player is none, or there is a system prompt for an unknown seat.
    """

    needs_prompt = False

    def __init__(
        self,
        play: Play,
        seats: Mapping[str, Player],
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        max_length: int | None = None,
        system_prompts: Mapping[str, str] | None = None,
        **options: Unpack[ConversationOptions],
    ) -> None:
        super().__init__(gconfig, tokenizer, 1, max_length, **options)
        self.play, self.seats, self.system_prompts = play, dict(seats), dict(system_prompts or {})
        self.trained = [name for name, player in seats.items() if player == "policy"]
        self.num_seats = len(self.trained)
        if not self.trained:
            raise ConfigError(f"seats {', '.join(seats)}: none is 'policy', so there is nothing to train")
        for name, player in seats.items():
            if not (player in ("policy", "policy_untrained") or hasattr(player, "agenerate") or callable(player)):
                raise ConfigError(f"seat {name}: {player!r:.200}; expected 'policy', an engine or an async function")
        if unknown := self.system_prompts.keys() - seats.keys():
            raise ConfigError(f"system_prompts: no seat has the name {', '.join(sorted(unknown))}")

    def opening(self, data: Mapping[str, Any]) -> None:
        """Return None, because `play` decides the prompts."""

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict:
        """Return the trajectories of the trained seats.

        Args:
            engine: the policy.
            data: the item.

        Raises:
            ConfigError: `play` is not async.
            DataError: `play` returns no reward for a trained seat that has answered.
            RolloutError: `play` has asked no trained seat.
        """
        seats = {name: self._seat(name, player, engine) for name, player in self.seats.items()}
        playing: Any = self.play(seats, data)
        if not inspect.isawaitable(playing):
            raise ConfigError(f"play returned {playing!r:.100}: write `async def` for it")
        rewards = await playing
        if not isinstance(rewards, Mapping):
            raise DataError(f"play returned {rewards!r:.200}; expected the reward of each trained seat by its name")
        rows = [
            self._rows(number, seat, rewards)
            for number, name in enumerate(self.trained)
            if (seat := seats[name]).conversation is not None and seat.conversation.is_answered
        ]
        if not rows:
            raise RolloutError("play has asked no trained seat: there is nothing to train on")
        return pad_trajectories(rows).exclude("group_ids")

    def _seat(self, name: str, player: Any, engine: AsyncInference) -> Seat:
        system = self.system_prompts.get(name)
        messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if not isinstance(player, str) and not hasattr(player, "agenerate"):
            return Seat(name, player, messages=messages)
        seat = Seat(name, ask=lambda messages: self._ask(seat, engine if isinstance(player, str) else player, messages))
        seat.messages = messages
        return seat

    async def _ask(self, seat: Seat, engine: AsyncInference, messages: list[Message]) -> str | None:
        """Return the answer of a model of this process, whose tokens are kept."""
        if seat.conversation is None:
            seat.conversation = self.begin({"messages": list(messages)})
        else:
            seat.conversation.reply(*messages[len(seat.conversation.messages) + 1 :])
        is_answered = await seat.conversation.ask(engine, self.gconfig) is not None
        return seat.conversation.answer if is_answered else None

    def _rows(self, number: int, seat: Seat, rewards: Rewards) -> TensorDict:
        if (reward := as_number(rewards.get(seat.name))) is None:
            raise DataError(f"play returned {rewards!r:.200}; expected a finite reward for the seat {seat.name!r}")
        assert seat.conversation is not None
        rows = seat.conversation.transcript.trajectory(reward)
        rows["seat_ids"] = torch.full((len(rows),), number)
        for name in self.trained:
            rows[f"{NAMED_REWARD}{name}"] = torch.full((len(rows),), reward if name == seat.name else torch.nan)
        return rows


def endpoint_player(
    base_url: str, model: str, api_key_variable: str | None = None, timeout: float = 600.0, **sampling: Any
) -> Reply:
    """Return a player behind an endpoint of OpenAI's chat interface.

    Args:
        base_url: address, such as "http://127.0.0.1:8000/v1".
        model: name of the model there.
        api_key_variable: name of the environment variable that holds the key; None: the endpoint needs none.
        timeout: seconds for one answer.
        **sampling: parameters of each request, such as temperature.

    Raises:
        ConfigError: the variable is not set, or the address is not of HTTP.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url={base_url!r}: expected http://... or https://...")
    if api_key_variable is not None and api_key_variable not in os.environ:
        raise ConfigError(f"api_key_variable={api_key_variable!r}: this environment variable is not set")
    key = {} if api_key_variable is None else {"Authorization": f"Bearer {os.environ[api_key_variable]}"}

    def ask(messages: Sequence[Message]) -> str:
        body = json.dumps({"model": model, "messages": [*messages], **sampling}).encode()
        headers = {"Content-Type": "application/json", **key}
        request = urllib.request.Request(f"{base_url.rstrip('/')}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)["choices"][0]["message"]["content"] or ""

    async def reply(messages: Sequence[Message]) -> str:
        return await asyncio.to_thread(ask, list(messages))

    return reply
