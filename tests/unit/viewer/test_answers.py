from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.errors import DataError
from rlite.services.record.files import ROWS
from rlite.services.record.writer import write_table
from rlite.viewer.answers import MAX_HITS, PAGE, QUESTIONS, Query, UnknownPlace, answer
from rlite.viewer.export import export
from rlite.viewer.prompts import MAX_ITEMS, ending, shortened
from rlite.viewer.run import ViewedRun, open_runs
from rlite.viewer.tables import means_by_step


@pytest.fixture(scope="module")
def runs(recorded: Path) -> list[ViewedRun]:
    return open_runs([str(recorded)])


def ask(runs: list[ViewedRun], name: str, **parameters: Any) -> Any:
    made = answer(runs, name, Query((key, str(value)) for key, value in {"run": 0, **parameters}.items()))
    return json.loads(json.dumps(made, allow_nan=False))


def test_a_run_tells_its_sources_and_steps(runs: list[ViewedRun]) -> None:
    [about] = ask(runs, "runs")
    assert about["sources"]["train"] == {"steps": list(range(1, 9)), "rollouts": 256, "set": "train"}
    assert about["sources"]["eval.countdown"]["steps"] == [4, 8]
    assert about["has_trace"]


def test_rows_have_a_column_for_each_part_of_the_reward(runs: list[ViewedRun]) -> None:
    columns = ask(runs, "rows", source="train", step=3)["columns"]
    assert {"reward/correct", "reward/format", "status", "response_tokens"} <= columns.keys()
    assert "reward_parts" not in columns
    assert {len(values) for values in columns.values()} == {32}
    assert set(columns["step"]) == {3}


def test_a_page_asks_only_for_the_columns_that_it_shows(runs: list[ViewedRun]) -> None:
    place = [("run", "0"), ("source", "train"), ("step", "3")]
    query = Query([*place, ("columns", "group"), ("columns", "reward"), ("columns", "unknown")])
    assert answer(runs, "rows", query)["columns"].keys() == {"group", "reward"}


def test_pieces_of_tokens_are_the_text(runs: list[ViewedRun]) -> None:
    found = ask(runs, "sample", source="train", step=2, group=8, sample=1)
    [sequence] = found["sequences"]
    text = "".join(segment["text"] for segment in found["row"]["segments"])
    assert sequence["before"] + "".join(sequence["pieces"]) == text
    assert len(sequence["pieces"]) == len(sequence["ids"]) == len(sequence["logprobs"])


def test_a_search_finds_texts_in_any_case_and_shows_where(runs: list[ViewedRun]) -> None:
    found = ask(runs, "search", source="train", step=1, text="THE TOOL SAYS")
    assert not found["is_cut"]
    assert {hit["step"] for hit in found["hits"]} == {1}
    assert all(hit["snippet"][1] == "The tool says" for hit in found["hits"])
    everywhere = ask(runs, "search", source="train", text="the tool says")
    assert len(everywhere["hits"]) == min(MAX_HITS, 24 * 8)
    assert ask(runs, "search", source="train", text="no such words")["hits"] == []


def test_the_ledger_accounts_for_every_rollout(runs: list[ViewedRun]) -> None:
    ledger = ask(runs, "ledger", source="train")
    assert ledger["rollouts"] == sum(ledger["statuses"].values()) == 256
    assert ledger["lost"] == sum(row["count_all"] for row in ledger["kinds"]) == 256 - ledger["statuses"]["trained"]
    for row in ledger["kinds"]:
        assert sum(row["steps"].values()) == row["count_all"]
        places = ask(runs, "ledger_rows", source="train", status=row["status"], reason=row["reason_min"], offset=0)
        assert places["number"] == row["count_all"]
        assert set(places["columns"]["status"]) == {row["status"]}


def test_the_ledger_joins_reasons_of_one_kind_and_pages_them(tmp_path: Path) -> None:
    base = {"step": 1, "sample": 0, "item": "", "status": "failed"}
    reasons = [f"sample {index % 2} of the group: ValueError: line {index}\nmore: text" for index in range(PAGE + 5)]
    given = [{**base, "group": group, "reason": reason} for group, reason in enumerate([*reasons, "TimeoutError"])]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(given, schema=ROWS))
    runs = open_runs([str(tmp_path)])
    kinds = ask(runs, "ledger", source="train")["kinds"]
    assert [(row["kind"], row["count_all"]) for row in kinds] == [("ValueError", PAGE + 5), ("TimeoutError", 1)]
    place = {"source": "train", "status": "failed", "kind": "ValueError"}
    pages = [ask(runs, "ledger_reasons", offset=offset, **place)["reasons"] for offset in (0, PAGE)]
    assert {row["reason"] for page in pages for row in page} == set(reasons)


