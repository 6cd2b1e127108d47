from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.errors import ConfigError, DivergedError
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.integration.worlds import ranks
from tests.tiny import Kind, build_model_dir

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
OPTIONS = EmbeddedOptions(max_model_len=128, max_num_seqs=3)
MODELS: list[tuple[Kind, bool]] = [("qwen2", True), ("qwen3", False), ("llama", True)]


def requests() -> list[SequenceRequest]:
    generator = torch.Generator().manual_seed(1)
    gconfigs = [
        GenerationHyperparameters(max_new_tokens=20, temperature=0),
        GenerationHyperparameters(max_new_tokens=24, temperature=0.8, top_k=30),
    ]
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (3, 25, 11, 1, 40, 11)]
    return [
        SequenceRequest(request_id=i, input_ids=prompt, gconfig=gconfigs[i % 2], seed=i)
        for i, prompt in enumerate(prompts)
    ]


def serve(worker: EmbeddedWorker) -> dict:
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    chunks = worker.advance(requests(), [], 8)
    while True:
        for chunk in chunks:
            tokens.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            logprobs.setdefault(chunk.request_id, []).extend(chunk.logprobs)
        if not (worker._scheduler.waiting or worker._scheduler.running):
            break
        chunks = worker.advance([], [], 8)
    shards = {n: (s.tensor.clone(), s.offset, s.global_shape) for n, s in worker.parameter_shards().items()}
    scores = [(found.logprobs, found.top_ids) for found in worker.prompt_logprobs([[1, 2, 3, 4], [9] * 30], 2)]
    return {"tokens": tokens, "logprobs": logprobs, "scores": scores, "shards": shards, "bytes": worker.memory_bytes()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Results of one process and of two ranks for each model; the ranks are started once, which takes seconds."""
    folder = tmp_path_factory.mktemp("parallel")
    paths = {}
    for kind, tie in MODELS:
        biased = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
        paths[kind] = str(build_model_dir(folder / kind, kind, tie, hidden=64, intermediate_size=191, **biased))
    three = {"num_attention_heads": 3, "num_key_value_heads": 3}
    paths["indivisible"] = str(build_model_dir(folder / "indivisible", "llama", hidden=48, **three))
    with ranks(serve_on_rank, [(rank, paths, str(folder)) for rank in range(2)]):
        pass
    return {"paths": paths, "ranks": [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]}


def serve_on_rank(rank: int, paths: dict[str, str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    made: dict = {kind: serve(EmbeddedWorker(paths[kind], OPTIONS, CPU, dist.group.WORLD)) for kind, _ in MODELS}
    try:
        EmbeddedWorker(paths["indivisible"], OPTIONS, CPU, dist.group.WORLD)
    except ConfigError as error:
        made["refusal"] = str(error)
    made |= overflow(EmbeddedWorker(paths["qwen3"], OPTIONS, CPU, dist.group.WORLD), rank)
    torch.save(made, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def overflow(worker: EmbeddedWorker, rank: int) -> dict:
    """Return the ends of requests after a token overflows the model, and then after a weight does."""
    shards, token = worker.parameter_shards(), 253  # in no prompt
    for name, shard in shards.items():
        if name.endswith("embed_tokens.weight"):
            rows = shard.offset[0] + torch.arange(len(shard.tensor))
            shard.tensor[:, 0] = rows == token
        elif "layers.0.self_attn.v_proj" in name:
            shard.tensor[:, 0] = torch.finfo(torch.float32).max
    first, second = requests()[:2]
    if rank == 1:
        worker._rules.path += "/nowhere"
    chunks = worker.advance([replace(first, gconfig=replace(first.gconfig, stop=("x",)))], [], 64)
    refused = [chunk.error for chunk in chunks]
    chunks = worker.advance([replace(first, input_ids=[1, token]), second], [], 64)
    ends = {chunk.request_id: chunk.error or chunk.finish_reason for chunk in chunks}
    if rank == 1:
        next(shard.tensor for name, shard in shards.items() if "layers.1.mlp.up_proj" in name).fill_(float("nan"))
    try:
        worker.advance([second], [], 8)
    except DivergedError as error:
        return {"ends": ends, "refused": refused, "weights": str(error)}
    return {"ends": ends}


@pytest.mark.parametrize("kind", [kind for kind, _ in MODELS])
def test_two_ranks_generate_what_one_does_with_little_more_than_half_the_memory_each(served: dict, kind: str) -> None:
    expected = serve(EmbeddedWorker(served["paths"][kind], OPTIONS, CPU))
    ranks = [rank[kind] for rank in served["ranks"]]
    for rank in ranks:
        assert rank["tokens"] == expected["tokens"]
        assert rank["bytes"]["weights"] <= 0.6 * expected["bytes"]["weights"]
        assert rank["bytes"]["kv_cache"] <= 0.5 * expected["bytes"]["kv_cache"]
        for request_id, logprobs in expected["logprobs"].items():
            assert rank["logprobs"][request_id] == pytest.approx(logprobs, abs=5e-5)
        for (found, top), (logprobs, others) in zip(rank["scores"], expected["scores"], strict=True):
            assert found == pytest.approx(logprobs, abs=5e-5)
            assert top == others
    # the blocks lie where their offsets say and cover every parameter
    for name, (whole, _, _) in expected["shards"].items():
        covered = torch.full_like(whole, float("nan"))
        for rank in ranks:
            block, offset, global_shape = rank["shards"][name]
            assert global_shape == tuple(whole.shape)
            covered[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))] = block
        assert torch.equal(covered, whole)


def test_key_heads_that_do_not_divide_are_refused_by_every_rank(served: dict) -> None:
    for rank in served["ranks"]:
        assert "num_key_value_heads=3" in rank["refusal"]


def test_nonfinite_values_on_one_rank_end_requests_on_all(served: dict) -> None:
    for rank in served["ranks"]:
        assert "not finite, though the weights are" in rank["ends"][0]
        assert rank["ends"][1] in ("stop", "length")
        assert "of policy version 0 hold NaN or infinity" in rank["weights"]
        (refused,) = rank["refused"]
        assert "stop strings need a tokenizer" in refused, "though rank 0 has one"
