"""The bookkeeping of captured steps, and that a step of fixed shape computes what any other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from rlite.backends.embedded.attention import DecodePlan
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.passes import DecodeGraphs, Replay, Shape, bucket, logits_of_fixed_step
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.architecture import rope_limit
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir

PROMPTS = [[7] * 3, [9, 8] * 20, [5]]


@pytest.fixture(params=[("qwen3", {}), ("mistral", {"sliding_window": 16})], ids=["full", "window"])
def worker(tmp_path: Path, request: pytest.FixtureRequest) -> EmbeddedWorker:
    """In the middle of three sequences; float64 has the plain cache that CUDA has."""
    kind, config = request.param
    path = str(build_model_dir(tmp_path / "model", kind, hidden=64, **config))
    options = EmbeddedOptions(max_model_len=300, max_num_seqs=6, dtype="float64")
    worker = EmbeddedWorker(path, options, torch.device("cpu"))
    gconfig = GenerationHyperparameters(max_new_tokens=20, ignore_eos=True)
    requests = [SequenceRequest(request_id=i, input_ids=p, gconfig=gconfig, seed=i) for i, p in enumerate(PROMPTS)]
    worker.advance(requests, [], 5)
    return worker


def test_a_bucket_is_the_next_power_of_two_within_its_limit() -> None:
    assert [bucket(n, 100) for n in (1, 2, 3, 4, 5, 64, 65, 100)] == [1, 2, 4, 4, 8, 64, 100, 100]
    assert [bucket(n, 1088, 256) for n in (1, 256, 257, 513, 1025, 1088)] == [256, 256, 512, 1024, 1088, 1088]
    assert bucket(40, 64, 256) == 64


@pytest.mark.parametrize("num_slots", [1, 3, 8, 100])
def test_every_batch_has_a_shape_that_holds_it_and_there_are_few_shapes(num_slots: int) -> None:
    shapes = {}
    for num_rows in range(1, num_slots + 1):
        for longest in range(2, 1000, 13):
            shape = shapes[num_rows, longest] = Shape.of(num_rows, longest, num_slots, 1024)
            assert num_rows <= shape.rows <= min(num_slots, 2 * num_rows)
            assert longest <= shape.width <= 1024
    assert len(set(shapes.values())) <= 3 * 8


def test_addresses_stay_when_weights_are_written_and_change_when_they_are_moved(worker: EmbeddedWorker) -> None:
    before = worker._weights.addresses()
    shards = worker.parameter_shards()
    for shard in shards.values():
        shard.tensor.mul_(1.5)
    worker.load_weights()
    assert worker._weights.addresses() == before
    worker.to_meta()
    worker.to_device("all")
    # the old tensors are still held by `shards`, so the new ones lie elsewhere
    assert not set(worker._weights.addresses()) & set(before)


@torch.inference_mode()
def test_a_step_of_fixed_shape_makes_the_logits_of_any_other(worker: EmbeddedWorker) -> None:
    sequences, model, cache = worker._scheduler.running, worker._weights, worker._serving_cache()
    lengths = [len(sequence.tokens) for sequence in sequences]
    shape = Shape.of(len(lengths), max(lengths), worker.options.max_num_seqs, 320)
    assert (shape.rows, shape.width) == (4, 256)
    tokens, positions = torch.zeros(2, shape.rows, dtype=torch.int64)
    tokens[:3] = torch.tensor([sequence.tokens[-1] for sequence in sequences])
    positions[:3] = torch.tensor(lengths) - 1
    table = torch.zeros(shape.rows, shape.width // 64, dtype=torch.int64)
    for row, sequence in zip(table, sequences, strict=False):
        row[: len(sequence.pages)] = torch.tensor(sequence.pages)
    fixed = logits_of_fixed_step(model, cache, tokens, positions, table)[:3]
    plan = DecodePlan(cache, table[:3], positions[None, :3], lengths)
    torch.testing.assert_close(fixed, model.logits(tokens[:3], positions[:3], plan), atol=1e-10, rtol=0)


class EagerRecorder:
    """Runs a step again and writes its result where the first one is, as a CUDA graph does."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        self.num_recorded += 1
        result = step().clone()
        return lambda: result.copy_(step()), result

    def clear(self) -> None:
        self.num_recorded = 0


@torch.inference_mode()
def test_captures_are_made_once_and_forgotten_when_memory_has_moved(worker: EmbeddedWorker) -> None:
    cache, recorder = worker._serving_cache(), EagerRecorder()
    graphs = DecodeGraphs(worker._weights, worker.options.max_num_seqs, 300, recorder)

    def step(num_rows: int, addresses: tuple[int, ...]) -> int:
        tokens = torch.zeros(num_rows, dtype=torch.int64)
        assert graphs.logits(cache, addresses, tokens, tokens + 290, 291).shape[0] == num_rows
        return recorder.num_recorded

    here = graphs.addresses(cache)
    there = (*here[:-1], here[-1] + 64)
    assert [step(1, here), step(3, here), step(4, here), step(1, here)] == [1, 2, 2, 2]
    assert [step(1, there), step(3, there), step(1, here)] == [3, 4, 5]
    graphs.clear()  # the recorder forgets its number
    assert [step(1, here), step(1, here)] == [1, 1]


@pytest.mark.parametrize("is_nested", [False, True], ids=["all layers", "by kind of layer"])
def test_a_rotary_embedding_that_looks_at_the_longest_position_is_not_captured(is_nested: bool) -> None:
    assert rope_limit(Qwen3Config()) is None
    scaled: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = Qwen3Config()
    config.rope_parameters = {"full_attention": scaled} if is_nested else scaled
    assert rope_limit(config)


def test_kept_caches_survive_the_padded_rows_of_captured_steps(tmp_path: Path) -> None:
    """One of four conversations ends, the others go on in steps of four rows, and then it takes another turn."""
    path = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    options = EmbeddedOptions(max_model_len=300, max_num_seqs=4, dtype="float64")
    prompts = [[number + 3] * (40 - number) for number in range(4)]

    def second_turn(recorder: EagerRecorder | None) -> list[float]:
        worker = EmbeddedWorker(path, options, torch.device("cpu"))
        if recorder is not None:
            worker._passes.graphs = DecodeGraphs(worker._weights, 4, 300, recorder)

        def ask(number: int, ids: list[int], num: int) -> SequenceRequest:
            gconfig = GenerationHyperparameters(max_new_tokens=num, ignore_eos=True)
            return SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=number)

        worker.advance([ask(number, ids, 20 if number < 3 else 2) for number, ids in enumerate(prompts)], [], 30)
        (chunk,) = worker.advance([ask(4, [*prompts[3], 11, 12], 9)], [], 30)
        assert worker._scheduler.num_reused
        return chunk.logprobs

    recorder = EagerRecorder()
    assert second_turn(recorder) == pytest.approx(second_turn(None), abs=1e-9)
    assert recorder.num_recorded