def test_a_prompt_is_followed_over_steps(runs: list[ViewedRun]) -> None:
    items = ask(runs, "items", text="countdown-0")["items"]
    assert items["item"][0] == "countdown-0"
    [found] = ask(runs, "item", set="train", item="countdown-0")
    assert len(set(found["columns"]["step"])) == items["step_count_distinct"][0]
    assert items["prompt"][0].startswith("Use each of the numbers")


def rows_file(folder: Path, source: str, step: int, rows: list[dict[str, Any]]) -> None:
    base = {"step": step, "group": 0, "sample": 0, "item": "0", "status": "trained", "reason": ""}
    write_table(folder, source, step, "rows", pa.Table.from_pylist([base | row for row in rows], schema=ROWS))


def test_rows_of_the_same_number_in_two_sets_are_two_prompts(tmp_path: Path) -> None:
    for source, prompt in (("train", "What is 0+3?"), ("eval.code", "What is 6+3?")):
        rows_file(tmp_path, source, 1, [{"item": "3", "segments": [{"role": "prompt", "text": prompt}]}])
    runs = open_runs([str(tmp_path)])
    items = ask(runs, "items")["items"]
    assert list(zip(items["set"], items["item"], items["prompt"], strict=True)) == [
        ("eval.code", "3", "What is 6+3?"),
        ("train", "3", "What is 0+3?"),
    ]
    [found] = ask(runs, "item", set="eval.code", item="3")
    assert found["source"] == "eval.code"


def test_models_that_answered_the_same_questions_share_their_prompts(tmp_path: Path) -> None:
    for source in ("eval.a", "eval.b", "eval.c"):
        rows_file(tmp_path, source, 0, [{}])
    settings = {name: {"questions": {"content": content}} for name, content in (("a", "x"), ("b", "x"), ("c", "y"))}
    (tmp_path / "results.json").write_text(json.dumps({"models": {}, "comparison": None, "settings": settings}))
    runs = open_runs([str(tmp_path)])
    assert sorted(ask(runs, "items")["items"]["count"]) == [1, 2]
    assert [each["source"] for each in ask(runs, "item", set="questions x", item="0")] == ["eval.a", "eval.b"]


def test_prompts_whose_rewards_changed_most_come_first_each_with_its_text(tmp_path: Path) -> None:
    rewards = {1: {"a": 0.5, "b": 0.1, "c": 0.9}, 2: {"b": 0.2}, 20: {"a": 0.6, "b": 0.9}}
    for step, own in rewards.items():
        texts = [[{"role": "prompt", "text": f"Question {name}"}] for name in own]
        rows = [
            {"group": n, "item": name, "reward": own[name], "segments": text}
            for n, (name, text) in enumerate(zip(own, texts, strict=True))
        ]
        rows_file(tmp_path, "train", step, rows)
    found = ask(open_runs([str(tmp_path)]), "items")
    items = found["items"]
    assert list(zip(items["item"], items["first"], items["last"], strict=True)) == [
        ("b", 0.1, 0.9),
        ("a", 0.5, 0.6),
        ("c", None, 0.9),
    ]
    assert items["prompt"] == ["Question b", "Question a", "Question c"]
    assert not found["is_partial"]


def test_prompts_are_read_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 21):
        segments = [{"role": "prompt", "text": f"Count to {step}."}]
        rows_file(tmp_path, "train", step, [{"group": step, "item": f"m{step}", "segments": segments}])
    runs = open_runs([str(tmp_path)])
    monkeypatch.setattr("rlite.viewer.prompts.MAX_READ", 1)
    answers = [ask(runs, "items") for _ in range(3)]
    assert [each["is_partial"] for each in answers] == [True, True, False]
    assert [sum(text is None for text in each["items"]["prompt"]) for each in answers] == [12, 4, 0]


