"""Servers of the Open Reward Standard (openreward): their environments, over HTTP and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlite.data.chat.forms import Message
from rlite.errors import ConfigError
from rlite.imports import optional
from rlite.rollout.environments.tool_episodes import ToolEpisode, reward_in, task_index, tool_schema
from rlite.rollout.failures import ENVIRONMENT_ERRORS, EnvironmentInvalid, EnvironmentRaised
from rlite.rollout.rewards.groups import Gathering
from rlite.rollout.rewards.score import as_number
from rlite.rollout.tools.formats import ToolCall
from rlite.rollout.tools.results import result_text
from rlite.rollout.tools.toolbox import ToolResult
from rlite.runtime.sandbox.function import limited

with optional("environments on a server need", "agents"):
    import aiohttp

STARTING_SECONDS = 2.0
"""pause until a server is asked again that is still starting an environment"""


class OrsSession:
    """Session of one episode with a server.

    `timeout`: seconds for one answer.
    """

    def __init__(self, client: aiohttp.ClientSession, base: str, timeout: float, name: str) -> None:
        self._client, self._base, self._timeout, self.name = client, base, timeout, name
        self.headers: dict[str, str] = {}

    async def ask(self, method: str, path: str, body: Any = None, missing: Any = None) -> Any:
        """Return the JSON of an answer, which may come as server-sent events.

        `missing`: returned if the server has no such route; None: that is an error.
        """
        async with limited(self.name, self._timeout, ENVIRONMENT_ERRORS):
            while True:
                options = {"json": body, "headers": self.headers}
                async with self._client.request(method, f"{self._base}{path}", **options) as answer:
                    if answer.status == 503 and answer.headers.get("X-Backend-State") == "starting":
                        await asyncio.sleep(STARTING_SECONDS)
                        continue
                    if answer.status == 404 and missing is not None:
                        return missing
                    text = await answer.text()
                    break
        if answer.status >= 400:
            raise EnvironmentRaised(f"{self.name} answered {answer.status} to {path}: {text[:2000]}")
        if answer.content_type != "text/event-stream":
            return json.loads(text)
        return self._of_events(text, path)

    def _of_events(self, text: str, path: str) -> Any:
        """Return the JSON of a stream of events: the id of the task, parts of the result, and its end."""
        parts, event = [], ""
        for line in text.splitlines():
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "data" and event == "error":
                raise EnvironmentRaised(f"{self.name} failed in {path}: {value[:2000]}")
            elif name == "data" and event in ("chunk", "end"):
                parts.append(value)
            elif name == "data" and event == "task_id" and path == "/create_session":
                return value
        try:
            return json.loads("".join(parts))
        except ValueError as error:
            raise EnvironmentInvalid(f"{self.name} answered {text!r:.200} to {path}") from error


class OrsEpisode(ToolEpisode):
    """One episode on a server.

    `messages`: what the model reads first. `scoring`: the group's scores; None if the server does not compare episodes.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        listed: Mapping[str, Any],
        session: OrsSession,
        path: str,
        scoring: Gathering | None,
    ) -> None:
        super().__init__(messages, [tool_schema(tool) for tool in listed["tools"]])
        self._terminal = listed.get("terminal_tool")
        self._session, self._path, self._scoring = session, path, scoring

    async def _call(self, call: ToolCall) -> ToolResult:
        asked = {"name": call.name, "input": call.arguments}
        result = await self._session.ask("POST", f"{self._path}/call", asked)
        if not result.get("ok"):
            return ToolResult(f"Error: {result.get('error')}", is_error=True)
        output = result["output"]
        self.is_done = output.get("finished") is True
        self.rewards += reward_in(output, self._session.name)
        return ToolResult(result_text(_text(output["blocks"])))

    async def reward(self, **arguments: Any) -> float:
        """Return the sum of the rewards of all calls, and the score of the episode among its siblings."""
        if self._terminal is not None and not self.is_done:
            named = {self._terminal["arg"]: arguments["completions"]} if self._terminal.get("arg") else {}
            await self._call(ToolCall(self._terminal["name"], named))
        if self._scoring is None:
            return self.rewards
        said = {"messages": _candidate(arguments["conversation"]), "session": self._session}
        return self.rewards + await self._scoring.result(said)


