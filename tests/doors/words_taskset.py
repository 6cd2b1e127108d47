"""A taskset of verifiers: short answers with many letters "e". Its harness asks once, or in several branches."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["Words", "WordsHarness"]
WORDS = ("tree", "bee", "broken", "hang", "branches")


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def letters(self, trace: vf.Trace) -> float:
        if "broken" in self.data.prompt:
            raise ValueError("this task cannot be scored")
        return trace.last_reply.count("e") / 8


class Words(vf.Taskset[WordTask]):
    def load(self) -> Any:
        for word in WORDS:
            yield WordTask(vf.TaskData(prompt=f"Say {word}"), self.config.task)


class WordsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, urls: Any, data: Any) -> Any:
        if "hang" in data.prompt:
            await asyncio.sleep(3600)
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60, headers={"Authorization": f"Bearer {secret}"}) as client:

            async def ask(messages: list[Any]) -> Any:
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                return answer.json()["choices"][0]["message"]

            said = await ask(messages)
            if "branches" in data.prompt:
                for word in ("more", "less"):
                    await ask(
                        [
                            *messages,
                            {"role": "assistant", "content": said["content"]},
                            {"role": "user", "content": word},
                        ]
                    )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