def test_the_texts_of_a_step_are_short(tmp_path: Path) -> None:
    segments = [
        {"role": "prompt", "text": "Add 2 and 2."},
        {"role": "model", "text": "so " * 500 + "it is 4<|im_end|>"},
    ]
    rows = [{"sample": n, "segments": own, "data": {"target": "4"}} for n, own in enumerate([segments, None])]
    rows_file(tmp_path, "train", 1, rows)
    found = ask(open_runs([str(tmp_path)]), "texts", source="train", step=1)
    assert found["groups"] == [{"group": 0, "prompt": "Add 2 and 2.", "data": [["target", "4"]]}]
    [own] = found["answers"]
    assert own["end"].startswith("… ")
    assert own["end"].endswith("so it is 4")
    assert len(own["end"]) < 200
    assert ending("short") == "short"


def test_the_ledger_tells_tokens_and_seconds_by_reason(tmp_path: Path) -> None:
    spent = {"seconds_queue": 9.0, "seconds_generate": 2.0, "seconds_reward": 0.5, "response_tokens": 10}
    rows = [{"sample": n, "status": status, **spent} for n, status in enumerate(["failed", "failed", "trained"])]
    rows_file(tmp_path, "train", 1, rows)
    ledger = ask(open_runs([str(tmp_path)]), "ledger", source="train")
    [kind] = ledger["kinds"]
    assert (kind["response_tokens_sum"], kind["seconds_sum"]) == (20, 5.0)
    assert ledger["sums"] == {"tokens": 30, "seconds": 7.5}


def test_prompts_are_in_natural_order(tmp_path: Path) -> None:
    rows_file(tmp_path, "train", 1, [{"group": n, "item": f"m{n}"} for n in (10, 9, 1, 2)])
    assert ask(open_runs([str(tmp_path)]), "items")["items"]["item"] == ["m1", "m2", "m9", "m10"]


def test_a_prompt_is_found_by_its_text_among_more_than_a_page_lists(tmp_path: Path) -> None:
    def rows(step: int, texts: list[str]) -> list[dict[str, Any]]:
        segments = [[{"role": "prompt", "text": text}, {"role": "model", "text": "a swan"}] for text in texts]
        groups = [1000 * step + number for number in range(len(texts))]
        return [{"group": g, "item": f"m{g}", "segments": own} for g, own in zip(groups, segments, strict=True)]

    for step in range(1, 21):
        texts = [f"Question {number}" for number in range(MAX_ITEMS)]
        rows_file(
            tmp_path, "train", step, rows(step, texts if step == 1 else ["Name a bird " * 20 + f"like Swan {step}?"])
        )
    runs = open_runs([str(tmp_path)])
    assert ask(runs, "items")["number"] == MAX_ITEMS + 19
    found = ask(runs, "items", text="a bird like swan 7?")
    assert (found["number"], found["items"]["item"]) == (1, ["m7000"])
    assert "like Swan 7?" in found["items"]["prompt"][0]
    assert ask(runs, "items", text="a swan")["number"] == 0, "an answer has it, no prompt"
    assert ask(runs, "items", text="M70")["items"]["item"] == ["m7000"]


def test_a_search_reads_the_newest_texts_and_says_when_it_leaves_out_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 21):
        segments = [{"role": "prompt", "text": f"Count to {step}."}]
        rows_file(tmp_path, "train", step, [{"group": step, "item": f"m{step}", "segments": segments}])
    runs = open_runs([str(tmp_path)])
    found = ask(runs, "items", text="count to")
    assert (found["number"], found["is_cut"]) == (20, False)
    monkeypatch.setattr("rlite.viewer.prompts.MAX_SEARCHED", 1)
    found = ask(runs, "items", text="count to")
    assert (found["items"]["item"], found["is_cut"]) == (["m20"], True)


def test_a_search_leaves_out_older_parts_of_a_merged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = {"sample": 0, "status": "trained", "reason": ""}
    given = [
        {**base, "step": step, "group": step, "item": f"m{step}", "segments": [{"role": "prompt", "text": "Count"}]}
        for step in (1, 2, 3)
    ]
    (tmp_path / "record").mkdir()
    merged = tmp_path / "record" / "train-00000001_00000100.rows.parquet"
    pq.write_table(pa.Table.from_pylist(given, schema=ROWS), merged, row_group_size=1)
    monkeypatch.setattr("rlite.viewer.prompts.MAX_SEARCHED", 1)
    found = ask(open_runs([str(tmp_path)]), "items", text="count")
    assert (found["items"]["item"], found["is_cut"]) == (["m3"], True)


