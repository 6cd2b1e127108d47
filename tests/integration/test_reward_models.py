"""Reward models as engines: the scores of transformers, PPO that learns from them, and evaluation by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import rlite
from rlite.assembly.evaluate.command import main
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.errors import ConfigError
from rlite.rollout import RewardFunction, SingleTurnWorkflow
from rlite.rollout.rewards.models import RewardModel
from rlite.trainer import ppo
from rlite.trainer.rl.reward_engines import RewardEngines
from tests.tiny import build_model_dir
from tests.unit.rollout.rewards.test_reward_models import scorer


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        prompt, answer = (
            torch.randint(5, 250, (n,), generator=generator).tolist() for n in (3 + number % 5, number % 7)
        )
        made.append({"prompt": "", "completions": "", "prompt_ids": prompt, "completion_ids": answer})
    return made


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_scores_are_those_of_transformers_however_they_are_batched(tmp_path: Path, is_deterministic: bool) -> None:
    path = scorer(tmp_path, num_hidden_layers=2)
    model = RewardModel(path)
    reward = RewardFunction(model, in_process=True, batch_size=8)
    asked = [(SingleTurnWorkflow(reward, {"max_new_tokens": 8}, byte_tokenizer()), [{"prompt": "a"}], "train_data")]
    rlite.init(num_devices=1, launcher="inprocess")
    engines = RewardEngines.of(asked, 64, is_deterministic)
    engines.build_apart(2, 0)
    policy = rlite.RliteInferenceEngine(str(build_model_dir(tmp_path / "policy", hidden=32)), executor="torch")
    policy.build(max_model_len=64)
    engines.build_beside(policy, 1, 0)
    given = rows(20)

    async def together() -> list[float]:
        return await asyncio.gather(*(reward(**row) for row in given))

    async def alone() -> list[float]:
        return [await reward(**row) for row in given]

    batched, single = asyncio.run(together()), asyncio.run(alone())
    direct = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    direct.config.pad_token_id = None
    with torch.no_grad():
        ids = [torch.tensor([row["prompt_ids"] + row["completion_ids"]]) for row in given]
        theirs = [direct(input_ids=each).logits[0, 0].item() for each in ids]
    assert batched == pytest.approx(theirs, abs=1e-5)
    assert single == (batched if is_deterministic else pytest.approx(batched, abs=1e-5))
    assert len({round(score, 3) for score in theirs}) > 10


def command(folder: Path, steps: int, *options: str) -> list[str]:
    model, judge = folder / "model", folder / "rm"
    if not model.exists():
        build_model_dir(model, hidden=64, max_position_embeddings=64)
        scorer(judge, hidden_size=64, intermediate_size=128, initializer_range=0.3)
        data = [{"prompt": f"{n}: "} for n in range(8)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return [
        *(f"actor.model_name={model}", f"train_data.path={folder / 'prompts.jsonl'}", f"reward.rm.model={judge}"),
        *("train_data.prompts_per_rollout=8", "train_data.responses_per_prompt=8", "actor.lr=3e-3"),
        *("rollout.train_sampling_params.max_new_tokens=8", f"trainer.save_dir={folder / 'run'}"),
        *("launcher=inprocess", "num_devices=1", f"trainer.total_steps={steps}", "trainer.save_freq=2", *options),
    ]


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_ppo_raises_the_score_of_a_reward_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ppo.main(command(tmp_path, 12, "adv.norm_var=true"))
    found = [step["reward"] for step in logged(tmp_path / "run")]
    assert sum(found[-3:]) / 3 > sum(found[:3]) / 3 + 0.1
    told = capsys.readouterr()
    assert "on the devices of the rollouts, reads the policy's tokens" in " ".join((told.out + told.err).split())


@pytest.mark.nightly
def test_a_deterministic_run_with_a_reward_model_resumes_with_the_same_bits(tmp_path: Path) -> None:
    exact = ("rollout.deterministic=true",)
    ppo.main(command(tmp_path, 4, *exact))
    whole = [step["reward"] for step in logged(tmp_path / "run")]
    rlite.shutdown()
    other = (*exact, f"trainer.save_dir={tmp_path / 'parts'}")
    ppo.main(command(tmp_path, 2, *other))
    rlite.shutdown()
    ppo.main(command(tmp_path, 4, *other))
    assert [step["reward"] for step in logged(tmp_path / "parts")] == whole


def test_a_reward_model_of_a_shorter_context_is_refused_before_work_starts(tmp_path: Path) -> None:
    given = command(tmp_path, 1, "rollout.max_model_len=128")
    build_model_dir(tmp_path / "model", hidden=64)
    with pytest.raises(ConfigError, match=r"reward.model=.*reads at most 64 tokens"):
        ppo.main(given)
    assert not (tmp_path / "run").exists()


def test_one_device_is_not_shared_and_own_at_the_same_time(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward models take 1 devices of their own, and there are 1 in all"):
        ppo.main(command(tmp_path, 1, "reward.rm.num_devices=1"))


def test_an_evaluation_scores_by_a_reward_model_and_goes_on_with_the_same_model_alone(tmp_path: Path) -> None:
    command(tmp_path, 1)
    given = [str(tmp_path / "model"), "--data", str(tmp_path / "prompts.jsonl"), "--samples", "2"]
    given += [f"reward.model={tmp_path / 'rm'}", "max_new_tokens=8", f"out={tmp_path / 'eval'}", "num_devices=1"]
    main(given)
    scores = [
        json.loads(line) for line in next((tmp_path / "eval" / "samples").glob("*.jsonl")).read_text().splitlines()
    ]
    assert len([line for line in scores if line.get("status") == "evaluated"]) == 16
