"""Verified weight syncs read back what vLLM computes with: fused, divided over two workers, and packed for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import WeightSyncError
from tests.faulty_serving import TENSOR
from tests.integration.modules import POLICIES, on_meta
from tests.integration.worlds import ray_session
from tests.marks import nightly
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


@pytest.mark.parametrize("size", [2, *nightly(1)])
@pytest.mark.parametrize("kind", ["qwen3", *nightly("llama"), *nightly("qwen2")])
def test_a_verified_sync_names_what_vllm_serves_otherwise(
    kind: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build_model_dir(tmp_path / kind, kind, tie=kind == "qwen3", hidden=128)
    serve = RliteInferenceEngine(path, executor="vllm-faulty")
    serve.build(tensor_parallel_size=size, data_parallel_size=1, max_model_len=128, max_num_seqs=8)
    train = RliteTrainEngine(on_meta(POLICIES[kind], path))
    train.build(tensor_parallel_size=size, data_parallel_size=1, colocate_with=serve)
    train.train_step(torch.randint(0, 256, (4, 32)).tolist())
    for _ in ("flipped", "unwritten"):
        with pytest.raises(WeightSyncError, match=f"^{TENSOR} on inference-[^;]* sent, as it is served$"):
            train.p2p_weight_sync(serve, verify_checksums=True)
    with pytest.raises(WeightSyncError, match="version 2 in place of 3 on inference-"):
        train.p2p_weight_sync(serve, verify_checksums=True)
    train.p2p_weight_sync(serve, verify_checksums=True)
    assert serve.proof is not None
    assert "compared is what it has read" not in caplog.text, "every tensor is read back"
    train.release()
    serve.release()