def test_prompts_are_shown_by_their_differences() -> None:
    chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    texts = [chat.format(text) for text in ("What is 1+1?", "Count\nto 3.")]
    assert shortened(texts) == ["What is 1+1?", "Count to 3."]


def test_held_out_means_count_failed_episodes_as_wrong(tmp_path: Path) -> None:
    base = {"step": 5, "sample": 0, "item": "", "status": "evaluated", "reason": ""}
    given = [{**base, "group": 0, "score": 1.0}, {**base, "group": 1, "status": "failed", "score": None}]
    write_table(tmp_path, "eval.math", 5, "rows", pa.Table.from_pylist(given, schema=ROWS))
    means = ask(open_runs([str(tmp_path)]), "overview")["sources"]["eval.math"]
    assert means == {"steps": [5], "values": [0.5], "errors": [0.5], "counts": [2]}


def test_a_failed_episode_counts_the_lowest_score_of_its_step_if_that_is_negative(tmp_path: Path) -> None:
    base = {"sample": 0, "item": "", "reason": ""}
    scores = {(5, 0): -1.0, (5, 1): 0.5, (6, 0): 0.5}
    given = [
        {**base, "step": step, "group": group, "status": "evaluated", "score": score}
        for (step, group), score in scores.items()
    ]
    given += [{**base, "step": step, "group": 9, "status": "failed", "reward": 1.0} for step in (5, 6)]
    write_table(tmp_path, "eval.math", 5, "rows", pa.Table.from_pylist(given, schema=ROWS))
    means = ask(open_runs([str(tmp_path)]), "overview")["sources"]["eval.math"]
    assert means["values"] == [-0.5, 0.25]


def test_groups_under_way_at_the_end_count_neither_as_rewards_nor_as_lost(tmp_path: Path) -> None:
    base = {"sample": 0, "item": "", "reason": ""}
    write_table(
        tmp_path,
        "train",
        1,
        "rows",
        pa.Table.from_pylist([{**base, "step": 1, "group": 0, "status": "trained", "reward": 1.0}], schema=ROWS),
    )
    aborted = [{**base, "step": 2, "group": group, "status": "aborted", "reward": 0.0} for group in (1, 2)]
    write_table(tmp_path, "train", 2, "rows", pa.Table.from_pylist(aborted, schema=ROWS))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    overview = ask(open_runs([str(tmp_path)]), "overview")
    assert overview["sources"]["train"]["steps"] == [1]
    assert overview["advisories"] == []
    assert overview["statuses"] == {"trained": 1, "aborted": 2}


def test_lost_rollouts_are_judged_by_the_last_steps_alone(tmp_path: Path) -> None:
    for step in range(1, 13):
        rows_file(tmp_path, "train", step, [{"status": "failed" if step < 3 else "trained"}])
    assert ask(open_runs([str(tmp_path)]), "overview")["advisories"] == []
    rows_file(tmp_path, "train", 12, [{"status": "failed"}])
    [advice] = ask(open_runs([str(tmp_path)]), "overview")["advisories"]
    assert advice["reason"].startswith("1 failed of 10 rollouts of the last 10 steps")


def test_standard_errors_are_clustered_by_group() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 8)
    values = rng.normal(size=20)[groups] + 0.1 * rng.normal(size=160)
    table = pa.table({"step": pa.array([1] * 160), "group": groups})
    [error] = means_by_step(table, pa.chunked_array([values]))["errors"]
    of_means = values.reshape(20, 8).mean(1).std(ddof=1) / math.sqrt(20)
    assert error == pytest.approx(of_means, rel=1e-9)


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    row = {"step": 1, "group": 0, "sample": 0, "item": "", "status": "trained", "reason": "", "reward": math.nan}
    row |= {"advantage": math.inf, "reward_parts": {"a": math.nan}, "score": -math.inf}
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([row], schema=ROWS))
    runs = open_runs([str(tmp_path)])
    columns = ask(runs, "rows", source="train", step=1)["columns"]
    assert columns["reward"] == columns["advantage"] == columns["reward/a"] == [None]
    assert ask(runs, "sample", source="train", step=1, group=0, sample=0)["row"]["reward_parts"] == {"a": None}
    ask(runs, "overview")


