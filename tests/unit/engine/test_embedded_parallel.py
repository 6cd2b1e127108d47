from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.worker import EmbeddedWorker
from rlite.errors import ConfigError
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir

CPU = torch.device("cpu")
OPTIONS = EmbeddedOptions(max_model_len=128, max_num_seqs=3)


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
        if not worker.num_unfinished:
            break
        chunks = worker.advance([], [], 8)
    shards = {n: (s.tensor.clone(), s.offset, s.global_shape) for n, s in worker.parameter_shards().items()}
    return {"tokens": tokens, "logprobs": logprobs, "shards": shards, "bytes": worker.memory_bytes()}


def serve_on_rank(rank: int, path: str, folder: str, world_size: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    worker = EmbeddedWorker(path, OPTIONS, CPU, dist.group.WORLD)
    torch.save(serve(worker), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "tie"), [("qwen2", True), ("qwen3", False), ("llama", True)])
def test_two_ranks_generate_what_one_does_with_little_more_than_half_the_memory_each(
    tmp_path: Path, kind: str, tie: bool
) -> None:
    biased = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    path = str(build_model_dir(tmp_path / "model", kind, tie, hidden=64, intermediate_size=191, **biased))
    expected = serve(EmbeddedWorker(path, OPTIONS, CPU))
    mp.spawn(serve_on_rank, (path, str(tmp_path), 2), nprocs=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for rank in ranks:
        assert rank["tokens"] == expected["tokens"]
        assert rank["bytes"]["weights"] <= 0.6 * expected["bytes"]["weights"]
        assert rank["bytes"]["kv_cache"] <= 0.5 * expected["bytes"]["kv_cache"]
        for request_id, logprobs in expected["logprobs"].items():
            assert rank["logprobs"][request_id] == pytest.approx(logprobs, abs=5e-5)
    # the blocks lie where their offsets say and cover every parameter
    for name, (whole, _, _) in expected["shards"].items():
        covered = torch.full_like(whole, float("nan"))
        for rank in ranks:
            block, offset, global_shape = rank["shards"][name]
            assert global_shape == tuple(whole.shape)
            covered[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))] = block
        assert torch.equal(covered, whole)


def build_on_rank(rank: int, path: str, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    try:
        EmbeddedWorker(path, OPTIONS, CPU, dist.group.WORLD)
    except ConfigError as error:
        Path(folder, f"refused{rank}").write_text(str(error))
    dist.destroy_process_group()
    sys.stdout.flush()


def test_key_heads_that_do_not_divide_are_refused_by_every_rank(tmp_path: Path) -> None:
    path = str(build_model_dir(tmp_path / "model", "llama", hidden=48, num_attention_heads=3, num_key_value_heads=3))
    mp.spawn(build_on_rank, (path, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert "num_key_value_heads=3" in (tmp_path / f"refused{rank}").read_text()
