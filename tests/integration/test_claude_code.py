"""The program of `claude-agent-sdk` completes an episode against the endpoint. It is not installed by `make`."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
from pathlib import Path

import pytest

from rlite.rollout.openai import AgentEndpoint, AgentSession
from tests.agents import WITH_TOOLS, Speaker, tokenizer_with

TOKENIZER = tokenizer_with(WITH_TOOLS)
CALL = '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo hello", "description": "greet"}}\n</tool_call>'


def find_program() -> str | None:
    found = importlib.util.find_spec("claude_agent_sdk")
    bundled = Path(found.origin).parent / "_bundled" / "claude" if found and found.origin else None
    return str(bundled) if bundled is not None and bundled.exists() else shutil.which("claude")


@pytest.mark.nightly
@pytest.mark.skipif(find_program() is None, reason="pip install claude-agent-sdk brings the program")
def test_an_episode_of_claude_code_continues_with_the_recorded_tokens(tmp_path: Path) -> None:
    async def use() -> tuple[bytes, AgentSession]:
        session = AgentSession(Speaker([CALL, "All done."], TOKENIZER), TOKENIZER)
        async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "ANTHROPIC_BASE_URL": access.root,
                "ANTHROPIC_API_KEY": access.api_key,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": access.model,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }
            command = [find_program() or "", "-p", "Say hello with bash", "--model", access.model]
            command += ["--allowedTools", "Bash(echo:*)", "--output-format", "json"]
            null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, cwd=tmp_path, stdin=null, stdout=pipe
            )
            try:
                told, _ = await process.communicate()
                return told, session
            finally:
                if process.returncode is None:
                    process.kill()

    told, session = asyncio.run(asyncio.wait_for(use(), 250))
    assert json.loads(told)["result"] == "All done."
    first, second = session.recording.completed()[-2:]
    assert second.parent is first
    assert second.prompt_ids[: len(first.sequence)] == first.sequence
