"""`executor="remote"` over a real vLLM server that the user owns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite import RliteInferenceEngine
from rlite.errors import DataError
from tests.marks import nightly
from tests.tiny import build_model_dir
from tests.vllm.processes import KEY, user_server

pytestmark = pytest.mark.timeout(840)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", hidden=64, head_dim=32)


@pytest.fixture(scope="module")
def local(path: Path) -> Iterator[RliteInferenceEngine]:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(path)
    engine.build(max_model_len=256)
    yield engine
    rlite.shutdown()


@pytest.fixture(params=["raw_logprobs", *nightly("processed_logprobs")])
def address(path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    with user_server(path, "--logprobs-mode", request.param, "--enable-scale-out") as url:
        yield url


def test_vllm_answers_greedily_as_the_local_engine_and_tells_how_it_counts(
    address: str, path: Path, local: RliteInferenceEngine, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    monkeypatch.setenv("RLITE_REMOTE_KEY", KEY)
    engine = RliteInferenceEngine(path, executor="remote")
    engine.build(addresses=[address], start_timeout_s=240.0, colocate_with=local)
    greedy, prompts = {"temperature": 0, "max_new_tokens": 24}, [[5, 6, 7], [8, 9]]
    for theirs, own in zip(engine.generate(prompts, greedy), local.generate(prompts, greedy), strict=True):
        assert theirs.outputs[0].token_ids == own.outputs[0].token_ids
        assert theirs.outputs[0].logprobs == pytest.approx(own.outputs[0].logprobs, abs=1e-3)
    warm = {"temperature": 0.5, "seed": 1, "max_new_tokens": 8}
    if "raw" in request.node.name:
        with pytest.raises(DataError, match="at temperature 1"):
            engine.generate(prompts, warm)
    else:
        (answer, _) = engine.generate(prompts, warm)
        from_local = local.prompt_logprobs([[*prompts[0], *answer.outputs[0].token_ids]])
        assert len(answer.outputs[0].logprobs) == 8
        assert from_local
    engine.release()
