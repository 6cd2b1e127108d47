"""The experts that SGLang chose, over a server that keeps its contract: asked for, decoded, replayed in training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlite
from rlite import RliteInferenceEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.sglang.replica import BACKEND
from rlite.backends.sglang.server import ServerProcess, SglangOptions
from rlite.data.packs import note_rows
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.types import GenerationHyperparameters, LLMRequest
from tests.contracts import sglang_wheel as wheel
from tests.contracts.test_sglang import installed  # noqa: F401  # an autouse fixture
from tests.integration.rewards import digits
from tests.mixtures import build_mixture_dir
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not wheel.IS_HERE, reason=wheel.REASON)]
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixture_dir(tmp_path_factory.mktemp("models") / "mixture", "qwen3_moe")


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


def routing_of(engine: RliteInferenceEngine) -> tuple[list[int], list[bytes]]:
    """Return the tokens of an answer, and what is known of the experts of the prompt and of these tokens."""
    gconfig = GenerationHyperparameters(max_new_tokens=6, greedy=True, ignore_eos=True)
    made = asyncio.run(engine.agenerate(LLMRequest(input_ids=PROMPT, gconfig=gconfig, extras=(ROUTED,))))
    known = [b""] * (len(PROMPT) + made.output_len)
    note_rows(known, len(PROMPT), made.extras[ROUTED])
    return made.output_tokens, known


def test_returned_experts_are_those_of_the_embedded_engine(mixture: Path) -> None:
    found = {}
    for executor in ("sglang", "torch"):
        engine = RliteInferenceEngine(mixture, executor=executor)
        engine.build(max_model_len=64, max_num_seqs=4, **engine.capabilities.options_for(ROUTED, {}))
        assert ROUTED in engine.extras
        found[executor] = routing_of(engine)
        engine.release()
    assert found["sglang"] == found["torch"]
    assert [bool(row) for row in found["sglang"][1]] == [True] * 10 + [False], "nobody read the last token"


def test_an_engine_that_is_not_asked_for_them_at_build_refuses_the_request(mixture: Path) -> None:
    engine = RliteInferenceEngine(mixture, executor="sglang")
    engine.build(max_model_len=64, max_num_seqs=4)
    with pytest.raises(ConfigError, match="routed_experts"):
        routing_of(engine)


def test_a_dense_model_has_none(tmp_path: Path) -> None:
    engine = RliteInferenceEngine(build_model_dir(tmp_path / "qwen2", "qwen2"), executor="sglang")
    with pytest.raises(ConfigError, match="no experts whose choice could be recorded"):
        engine.build(max_model_len=64, enable_return_routed_experts=True)


def test_a_running_server_has_to_return_them(mixture: Path) -> None:
    (asked, obstacle), addresses = BACKEND.capabilities.optional_extras[ROUTED], {"addresses": ["http://127.0.0.1:1"]}
    assert "enable_return_routed_experts=true beside addresses says that they do" in obstacle(addresses)
    assert not obstacle({**addresses, asked: True})
    process = ServerProcess("127.0.0.1", {"model_path": str(mixture), "dtype": "float32"}, "its key", [])
    process.wait_until_ready(60)
    engine = RliteInferenceEngine(mixture, executor="sglang")
    with pytest.raises(ConfigError, match=r"the server at http.* was started without it"):
        engine.build(addresses=[process.endpoint.url], api_key="its key", enable_return_routed_experts=True)
    process.stop()


def test_an_sglang_without_the_argument_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlite.backends.sglang.server.server_arguments", frozenset)
    with pytest.raises(ConfigError, match="the installed SGLang does not record them"):
        SglangOptions(enable_return_routed_experts=True)


def test_auto_replays_the_experts_of_sglang(mixture: Path, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{number}+1="}]} for number in range(4)]
    sampling = SamplingOptions(max_new_tokens=8)
    config = PpoConfig(
        actor=ActorOptions(model_name=str(mixture), lr=1e-4),
        train_data=PromptOptions(prompts_per_rollout=2, responses_per_prompt=2),
        rollout=RolloutOptions(
            executor="sglang", train_sampling_params=sampling, max_model_len=64, dynamic_filtering=False
        ),
        trainer=TrainerOptions(save_dir=str(tmp_path / "run"), total_steps=2),
    )
    run = PpoTrainer(config, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), rows)
    told = {"routing replay": "the engine's choice of experts (the engine returns them)"}
    assert run.parts.device_plan.routing.topic() == told
    run.fit()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [row for row in metrics if "loss" in row]
    assert [row["routing_recorded"] for row in metrics] == [1.0, 1.0]
    assert all(row["moe/replay_differs"] == 0.0 for row in metrics)
