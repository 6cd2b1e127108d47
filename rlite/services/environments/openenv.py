"""OpenEnv: its servers as environments, over WebSocket, and its captured agent rollouts as trajectories."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tensordict import TensorDict

from rlite.data.packs import TokenHistory
from rlite.errors import ConfigError, DataError
from rlite.imports import optional
from rlite.rollout.environments.file import MAX_OBSERVATION, Turn
from rlite.rollout.environments.gym import GymEpisode
from rlite.rollout.environments.tool_episodes import ToolEpisode, reward_in, tool_schema
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentInvalid, EnvironmentRaised
from rlite.rollout.joined import join_histories
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.results import result_text
from rlite.rollout.tools.toolbox import ToolResult
from rlite.rollout.workflow import of_trajectory
from rlite.runtime.sandbox.function import limited

with optional("environments on a server need", "agents"):
    import aiohttp

MAX_MESSAGE = 100 << 20
"""bytes of a message, as in OpenEnv's own client"""
TEXT_KEYS = ("text", "message", "prompt", "observation", "response", "result", "content", "output")
"""fields of an observation that hold its text, the first of them that there is"""


class OpenEnvSession:
    """Session of one episode with a server.

    `timeout`: seconds for an answer.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout: float, name: str) -> None:
        self._socket, self._timeout, self.name = socket, timeout, name

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the server's answer: `observation`, `reward` and `done`."""
        async with limited(self.name, self._timeout, ENVIRONMENT_ERRORS):
            await self._socket.send_json({"type": kind, "data": dict(data)})
            answer = await self._socket.receive_json()
        if answer.get("type") == "error":
            raise EnvironmentRaised(f"{self.name} answered {str(answer.get('data'))[:2000]}")
        result = answer.get("data")
        if not isinstance(result, dict) or not isinstance(result.get("observation"), dict):
            raise EnvironmentInvalid(f"{self.name} answered {answer!r:.200}; expected an observation")
        return result


class OpenEnv:
    """Environments of an OpenEnv server whose actions are texts, for `GymWorkflow`.

    The row's `seed` and `env_options` are the parameters of `reset`. The model's answer is one field of the action. The
    text that it reads is one field of the observation.

    Args:
        url: address of the server, such as http://localhost:8000.
        action: field of the action that holds the model's text. Default: the only text that the server's action needs.
        observation: field of the observation that the model reads. Default: the first of TEXT_KEYS, else the whole
            observation as JSON.
        timeout: seconds for one call.
        headers: sent with the request to connect, such as the authorisation for a private server.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.action, self.observation = url.rstrip("/"), action, observation
        self.timeout, self.headers, self.name = timeout, dict(headers or {}), f"the OpenEnv server {url}"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[OpenEnvSession]:
        """Connect to the server inside the block, which is one session of it.

        Yields:
            The session.

        Raises:
            EnvironmentFailure: there is no such server, or it refuses the connection.
        """
        async with aiohttp.ClientSession(headers=self.headers, trust_env=False) as client:
            async with limited(self.name, self.timeout, ENVIRONMENT_ERRORS):
                if self.action is None:
                    self.action = await self._find_action(client)
                socket = await client.ws_connect(f"{self.url}/ws", max_msg_size=MAX_MESSAGE, heartbeat=20.0)
            async with socket:
                yield OpenEnvSession(socket, self.timeout, self.name)
                await socket.send_json({"type": "close"})

    async def _find_action(self, client: aiohttp.ClientSession) -> str:
        """Return the field of an action that takes the model's text, as the server describes its actions."""
        async with client.get(f"{self.url}/schema") as answer:
            schema = (await answer.json()).get("action", {})
        properties, needed = schema.get("properties", {}), schema.get("required", [])
        texts = [name for name in needed if properties.get(name, {}).get("type") == "string"]
        return texts[0] if len(texts) == len(needed) == 1 else ""

    @asynccontextmanager
    async def episode(self, seed: int, options: Mapping[str, Any] | None = None) -> AsyncIterator[GymEpisode]:
        """Begin an episode.

        Args:
            seed: of the environment's `reset`.
            options: further parameters of it.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
            ConfigError: an action needs more than one text.
        """
        async with self.session() as session:
            if not self.action:
                what = "an action needs other values than one text: give action=, the field of the model's text,"
                raise ConfigError(f"{self.name}: {what} or use OpenEnvTools for an environment with tools")
            field = self.action
            first = self._turn(await session.ask("reset", {"seed": seed, **(options or {})}))

            async def step(action: str) -> Turn:
                return self._turn(await session.ask("step", {field: action}))

            yield GymEpisode(first.observation, step)

    def _turn(self, result: Mapping[str, Any]) -> Turn:
        seen = result["observation"]
        keys = TEXT_KEYS if self.observation is None else (self.observation,)
        text = next((seen[key] for key in keys if isinstance(seen.get(key), str)), None)
        text = json.dumps(seen, ensure_ascii=False, default=str) if text is None else text
        return Turn(text[:MAX_OBSERVATION], reward := reward_in(result, self.name), reward, result.get("done") is True)


