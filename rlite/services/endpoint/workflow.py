"""Workflow that runs an agent, with a new session for every episode."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Literal

from tensordict import TensorDict

from rlite.data.chat.template import Tokenizer
from rlite.errors import ConfigError, DataError
from rlite.rollout.conversation import check_turn_discount
from rlite.rollout.rewards.score import as_number
from rlite.rollout.tools.formats import ToolCallFormat
from rlite.rollout.tools.workflow import tool_call_format
from rlite.rollout.workflow import RolloutWorkflow
from rlite.services.endpoint.recording import Style, check_style
from rlite.services.endpoint.session import AgentSession, Serve
from rlite.types import AsyncInference, GenerationHyperparameters

Interface = Literal["client", "http"]
Worth = float | Mapping[str, float] | None
Agent = Callable[[Any, dict[str, Any]], Awaitable[Worth]]


class AgentWorkflow(RolloutWorkflow):
    """Runs `await agent(model, data)` for each episode, and records the agent's requests and the answers.

    The agent is ordinary code for OpenAI's interface. It returns the reward of its last interaction, or rewards by
    interaction id, or None. If it returns None without having set a reward, the episode is dropped. The event loop also
    runs other episodes, so synchronous code belongs in `asyncio.to_thread`.

    Args:
        agent: an async function of the model and the item.
        gconfig: sampling parameters that the agent does not set.
        tokenizer: the model's tokenizer.
        interface: "client": the agent gets an `openai.AsyncOpenAI` (needs the openai package); "http": an `Access` with
            base_url, api_key and model (needs aiohttp), for other clients, threads and processes on this machine.
        style: "concat" or "individual". See `rlite.services.endpoint.recording.export`.
        turn_discount: earlier interactions share in later rewards; None leaves rewards unchanged.
        model: the name that the agent asks for.
        tool_format: a name in `rlite.rollout.tools.formats.FORMATS`, or a ToolCallFormat; default: the format that
            the chat template teaches.
        chat_template_options: further keyword arguments for `apply_chat_template`.
        max_length: tokens of one sequence; None means the engine's limit.
        is_sampling_fixed: temperature, top_p and top_k are those of `gconfig`, not those of the agent: a trainer
            that computes log-probabilities at another temperature trains on a wrong ratio.

    Raises:
        ConfigError: the interface, style or format is unknown, or the package of the interface is missing.
    """

    needs_prompt = False  # an agent may read any row

    def __init__(
        self,
        agent: Agent,
        gconfig: GenerationHyperparameters | Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        interface: Interface = "client",
        style: Style = "concat",
        turn_discount: float | None = 1.0,
        model: str = "policy",
        tool_format: str | ToolCallFormat | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        is_sampling_fixed: bool = False,
    ) -> None:
        if interface not in ("client", "http"):
            raise ConfigError(f"interface={interface!r}: expected 'client' or 'http'")
        if not callable(agent):
            raise ConfigError(f"AgentWorkflow({agent!r}): expected an async function of the model and the item")
        if turn_discount is not None:
            check_turn_discount(turn_discount)
        check_style(style)
        if tool_format is not None:
            tool_format = tool_call_format(tool_format, tokenizer, chat_template_options)
        self.agent = agent
        self.gconfig: GenerationHyperparameters = GenerationHyperparameters.from_mapping(gconfig)
        self.tokenizer = tokenizer
        self.style: Style = style
        self.turn_discount = turn_discount
        self._session = partial(
            AgentSession,
            model=model,
            tool_format=tool_format,
            chat_template_options=chat_template_options,
            max_length=max_length,
            is_sampling_fixed=is_sampling_fixed,
        )
        self._serve = _server(interface)

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict | None:
        """Run the agent on one item.

        Returns:
            The trajectory; None to drop the episode.
        """
        session = self._session(engine, self.tokenizer, self.gconfig)
        async with session.used(self._serve) as model:
            worth = await _running(self.agent(model, data))
        return self._trajectory(session, worth)

    def _trajectory(self, session: AgentSession, worth: Worth) -> TensorDict | None:
        if isinstance(worth, Mapping):
            for interaction_id, reward in worth.items():
                session.set_reward(interaction_id, reward)
        elif worth is not None:
            if as_number(worth) is None:
                expected = "expected a finite reward, rewards by interaction id, or None"
                raise DataError(f"the agent returned {worth!r}; {expected}")
            session.set_last_reward(worth)
        if not session.recording.has_reward():
            return None
        if self.turn_discount is not None and session.recording.turn_discount is None:
            session.apply_reward_discount(self.turn_discount)
        return session.export(self.style)


def _running(answer: Awaitable[Worth]) -> Awaitable[Worth]:
    if not inspect.isawaitable(answer):
        expected = "expected an async function; synchronous code belongs into asyncio.to_thread"
        raise ConfigError(f"the agent returned {answer!r} and nothing to await: {expected}")
    return answer


def _server(interface: Interface) -> Serve:
    if interface == "client":
        from rlite.services.endpoint.client import AgentClient  # the openai package is optional

        return AgentClient
    from rlite.services.endpoint.endpoint import AgentEndpoint  # aiohttp is optional

    return AgentEndpoint().serving
