"""Serve a model with OpenAI's interface while a command runs, such as an evaluation harness.

    pip install "rlite[agents]"
    python examples/serve.py MODEL COMMAND

The shell command gets the address in OPENAI_BASE_URL and RLITE_BASE_URL, and the key in OPENAI_API_KEY and
RLITE_API_KEY. The model's name is `policy`.
"""

import asyncio
import os
import sys

import rlite
from rlite.rollout.openai import AgentEndpoint, AgentSession


async def serve(engine: rlite.RliteInferenceEngine, command: str) -> int:
    session = AgentSession(engine, engine.tokenizer, is_recording=False)  # nobody trains on the answers
    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
        address = {"OPENAI_BASE_URL": access.base_url, "RLITE_BASE_URL": access.base_url}
        key = {"OPENAI_API_KEY": access.api_key, "RLITE_API_KEY": access.api_key}
        process = await asyncio.create_subprocess_shell(command, env={**os.environ, **address, **key})
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def main(model: str, command: str) -> int:
    rlite.init(num_devices=1)
    try:
        engine = rlite.RliteInferenceEngine(model)
        engine.build()
        return asyncio.run(serve(engine, command))
    finally:
        rlite.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
