"""Adapters of several ranks and layers, which tests train and serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.nn import LoraOptions
from rlite.runtime.replicas.adapters import AdapterWeights, Factors
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, TokenChunk
from tests.integration.modules import next_token_logprobs

ADAPTERS = {
    "wide": LoraOptions(rank=8, alpha=16.0),
    "narrow": LoraOptions(rank=2, alpha=2.0, target_modules=["q_proj", "v_proj"]),
    "mlp": LoraOptions(rank=5, alpha=3.0, target_modules=["layers.1.mlp.down_proj", "gate_proj"]),
}
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5], [9, 9], [1, 2, 3, 4], [60, 61]]
SAMPLED = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": 3}


def of_trainer(engine: RliteTrainEngine, ids: list[int], adapter: str | None) -> Tensor:
    """Log-probabilities of the tokens after the first, as the trainer computes them with an adapter."""
    row = torch.tensor([ids])
    batch = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    return engine.forward(batch, next_token_logprobs, adapter=adapter)[0, :-1]


def assert_served(trainer: RliteTrainEngine, engine: RliteInferenceEngine, names: list[str | None]) -> None:
    """One batch with requests of several adapters has the trainer's log-probabilities."""
    outputs = engine.generate(PROMPTS, SAMPLED, adapter=names)
    for prompt, name, output in zip(PROMPTS, names, outputs, strict=True):
        made = output.outputs[0]
        expected = of_trainer(trainer, [*prompt, *made.token_ids], name)[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(made.logprobs), expected.float(), atol=1e-5, rtol=0)


def drawn(seed: int, hidden: int) -> AdapterWeights:
    """An adapter of random values for a tiny model of this width."""
    made = torch.Generator().manual_seed(seed)
    down, up = torch.randn(2, hidden, generator=made), torch.randn(hidden, 2, generator=made)
    return AdapterWeights(2, 4.0, {"model.layers.0.self_attn.q_proj": Factors(down, up)})


def assert_base_after_removal(engine: RliteInferenceEngine, hidden: int) -> None:
    """A request in flight goes on with the base when the policy's adapter is removed, under the next version."""
    version = engine.take_adapter(None, drawn(0, hidden), "a test")
    gconfig = GenerationHyperparameters(max_new_tokens=600, ignore_eos=True)
    asked = LLMRequest(input_ids=[1, 2, 3], gconfig=gconfig)
    (answer,) = asyncio.run(interrupted(engine, [asked], partial(engine.remove_adapter, None)))
    assert sorted({*answer.output_versions}) == [version, version + 1]
    (base,) = engine.prompt_logprobs([[*answer.input_tokens, *answer.output_tokens]])
    num_last = answer.output_versions.count(version + 1)
    assert answer.output_logprobs[-num_last:] == pytest.approx(list(base)[-num_last:], abs=1e-5)
    assert engine.adapters == {}


async def interrupted(
    engine: RliteInferenceEngine, requests: list[LLMRequest], act: Any, after: int = 10
) -> list[LLMResponse]:
    """Answers to requests, amid which `act()` runs in another thread."""
    seen, loop = asyncio.Event(), asyncio.get_running_loop()
    counts: dict[int, int] = {}

    def see(chunk: TokenChunk) -> None:
        counts[chunk.request_id] = counts.get(chunk.request_id, 0) + len(chunk.token_ids)
        if len(counts) == len(requests) and min(counts.values()) >= after:
            loop.call_soon_threadsafe(seen.set)

    tasks = [asyncio.ensure_future(engine.agenerate(request, see)) for request in requests]
    await seen.wait()
    await asyncio.to_thread(act)
    return list(await asyncio.gather(*tasks))


async def across_versions(
    engine: RliteInferenceEngine, sync: Callable[[int], Any], gconfig: GenerationHyperparameters, num: int
) -> list[LLMResponse]:
    """Answers that begin with one version of the adapter "kept" each, and are in flight when the last one arrives."""
    loop, tasks = asyncio.get_running_loop(), []
    for number in range(num):
        await asyncio.to_thread(sync, number)
        seen = asyncio.Event()
        request = LLMRequest(input_ids=[7, 8, 9 + number], gconfig=gconfig.new(seed=number), adapter="kept")
        tasks.append(asyncio.ensure_future(engine.agenerate(request, partial(_set, loop, seen))))
        await seen.wait()
    await asyncio.to_thread(sync, num)
    assert not any(task.done() for task in tasks)
    return list(await asyncio.gather(*tasks))


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event, chunk: TokenChunk) -> None:
    loop.call_soon_threadsafe(event.set)


def assert_kept_versions(
    trainer: RliteTrainEngine, engine: RliteInferenceEngine, names: list[str], num_tokens: int
) -> None:
    """Requests in flight end with the versions with which they began: all but the last of the trainer's adapters."""

    def sync(number: int) -> None:
        report = trainer.p2p_adapter_sync(engine, names[number], name="kept", on_inflight="keep")
        assert report.version == number + 1

    gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True)
    answers = asyncio.run(across_versions(engine, sync, gconfig, len(names) - 1))
    for number, answer in enumerate(answers):
        assert {*answer.output_versions} == {number + 1}
        expected = of_trainer(trainer, [*answer.input_tokens, *answer.output_tokens], names[number])
        found = torch.tensor(answer.output_logprobs)
        torch.testing.assert_close(found, expected[answer.input_len - 1 :], atol=1e-5, rtol=0)
    assert engine.adapters["kept"] == len(names)
