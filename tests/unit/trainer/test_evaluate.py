"""Options, items and tables of `rlite eval`."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlite import config
from rlite.assembly.evaluate import answers
from rlite.assembly.evaluate.answers import EvaluationRequest, digest_of, item_ids
from rlite.assembly.evaluate.command import (
    advice,
    difference,
    evaluate,
    print_result,
    result_of,
    shown,
    shown_metrics,
    title,
)
from rlite.assembly.evaluate.options import EvalConfig
from rlite.config import load
from rlite.errors import ConfigError, DataError, UnknownOptionError
from rlite.evaluation.folder import Answered, EvaluatedModel, EvaluationResult
from rlite.evaluation.metrics import (
    Comparison,
    Sample,
    directions,
    lower_is_better,
    summary_of_tasks,
    task_metrics,
    task_values,
)
from rlite.evaluation.record import task_rows
from rlite.evaluation.statistics import clustered_standard_error
from rlite.files import file_name
from rlite.rollout import RewardFunction, from_trl, from_verl
from rlite.rollout.registry import REWARDS, WORKFLOWS
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects
from tests.unit.trainer.test_evaluate_folder import row, write


def options(*arguments: str) -> EvalConfig:
    return load(EvalConfig, EvalConfig.arguments(arguments))


def evaluated(models: Sequence[Answered], own: EvalConfig) -> EvaluationResult:
    return result_of(models, own.k, own.solved_at, own.confidence, own.seed)


def test_arguments_are_spelled_as_flags_as_keys_and_without_key() -> None:
    flags = options("a", "b", "--data", "t.jsonl", "--reward=my.py:f", "--samples", "4", "--out", "x", "--limit", "7")
    keys = options("model=a", "other=b", "data.path=t.jsonl", "reward.path=my.py:f", "samples=4", "out=x", "limit=7")
    assert flags == keys
    assert options("a", "data=t.jsonl", "reward=my.py:f", "samples=4").reward["f"].path == "my.py:f"
    assert options("a", "data={path: t.jsonl, columns: {answer: x}}").data.columns == {"answer": "x"}
    assert options("a", "--tasks", "gsm8k,arc").tasks == options("a", "tasks=[gsm8k, arc]").tasks == ["gsm8k", "arc"]
    assert options("a", "--env", "game.py").env_path == "game.py"


def test_the_trainers_name_of_the_folder_means_the_same(tmp_path: Path) -> None:
    for given in (["save_dir=x"], ["--save_dir", "x"], ["--save_dir=x"], ["out=x"]):
        assert options("a", *given).out == "x"
    (tmp_path / "eval.yaml").write_text("save_dir: x\n")
    assert (
        config.load(EvalConfig, ["model=a", "--config", str(tmp_path / "eval.yaml")], aliases=EvalConfig.aliases).out
        == "x"
    )
    assert "save_dir" in config.describe(EvalConfig, "out")


def test_keys_inside_of_groups_are_spelled_as_flags_too() -> None:
    flags = [
        "--reward",
        "my.py:f",
        "--reward.timeout",
        "30",
        "--data.system_prompt=Be brief.",
        "--data.columns",
        "{a: b}",
    ]
    keys = ["reward.path=my.py:f", "reward.timeout=30", "data.system_prompt=Be brief.", "data.columns={a: b}"]
    assert options("a", *flags) == options("a", *keys)
    assert options("a", "--reward.one.path", "my.py:f", "--reward.one.weight=2").reward["one"].weight == 2
    with pytest.raises(UnknownOptionError, match=r"data\.colums.*did you mean"):
        options("a", "--data.colums", "{a: b}")
    with pytest.raises(ConfigError, match=r"--reward\.timeout: expected a value"):
        options("a", "--reward.timeout")
    with pytest.raises(ConfigError, match=r"argument '--sampels\.x'"):
        options("a", "--sampels.x", "1")


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["runs/grpo/latest"], "runs/eval-grpo"),
        (["runs/sft", "runs/grpo"], "runs/eval-sft-vs-grpo"),
        (["runs/grpo", "name=x"], "runs/eval-x"),
        (["runs/grpo", "--out", "evals/{name}-math"], "evals/grpo-math"),
        (["runs/grpo", "out=x-"], "x-"),
        (["runs/grpo", "data=my/test.v2.jsonl", "reward=my.py:f"], "runs/eval-grpo-test.v2"),
        (["runs/grpo", "data=openai/gsm8k", "reward=my.py:f", "out={data}/{name}"], "gsm8k/grpo"),
        (["runs/grpo", "tasks=arc_easy,gsm8k"], "runs/eval-grpo-arc_easy_gsm8k"),
        (["runs/grpo", "env=my/game.py"], "runs/eval-grpo-game"),
    ],
)
def test_the_folder_has_the_names_of_the_models(arguments: list[str], folder: str) -> None:
    assert options(*arguments).folder == Path(folder)
    assert options(*arguments, "out=null").folder is None


@pytest.mark.parametrize(
    ("arguments", "temperature"), [([], 0), (["samples=2"], 1), (["samples=2", "temperature=0.6"], 0.6)]
)
def test_several_samples_are_drawn_and_one_is_greedy(arguments: list[str], temperature: float) -> None:
    assert options("a", *arguments).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["reward=my.py:f", "samples=2", "k=3"],
            "k=3: pass@3 needs 3 samples of each prompt, and samples=2; raise samples, or lower k",
        ),
        (["tasks=x", "data=t.jsonl"], "tasks bring their own questions"),
        (["tasks=x", "timeout=60"], "timeout=60.0: an option of episodes, and tasks have none; leave it out"),
        (["tasks=x", "retries=0"], "retries=0: an option of episodes"),
        (["tasks=x", "solved_at=0.5"], "solved_at=0.5: an option of episodes"),
        (["chat=true"], "are options of tasks"),
        (["b", "name=x"], "two models have the names of their folders"),
        (["name=x/y"], "expected letters, digits"),
        (["name=."], "none of . and - first"),
        (["name=.."], "none of . and - first"),
        (["name=-x"], "none of . and - first"),
        (["reward=my.py:f", "max_turns=2"], r"reward\.\* is of single answers"),
        (["data.chat_template_options={tokenize: true}"], "rlite sets tokenize itself"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options("a", *arguments)


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["runs/grpo"], ["grpo"]),
        (["runs/grpo/latest", "runs/sft/best"], ["grpo", "sft"]),
        (["runs/grpo/latest", "runs/grpo/best"], ["grpo-latest", "grpo-best"]),
        (["runs/grpo", "runs/grpo/best"], ["grpo", "grpo-best"]),
        (["a/model", "b/model"], ["a-model", "b-model"]),
        (["a/x/latest", "b/x/latest"], ["a-x-latest", "b-x-latest"]),
        (["model", "model"], ["model", "model-2"]),
        (["Qwen/Qwen3-0.6B", "odd name!"], ["Qwen3-0.6B", "odd_name"]),
    ],
)
def test_models_have_the_names_of_their_folders(models: list[str], names: list[str]) -> None:
    assert options(*models).names == names
    assert [file_name(name) for name in names] == names


def test_items_are_named_by_their_id_or_their_number_and_by_no_name_twice() -> None:
    assert item_ids([{"id": 7}, {"prompt": "x"}, {"id": None}], "data") == ["7", "1", "2"]
    with pytest.raises(DataError, match="data, row index 1: its id '1' is also that of row index 0"):
        item_ids([{"id": "1"}, {"prompt": "x"}], "data")


def result(comparison: Comparison | None = None) -> EvaluationResult:
    samples = [Sample(str(item), sample, 1.0) for item in range(3) for sample in range(2)]
    metrics = {"accuracy": 0.5, "standard_error": 0.125, **{f"pass@{k}": 0.5 for k in range(1, 7)}, "num_errors": 2.0}
    return EvaluationResult([EvaluatedModel(name, "m", metrics, samples, sampled(2, 1.0)) for name in "ab"], comparison)


def sampled(samples: int, temperature: float) -> dict[str, Any]:
    """Return settings of an evaluation."""
    return {"sampling": {"samples": samples, "temperature": temperature, "max_new_tokens": 1024}}


def test_the_table_says_how_answers_were_sampled_and_some_of_the_ks() -> None:
    assert title(result()) == (
        "3 prompts x 2 samples, temperature 1 (the default of samples=2), at most 1024 new tokens"
    )
    metrics = result().metrics
    assert shown_metrics([metrics]) == ["accuracy", "pass@1", "pass@2", "pass@4", "pass@6", "num_errors"]
    assert [shown(name, metrics) for name in ("accuracy", "pass@1", "num_errors", "other")] == [
        *("0.5000 ± 0.1250", "0.5000", "2", "")
    ]


def test_models_that_were_sampled_in_other_ways_are_described_one_by_one() -> None:
    first, second = result().models
    earlier = replace(first, samples=first.samples[::2], settings=sampled(1, 0.6))
    assert title(EvaluationResult([earlier, second])).splitlines() == [
        "a: 3 prompts x 1 sample, temperature 0.6, at most 1024 new tokens",
        "b: 3 prompts x 2 samples, temperature 1 (the default of samples=2), at most 1024 new tokens",
    ]
    tasks = sampled(2, 1.0) | {"tasks": {"tasks": ["gsm8k"]}}
    once = replace(first, samples=first.samples[::2], settings=tasks)
    assert title(EvaluationResult([once])) == "3 questions of gsm8k"
    several = "3 questions of gsm8k x 2 samples, temperature 1 (the default of samples=2)"
    assert title(EvaluationResult([replace(first, settings=tasks)])) == several


def test_the_difference_is_told_with_its_interval_and_test() -> None:
    assert difference(result()) is None
    assert difference(result(Comparison(0.25, 0.1, 0.375, 0.95, 0.012, 40, 12, 3))) == (
        "accuracy of b - a: +0.2500 [+0.1000, +0.3750] (95% interval of 40 paired items), p = 0.012 "
        "(two-sided sign-flip test); better at 12 items, worse at 3"
    )
    assert "(99.5% interval" in str(difference(result(Comparison(0.25, 0.1, 0.375, 0.995, 0.012, 40, 12, 3))))
    assert " [" not in str(difference(result(Comparison(1.0, None, None, 0.95, 1.0, 1, 1, 0))))


QUESTION: dict[str, Any] = {"metrics": ["acc"], "acc": 1.0, "filter": "none"}


def test_answers_to_tasks_become_rows() -> None:
    choice = QUESTION | {
        "doc_id": 4,
        "arguments": [("2+2=", " 4"), ("2+2=", " 5")],
        "resps": [[(-0.5, True)], [(-2.0, False)]],
    }
    written = QUESTION | {"doc_id": 0, "arguments": [("Say:", {"until": []})], "resps": [["4"]], "filter": "strict"}
    other_filter = written | {"filter": "flexible"}
    without_number = QUESTION | {"doc_id": 0, "arguments": [("x",)], "resps": [[-3.0]], "acc": (-3.0, 2)}
    found = list(task_rows({"sums": [choice], "says": [written, other_filter], "wiki": [without_number]}))
    assert [(row["item"], row["score"]) for row in found] == [("sums/4", 1.0), ("says/0", 1.0)]
    assert [[segment["text"] for segment in row["segments"]] for row in found] == [["2+2=", " 4"], ["Say:", "4"]]


def test_a_metric_of_a_task_that_is_not_finite_is_no_score() -> None:
    broken = QUESTION | {"doc_id": 4, "arguments": [("x",)], "resps": [["4"]], "acc": math.nan}
    [row] = task_rows({"sums": [broken]})
    assert (row["status"], row["reason"], row["score"]) == ("failed", "acc is nan", None)
    assert dict(task_metrics({"t": {"acc,none": 0.5, "acc_stderr,none": math.nan, "ppl,none": math.inf}})) == {
        "t/acc": 0.5
    }


def test_metrics_of_tasks_keep_the_harness_names() -> None:
    results = {"gsm8k": {"alias": "gsm8k", "sample_len": 8, "acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict": 0.25}}
    metrics = dict(task_metrics(results))
    assert metrics == {"gsm8k/acc": 0.5, "gsm8k/acc_stderr": 0.1, "gsm8k/em,strict": 0.25}
    assert shown_metrics([metrics]) == ["gsm8k/acc", "gsm8k/em,strict"]
    assert shown("gsm8k/acc", metrics) == "0.5000 ± 0.1000"


def line_of_task(sample: int, scores: list[float], bleu: float = 0.0) -> dict[str, Any]:
    rows = [row(number, sample=sample, item=f"gsm8k/{number}", score=score) for number, score in enumerate(scores)]
    return {
        "task": "gsm8k",
        "sample": sample,
        "samples": 2,
        "metrics": {"gsm8k/em": sum(scores) / len(scores), "gsm8k/em_stderr": 9.0, "gsm8k/bleu": bleu},
        "values": {"gsm8k/em": scores, "gsm8k/bleu": [0.0, 0.0, 0.0]},
        "rows": rows,
    }


def test_samples_of_a_task_have_mean_metrics_clustered_errors_and_pass_at_k() -> None:
    scores = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    once = {"task": "arc", "metrics": {"arc/acc": 0.5, "arc/acc_stderr": 0.1}, "rows": [row(0, item="arc/0")]}
    lines = [once, *(line_of_task(number, own, 10.0 + number) for number, own in enumerate(scores))]
    metrics = summary_of_tasks(lines)
    error = clustered_standard_error([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    passes = {"gsm8k/pass@1": 0.5, "gsm8k/pass@2": pytest.approx(2 / 3)}
    passes |= {"gsm8k/pass@1_standard_error": pytest.approx(error), "gsm8k/pass@2_standard_error": pytest.approx(1 / 3)}
    assert metrics == {
        "arc/acc": 0.5,
        "arc/acc_stderr": 0.1,
        "gsm8k/em": 0.5,
        "gsm8k/em_stderr": pytest.approx(error),
        "gsm8k/bleu": 10.5,
        **passes,
    }
    assert "gsm8k/pass@2" not in summary_of_tasks(lines, k=1)
    assert not any("pass@" in name for name in summary_of_tasks([line_of_task(n, [0.5, 0.2, 1.0]) for n in range(2)]))
    fewer = [line_of_task(0, [1.0, 0.0, 0.0]), line_of_task(1, [1.0, 1.0])]
    del fewer[1]["values"]["gsm8k/em"]  # of the third question it was no number
    assert not any("pass@" in name for name in summary_of_tasks(fewer))
    assert shown_metrics([{f"gsm8k/pass@{k}": 0.5 for k in range(1, 7)}]) == [f"gsm8k/pass@{k}" for k in (1, 2, 4, 6)]


def test_a_score_that_is_better_if_lower_has_no_pass_at_k() -> None:
    lines = [line_of_task(number, [1.0, 0.0, 0.0]) | {"lower_is_better": ["gsm8k"]} for number in range(2)]
    assert not any("pass@" in name for name in summary_of_tasks(lines))


def test_the_direction_of_a_metric_is_that_of_the_task() -> None:
    higher = {"t": {"ppl": False, "acc": True, "odd": None}, "u": {"acc": True}}
    results = {"t": {"alias": "t", "ppl,none": 9.0, "ppl_stderr,none": 1.0, "acc,strict": 0.5, "odd,none": 1.0}}
    assert dict(directions(results, higher)) == {"t/ppl": False, "t/acc,strict": True}
    samples = {"t": [{"metrics": ["ppl", "acc"]}], "u": [{"metrics": ["acc"]}], "v": [{"metrics": []}]}
    assert lower_is_better(samples, higher) == ["t"]


def of_tasks(name: str, scores: dict[str, list[float]], lowest: list[str]) -> Answered:
    """A model's results of tasks with these scores."""
    lines = [
        {
            "task": task,
            "metrics": {f"{task}/own": sum(own) / len(own)},
            "higher_is_better": {f"{task}/own": task not in lowest},
            "lower_is_better": [task] if task in lowest else [],
            "rows": [row(number, item=f"{task}/{number}", score=score) for number, score in enumerate(own)],
        }
        for task, own in scores.items()
    ]
    settings = {"tasks": {"tasks": [*scores]}, "sampling": {"samples": 1, "temperature": 0.0}}
    return Answered(name, name, settings, lines)


