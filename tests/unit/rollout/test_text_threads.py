"""Long texts beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.prompts import TooManyTokens
from rlite.rollout import Conversation, GenerationHyperparameters, ScriptedEngine, SingleTurnWorkflow
from rlite.runtime.event_loop import NUM_THREADS, SHORT_TEXT, beside_loop

GCONFIG = GenerationHyperparameters(max_new_tokens=8)


def test_the_loop_turns_while_long_texts_are_worked_on_and_a_bounded_number_at_once() -> None:
    may_end, running, most = threading.Event(), [0], [0]
    lock = threading.Lock()

    def work() -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        may_end.wait(100)
        with lock:
            running[0] -= 1
        return threading.get_ident()

    async def use() -> None:
        long = [asyncio.create_task(beside_loop(SHORT_TEXT + 1, work)) for _ in range(3 * NUM_THREADS)]
        assert await beside_loop(SHORT_TEXT, threading.get_ident) == threading.get_ident()
        assert not any(task.done() for task in long)
        may_end.set()
        assert threading.get_ident() not in await asyncio.gather(*long)

    asyncio.run(use())
    assert most[0] <= NUM_THREADS


def test_a_reply_that_cannot_fit_ends_the_episode_as_truncated() -> None:
    conversation = Conversation(byte_tokenizer(), {"messages": [{"role": "user", "content": "a"}]}, max_length=256)
    engine = ScriptedEngine([[65, 66]])

    async def talk() -> None:
        assert await conversation.ask(engine, GCONFIG) is not None
        conversation.reply({"role": "user", "content": "x" * 5_000_000})
        assert await conversation.ask(engine, GCONFIG) is None

    asyncio.run(talk())
    trajectory = conversation.transcript.trajectory(0.0)
    assert trajectory["input_ids"].shape[1] < 256
    assert trajectory["input_ids"][0, -2:].tolist() == [65, 66]
    assert trajectory["truncated"].tolist() == [True]


def test_a_prompt_far_beyond_what_the_engine_takes_is_refused_before_it_is_tokenised_whole() -> None:
    engine = ScriptedEngine([[65]], context_length=128)
    workflow = SingleTurnWorkflow(lambda **_: 0.0, GCONFIG, byte_tokenizer())
    for item in ({"prompt": "x" * 5_000_000}, {"messages": [{"role": "user", "content": "x" * 5_000_000}]}):
        with pytest.raises(TooManyTokens, match="than the 128 that fit"):
            asyncio.run(workflow.arun_episode(engine, item))
    assert engine.num_requests == 0
