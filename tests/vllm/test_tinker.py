"""`rlite tinker executor=vllm`: what the real client trains, the real vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlite.errors import ConfigError
from tests.tinker.client import client_package, counting, datum
from tests.tinker.commands import TOKEN, free_port, server
from tests.tiny import build_model_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(840),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning:tinker"),
]
PROMPT = [3, 4, 5]
LORA = "executor_options={enable_lora: true, max_lora_rank: 8, max_loras: 2}"
SIZES = ("max_model_len=64", "max_num_seqs=8")


def sampled(sampler: Any, num: int = 12) -> tuple[list[int], list[float]]:
    """Tokens of one sample, and their log-probabilities."""
    types = client_package().types
    params = types.SamplingParams(max_tokens=num, temperature=1.0, seed=7, stop=[])
    (found,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    return list(found.tokens), list(found.logprobs)


def of_trainer(client: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities of an answer, as training computes them."""
    row = [*PROMPT, *tokens]
    given = datum(row[:-1], row[1:], weights=[1.0] * (len(row) - 1))
    found = client.forward([given], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    return list(found)[len(PROMPT) - 1 :]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], r"build it with enable_lora=True, and with max_lora_rank and max_loras"),
        (["executor_options={enable_lora: true}"], "max_loras=1, vLLM's default"),
        (["deterministic=true", LORA], "deterministic=true: executor=vllm computes other bits"),
        (["max_model_len=64", "executor_options={enable_lora: true, max_model_len: 32}"], "max_model_len"),
        (["executor=remote"], "the executor 'remote' does not offer this"),
    ],
)
def test_options_that_vllm_cannot_serve_tenants_with_are_refused_before_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], told: str
) -> None:
    client_package()
    from rlite.assembly.commands.tinker import main

    monkeypatch.setenv("RLITE_TINKER_TOKEN", TOKEN)
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=64)
    executor = [] if any(each.startswith("executor=") for each in given) else ["executor=vllm"]
    with pytest.raises(ConfigError, match=told):
        main(["--model", str(model), f"folder={tmp_path / 'state'}", *executor, *given])
    assert not (tmp_path / "state").exists()


@pytest.mark.nightly
def test_vllm_serves_a_tenants_adapter_as_it_is_trained(tmp_path: Path) -> None:
    tinker = client_package()
    types, port = tinker.types, free_port()
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=128)
    with (
        server(model, tmp_path / "state", port, "executor=vllm", LORA, *SIZES, deterministic=False),
        tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=TOKEN) as service,
    ):
        base = service.create_sampling_client(base_model=str(model)).result()
        before = sampled(base)
        samplers = []
        for seed in range(3):  # more than vLLM has places for
            client = service.create_lora_training_client(str(model), rank=4, seed=seed).result()
            for _ in range(2):
                client.forward_backward(counting(8, start=seed), "cross_entropy").result()
                client.optim_step(types.AdamParams(learning_rate=3e-2)).result()
            sampler = client.save_weights_and_get_sampling_client().result()
            tokens, logprobs = sampled(sampler)
            assert logprobs == pytest.approx(of_trainer(client, tokens), abs=1e-5)
            scored = sampler.compute_logprobs(types.ModelInput.from_ints([*PROMPT, *tokens])).result()
            assert scored[len(PROMPT) :] == pytest.approx(logprobs, abs=1e-5)
            samplers.append((sampler, tokens, logprobs))
        for sampler, tokens, logprobs in samplers:
            again = sampled(sampler)
            assert again[0] == tokens
            assert again[1] == pytest.approx(logprobs, abs=1e-5)
        assert len({tuple(tokens) for _, tokens, _ in samplers} | {tuple(before[0])}) == 4, "each has learnt its own"
        assert sampled(base)[0] == before[0]
        with pytest.raises(tinker.BadRequestError, match=r"lora_config\.rank=16: .*above max_lora_rank=8"):
            service.create_lora_training_client(str(model), rank=16).result()
