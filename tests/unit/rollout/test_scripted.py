from __future__ import annotations

import asyncio
import time

import pytest

from rlite.rollout import GenerationHyperparameters, LLMRequest, ScriptedEngine


def request(max_new_tokens: int = 16) -> LLMRequest:
    return LLMRequest(input_ids=[1, 2], gconfig=GenerationHyperparameters(max_new_tokens=max_new_tokens))


def test_a_script_is_gone_through_again_and_again_and_cut_at_the_limit() -> None:
    engine = ScriptedEngine([[5], [6, 7, 8]], version=3, logprob=-0.5)

    async def three() -> list:
        return [await engine.agenerate(request(max_new_tokens=2)) for _ in range(3)]

    responses = asyncio.run(three())
    assert [response.output_tokens for response in responses] == [[5], [6, 7], [5]]
    assert [response.stop_reason for response in responses] == ["stop", "length", "stop"]
    assert responses[1].output_versions == [3, 3]
    assert responses[1].output_logprobs == [-0.5, -0.5]


def test_agenerate_raises_the_error_of_the_script() -> None:
    def answer(request: LLMRequest) -> list[int]:
        raise ConnectionError("the server is gone")

    with pytest.raises(ConnectionError, match="the server is gone"):
        asyncio.run(ScriptedEngine(answer).agenerate(request()))


def test_tokens_made_after_an_update_carry_the_new_version() -> None:
    engine = ScriptedEngine([[1, 2, 3, 4]], latency=0.4)

    async def update_halfway() -> list[int]:
        call = asyncio.create_task(engine.agenerate(request()))
        await asyncio.sleep(0.25)
        engine.set_version(1)
        return (await call).output_versions

    versions = asyncio.run(update_halfway())
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[-1] == 1


def test_nothing_is_made_during_a_pause() -> None:
    engine = ScriptedEngine([[1, 2]], latency=0.05)

    async def pause_and_update() -> tuple[list[int], float]:
        call = asyncio.create_task(engine.agenerate(request()))
        await asyncio.sleep(0)
        started = time.monotonic()
        engine.pause()
        await asyncio.sleep(0.2)
        assert not call.done()
        engine.set_version(1)
        await asyncio.to_thread(engine.resume)
        return (await call).output_versions, time.monotonic() - started

    versions, seconds = asyncio.run(pause_and_update())
    assert versions == [1, 1]
    assert seconds >= 0.24


def test_a_stream_has_the_tokens_one_by_one_and_can_be_left() -> None:
    engine = ScriptedEngine([[1, 2, 3], []], latency=0.03, version=4)

    async def both() -> tuple[list, list, list]:
        whole = [chunk async for chunk in engine.stream(request())]
        empty = [chunk async for chunk in engine.stream(request())]
        left = []
        async for chunk in engine.stream(request()):
            left.append(chunk)
            break
        return whole, empty, left

    whole, empty, left = asyncio.run(both())
    assert [chunk.token_ids for chunk in whole] == [[1], [2], [3]]
    assert [chunk.finish_reason for chunk in whole] == [None, None, "stop"]
    assert {chunk.version for chunk in whole} == {4}
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in empty] == [([], "stop")]
    assert [chunk.token_ids for chunk in left] == [[1]]
