"""A server for one model, in the interfaces that clients of OpenAI and of Anthropic speak.

    rlite serve MODEL [port=8000 executor=vllm ...]
    rlite serve runs/grpo                                  the newest model of a run

Each request needs the token of RLITE_SERVE_TOKEN, or of the file that the first line names. The routes are those of the
agent endpoint of a training run (docs/serving.md).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rlite
from rlite import config
from rlite.assembly.commands.generate import check_writes, model_folder
from rlite.assembly.commands.options import ServeConfig
from rlite.assembly.commands.served import tell_reach, until_interrupted
from rlite.assembly.launch import init_devices
from rlite.engine.inference import RliteInferenceEngine
from rlite.rollout.openai import Access, AgentEndpoint, AgentSession
from rlite.services.endpoint.admin import Admin
from rlite.services.endpoint.connections import Words
from rlite.services.endpoint.guard import TOKEN_VARIABLE, Limits, Names, find_admin_token, find_token
from rlite.trainer.options import LaunchOptions
from rlite.types import AsyncInference

WORDS = Words(
    "rlite serve",
    "the token",
    "further ones are dropped without a message",
    ". For more connections at once, raise the limit of open files (ulimit -n) before the start",
)


def main(argv: Sequence[str]) -> None:
    """Serve a model until SIGINT or SIGTERM."""
    options = config.load(ServeConfig, ServeConfig.arguments(argv))
    token = find_token(Path(options.token_file).expanduser(), os.environ)
    secret = find_admin_token(options.admin_token_file, os.environ, token)
    folder = model_folder(options.model)
    init_devices(LaunchOptions(launcher=options.launcher, num_devices=options.devices))
    try:
        check_writes(folder)
        engine = RliteInferenceEngine(folder, executor=options.executor)
        engine.build(**options.build_options())
        admin = None if secret is None else Admin(engine, secret)
        asyncio.run(serve(engine, engine.tokenizer, options, token, tell, admin))
    finally:
        rlite.shutdown()


async def serve(
    engine: AsyncInference,
    tokenizer: Any,
    options: ServeConfig,
    token: str,
    tell: Callable[[Access, ServeConfig], object],
    admin: Admin | None = None,
) -> None:
    """Serve an engine until SIGINT or SIGTERM. For the main thread."""
    session = AgentSession(
        engine,
        tokenizer,
        options.gconfig(),
        model=options.name or Path(options.model).expanduser().resolve().name,
        tool_format=options.tool_format,
        chat_template_options=options.chat_template_options,
        max_length=options.max_length,
        is_recording=False,
    )
    names, limits = Names(options.host, options.host_names), Limits(options.max_running, options.max_waiting)
    async with (
        until_interrupted(options.host, options.port) as is_over,
        AgentEndpoint(options.port, names, limits, WORDS, admin) as endpoint,
    ):
        async with endpoint.serving(session, token) as access:
            tell(access, options)
            await is_over.wait()
        await session.close()


def tell(access: Access, options: ServeConfig) -> None:
    """Print how clients reach the server. The token itself is not printed."""
    secret = f"${TOKEN_VARIABLE}" if TOKEN_VARIABLE in os.environ else f"$(cat {options.token_file})"
    print(f"rlite serve: {access.model} at {access.base_url}, with the token {secret}")
    print(f'  export OPENAI_BASE_URL={access.base_url} OPENAI_API_KEY="{secret}"')
    print(f'  export ANTHROPIC_BASE_URL={access.root} ANTHROPIC_API_KEY="{secret}"')
    tell_reach(options.host, "prompts, answers")