def test_a_lower_perplexity_is_better(capsys: pytest.CaptureFixture[str]) -> None:
    models = [of_tasks("a", {"wiki": [9.0, 8.0, 7.0]}, ["wiki"]), of_tasks("b", {"wiki": [5.0, 9.0, 6.0]}, ["wiki"])]
    found = evaluated(models, options("a", "b"))
    assert found.comparison is not None
    assert (found.comparison.difference, found.comparison.better, found.comparison.worse) == (
        pytest.approx(-4 / 3),
        2,
        1,
    )
    assert (difference(found) or "").startswith("score (lower is better) of b - a: -1.3333 [")
    assert found.to_json()["models"]["a"]["higher_is_better"] == {"wiki/own": False}
    print_result(found)
    assert "wiki/own (lower is better)" in capsys.readouterr().out


def test_scores_of_different_directions_are_not_pooled() -> None:
    scores = {"wiki": [9.0, 8.0], "arc": [1.0, 0.0]}
    found = evaluated([of_tasks(name, scores, ["wiki"]) for name in ("a", "b")], options("a", "b"))
    assert found.comparison is None
    reason = "lower is better in wiki, and higher in arc; compare tasks of one direction in a command"
    assert difference(found) == f"no difference of a and b: {reason}"
    assert found.to_json()["no_comparison"] == reason


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], None),
        (["top_p=0.9"], {"top_p": 0.9}),
        (["temperature=0.5", "top_k=3"], {"temperature": 0.5, "do_sample": True, "top_k": 3}),
        (["temperature=0"], {"temperature": 0.0, "do_sample": False}),
        (["max_new_tokens=1024", "stop=[x]"], {"max_gen_toks": 1024, "until": ["x"]}),
        (["stop_token_ids=[5]"], {"stop_token_ids": [5]}),
        (["samples=4"], {"temperature": 1.0, "do_sample": True, "top_p": 1.0, "top_k": 0}),
    ],
)
def test_tasks_are_answered_with_the_options_that_are_given(arguments: list[str], given: Any) -> None:
    assert options("a", "tasks=x", *arguments).sampling_of_tasks == given


