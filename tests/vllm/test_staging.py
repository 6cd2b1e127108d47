"""Syncs to the real vLLM pass through one kept block of host memory, and what vLLM samples has the trainer's values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.runtime.cluster.group import apply_on_processes
from rlite.runtime.parallel import shared_memory
from tests.integration.modules import POLICIES, next_token_logprobs, on_meta
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


@pytest.mark.nightly
def test_three_syncs_take_memory_once_and_sampled_logprobs_are_the_trainer_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Counted(shared_memory.SharedArena):
        def __init__(self, nbytes: int) -> None:
            made.append(nbytes)
            super().__init__(nbytes)

    path = build_model_dir(tmp_path / "qwen3", "qwen3", tie=True, hidden=128)
    serve = RliteInferenceEngine(path, executor="vllm")
    serve.build(max_model_len=128, max_num_seqs=8)
    train = RliteTrainEngine(on_meta(POLICIES["qwen3"], path))
    train.build(colocate_with=serve)
    monkeypatch.setattr("rlite.backends.serving.staging.SharedArena", Counted)
    addresses: list[Any] = []

    def staged(worker: Any) -> dict[str, int]:
        worker.stage(is_near=True)
        return {name: shard.tensor.data_ptr() for name, shard in worker.parameter_shards().items()}

    for _ in range(3):
        train.train_step([list(range(40, 70))])
        train.p2p_weight_sync(serve, verify_checksums=True)
        group = serve.group
        addresses += apply_on_processes([(group, 0, (group.key(0),), ())], staged, [group], "look", 60)
        prompts = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]  # of several lengths, so of several positions
        outputs = serve.generate(prompts, {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True, "seed": 1})
        greedy = serve.generate(prompts, {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True})
        assert [each.outputs[0].token_ids for each in outputs] != [each.outputs[0].token_ids for each in greedy]
        for prompt, output in zip(prompts, greedy, strict=True):
            ids = torch.tensor([prompt + output.outputs[0].token_ids])
            own = train.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, next_token_logprobs)[0]
            told = torch.tensor(output.outputs[0].logprobs)
            torch.testing.assert_close(own[len(prompt) - 1 : -1], told, atol=1e-4, rtol=0)
    assert len(made) == 1, "the second and the third sync allocate nothing"
    assert addresses == [addresses[0]] * 3
    train.release()
    serve.release()
