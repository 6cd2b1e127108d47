"""Verified weight syncs: every planted fault is found and named, and a sound run is left alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.lora import LoraTrainModule
from rlite.errors import ResidencyError, WeightSyncError
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.faulty_serving import FAULTS
from tests.integration.modules import POLICIES, on_meta
from tests.integration.rewards import digits
from tests.tiny import build_model_dir

ROWS = [{"messages": [{"role": "user", "content": f"{a}+{a}="}]} for a in range(8)]
ALARM = "computes the same log-probabilities"


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1)
    yield
    rlite.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", hidden=64)


def fit(model: Path, folder: Path, steps: int = 2, actor: Mapping[str, Any] = {}, **rollout: Any) -> None:
    sampling = SamplingOptions(max_new_tokens=4)
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=3e-3, **actor),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(train_sampling_params=sampling, max_model_len=64, max_num_seqs=16, **rollout),
        trainer=TrainerOptions(save_dir=str(folder), total_steps=steps, save_freq=8),
    )
    trainer = PpoTrainer(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), ROWS)
    try:
        trainer.fit()
    finally:
        for engine in (trainer.engines.actor, trainer.engines.rollout):
            engine.release()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_verified_sync_names_what_is_served_otherwise(model: Path, fault: str) -> None:
    serve, train = RliteInferenceEngine(model, executor=fault), RliteTrainEngine(on_meta(POLICIES["qwen3"], model))
    serve.build(max_model_len=64, max_num_seqs=4)
    train.build(colocate_with=serve)
    train.train_step([[1, 2, 3, 4, 5, 6]])
    with pytest.raises(WeightSyncError, match=FAULTS[fault]):
        train.p2p_weight_sync(serve, verify_checksums=True)
    with pytest.raises(ResidencyError, match="not written yet"):
        serve.generate([[1, 2, 3]], {"max_tokens": 2})
    train.p2p_weight_sync(serve)  # without the option nobody notices
    serve.release()
    train.release()


@pytest.mark.parametrize("actor", [{}, {"lora": {"rank": 2}}, {"offload_model": True}])
def test_a_sound_run_is_verified_at_every_nth_sync_without_an_alarm(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], actor: dict[str, Any]
) -> None:
    fit(model, tmp_path, steps=3, actor=actor, verify_sync=2)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert ALARM not in capsys.readouterr().out


@pytest.mark.parametrize("actor", [{}, {"lora": {"rank": 2}}], ids=["weights", "adapters"])
def test_a_run_whose_engine_keeps_a_base_weight_ends_at_the_verified_sync(
    model: Path, tmp_path: Path, actor: dict[str, Any]
) -> None:
    with pytest.raises(WeightSyncError, match=r"k_proj\.weight on rollout-"):
        fit(model, tmp_path, steps=4, actor=actor, executor="unwritten", verify_sync=2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1], "the second sync is the first that is verified"


def test_adapters_that_are_not_merged_into_what_is_sent_are_an_alarm(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = super(LoraTrainModule, LoraTrainModule).served_parameter
    monkeypatch.setattr(LoraTrainModule, "served_parameter", lambda self, name, value: served(self, name, value))
    fit(model, tmp_path, actor={"lora": {"rank": 2}}, verify_sync=1)
    told = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert told.count(ALARM) == 2
    assert "steps with updates 1" in told
    assert "adapters not merged" in told


def test_the_loop_of_the_documents_tells_a_sync_that_changes_nothing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "verified-sync.md").read_text()
    (program,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "verify_checksums" in each]
    serve, train = RliteInferenceEngine(model), RliteTrainEngine(on_meta(POLICIES["qwen3"], model))
    serve.build(max_model_len=64, max_num_seqs=4)
    train.build(colocate_with=serve)
    exec(program, {"engine": serve, "train_engine": train})
    assert "version 1 (" in capsys.readouterr().out
    train.train_step([[1, 2, 3, 4, 5, 6]])
    exec(program, {"engine": serve, "train_engine": train})
    assert capsys.readouterr().out == ""
    serve.release()
    train.release()


def test_the_digest_of_what_was_sent_changes_with_the_weights_alone(model: Path) -> None:
    serve, train = RliteInferenceEngine(model), RliteTrainEngine(on_meta(POLICIES["qwen3"], model))
    serve.build(max_model_len=64, max_num_seqs=4, dtype="bfloat16")
    train.build(colocate_with=serve)
    digests = []
    for _ in range(2):
        train.p2p_weight_sync(serve, verify_checksums=True)
        digests.append(serve.proof)
        assert serve.proof is not None
    assert digests[0] == digests[1], "nothing was trained"
    train.train_step(torch.randint(0, 256, (2, 8)).tolist())
    train.p2p_weight_sync(serve, verify_checksums=True)
    assert serve.proof != digests[0]
    serve.release()
    train.release()
