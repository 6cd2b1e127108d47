"""Judges on engines of the run: asked beside the policy, on shared devices or on their own, by the same rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.assembly.evaluate.command import main
from rlite.assembly.quickstart.run import CHATML
from rlite.errors import ConfigError, RliteError
from rlite.rollout import SingleTurnWorkflow
from rlite.rollout.failures import RewardInvalid
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.options import JudgeOptions, RewardOptions
from rlite.trainer.rl.reward_engines import RewardEngines
from tests.agents import tokenizer_with
from tests.integration.worlds import kill, process_of, ray_session
from tests.tiny import build_model_dir

ROW: dict[str, Any] = {"prompt": "2+2=", "answer": "4"}


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def judge_dir(folder: Path, has_template: bool = True, hidden: int = 32, **config: Any) -> str:
    build_model_dir(folder, hidden=hidden, **{"max_position_embeddings": 1024, **config})
    tokenizer = tokenizer_with(CHATML)
    tokenizer.save_pretrained(folder)
    if not has_template:
        (folder / "chat_template.jinja").unlink()
    return str(folder)


def chosen(model: str, **own: Any) -> ChosenRewards:
    num_devices = own.pop("num_devices", None)
    judge = {"model": model, "rubric": "Is it {answer}?", "max_new_tokens": 8, **own}
    return ChosenRewards({"style": RewardOptions(judge=judge, num_devices=num_devices)}, {})


def workflow(rewards: ChosenRewards) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(rewards.make(), {"max_new_tokens": 4}, tokenizer_with(CHATML))


def served(made: SingleTurnWorkflow, is_deterministic: bool = False) -> RewardEngines:
    return RewardEngines.of([(made, [ROW], "train_data")], 64, is_deterministic)


def test_a_judge_on_an_engine_reads_the_same_question_and_is_parsed_as_strictly(tmp_path: Path) -> None:
    made = workflow(chosen(judge_dir(tmp_path / "judge")))
    engines = served(made)
    [judge] = engines.judges.values()
    rlite.init(num_devices=1, launcher="inprocess")
    policy = rlite.RliteInferenceEngine(str(build_model_dir(tmp_path / "policy", hidden=32)), executor="torch")
    policy.build(max_model_len=64)
    engines.build_beside(policy, 1, 0)
    arguments = {**ROW, "completions": "4", "prompt_ids": [1], "completion_ids": [2]}
    told = []
    for _ in range(2):
        with pytest.raises(RewardInvalid, match="no score: the judge's last line is") as raised:
            asyncio.run(made.reward_fn(**arguments))
        told.append(str(raised.value))
    assert told[0] == told[1]  # greedy
    question = judge.judges[0].question(arguments)
    greedy = {"temperature": 0.0, "max_new_tokens": 8}
    direct = judge.engine.chat(question, greedy).outputs[0].text
    assert "Is it 4?" in question
    assert asyncio.run(judge.judges[0].ask(question)) == direct  # type: ignore[misc]
    assert "judge" in engines.topic()["reward models"]


def test_a_score_of_an_engine_is_a_reward(tmp_path: Path) -> None:
    made = workflow(chosen(judge_dir(tmp_path / "judge"), lowest=-1.0))
    [judge] = [each for engine in served(made).judges.values() for each in engine.judges]

    async def reply(text: str) -> str:
        return "Short.\nScore: -0.5"

    judge.ask = reply
    score = made.reward_fn(**ROW, completions="4", prompt_ids=[1], completion_ids=[2])
    assert asyncio.run(score) == -0.5


@pytest.mark.parametrize(
    ("model", "own", "told"),
    [
        ({"has_template": False}, {}, "no chat template"),
        ({"max_position_embeddings": 64}, {}, "row index 0: reward.judge: .* and the judge reads 64"),
        ({}, {"max_model_len": 100}, "the judge reads 100"),
        ({}, {"options": {"temperature": 0.5}}, "deterministic=true needs 0"),
        ({}, {"options": {"reasoning_effort": "low"}}, "unknown sampling parameter"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_work_starts(
    tmp_path: Path, model: dict[str, Any], own: dict[str, Any], told: str
) -> None:
    with pytest.raises(RliteError, match=told):
        served(workflow(chosen(judge_dir(tmp_path, **model), **own)), is_deterministic=True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"key_env": "KEY"}, "key_env is an option of a judge on a server"),
        ({"url": "http://host/v1", "tp_size": 2}, "tp_size is an option of a judge on an engine"),
    ],
)
def test_options_of_the_other_place_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        JudgeOptions(**{"model": "m", "rubric": "r", **given})


def test_judges_of_one_checkpoint_share_an_engine_and_other_options_make_another(tmp_path: Path) -> None:
    model = judge_dir(tmp_path)
    asked = [(workflow(chosen(model, rubric=text)), [ROW], "train_data") for text in ("a", "b")]
    found = RewardEngines.of([*asked, (workflow(chosen(model, max_num_seqs=2)), [ROW], "test_data")], 64, False)
    assert sorted(len(engine.judges) for engine in found.judges.values()) == [1, 2]


def test_an_evaluation_asks_a_judge_on_an_engine_and_names_replies_without_a_score(tmp_path: Path) -> None:
    model = str(build_model_dir(tmp_path / "model", hidden=32, max_position_embeddings=64))
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    given = [model, "--data", str(tmp_path / "rows.jsonl"), f"reward.style.judge.model={judge_dir(tmp_path / 'judge')}"]
    given += ["reward.style.judge.rubric=Is it {answer}?", "reward.style.judge.max_new_tokens=8", "num_devices=1"]
    with pytest.raises(Exception, match="the judge's last line is"):
        main([*given, "max_new_tokens=4", f"out={tmp_path / 'eval'}"])


@pytest.mark.nightly
@pytest.mark.slow
def test_a_judge_has_devices_of_its_own(tmp_path: Path) -> None:
    made = workflow(chosen(judge_dir(tmp_path), num_devices=1))
    engines = served(made)
    with ray_session(2):
        assert engines.build_apart(2, 0) == 1
        assert "on 1 device of its own" in engines.topic()["reward models"]
        with pytest.raises(RewardInvalid, match="last line"):
            asyncio.run(made.reward_fn(**ROW, completions="4", prompt_ids=[1], completion_ids=[2]))
        engines.release()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_judge_that_loses_a_replica_judges_every_answer(tmp_path: Path) -> None:
    made = workflow(chosen(judge_dir(tmp_path), num_devices=2, max_new_tokens=200))
    engines = served(made)
    with ray_session(3):
        assert engines.build_apart(3, 0) == 1
        [judge] = engines.judges.values()
        ask = judge.judges[0].ask
        assert ask is not None

        async def judged() -> list[str]:
            asked = [asyncio.create_task(ask(f"question {number}")) for number in range(8)]
            while not judge.engine.num_in_flight:
                await asyncio.sleep(0.01)
            kill(process_of(judge.engine, 1))
            return await asyncio.gather(*asked)

        calm = [asyncio.run(ask(f"question {number}")) for number in range(8)]
        assert asyncio.run(judged()) == calm
        engines.release()
