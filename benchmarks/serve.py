"""Time that the server adds to a request, and its CPU time for each request of many sessions.

    python -m benchmarks.serve [--rounds 100] [--sessions 200] [--latency 0.5]

First one client sends chat requests of 200 prompt tokens and 32 answer tokens, not streamed, to a tiny model. The same
prompt goes to the engine directly, in turns with the request. The added time is the median of the paired differences.
Then many sessions of three streamed turns run at once in every dialect. A scripted engine answers them, so that the CPU
time is that of the server and of the clients, which share the process.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

import rlite
from rlite.rollout.openai import AgentEndpoint, AgentSession
from rlite.services.endpoint.connections import find_capacity
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.agents import Speaker, tokenizer_with
from tests.integration.test_serve import ANSWER, KINDS, talk
from tests.tiny import build_model_dir

NUM_PROMPT, NUM_ANSWER = 200, 32
WARM_UP, LIMIT_MS = 5, 5.0


@dataclass(frozen=True)
class Cost:
    """Median milliseconds of a request, and of what it takes longer than the engine alone."""

    whole: float
    added: float
    added_cpu: float
    """CPU time of this process, the client's included"""


async def cost_of(engine: rlite.RliteInferenceEngine, rounds: int) -> Cost:
    """The cost of a request, by pairs of a request and the same generation without the server."""
    sampling = GenerationHyperparameters(max_new_tokens=NUM_ANSWER, ignore_eos=True, greedy=True)
    session = AgentSession(engine, engine.tokenizer, sampling, is_recording=False)
    frame = len(session.chat({"model": "policy", "messages": [{"role": "user", "content": ""}]}).exchange.prompts[0][0])
    body = {"model": "policy", "messages": [{"role": "user", "content": "x" * (NUM_PROMPT - frame)}]}
    [prompt] = session.chat(body).exchange.prompts
    assert len(prompt.token_ids) == NUM_PROMPT

    async def alone() -> None:
        await engine.agenerate(LLMRequest(input_ids=prompt.token_ids, gconfig=sampling))

    async with AgentEndpoint() as endpoint, endpoint.serving(session) as access, aiohttp.ClientSession() as client:
        key = {"Authorization": f"Bearer {access.api_key}"}

        async def asked() -> None:
            async with client.post(f"{access.base_url}/chat/completions", json=body, headers=key) as response:
                assert (await response.json())["usage"]["completion_tokens"] == NUM_ANSWER

        pairs = [[await timed(asked), await timed(alone)] for _ in range(rounds + WARM_UP)][WARM_UP:]
    added = [statistics.median(one[clock] - other[clock] for one, other in pairs) for clock in range(2)]
    return Cost(statistics.median(one[0] for one, _ in pairs), *added)


async def timed(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Milliseconds, and milliseconds of CPU time, of some work."""
    began = time.perf_counter(), time.process_time()
    await work()
    return 1e3 * (time.perf_counter() - began[0]), 1e3 * (time.process_time() - began[1])


async def many_sessions(num_sessions: int, latency: float) -> tuple[float, float]:
    """Seconds, and milliseconds of CPU time for each request, of sessions of three streamed turns."""
    tokenizer = tokenizer_with()
    find_capacity()

    async def one(number: int, endpoint: AgentEndpoint, client: aiohttp.ClientSession) -> int:
        session = AgentSession(Speaker([ANSWER], tokenizer, latency=latency), tokenizer)
        async with endpoint.serving(session) as access:
            return await talk(client, access, KINDS[number % len(KINDS)], None)

    connector = aiohttp.TCPConnector(limit=0)
    async with AgentEndpoint() as endpoint, aiohttp.ClientSession(connector=connector) as client:
        began, cpu = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*(one(number, endpoint, client) for number in range(num_sessions)))
        return time.perf_counter() - began, 1e3 * (time.process_time() - cpu) / sum(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--latency", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rlite.init(num_devices=1, num_threads=1)
        engine = rlite.RliteInferenceEngine(build_model_dir(Path(scratch) / "model", hidden=64))
        engine.build(max_model_len=512, max_num_seqs=8)
        cost = asyncio.run(cost_of(engine, options.rounds))
        rlite.shutdown()
    verdict = "ok" if cost.added < LIMIT_MS else f"above {LIMIT_MS:g} ms"
    print(f"chat request of {NUM_PROMPT} + {NUM_ANSWER} tokens: median {cost.whole:.2f} ms")
    print(f"the server adds {cost.added:.2f} ms ({cost.added_cpu:.2f} ms CPU): {verdict}")
    seconds, cpu = asyncio.run(many_sessions(options.sessions, options.latency))
    print(f"{options.sessions} sessions of 3 streamed turns: {seconds:.1f} s, {cpu:.2f} ms CPU for each request")


if __name__ == "__main__":
    main()