def test_a_search_shows_the_hit_after_letters_whose_small_form_is_longer(tmp_path: Path) -> None:
    segments = [{"role": "model", "text": "hi İstanbul (ABC)"}]
    row = {"step": 1, "group": 0, "sample": 0, "item": "", "status": "trained", "reason": "", "segments": segments}
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([row], schema=ROWS))
    [hit] = ask(open_runs([str(tmp_path)]), "search", source="train", text="(abc)")["hits"]
    assert hit["snippet"] == ["hi İstanbul ", "(ABC)", ""]


def test_a_text_that_no_file_can_hold_is_not_found(runs: list[ViewedRun]) -> None:
    assert ask(runs, "search", source="train", text="\ud800")["hits"] == []
    assert ask(runs, "item", item="\udcff") == []


def test_names_of_metrics_may_have_commas(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "a,b": 2.0, "c": 1.0}\n')
    query = Query([("run", "0"), ("names", "a,b"), ("names", "loss"), ("names", "unknown")])
    assert answer(open_runs([str(tmp_path)]), "series", query).keys() == {"a,b", "loss"}


def test_nonfinite_values_serialise(tmp_path: Path) -> None:
    row = {"step": 1, "group": 0, "sample": 0, "item": "", "status": "failed", "reason": "", "reward": math.inf}
    row |= {"events": [{"name": "queue", "start": 0.0, "end": math.nan}]}
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([row], schema=ROWS))
    (tmp_path / "config.yaml").write_text("actor: {limit: .inf, began: 2026-01-02, all: [.nan, {2026-01-02: 1}]}\n")
    runs = open_runs([str(tmp_path)])
    assert ask(runs, "config") == {
        "actor.limit": "inf",
        "actor.began": "2026-01-02",
        "actor.all": ["nan", {"2026-01-02": 1}],
    }
    assert ask(runs, "ledger", source="train")["kinds"][0]["reward_mean"] is None
    assert ask(runs, "items")["items"]["last"] == [None]
    assert ask(runs, "sample", source="train", step=1, group=0, sample=0)["row"]["events"][0]["end"] is None
    export(runs, tmp_path / "out.html", [], 1)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("nothing", {}, "no question 'nothing'"),
        ("rows", {"run": 3}, "run=3: there are 1 runs"),
        ("rows", {"step": "x"}, "step: expected a whole number from 0 on, found 'x'"),
        ("rows", {"source": "eval.math", "step": 1}, "source=eval.math: the record of first has"),
        ("sample", {"step": 1, "group": 0, "sample": 99}, "no rollout 99 in group 0 of step 1"),
        ("rows", {"step": 10**23}, "step: expected a whole number from 0 on, found '1000"),
        ("search", {"step": "nan", "text": "a"}, "step: expected a whole number"),
        ("search", {"step": "inf", "text": "a"}, "step: expected a whole number"),
        ("ledger_rows", {"offset": -1}, "offset: expected a whole number from 0 on, found '-1'"),
        ("timeline", {"start": "x"}, "start: expected a number"),
        ("timeline", {"start": "inf"}, "start: expected a number"),
    ],
)
def test_a_wrong_question_is_refused(runs: list[ViewedRun], name: str, parameters: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        ask(runs, name, **parameters)
    assert isinstance(raised.value, UnknownPlace) != ("expected" in message)


def test_a_folder_without_a_record_answers_every_question_or_says_why(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    runs = open_runs([str(tmp_path)])
    assert ask(runs, "runs")[0]["sources"] == {}
    assert ask(runs, "overview")["sources"] == {}
    assert ask(runs, "items")["number"] == 0
    assert ask(runs, "timeline") is None
    with pytest.raises(DataError, match=r"tinker\.json: cannot be read"):
        ask(runs, "tinker")
    for name in QUESTIONS.keys() - {"overview", "items", "item", "config", "timeline", "series", "tinker"}:
        with pytest.raises(UnknownPlace, match="no rows"):
            ask(runs, name, step=1, group=0, sample=0, offset=0)


def test_an_evaluation_of_two_models_tells_its_results_and_where_they_differ(tmp_path: Path) -> None:
    scores = {"a": {"0": 1.0, "1": 0.0, "2": 0.5}, "b": {"0": 0.0, "1": 0.0, "2": 1.0}, "old": {"0": 1.0}}
    for name, own in scores.items():
        rows = [{"item": item, "score": score, "status": "evaluated"} for item, score in own.items()]
        rows_file(tmp_path, f"eval.{name}", 0, rows)
    found = {
        "models": {name: {"metrics": {"accuracy": 0.5, "pass@1": 0.5}} for name in ("a", "b")},
        "comparison": {"first": "a", "second": "b", "difference": 0.0, "low": -1.0, "high": 1.0, "p_value": 1.0},
        "settings": {name: {"questions": {"content": "x"}} for name in ("a", "b")},
    }
    (tmp_path / "results.json").write_text(json.dumps(found))
    overview = ask(open_runs([str(tmp_path)]), "overview")
    assert overview["statuses"] == {"evaluated": 6}, "all models count, but none of an earlier evaluation"
    results = overview["results"]
    assert results["models"]["b"]["pass@1"] == 0.5
    assert results["comparison"]["low"] == -1.0
    assert [(row["item"], row["first"], row["second"]) for row in results["different"]] == [("0", 1, 0), ("2", 0.5, 1)]


def test_failures_of_two_models_count_the_lowest_score_of_both(tmp_path: Path) -> None:
    scores = {"a": {"0": -2.0, "1": None, "2": 1.0}, "b": {"0": -0.5, "1": None, "2": None}}
    for name, own in scores.items():
        rows = [{"item": i, "score": s, "status": "failed" if s is None else "evaluated"} for i, s in own.items()]
        rows_file(tmp_path, f"eval.{name}", 0, rows)
    models = {name: {"metrics": {"accuracy": 0.5}} for name in scores}
    settings = {name: {"questions": {"content": "x"}} for name in scores}
    (tmp_path / "results.json").write_text(json.dumps({"models": models, "comparison": None, "settings": settings}))
    different = ask(open_runs([str(tmp_path)]), "overview")["results"]["different"]
    found = {row["item"]: (row["first"], row["second"]) for row in different}
    assert found == {"0": (-2.0, -0.5), "2": (1.0, -2.0)}


def test_failures_count_the_highest_score_of_both_models_if_lower_is_better(tmp_path: Path) -> None:
    for name, score in (("a", 3.0), ("b", None)):
        status = "failed" if score is None else "evaluated"
        other = {"item": "1", "score": 5.0 if name == "a" else 4.0, "status": "evaluated"}
        rows_file(tmp_path, f"eval.{name}", 0, [{"item": "0", "score": score, "status": status}, other])
    comparison = {"first": "a", "second": "b", "difference": 0.0, "low": 0, "high": 0, "p_value": 1.0}
    found = {
        "models": {name: {"metrics": {"ppl": 4.0}} for name in ("a", "b")},
        "comparison": comparison | {"lower_is_better": True},
        "settings": {name: {"questions": {"content": "x"}} for name in ("a", "b")},
    }
    (tmp_path / "results.json").write_text(json.dumps(found))
    different = ask(open_runs([str(tmp_path)]), "overview")["results"]["different"]
    assert {row["item"]: (row["first"], row["second"]) for row in different} == {"0": (3.0, 5.0), "1": (5.0, 4.0)}


@pytest.mark.parametrize("text", ["{", "[]", '{"models": 3}', '{"models": {"a": {"metrics": {"accuracy": "x"}}}}'])
def test_results_that_cannot_be_read_are_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "results.json").write_text(text)
    runs = open_runs([str(tmp_path)])
    assert runs[0].problems[0].startswith("results.json: cannot be read")
    assert ask(runs, "overview")["results"] is None


def test_the_state_of_a_tinker_server_is_told_or_why_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tinker.json").write_text('{"base": "b", "samples": 0, "num_models": 0, "models": [], "further": 1}')
    found = open_runs([str(tmp_path)])
    assert ask(found, "runs")[0]["is_tinker"]
    assert ask(found, "tinker") == {"base": "b", "samples": 0, "num_models": 0, "models": []}
    for broken in ("[]", "{", '{"models": 3}', "[" * 100_000):
        (tmp_path / "tinker.json").write_text(broken)
        with pytest.raises(DataError, match="cannot be read"):
            ask(found, "tinker")
