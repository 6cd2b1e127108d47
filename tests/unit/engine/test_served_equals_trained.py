"""deterministic=true: served log-probabilities are those of training, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlite.algorithms import gather_logprobs, next_token
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.data.packs import lazy_pack as pack
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.integration.modules import POLICIES, make_batch
from tests.tiny import Kind, build_model_dir
from tests.unit.engine.test_embedded_worker import run

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"hidden": 64}),
    "qwen3": ("qwen3", {"hidden": 256, "tie": False, "vocab_size": 1000}),
    "llama": ("llama", {"hidden": 64, "tie": False, "attention_bias": True, "mlp_bias": True}),
    "one head of keys": ("qwen3", {"hidden": 96, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 261}),
    "equal heads": ("llama", {"hidden": 128, "num_key_value_heads": 4, "intermediate_size": 250}),
    "wide": ("qwen2", {"hidden": 512, "layers": 1, "vocab_size": 5003, "num_attention_heads": 8}),
}
OFTEN = ("qwen2", "llama", "one head of keys")
"""shapes of every run of the tests"""


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: build_model_dir(root / name, kind, **shape) for name, (kind, shape) in SHAPES.items()}


def trained_module(path: Path, kind: Kind) -> HuggingFaceFsdp2TrainModule:
    module: HuggingFaceFsdp2TrainModule = POLICIES[kind].from_pretrained(path)
    module.check_deterministic("cpu")
    module.make_deterministic()
    return module


def serve(path: Path, requests: Sequence[SequenceRequest], max_steps: int, **options: Any) -> dict[int, TokenChunk]:
    defaults = {"max_model_len": 256, "max_num_seqs": 24, "deterministic": True, "dtype": "float32"}
    return run(EmbeddedWorker(str(path), EmbeddedOptions(**{**defaults, **options}), CPU), list(requests), max_steps)


def requests_of(draw: random.Random, num: int, temperature: float, vocab_size: int) -> list[SequenceRequest]:
    """Prompts of 1 to 140 tokens, some of them twice, and answers of 1 to 100 tokens."""
    made: list[SequenceRequest] = []
    for number in range(num):
        ids = [draw.randrange(min(vocab_size, 256)) for _ in range(draw.randint(1, 140))]
        if made and draw.random() < 0.2:
            ids = draw.choice(made).input_ids
        gconfig = GenerationHyperparameters(
            max_new_tokens=draw.randint(1, 100), temperature=temperature, ignore_eos=True
        )
        made.append(SequenceRequest(request_id=number, input_ids=ids, gconfig=gconfig, seed=number))
    return made


def batch_of(requests: Sequence[SequenceRequest], chunks: dict[int, TokenChunk]) -> tuple[dict[str, Tensor], Tensor]:
    """The sequences as a batch, and the served log-probability of each token, 0 for the prompts."""
    rows = [[*request.input_ids, *chunks[request.request_id].token_ids] for request in requests]
    batch = make_batch([len(row) for row in rows])
    served = torch.zeros(batch["input_ids"].shape)
    for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
        batch["input_ids"][index, : len(row)] = torch.tensor(row)
        served[index, len(request.input_ids) : len(row)] = torch.tensor(chunks[request.request_id].logprobs)
    return batch, served


def assert_equal_bits(found: Tensor, data: dict[str, Any]) -> None:
    """Compare log-probabilities `[T]` of next tokens with `data["logprobs"]`, at the generated tokens."""
    served = next_token(data["logprobs"], data["cu_seqlens"])
    is_generated = served != 0
    assert is_generated.any()
    assert torch.equal(found[is_generated], served[is_generated])


@pytest.mark.parametrize(
    ("name", "num_threads"),
    [
        *(pytest.param(name, (1, 1), marks=[pytest.mark.nightly] * (name not in OFTEN)) for name in SHAPES),
        ("qwen3", (2, 1)),
        pytest.param("equal heads", (1, 2), marks=pytest.mark.nightly),
    ],
)
def test_served_logprobs_are_those_of_training(
    models: dict[str, Path], threads: Callable[[int], None], name: str, num_threads: tuple[int, int]
) -> None:
    kind, shape = SHAPES[name]
    draw = random.Random(name)
    threads(num_threads[1])
    module = trained_module(models[name], kind)
    for temperature in (1.0, 0.7):
        requests = requests_of(draw, 14, temperature, shape.get("vocab_size", 256))
        limits = {"max_num_seqs": draw.choice([3, 8, 24]), "max_prefill_tokens": draw.choice([50, 4096])}
        threads(num_threads[0])
        batch, served = batch_of(requests, serve(models[name], requests, draw.choice([3, 1000]), **limits))
        threads(num_threads[1])
        order = draw.sample(range(len(requests)), len(requests))
        while order:
            num = draw.randint(1, 6)
            rows, order = order[:num], order[num:]
            data = pack({**batch, "logprobs": served}, rows, CPU)
            with torch.no_grad():
                found = module.compute_logprobs(data, temperature).logprobs
                assert_equal_bits(found, data)
                if shape.get("vocab_size", 0) < 4096:
                    labels = next_token(data["input_ids"], data["cu_seqlens"])
                    assert_equal_bits(gather_logprobs(module.compute_logits(data), labels, temperature), data)
            wanted = next_token(data["logprobs"], data["cu_seqlens"]) != 0
            with_gradients = module.compute_logprobs(data, temperature, wanted)
            assert_equal_bits(with_gradients.logprobs.detach(), data)


def test_gradients_are_those_of_an_ordinary_forward(models: dict[str, Path]) -> None:
    plain = POLICIES["qwen3"].from_pretrained(models["qwen3"])
    exact = trained_module(models["qwen3"], "qwen3")
    data = pack(make_batch([70, 3, 130, 1, 20]), [0, 1, 2, 3, 4], CPU)
    for module in (plain, exact):
        module.compute_logprobs(data, 0.7).logprobs.mean().backward()
    for (name, ours), theirs in zip(exact.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-3, msg=name)


def test_a_continued_session_and_a_recomputed_cache_have_the_same_bits(models: dict[str, Path]) -> None:
    worker = EmbeddedWorker(
        str(models["qwen2"]), EmbeddedOptions(max_model_len=256, max_num_seqs=4, deterministic=True), CPU
    )
    gconfig = GenerationHyperparameters(max_new_tokens=70, ignore_eos=True)
    first = SequenceRequest(request_id=0, input_ids=list(range(50)), gconfig=gconfig, seed=1)
    answer = run(worker, [first])[0].token_ids
    second = SequenceRequest(request_id=1, input_ids=[*range(50), *answer, 7], gconfig=gconfig, seed=2)
    continued = run(worker, [second])[1]
    assert worker._scheduler.num_reused > 100
    worker.weights_changed(version=1)
    chunks = worker.advance([second], [], 30)
    worker.weights_changed(version=2)
    rest = worker.advance([], [], 1000)
    assert [*chunks[0].logprobs, *rest[0].logprobs] == continued.logprobs


def test_long_sequences_have_the_same_bits(models: dict[str, Path]) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=40, ignore_eos=True)
    requests = [
        SequenceRequest(request_id=n, input_ids=[n * i % 251 for i in range(n * 240)], gconfig=gconfig, seed=n)
        for n in (1, 2, 3, 5)
    ]
    batch, served = batch_of(requests, serve(models["equal heads"], requests, 1000, max_model_len=1280))
    data = pack({**batch, "logprobs": served}, [2, 0, 3, 1], CPU)
    with torch.no_grad():
        assert_equal_bits(trained_module(models["equal heads"], "llama").compute_logprobs(data).logprobs, data)