class OrsEnvironment:
    """One environment of an ORS server, for `ToolEnvironmentWorkflow`.

    The row has `task`, the number of a task of the split, or `seed`, which means the same; numbers beyond the last task
    begin anew. Or it has `task_spec`, the task itself. The rewards of all calls are summed. If the server implements
    `score_group`, the episodes of a group are also compared, and each score is added.

    Args:
        url: address of the server, such as http://localhost:8080.
        environment: its name; default: the first one of the server.
        split: split of the tasks.
        timeout: seconds for one answer; the start of an environment is one.
        headers: of each request, such as the authorisation for a hosted server.
    """

    def __init__(
        self,
        url: str,
        environment: str | None = None,
        split: str = "train",
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self.environment, self.split = url.rstrip("/"), environment, split
        self.timeout, self.headers, self.name = timeout, dict(headers or {}), f"the ORS server {url}"
        self._num_tasks: int | None = None
        self._scoring = Gathering(self._score_group)

    @asynccontextmanager
    async def episode(self, data: Mapping[str, Any]) -> AsyncIterator[OrsEpisode]:
        """Begin an episode.

        Args:
            data: the row, with `task`, `seed` or `task_spec`.

        Yields:
            The episode.

        Raises:
            EnvironmentFailure: a call failed. The class depends on the outcome.
            DataError: the row names no task.
            ConfigError: the server has no such environment.
        """
        async with aiohttp.ClientSession(headers=self.headers, trust_env=False) as client:
            session = OrsSession(client, self.url, self.timeout, self.name)
            path = f"/{await self._find(session)}"
            task = await self._task(session, path, data)
            session.headers = {"X-Session-ID": await session.ask("POST", "/create_session")}
            await session.ask("POST", "/create", {"env_name": self.environment, **task})
            try:
                listed = await session.ask("GET", f"{path}/task_tools")
                found = await session.ask("GET", f"{path}/messages", missing="")
                found = found or [{"role": "user", "blocks": await session.ask("GET", f"{path}/prompt")}]
                messages = [{"role": each["role"], "content": _text(each["blocks"])} for each in found]
                scoring = self._scoring if listed.get("supports_score_group") else None
                yield OrsEpisode(messages, listed, session, path, scoring)
            finally:
                await session.ask("POST", "/delete", missing="")

    async def _find(self, session: OrsSession) -> str:
        if self.environment is None:
            self.environment = (await session.ask("GET", "/list_environments"))[0]
        return self.environment

    async def _task(self, session: OrsSession, path: str, data: Mapping[str, Any]) -> dict[str, Any]:
        if "task_spec" in data:
            return {"task_spec": data["task_spec"]}
        index = task_index(data, "the number of a task, from 0, or task_spec")
        if self._num_tasks is None:
            self._num_tasks = (await session.ask("POST", f"{path}/num_tasks", {"split": self.split}))["num_tasks"]
        if not self._num_tasks:
            raise ConfigError(f"{self.name}: the split {self.split!r} of {path[1:]} has no tasks")
        return {"split": self.split, "index": index % self._num_tasks}

    async def _score_group(self, rows: Sequence[Mapping[str, Any]]) -> list[float]:
        session: OrsSession = rows[-1]["session"]
        candidates = [{"messages": row["messages"]} for row in rows]
        answer = await session.ask("POST", f"/{self.environment}/score_group", {"candidates": candidates})
        scores = [as_number(score.get("reward")) for score in answer.get("scores", ())]
        if len(scores) != len(rows) or None in scores:
            raise EnvironmentInvalid(f"{self.name} scored a group of {len(rows)} with {answer!r:.200}")
        return scores  # type: ignore[return-value]


def _text(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the texts of blocks."""
    if any(block.get("type") == "image" for block in blocks):
        raise EnvironmentInvalid("the environment shows an image, and the model reads texts alone")
    return "\n".join(block["text"] for block in blocks if block.get("type") == "text")


def _candidate(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the texts of a conversation as messages of the standard."""
    roles = {"system": "system", "assistant": "assistant"}
    return [
        {"role": roles.get(message["role"], "user"), "blocks": [{"type": "text", "text": message["content"] or ""}]}
        for message in conversation
    ]