def test_a_score_from_which_an_answer_is_solved_is_an_option() -> None:
    settings = {"sampling": {"samples": 2, "temperature": 1.0, "max_new_tokens": 8}}
    lines = [row(0, sample=sample, score=score) for sample, score in enumerate((0.5, 0.25))]
    model = Answered("a", "a", settings, lines)
    assert evaluated([model], options("a")).metrics["pass@2"] == 0.0
    assert evaluated([model], options("a", "solved_at=0.5")).metrics["pass@2"] == 1.0


@pytest.mark.parametrize(
    ("given", "limit", "unknown", "told"),
    [
        ([], 40_960, 16_384, "of at most 16384 tokens, the default; max_model_len=N allows up to 40960"),
        (["max_model_len=32768"], 32_768, 32_768, ""),
        (["max_model_len=99999"], 40_960, 40_960, "max_model_len=99999: at most 40960 tokens"),
        (["max_model_len=512"], 512, 512, ""),
    ],
)
def test_an_explicit_max_model_len_is_bound_by_the_model_alone(
    given: list[str], limit: int, unknown: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 40960}')
    chosen = options("a", *given)
    request = EvaluationRequest(chosen, NOTHING)
    assert request.context_limit(str(tmp_path)) == limit
    assert request.unknown_context(str(tmp_path), limit) == unknown
    printed = capsys.readouterr().err
    assert told in printed
    assert len(printed.splitlines()) == bool(told)


