"""Captured decode steps on a GPU make what eager ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir

pytestmark = pytest.mark.gpu


def requests_of(temperature: float = 0.0) -> list[SequenceRequest]:
    """More than there are slots, with lengths that cross buckets of rows and of width."""
    generator = torch.Generator().manual_seed(1)
    lengths = [(3, 300), (40, 20), (1, 64), (250, 30), (17, 100), (17, 5), (90, 200), (8, 1), (60, 60), (2, 150)]
    return [
        SequenceRequest(
            request_id=i,
            input_ids=torch.randint(0, 256, (prompt,), generator=generator).tolist(),
            gconfig=GenerationHyperparameters(max_new_tokens=new, temperature=temperature, ignore_eos=True),
            seed=i,
        )
        for i, (prompt, new) in enumerate(lengths)
    ]


def worker_of(path: str, cuda_graphs: bool, dtype: str = "float32") -> EmbeddedWorker:
    options = EmbeddedOptions(
        max_model_len=600, max_num_seqs=6, dtype=dtype, cuda_graphs=cuda_graphs, gpu_memory_utilization=0.5
    )
    return EmbeddedWorker(path, options, torch.device("cuda", 0))


def run(worker: EmbeddedWorker, requests: list[SequenceRequest]) -> dict[int, tuple[list[int], list[float]]]:
    made: dict[int, tuple[list[int], list[float]]] = {}
    chunks = worker.advance(requests, [], 7)
    while True:
        for chunk in chunks:
            tokens, logprobs = made.setdefault(chunk.request_id, ([], []))
            tokens += chunk.token_ids
            logprobs += chunk.logprobs
        if not (worker._scheduler.waiting or worker._scheduler.running):
            return made
        chunks = worker.advance([], [], 7)


def assert_same(made: dict, expected: dict, atol: float) -> None:
    assert made.keys() == expected.keys()
    for i, (tokens, logprobs) in expected.items():
        assert made[i][0] == tokens
        assert made[i][1] == pytest.approx(logprobs, abs=atol)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_steps_make_the_tokens_and_logprobs_of_eager_ones(
    tmp_path: Path, kind: str, temperature: float
) -> None:
    path = str(build_model_dir(tmp_path / "model", kind, hidden=64))
    captured, eager = worker_of(path, True), worker_of(path, False)
    expected = run(eager, requests_of(temperature))
    assert_same(run(captured, requests_of(temperature)), expected, 5e-5)
    assert captured._graphs is not None
    shapes = len(captured._graphs.captures)
    assert shapes >= 4
    assert_same(run(captured, requests_of(temperature)), expected, 5e-5)
    assert len(captured._graphs.captures) == shapes
    assert eager._graphs is None


def test_half_precision_differs_from_eager_by_rounding(tmp_path: Path) -> None:
    path = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    made = run(worker_of(path, True, "bfloat16"), requests_of())
    expected = run(worker_of(path, False, "bfloat16"), requests_of())
    first = torch.tensor([[made[i][1][0], expected[i][1][0]] for i in expected])
    torch.testing.assert_close(first[:, 0], first[:, 1], atol=0.1, rtol=0)


def test_captures_see_weights_that_are_written_in_place_and_outlive_no_move(tmp_path: Path) -> None:
    path = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    captured, eager = worker_of(path, True), worker_of(path, False)
    run(captured, requests_of())
    assert captured._graphs is not None
    graphs = captured._graphs.captures
    kept = len(graphs)
    generator = torch.Generator("cuda").manual_seed(3)
    for name, shard in captured.parameter_shards().items():
        noise = 0.02 * torch.randn(shard.tensor.shape, generator=generator, device="cuda")
        eager.parameter_shards()[name].tensor.add_(noise)
        shard.tensor.add_(noise)
    expected = run(eager, requests_of())
    assert_same(run(captured, requests_of()), expected, 5e-5)
    assert len(graphs) == kept
    captured.to_cpu()
    assert len(graphs) == 0
    captured.to_device()
    assert_same(run(captured, requests_of()), expected, 5e-5)
    captured.to_meta()
    assert captured.memory_bytes() == {"weights": 0, "kv_cache": 0}
    captured.load_weights()
    captured.to_device("kv_cache")
    original = run(worker_of(path, False), requests_of())
    assert_same(run(captured, requests_of()), original, 5e-5)