class _OpenEnvToolEpisode(ToolEpisode):
    def __init__(self, messages: Any, schemas: Any, session: OpenEnvSession) -> None:
        super().__init__(messages, schemas)
        self._session = session

    async def _call(self, call: ToolCall) -> ToolResult:
        asked = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
        result = await self._session.ask("step", asked)
        self.rewards += reward_in(result, self._session.name)
        self.is_done = result.get("done") is True
        seen = result["observation"]
        if seen.get("error"):
            return ToolResult(f"Error: {seen['error'].get('message', seen['error'])}", is_error=True)
        return ToolResult(result_text(_plain(seen.get("result"))))


def _plain(result: Any) -> Any:
    """Return the data of a tool's result, which MCP wraps into content blocks."""
    if isinstance(result, Mapping) and "data" in result:
        return result["data"]
    blocks = result.get("content") if isinstance(result, Mapping) else None
    texts = [block.get("text", "") for block in blocks or () if isinstance(block, Mapping)]
    return "\n".join(texts) if texts else result


class OpenEnvTools:
    """Environments of an OpenEnv server whose actions are calls of MCP tools, for `ToolEnvironmentWorkflow`.

    The row's `seed` and `env_options` are the parameters of `reset`. What it says is the prompt of a row that has none.

    Args:
        url: address of the server, such as http://localhost:8000.
        **options: the keyword arguments of `OpenEnv`, without `action`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._server = OpenEnv(url, action="", **options)

    @asynccontextmanager
    async def episode(self, data: Mapping[str, Any]) -> AsyncIterator[ToolEpisode]:
        """Begin an episode.

        Args:
            data: the row.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
        """
        options = {"seed": data["seed"]} if "seed" in data else {}
        async with self._server.session() as session:
            first = self._server._turn(await session.ask("reset", {**options, **(data.get("env_options") or {})}))
            listed = await session.ask("step", {"type": "list_tools"})
            schemas = [tool_schema(tool) for tool in listed["observation"].get("tools") or ()]
            messages = data.get("messages", data.get("prompt")) or first.observation or ""
            if isinstance(messages, str):
                messages = [{"role": "user", "content": messages}]
            yield _OpenEnvToolEpisode(messages, schemas, session)


def from_openenv(trace: Any, reward: float, version: int = 0) -> TensorDict:
    """Return an agent's rollout that OpenEnv has captured as a trajectory.

    A turn whose prompt begins with the prompt and the completion of an earlier turn continues it; each line of
    conversation is a row. Tokens are trained on where `loss_mask` says so, each turn in the first row that holds it.

    Args:
        trace: a `TrainingTrace`, or its dict.
        reward: of the rollout.
        version: policy version that has written all of it.

    Raises:
        DataError: it is not a trace, its lists differ in length, or there is nothing to train on.
    """
    data = trace.model_dump() if hasattr(trace, "model_dump") else trace
    if not isinstance(data, Mapping) or data.get("schema_version", 1) != 1 or not data.get("turns"):
        raise DataError(f"from_openenv: found {data!r:.200}; expected a TrainingTrace of version 1 with turns")
    turns = list(data["turns"])
    sequences = [[*turn["prompt_token_ids"], *turn["completion_token_ids"]] for turn in turns]
    parents = [_parent(number, turns, sequences) for number in range(len(turns))]
    untrained, lines = set(range(len(turns))), []
    for leaf in (number for number in range(len(turns)) if number not in parents):
        path: list[int] = [leaf]
        while (parent := parents[path[-1]]) is not None:
            path.append(parent)
        lines.append(
            _line([turns[number] for number in path[::-1]], [number in untrained for number in path[::-1]], version)
        )
        untrained.difference_update(path)
    lines = [line for line in lines if any(line.loss_mask)]
    if not lines:
        raise DataError("from_openenv: no token of the trace is trained on; all loss masks are 0")
    rows = join_histories(lines, len(turns)).exclude("token_rewards")
    return rows.update(of_trajectory(len(lines), rewards=reward))


def _parent(number: int, turns: list[Any], sequences: list[list[int]]) -> int | None:
    prompt = turns[number]["prompt_token_ids"]
    earlier = [each for each in range(number) if prompt[: len(sequences[each])] == sequences[each]]
    return max(earlier, key=lambda each: len(sequences[each]), default=None)


def _line(line: list[Any], is_trained: list[bool], version: int) -> TokenHistory:
    history = TokenHistory()
    for turn, is_first in zip(line, is_trained, strict=True):
        said, mask = turn["completion_token_ids"], turn["loss_mask"]
        if len(mask) != len(turn["prompt_token_ids"]) + len(said) or len(turn["per_token_logps"]) != len(said):
            raise DataError(f"turn {turn.get('node_id')!r} of the trace has lists of other lengths than its tokens")
        history.read(turn["prompt_token_ids"][len(history.tokens) :])
        history.write(said, turn["per_token_logps"], [version] * len(said), "stop")
        trained = [bool(one) and is_first for one in mask[len(mask) - len(said) :]]
        history.loss_mask[len(history.tokens) - len(said) :] = trained
    return history