def test_values_of_a_metric_have_its_name_and_the_order_of_the_questions() -> None:
    questions = [QUESTION | {"acc": score, "filter": name} for name in ("none", "strict") for score in (1.0, False)]
    pair = {"metrics": ["ppl", "nan"], "ppl": (1.0, 2), "nan": math.nan, "filter": "none"}
    assert task_values({"t": questions, "u": [pair]}) == {"t/acc": [1.0, 0.0], "t/acc,strict": [1.0, 0.0]}


def test_a_missing_harness_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match="needs the package lm_eval"):
        EvaluationRequest(options("a", "tasks=x"), NOTHING).find_tasks()


def program_function(body: str, file: str = "<program>", module: str = "__main__") -> Any:
    """Return the function `own` of a program."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile(f"def own(completions, **row):\n    {body}\n", file, "exec"), names)
    return names["own"]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda function: function,
        lambda function: functools.partial(function, scale=2),
        lambda function: functools.wraps(function)(lambda *args: None),
        lambda function: type("Scorer", (), {"__call__": function})(),
        lambda function: RewardFunction(function, in_process=True),
        from_trl,
    ],
)
def test_changed_code_of_a_programs_reward_has_another_digest(wrapped: Any) -> None:
    first, same, changed = (wrapped(program_function(f"return {score}")) for score in ("1.0", "1.0", "0.5"))
    config = options("a", "data=t.jsonl", "reward=__main__:own")
    programs = [ProgramObjects(rewards={"reward": {"own": each}}) for each in (first, same, changed)]
    digests = [EvaluationRequest(config, program).code() for program in programs]
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_changed_code_of_a_module_or_a_registered_name_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "scores_of_module.py"
    module.write_text("def own(completions, **row):\n    return 1.0\n")
    config = options("a", "data=t.jsonl", "reward=scores_of_module:own")
    before = EvaluationRequest(config, NOTHING).code()
    function = sys.modules["scores_of_module"].own
    monkeypatch.setitem(REWARDS, "registered", function)
    monkeypatch.setitem(WORKFLOWS, "registered", function)
    named = [options("a", "data=t.jsonl", "reward=registered"), options("a", "workflow=registered")]
    registered = [EvaluationRequest(each, NOTHING).code() for each in named]
    module.write_text("def own(completions, **row):\n    return 0.5\n")
    assert before.keys() == {"scores_of_module:own"}
    assert EvaluationRequest(config, NOTHING).code() != before
    for each, digests in zip(named, registered, strict=True):
        assert digests.keys() == {"registered"}
        assert EvaluationRequest(each, NOTHING).code() != digests


def test_the_code_behind_a_reward_of_another_library_counts() -> None:
    made = [from_verl(each) for each in (test_code_that_cannot_be_read_equals_no_other, digest_of, digest_of)]
    digests = [digest_of(each) for each in made]
    assert digests[0] != digests[1] == digests[2]


def test_code_that_cannot_be_read_equals_no_other() -> None:
    assert digest_of(len) != digest_of(len)


def test_an_interrupted_command_is_not_advised_to_overwrite_its_samples() -> None:
    assert advice(Path("x"), overwrites=False) == "Finished samples are in x; the same command continues."
    assert "x; the same command without overwrite=true continues" in advice(Path("x"), overwrites=True)


def test_a_log_file_has_a_line_of_progress_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlite.services.console.terminal._POLL_S", 0.001)
    assert answers.QUIET_S <= 10
    monkeypatch.setattr(answers, "QUIET_S", 0.0)
    has_said = threading.Event()
    texts = iter(["grpo: 3 of 12 samples", "grpo: 7 of 12 samples"])

    def text() -> str:
        found = next(texts, "")
        if not found:
            has_said.set()
        return found

    with answers.showing_progress(text):
        assert has_said.wait(10)
    assert capsys.readouterr().err == "grpo: 3 of 12 samples\ngrpo: 7 of 12 samples\n"


def test_the_first_line_names_a_source_of_scores_only_if_one_is_given() -> None:
    assert options("runs/a", "runs/b", "out=x").headline() == "runs/a and runs/b, into x"
    assert options("m", "data=t.jsonl", "reward=my.py:f").headline() == "m on t.jsonl, into runs/eval-m-t"
    assert options("m", "reward=__main__:f", "out=null").headline() == "m on rows of the program"


def test_the_model_that_needs_a_source_of_scores_is_named(tmp_path: Path) -> None:
    write(tmp_path / "eval", "a", row(0), row(1))
    with pytest.raises(ConfigError, match=r"missing: a source of scores for .*/turns \(reward"):
        evaluate(options(f"{tmp_path}/turns", f"{tmp_path}/eval"))


def test_an_evaluation_that_continues_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    answers.continuing("new", 0, 12, "samples")
    answers.continuing("grpo", 5, 12, "samples")
    assert capsys.readouterr().err == "grpo: continuing: 5 of 12 samples are there\n"


def test_k_of_earlier_results_is_not_bound_by_the_default_of_samples() -> None:
    assert options("runs/eval-before", "runs/eval-after", "k=3").k == 3
