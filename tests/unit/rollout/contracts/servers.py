"""Servers that speak the wire of OpenEnv and of the Open Reward Standard as their packages do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def openenv_app(sessions: list[list[Any]]) -> web.Application:
    """An echo whose reward is the length of the message, and a tool `add`; each session is kept."""

    async def schema(request: web.Request) -> web.Response:
        action = {
            "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
            "required": ["message"],
        }
        return web.json_response({"action": action})

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        sessions.append(heard := [])
        async for message in socket:
            heard.append(asked := json.loads(message.data))
            if asked["type"] == "close":
                break
            await socket.send_json(answer(asked["type"], asked["data"]))
        return socket

    def answer(kind: str, data: Any) -> Any:
        if data.get("message") == "break":
            return {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}
        seen: dict[str, Any] = {"text": f"seed {data.get('seed')}", "metadata": {}}
        reward: Any = None
        if data.get("type") == "list_tools":
            parameters = {"type": "object", "properties": {"number": {"type": "integer"}}}
            seen = {"tools": [{"name": "add", "description": "Add.", "input_schema": parameters}]}
        elif data.get("type") == "call_tool":
            reward = data["arguments"]["number"]
            seen = {"tool_name": "add", "result": {"data": reward}, "error": None}
        elif kind == "step":
            seen, reward = {"text": f"you said {data['message']}"}, len(data["message"])
        is_done = kind == "step" and data.get("message") == "bye"
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": is_done}}

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", talk)])
    return app


def ors_app(deleted: list[str], compares: bool) -> web.Application:
    """Two tasks, a tool `answer` that ends the episode, and scores of groups: the place of each candidate."""
    tools = [{"name": "answer", "description": "Answer.", "input_schema": {"type": "object", "properties": {}}}]
    created: dict[str, Any] = {}

    async def events(*parts: tuple[str, str]) -> web.Response:
        body = "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in parts)
        return web.Response(text=body, content_type="text/event-stream")

    async def new(request: web.Request) -> web.Response:
        return await events(("task_id", f"s{len(created)}"), ("end", ""))

    async def create(request: web.Request) -> web.Response:
        created[request.headers["X-Session-ID"]] = await request.json()
        return web.json_response({"sid": request.headers["X-Session-ID"]})

    async def prompt(request: web.Request) -> web.Response:
        index = created[request.headers["X-Session-ID"]]["index"]
        return web.json_response([{"type": "text", "text": f"task {index}"}])

    async def listed(request: web.Request) -> web.Response:
        return web.json_response({"tools": tools, "terminal_tool": None, "supports_score_group": compares})

    async def call(request: web.Request) -> web.Response:
        asked = await request.json()
        output = {"blocks": [{"type": "text", "text": "seen"}], "reward": 0.5, "finished": "text" in asked["input"]}
        whole = json.dumps({"ok": True, "output": output})
        return await events(("task_id", "t"), ("chunk", whole[:10]), ("end", whole[10:]))

    async def score(request: web.Request) -> web.Response:
        candidates = (await request.json())["candidates"]
        scores = [{"reward": 10.0 * place} for place in range(len(candidates))]
        return await events(("task_id", "t"), ("end", json.dumps({"scores": scores})))

    async def delete(request: web.Request) -> web.Response:
        deleted.append(request.headers["X-Session-ID"])
        return web.json_response({})

    async def names(request: web.Request) -> web.Response:
        return web.json_response(["quiz"])

    async def count(request: web.Request) -> web.Response:
        return web.json_response({"num_tasks": 2})

    app = web.Application()
    app.add_routes(
        [
            web.get("/list_environments", names),
            web.post("/quiz/num_tasks", count),
            web.post("/create_session", new),
            web.post("/create", create),
            web.post("/delete", delete),
            web.get("/quiz/task_tools", listed),
            web.get("/quiz/prompt", prompt),
            web.post("/quiz/call", call),
            web.post("/quiz/score_group", score),
        ]
    )
    return app
