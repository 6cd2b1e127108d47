"""Options of held-out data: of one set, or of several by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.config import describe, load, save, schema
from rlite.errors import ConfigError, RliteError
from rlite.evaluation.sets import EvaluationSet, make_sets
from rlite.rollout import GenerationHyperparameters, RewardFunction, SingleTurnWorkflow
from rlite.trainer.held_out import held_out_sources, prefixed, without_sets
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import SftConfig


def ppo(*settings: str) -> PpoConfig:
    return load(PpoConfig, ["actor.model_name=x", *settings])


def made(options: PpoConfig, *given: Any) -> dict[str, EvaluationSet]:
    return make_sets(options.test_data, options.rollout.sampling_of, *given)


def test_options_of_a_single_set_have_no_name_and_are_read_by_their_types() -> None:
    options = ppo("test_data.path=001", "test_data.columns.prompt=question", "test_data.sampling.temperature=0.6")
    assert list(options.test_data) == [""]
    chosen = options.test_data[""]
    assert (chosen.path, chosen.columns) == ("001", {"prompt": "question"})
    assert options.rollout.sampling_of(chosen.sampling).temperature == 0.6


def test_sets_have_options_of_their_own_and_inherit_the_rest() -> None:
    settings = ["test_data.math.path=m", "test_data.math.samples=4", "test_data.math.sampling.temperature=0.7"]
    settings += [
        "test_data.code.path=c",
        "test_data.code.reward.path=code.py:passes",
        "rollout.test_sampling_params.top_k=5",
    ]
    options = ppo(*settings)
    math, code = options.test_data["math"], options.test_data["code"]
    assert (math.samples, code.samples) == (4, 1)
    assert list(code.reward) == ["passes"]
    sampling = options.rollout.sampling_of(math.sampling)
    assert (sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (0.7, 5, 1024)
    assert options.rollout.sampling_of(code.sampling).temperature == 0


@pytest.mark.parametrize("settings", [[], ["test_data.path=x"], ["test_data.a.path=x", "test_data.b.path=y"]])
def test_a_saved_config_reads_back_and_a_single_set_keeps_its_keys(settings: list[str], tmp_path: Path) -> None:
    options = ppo(*settings)
    save(options, tmp_path / "config.yaml")
    assert load(PpoConfig, ["--config", str(tmp_path / "config.yaml")]) == options
    is_single = settings == ["test_data.path=x"]
    assert ("test_data:\n  path: x\n" in (tmp_path / "config.yaml").read_text()) is is_single


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["test_data=x"], "test_data=x: expected test_data.path=x"),
        (
            ["test_data.a.path=x", "test_data.a.reward=reward.py:f"],
            "^test_data.a.reward=reward.py:f: expected test_data.a.reward.path=reward.py:f",
        ),
        (
            ["test_data.a.path=x", "test_data.path=y"],
            "test_data.path is of a group without a name, and test_data.a",
        ),
        (["test_data.a b.path=x"], "test_data.a b: a name has letters, digits"),
        (["test_data.pth=x"], "did you mean 'test_data.path'"),
        (["test_data.a.pth=x"], "did you mean 'test_data.a.path'"),
        (["test_data.samples=0"], "test_data.samples=0: expected at least 1"),
        (["test_data.path=x", "test_data.samples=2", "test_data.k=4"], "test_data.k=4: pass@4 needs 4 samples of each"),
        (["test_data.a.k=2"], "test_data.a.k=2: pass@2 needs 2 samples of each prompt, and samples=1"),
        (["test_data.a.workflow=unheard-of"], "test_data.a.workflow=unheard-of: unknown workflow"),
        (["trainer.evaluation_devices=1"], "trainer.evaluation_devices=1: .* trainer.evaluate=beside"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_key(settings: list[str], message: str) -> None:
    with pytest.raises(RliteError, match=message):
        ppo(*settings)


@pytest.mark.parametrize("name", ["a b", "../a", "-a", "a.b"])
def test_names_that_a_program_gives_are_checked_too(name: str) -> None:
    reward = RewardFunction(lambda *given, **row: 0.0, in_process=True)
    workflow = SingleTurnWorkflow(reward, GenerationHyperparameters(), byte_tokenizer())
    with pytest.raises(ConfigError, match="a name has letters, digits"):
        made(ppo(), workflow, {name: [{"prompt": "x"}]}, None)


def test_options_of_a_set_without_rows_are_refused_unless_the_set_is_switched_off() -> None:
    reward = RewardFunction(lambda *given, **row: 0.0, in_process=True)
    workflow = SingleTurnWorkflow(reward, GenerationHyperparameters(), byte_tokenizer())
    rows = {"maths": [{"prompt": "x"}]}
    with pytest.raises(ConfigError, match=r"test_data\.math: there are rows of test_data\.maths; expected some of"):
        made(ppo("test_data.math.path=x"), workflow, rows, None)
    for settings in (["test_data.path=null"], ["test_data.limit=3"], []):
        assert made(ppo(*settings), workflow, {}, None) == {}


def test_a_named_set_needs_a_path_where_tables_are_read() -> None:
    with pytest.raises(ConfigError, match=r"required and not set: test_data\.a\.path"):
        held_out_sources(ppo("test_data.a.limit=3").test_data, {}, None)
    assert held_out_sources(ppo("test_data.limit=3").test_data, {}, None) == {}


def test_a_misspelt_name_of_a_set_is_told_the_set_that_is_meant() -> None:
    settings = ["test_data.math.path=x", "test_data.code.path=y", "test_data.maths.samples=4"]
    with pytest.raises(ConfigError, match=r"not set: test_data\.maths\.path; did you mean 'test_data\.math'\?"):
        held_out_sources(ppo(*settings).test_data, {}, None)


def test_sets_read_their_tables_with_their_own_columns_and_system_prompt() -> None:
    settings = [
        "test_data.a.path=x",
        "test_data.b.path=y",
        "test_data.b.columns.prompt=q",
        "test_data.b.system_prompt=Hi",
    ]
    found = held_out_sources(ppo(*settings).test_data, {"prompt": "question"}, "Hello")
    assert (found["a"].columns, found["a"].system_prompt, found["a"].key) == (
        {"prompt": "question"},
        "Hello",
        "test_data.a",
    )
    assert (found["b"].columns, found["b"].system_prompt, found["b"].key) == ({"prompt": "q"}, "Hi", "test_data.b")


def test_help_and_schema_know_the_options_of_a_set() -> None:
    assert "test_data.samples=1" in describe(PpoConfig, "test_data")
    assert "[test_data: Prompts to evaluate on]" in describe(PpoConfig)
    assert "test_data.NAME.samples" not in describe(PpoConfig), "once, as of a single set"
    assert "test_data.NAME.samples=1" in describe(PpoConfig, "test_data.NAME")
    validator = jsonschema.Draft202012Validator(schema(SftConfig))
    assert validator.is_valid({"test_data": {"path": "x"}})
    assert validator.is_valid({"test_data": {"a": {"path": "x"}}})
    assert not validator.is_valid({"test_data": {"a": {"pth": "x"}}})


def test_metrics_of_named_sets_have_their_names_before_them() -> None:
    metrics = (
        prefixed("math", {"accuracy": 0.5}) | prefixed("math2", {"accuracy": 0.7}) | prefixed("", {"accuracy": 1.0})
    )
    assert metrics == {"math/accuracy": 0.5, "math2/accuracy": 0.7, "accuracy": 1.0}
    assert without_sets(["math"], metrics) == {"math2/accuracy": 0.7, "accuracy": 1.0}


def test_a_single_set_never_takes_the_name_of_a_metric_of_training() -> None:
    assert prefixed("", {"accuracy": 1.0, "truncated": 0.5}) == {"accuracy": 1.0, "test_truncated": 0.5}
