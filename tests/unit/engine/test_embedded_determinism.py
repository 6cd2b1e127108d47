"""deterministic=true: a request's bits are its own."""

from __future__ import annotations

import pytest
import torch

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.tiny import Kind, build_model_dir
from tests.unit.engine.test_embedded_worker import run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    kinds: tuple[Kind, ...] = ("qwen2", "qwen3", "llama")
    return {kind: str(build_model_dir(root / kind, kind, hidden=96, initializer_range=0.05)) for kind in kinds}


def make(path: str, **options: object) -> EmbeddedWorker:
    defaults = {"max_model_len": 256, "max_num_seqs": 20, "deterministic": True}
    return EmbeddedWorker(path, EmbeddedOptions(**{**defaults, **options}), CPU)


def request_of(number: int, length: int, **gconfig: object) -> SequenceRequest:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 256, (length,), generator=generator).tolist()
    hyperparameters = GenerationHyperparameters(**{"max_new_tokens": 70, "ignore_eos": True, **gconfig})
    return SequenceRequest(request_id=number, input_ids=ids, gconfig=hyperparameters, seed=1000 + number)


def bits(chunk: TokenChunk) -> tuple:
    return chunk.token_ids, chunk.logprobs, chunk.sampling_logprobs


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen2", "float32"),
        pytest.param("llama", "float32", marks=pytest.mark.nightly),
        pytest.param("qwen3", "float64", marks=pytest.mark.nightly),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_a_request_gets_the_same_bits_in_any_company_and_after_a_restart(
    models: dict[str, str], kind: str, dtype: str
) -> None:
    model_dir = models[kind]
    worker = make(model_dir, dtype=dtype)
    watched = [request_of(0, 70), request_of(1, 5, temperature=0.7, top_p=0.9), request_of(2, 130, greedy=True)]
    neighbours = [request_of(n, 1 + 9 * n, max_new_tokens=2 * n, temperature=1.0 + n / 10) for n in range(3, 22)]
    crowd = run(worker, [*neighbours, *watched])
    bursts = run(worker, [*watched, *neighbours[6:]], max_steps=5)
    restarted = run(make(model_dir, dtype=dtype, max_num_seqs=3, max_prefill_tokens=7), [neighbours[2], *watched])
    for number, request in enumerate(watched):
        alone = bits(run(worker, [request])[number])
        assert len(alone[0]) == 70
        assert bits(run(worker, [*neighbours[:6], request])[number]) == alone, "in a batch of 7"
        assert bits(bursts[number]) == alone, "with others, in other bursts"
        assert bits(crowd[number]) == alone, "among more than there are slots"
        twin = SequenceRequest(request_id=99, input_ids=request.input_ids, gconfig=request.gconfig, seed=5)
        copied = run(worker, [neighbours[9], twin, neighbours[3], request])
        assert bits(copied[number]) == alone, "with a copied prompt"
        assert bits(restarted[number]) == alone, "after a restart, with other limits"


def test_it_makes_the_same_text_as_without(models: dict[str, str]) -> None:
    model_dir = models["qwen3"]
    requests = [request_of(n, 20 * n + 1, greedy=True, max_new_tokens=20) for n in range(6)]
    fixed, free = (
        run(make(model_dir, dtype="float64"), requests),
        run(make(model_dir, dtype="float64", deterministic=False), requests),
    )
    for number, chunk in free.items():
        assert fixed[number].token_ids == chunk.token_ids
        assert fixed[number].logprobs == pytest.approx(chunk.logprobs, abs=1e-9)
