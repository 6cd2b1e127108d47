"""Log-probabilities of prompts by the embedded worker: in packs, in pieces, beside requests that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker, pieces
from rlite.errors import DataError, NonFiniteError, ResidencyError
from rlite.types import GenerationHyperparameters, SequenceRequest
from tests.tiny import build_model_dir

PROMPTS = [list(range(1, 40)), [5], [7, 8], [], [200, 3] * 20, [9, 9, 9]]
WINDOW = {"sliding_window": 8, "head_dim": 16}


def worker_of(path: Path, **options: Any) -> EmbeddedWorker:
    return EmbeddedWorker(str(path), EmbeddedOptions(max_model_len=64, max_num_seqs=4, **options), torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "config", "dtype"),
    [
        ("qwen2", {}, None),
        ("llama", {}, "float64"),
        ("mistral", WINDOW, None),
        ("granite", {"logits_scaling": 3.0}, None),
    ],
)
@pytest.mark.parametrize("max_prefill_tokens", [4096, 7])
def test_they_are_those_of_the_model_wherever_prompts_are_cut(
    tmp_path: Path, kind: Any, config: dict[str, Any], dtype: str | None, max_prefill_tokens: int
) -> None:
    path = build_model_dir(tmp_path / kind, kind, hidden=64, **config)
    found = worker_of(path, dtype=dtype, max_prefill_tokens=max_prefill_tokens).prompt_logprobs(PROMPTS, 2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto").eval()
    for prompt, scored in zip(PROMPTS, found, strict=True):
        assert len(scored.logprobs) == len(scored.top_ids) == len(scored.top_logprobs) == max(len(prompt) - 1, 0)
        if len(prompt) < 2:
            continue
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert scored.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert scored.top_ids == logprobs.topk(2).indices.tolist()
        assert torch.tensor(scored.top_logprobs).numpy() == pytest.approx(logprobs.topk(2).values.numpy(), abs=1e-5)


def test_pieces_cover_every_token_but_the_last_once_and_cut_prompts_only_when_full() -> None:
    cut = list(pieces(PROMPTS, 7, is_alone=False))
    assert [sum(c.stop - c.start for c in piece) for piece in cut[:-1]] == [7] * (len(cut) - 1)
    assert all(chunk.start == 0 for piece in cut for chunk in piece[1:])
    for index, prompt in enumerate(PROMPTS):
        assert [token for piece in cut for c in piece if c.row == index for token in c.tokens] == prompt[:-1]
    assert all(len({chunk.row for chunk in piece}) == 1 for piece in pieces(PROMPTS, 7, is_alone=True))


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])  # one that is computed in any shape, and one in fixed shapes
def test_deterministic_ones_have_the_same_bits_beside_any_other_prompts(tmp_path: Path, kind: Any) -> None:
    worker = worker_of(build_model_dir(tmp_path / kind, kind, hidden=64), deterministic=True)
    together = worker.prompt_logprobs(PROMPTS, 1)
    assert [worker.prompt_logprobs([prompt], 1)[0] for prompt in PROMPTS] == together


def test_requests_that_run_go_on_as_if_no_prompt_had_been_scored(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "qwen2", hidden=64)
    gconfig = GenerationHyperparameters(max_new_tokens=12, greedy=True, ignore_eos=True)
    request = SequenceRequest(request_id=1, input_ids=[1, 2, 3], gconfig=gconfig, seed=0)
    [expected] = worker_of(path).advance([request], [], 20)
    worker = worker_of(path)
    [first] = worker.advance([request], [], 5)
    worker.prompt_logprobs(PROMPTS, 1)
    [rest] = worker.advance([], [], 20)
    assert first.token_ids + rest.token_ids == expected.token_ids
    assert first.logprobs + rest.logprobs == expected.logprobs


def test_a_prompt_that_is_too_long_or_not_finite_and_weights_that_are_away_are_errors(tmp_path: Path) -> None:
    worker = worker_of(build_model_dir(tmp_path / "qwen2", hidden=64))
    assert len(worker.prompt_logprobs([[1] * 64], 0)[0].logprobs) == 63
    with pytest.raises(DataError, match="the prompt has 65 tokens, max_model_len=64"):
        worker.prompt_logprobs([[1] * 65], 0)
    shards = worker.parameter_shards()
    shards["model.layers.0.mlp.down_proj.weight"].tensor.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"prompt 1: its logits are not finite in torch\.float32"):
        worker.prompt_logprobs([[1], [1, 2]], 0)
    worker.to_cpu()
    with pytest.raises(ResidencyError, match="weights"):
        worker.prompt_logprobs([[1, 2]], 0)
