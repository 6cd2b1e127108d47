"""Weights that are served equal the weights that are trained, tied and untied, on one and on two vLLM workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlite import RliteInferenceEngine, RliteTrainEngine
from tests.integration.modules import POLICIES, next_token_logprobs, on_meta
from tests.integration.worlds import MARK, ray_session
from tests.marks import nightly
from tests.tiny import build_model_dir
from tests.vllm.processes import servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]
PROMPTS = [[1, 2, 3], [200, 7, 91, 4, 77, 8], [5]]
NUM_STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2) as mark:
        yield
        assert servers(mark=MARK, value=mark) == [], "a released engine leaves no process"


@pytest.mark.parametrize("size", [*nightly(1), 2])
@pytest.mark.parametrize("kind", ["qwen3", *nightly("llama")])
def test_served_logprobs_equal_the_trainer_s_after_twenty_steps(kind: str, size: int, tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / kind, kind, tie=kind != "llama", hidden=128)
    serve = RliteInferenceEngine(path, executor="vllm")
    serve.build(tensor_parallel_size=size, data_parallel_size=1, max_model_len=128, max_num_seqs=8)
    train = RliteTrainEngine(on_meta(POLICIES[kind], path))
    train.build(tensor_parallel_size=size, data_parallel_size=1, colocate_with=serve)
    serve.generate(PROMPTS, {"max_tokens": 8, "temperature": 0.0})  # fills the prefix cache with old weights
    generator = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        train.train_step(torch.randint(0, 256, (4, 32), generator=generator).tolist())
    report = train.p2p_weight_sync(serve, verify_checksums=True)
    assert report.version == serve.get_version() == 1

    outputs = serve.generate(PROMPTS, {"max_tokens": 24, "temperature": 0.8, "ignore_eos": True, "seed": 1})
    greedy = serve.generate(PROMPTS, {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True})
    prompts = serve.prompt_logprobs([out.prompt_token_ids + out.outputs[0].token_ids for out in outputs])
    for prompt, output, of_prompt in zip(PROMPTS, greedy, prompts, strict=True):
        ids = torch.tensor([prompt + output.outputs[0].token_ids])
        own = train.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, next_token_logprobs)[0]
        served = torch.tensor(output.outputs[0].logprobs)
        torch.testing.assert_close(own[len(prompt) - 1 : -1], served, atol=1e-4, rtol=0)
        assert len(of_prompt) == len(prompt) + 23
    for output, of_prompt in zip(outputs, prompts, strict=True):
        ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
        own = train.forward({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, next_token_logprobs)[0]
        torch.testing.assert_close(own[:-1], torch.tensor(of_prompt), atol=1e-4, rtol=0)
    train.release()
    serve.release()
