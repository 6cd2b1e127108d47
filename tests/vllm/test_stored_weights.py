"""Experts reach the real vLLM under their stored names: by a sync, after training too, and from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.nn.pretrained import quiet_transformers
from tests.integration.modules import Policy
from tests.marks import nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]
SHAPE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
IDS = list(range(40, 70))


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=2)
    yield
    rlite.shutdown()


def checkpoint(kind: str, folder: Path, seed: int) -> Any:
    """Write a random model and return it."""
    config = AutoConfig.for_model(kind)
    config = type(config)(**{name: value for name, value in SHAPE.items() if name in vars(config)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
    with quiet_transformers():
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    found = model(torch.tensor([IDS])).logits[0].log_softmax(-1)[:-1]
    return found.gather(1, torch.tensor(IDS)[1:, None])[:, 0]


@pytest.mark.parametrize("kind", ["qwen3_moe", *nightly("gpt_oss")])
def test_served_logprobs_are_those_of_the_weights_that_were_trained_synced_or_loaded(kind: str, tmp_path: Path) -> None:
    one, other = checkpoint(kind, tmp_path / "one", 0), checkpoint(kind, tmp_path / "other", 1)
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(one.config)]

    class Unchecked(Policy, cls):
        def check_architecture(self) -> None:
            pass

    serve = RliteInferenceEngine(tmp_path / "one", executor="vllm")
    serve.build(max_model_len=128, max_num_seqs=4)

    def served() -> Tensor:
        return torch.tensor(serve.prompt_logprobs([IDS])[0][1 - len(IDS) :])

    torch.testing.assert_close(served(), logprobs(one), atol=1e-4, rtol=0)
    with init_empty_weights():
        module = Unchecked.from_pretrained(tmp_path / "other")
    train = RliteTrainEngine(module)
    train.build(colocate_with=serve)
    train.p2p_weight_sync(serve, verify_checksums=True)
    torch.testing.assert_close(served(), logprobs(other), atol=1e-4, rtol=0)
    serve.load(tmp_path / "one")
    torch.testing.assert_close(served(), logprobs(one), atol=1e-4, rtol=0)
    for _ in range(3):
        train.train_step([IDS])
    train.p2p_weight_sync(serve)
    before = logprobs(other)
    other.load_state_dict(train.state_dict())
    assert (logprobs(other) - before).abs().max() > 0.1
    torch.testing.assert_close(served(), logprobs(other), atol=1e-4, rtol=0)
    train.release()
    serve.release()
