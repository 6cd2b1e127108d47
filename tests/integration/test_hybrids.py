"""Models with layers that carry a state are trained and served on real processes as transformers computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Lfm2ForCausalLM, Qwen3_5ForCausalLM

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError
from rlite.nn import HuggingFaceFsdp2TrainModule, LoraOptions
from rlite.nn.options import ALL_LINEAR
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests.hybrids import hybrid, save_hybrid
from tests.integration.modules import make_batch, next_token_logprobs, num_counted, on_meta, token_loss
from tests.integration.worlds import world

LENGTHS = [9, 70, 13, 1, 7, 6, 5]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"max_tokens_per_microbatch": 72, "gradient_checkpointing": True},
    {"size": 2},
    {"size": 2, "gradient_checkpointing": True},
    {"copies": 2, "max_tokens_per_microbatch": 72},
]


class Descending(HuggingFaceFsdp2TrainModule):
    """Plain gradient descent, whose weights show gradients without scaling them."""

    def on_weights_materialized(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.5)


class Qwen3_5Policy(Descending, Qwen3_5ForCausalLM):
    pass


class Lfm2Policy(Descending, Lfm2ForCausalLM):
    pass


POLICIES = {"qwen3_5_text": Qwen3_5Policy, "lfm2": Lfm2Policy}
Build = Callable[..., RliteTrainEngine]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with world(2):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {kind: save_hybrid(hybrid(kind), root / kind) for kind in POLICIES}


@pytest.fixture
def build(folders: dict[str, Path]) -> Iterator[Build]:
    built = []

    def build_engine(kind: str, size: int = 1, copies: int = 1, **options: Any) -> RliteTrainEngine:
        engine = RliteTrainEngine(on_meta(POLICIES[kind], folders[kind]))
        engine.build(tensor_parallel_size=size, data_parallel_size=copies, **options)
        built.append(engine)
        return engine

    yield build_engine
    for engine in built:
        engine.release()


def descended(kind: str) -> dict[str, Tensor]:
    """Weights after one step on the batch, whose rows the plain model reads one after the other."""
    model, batch = hybrid(kind).double(), make_batch(LENGTHS)
    losses = []
    for ids, length in zip(batch["input_ids"], LENGTHS, strict=True):
        if length > 1:
            logits = model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:length], reduction="sum"))
    (sum(losses) / num_counted(batch)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert norm > 0
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.nightly)])
def test_any_layout_gives_the_weights_of_the_plain_model(build: Build, kind: str) -> None:
    expected = descended(kind)
    for layout in LAYOUTS:
        engine = build(kind, **layout, param_dtype="float64")
        engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
        weights = engine.state_dict()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-7, rtol=1e-6, msg=f"{layout} {name}")
        engine.release()


@pytest.mark.parametrize("kind", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.nightly)])
def test_trained_weights_are_served_with_the_trainer_s_log_probabilities(build: Build, kind: str, folders: Any) -> None:
    engine = build(kind, size=2)
    engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    serve = RliteInferenceEngine(folders[kind])
    serve.build(data_parallel_size=1, colocate_with=engine, max_model_len=128, max_num_seqs=3, max_prefill_tokens=32)
    engine.p2p_weight_sync(serve, verify_checksums=True)
    prompts = [row[:length].tolist() for row, length in zip(make_batch(LENGTHS)["input_ids"], LENGTHS, strict=True)]
    outputs = [out.outputs[0] for out in serve.generate(prompts, {"max_tokens": 9, "ignore_eos": True, "seed": 1})]
    serve.release()
    batch = make_batch([length + 9 for length in LENGTHS])
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        batch["input_ids"][row, : len(prompt) + 9] = torch.tensor([*prompt, *output.token_ids])
    found = engine.forward(batch, next_token_logprobs)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        expected = found[row, len(prompt) - 1 : len(prompt) + 8]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=2e-4, rtol=0)


@pytest.mark.nightly
def test_adapters_on_the_layers_of_a_mixer_are_trained_alone(folders: dict[str, Path]) -> None:
    lora = LoraOptions(rank=4, target_modules=[ALL_LINEAR])
    options = OptimizerOptions(lr=1e-2, weight_decay=0.0, scheduler="constant", warmup_steps=0, total_steps=10)
    engine = RliteTrainEngine(policy_module(folders["qwen3_5_text"], options, lora))
    engine.build(tensor_parallel_size=2, data_parallel_size=1)
    before = engine.state_dict()
    engine.train_batch(make_batch(LENGTHS), token_loss, num_counted)
    after = engine.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {f"model.layers.0.linear_attn.{name}.weight" for name in ("in_proj_qkv", "in_proj_a", "out_proj")} <= changed
    assert not any("conv1d" in name or "norm" in name for name in changed)
    engine.release()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sp_size": 2}, r"sp_size=2: Qwen3_5GatedDeltaNet carries a state .* use sp_size=1"),
        ({"tp_size": 2}, r"tp_size=2: Qwen3_5GatedDeltaNet carries a state .* use tp_size=1"),
        ({"deterministic": True}, "Qwen3_5GatedDeltaNet sums the past in chunks of tokens when it trains"),
    ],
)
def test_what_a_state_rules_out_is_refused_before_work_starts(build: Build, options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build("qwen3_5_text", size=2, **options)


def test_a_served_state_is_not_split(folders: dict[str, Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2: Lfm2ShortConv carries .* use tensor_parallel_size=1"
    ):
        RliteInferenceEngine(folders["lfm2"]).build(tensor_parallel_size=2)
