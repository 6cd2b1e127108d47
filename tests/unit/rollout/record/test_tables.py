"""Tables of groups: what a row and its tokens say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.packs import TokenHistory, check_trajectory
from rlite.rollout.collector.ended import MAX_COLUMNS, MAX_VALUE, Ended
from rlite.rollout.collector.runner import Group
from rlite.rollout.collector.saved import ended_state, saved_ended
from rlite.rollout.joined import join_histories, pad_trajectories
from rlite.rollout.workflow import RolloutWorkflow, of_trajectory
from rlite.services.record.files import ROWS, WRITTEN_TOKENS
from rlite.services.record.recorder import MAX_EVENTS, NUM_GROUPS, FileRecorder, TokenTexts, make_tables, sampled
from rlite.types import Status, TokenChunk
from tests.recorded import recorded


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts(byte_tokenizer())


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_special_tokens=False)


def turns(*parts: str, version: int = 3, reward: float = 0.5, **values: float) -> TensorDict:
    """A trajectory of a prompt, and of turns of model and environment."""
    history = TokenHistory()
    for place, part in enumerate(parts):
        tokens = ids(part)
        if place % 2:
            history.write(tokens, [-0.5] * len(tokens), [version + place] * len(tokens), "stop")
        else:
            history.read(tokens)
    return history.row().update(of_trajectory(1, rewards=reward, **values))


class Unused(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None: ...


def ended(number: int, *trajectories: TensorDict | None, status: Status = "trained", reason: str = "") -> Ended:
    group = Group(number, {}, Unused(), len(trajectories), item=f"item {number}")
    for episode, trajectory in zip(group.episodes, trajectories, strict=True):
        episode.trajectory = trajectory
    return Ended.of(group, status, reason)


def test_a_row_says_what_a_trajectory_holds(texts: TokenTexts) -> None:
    trajectory = turns("2+2=", "five", " no ", "four", reward=1.5, scores=2.0, num_turns=2.0, num_tool_calls=3.0)
    trajectory["reward/format"], trajectory["reward/length"] = torch.tensor([0.25]), torch.tensor([math.nan])
    group = ended(4, trajectory)
    episode = group.episodes[0]
    episode.started, episode.ended, episode.ended_at = 1.0, 5.0, 1e9
    episode.spans = [("generate", 1.0, 2.0), ("generate", 2.5, 3.5), ("reward", 4.0, 4.75)]
    table = make_tables(9, [group], texts, shown=[0])["rows"]
    assert table.schema.equals(ROWS, check_metadata=True)
    (row,) = table.to_pylist()
    assert row == {
        "step": 9,
        "group": 4,
        "sample": 0,
        "item": "item 4",
        "status": "trained",
        "reason": "",
        "failed_attempts": "",
        "redrawn": "",
        "reward": 1.5,
        "reward_parts": [("format", 0.25)],
        "score": 2.0,
        "answer": None,
        "advantage": None,
        "turns": 2,
        "tool_calls": 3,
        "tool_errors": None,
        "prompt_tokens": 4,
        "response_tokens": 8,
        "truncated": False,
        "version_min": 4,
        "version_max": 6,
        "ended": 1e9,
        "seconds_queue": 1.0,
        "seconds_generate": 2.0,
        "seconds_environment": 1.25,
        "seconds_reward": 0.75,
        "events": [
            {"name": name, "start": start, "end": end}
            for name, start, end in [
                ("queue", 0.0, 1.0),
                ("generate", 1.0, 2.0),
                ("environment", 2.0, 2.5),
                ("generate", 2.5, 3.5),
                ("environment", 3.5, 4.0),
                ("reward", 4.0, 4.75),
                ("environment", 4.75, 5.0),
            ]
        ],
        "segments": [
            {"role": "prompt", "text": "2+2="},
            {"role": "model", "text": "five"},
            {"role": "environment", "text": " no "},
            {"role": "model", "text": "four"},
        ],
        "data": [],
    }


def test_columns_of_the_data_item_stand_beside_its_text_and_are_bounded(texts: TokenTexts) -> None:
    item = {"id": "a", "answer": "4", "level": 2, "tests": [list(range(100))] * 100, "prompt": "x" * 1000}
    group = Group(1, item | {f"more {n}": n for n in range(100)}, Unused(), 1)
    shown, other = make_tables(1, [Ended.of(group, "failed")] * 2, texts, shown=[0])["rows"]["data"].to_pylist()
    assert other is None
    columns = dict(shown)
    assert {name: columns[name] for name in ("answer", "level")} == {"answer": "4", "level": "2"}
    assert "id" not in columns
    assert len(columns) == MAX_COLUMNS
    assert max(map(len, columns.values())) == MAX_VALUE


def test_tokens_have_the_columns_of_engine_and_trainer(texts: TokenTexts) -> None:
    groups = [ended(2, turns("ab", "cd"), turns("abcdef", "gh")), ended(1, turns("x", "y"), turns("x", "yz"))]
    rows = [episode.trajectory for group in groups for episode in group.episodes]
    batch = pad_trajectories([row for row in rows if row is not None], [2, 2, 1, 1])
    batch["advantages"] = batch["loss_mask"] * torch.tensor([[1.0], [-1.0], [2.0], [-2.0]])
    batch["old_logprobs"] = batch["logprobs"] - 1
    made = make_tables(1, groups, texts, [0, 1], batch)
    assert made["tokens"].schema.equals(WRITTEN_TOKENS, check_metadata=True)
    row = made["tokens"].to_pylist()[1]
    assert (row["group"], row["sample"], row["sequence"], row["text"]) == (2, 1, 0, "abcdefgh")
    assert row["ids"] == ids("abcdefgh")
    assert row["offsets"] == list(range(8))
    assert row["mask"] == [False] * 6 + [True] * 2
    assert row["versions"] == [-1] * 6 + [4] * 2
    assert row["logprobs"] == [0.0] * 6 + [-0.5] * 2
    assert row["trainer_logprobs"] == [-1.0] * 6 + [-1.5] * 2
    assert row["advantages"] == [0.0] * 6 + [-1.0] * 2
    assert row["entropy"] is None
    assert [row["advantage"] for row in made["rows"].to_pylist()] == [1.0, -1.0, 2.0, -2.0]


def test_rows_that_no_update_has_computed_have_null(texts: TokenTexts) -> None:
    groups = [ended(0, turns("a", "b")), ended(1, turns("a", "b"))]
    batch = pad_trajectories([group.episodes[0].trajectory for group in groups], [0, 1])  # type: ignore[misc]
    batch["entropies"] = batch["loss_mask"] * 2.0
    batch["entropies"][0] = math.nan
    made = make_tables(1, groups, texts, [0, 1], batch)["tokens"].to_pylist()
    assert [sequence["entropy"] for sequence in made] == [None, [0.0, 2.0]]


def test_every_sequence_of_a_trajectory_has_its_tokens(texts: TokenTexts) -> None:
    histories = []
    for prompt, answer in (("longer prompt", "a"), ("b", "cd")):
        history = TokenHistory()
        history.read(ids(prompt))
        history.write(ids(answer), [-1.0] * len(answer), [0] * len(answer), "length")
        history.reward(0.5)
        histories.append(history)
    trajectory = join_histories(histories, num_turns=2)
    batch = pad_trajectories([trajectory], [5])
    batch["advantages"] = batch["loss_mask"] * torch.tensor([[1.0], [4.0]])
    made = make_tables(1, [ended(5, trajectory)], texts, [0], batch)
    rows = made["tokens"].to_pylist()
    assert [(row["sequence"], row["text"], row["advantages"][-1]) for row in rows] == [
        (0, "longer prompta", 1.0),
        (1, "bcd", 4.0),
    ]
    (row,) = made["rows"].to_pylist()
    assert (row["reward"], row["turns"], row["truncated"], row["advantage"]) == (1.0, 2, True, 3.0)
    assert [segment["text"] for segment in row["segments"]] == ["longer prompt", "a", "b", "cd"]


def test_a_failed_episode_has_a_row_with_its_reason_and_so_have_its_siblings(texts: TokenTexts) -> None:
    group = ended(0, turns("a", "b"), None, status="failed", reason="ValueError: first line\n  at x\nValueError: 3 < 4")
    group.episodes[1].failure = group.reason
    group.episodes[1].num_tokens = 17
    first, second = make_tables(1, [group], texts, [0])["rows"].to_pylist()
    assert first["reason"] == "sample 1 of the group: ValueError: ValueError: 3 < 4"
    assert second["reason"] == "ValueError: ValueError: 3 < 4"
    assert (first["status"], first["reward"], second["status"], second["reward"]) == ("failed", 0.5, "failed", None)
    assert second["response_tokens"] == 17
    assert second["segments"] == []


def test_an_episode_without_a_trajectory_has_the_tokens_of_its_last_attempt(texts: TokenTexts) -> None:
    group = ended(0, None, status="failed", reason="ValueError: the reward")
    [episode] = group.episodes
    for text in ("first", "second"):
        episode.begin_attempt()
        with episode.attempt.turn(ids("1+1=")) as write:
            made = ids(text)
            write(TokenChunk(request_id=0, version=5, token_ids=made, logprobs=[-0.25] * len(made)))
    again = saved_ended(ended_state(group))
    for each in (group, again):
        made = make_tables(1, [each], texts, shown=[0])
        [row], [tokens] = made["rows"].to_pylist(), made["tokens"].to_pylist()
        assert row["segments"] == [{"role": "prompt", "text": "1+1="}, {"role": "model", "text": "second"}]
        assert (row["reward"], row["turns"], row["version_min"], row["response_tokens"]) == (None, 1, 5, 6)
        assert tokens["logprobs"] == [0.0] * 4 + [-0.25] * 6
        assert (tokens["trainer_logprobs"], tokens["advantages"]) == (None, None)
    episode.take_trajectory(turns("a", "b"))
    assert episode.attempt.arrays() == []


def test_a_group_that_never_started_has_rows(texts: TokenTexts) -> None:
    rows = make_tables(1, [ended(0, None, None, status="aborted", reason="the run ended")], texts, [])["rows"]
    assert [(row["status"], row["seconds_queue"], row["segments"]) for row in rows.to_pylist()] == [
        ("aborted", None, None)
    ] * 2


def test_hostile_texts_and_endless_episodes_can_be_written(texts: TokenTexts) -> None:
    group = ended(0, turns("a", "b"), status="failed", reason="\ud800 <script>\u202e" + "x" * 10_000)
    group.episodes[0].started = group.episodes[0].now()
    group.episodes[0].spans = [("generate", float(second), second + 0.5) for second in range(1, 2000)]
    group.episodes[0].answer = "\udfff"
    (row,) = make_tables(1, [group], texts, [])["rows"].to_pylist()
    assert row["reason"].startswith("? <script>\u202exxx")
    assert len(row["reason"]) == 500
    assert row["answer"] == "?"
    assert len(row["events"]) == MAX_EVENTS
    assert row["seconds_generate"] == pytest.approx(1999 * 0.5)


def test_an_evaluation_of_a_workflow_without_masks_has_rows(texts: TokenTexts) -> None:
    plain = turns("a", "b").select("input_ids", "attention_mask", "rewards")
    made = make_tables(1, [ended(0, plain, status="evaluated")], texts, [0])
    (row,) = made["rows"].to_pylist()
    assert (row["reward"], row["prompt_tokens"], row["version_min"], row["truncated"]) == (0.5, 2, None, None)
    assert made["tokens"].to_pylist()[0]["logprobs"] is None


def test_keys_of_a_workflow_do_not_stop_the_record(texts: TokenTexts) -> None:
    trajectory = turns("a", "bc", num_turns=2.0)
    trajectory["logprobs"] = trajectory["logprobs"].bfloat16().requires_grad_()
    trajectory["scores"] = torch.tensor([2.0], dtype=torch.bfloat16)
    trajectory["reward/format"], trajectory["num_tool_calls"] = torch.full((1, 3), 0.25), torch.ones(1, 3)
    trajectory["own"] = torch.ones(1, dtype=torch.bfloat16)
    check_trajectory(trajectory)
    made = make_tables(1, [ended(0, trajectory)], texts, [0], warn=pytest.fail)
    (row,) = made["rows"].to_pylist()
    assert (row["score"], row["reward_parts"], row["tool_calls"]) == (2.0, [("format", 0.25)], 1)
    assert made["tokens"].to_pylist()[0]["logprobs"] == [0.0, -0.5, -0.5]


def test_a_trajectory_that_cannot_be_read_has_a_row_without_columns(texts: TokenTexts) -> None:
    empty_part, too_large, fine = turns("a", "b"), turns("a", "b", num_turns=1e12), turns("a", "b")
    empty_part["reward/format"] = torch.ones(1, 0)
    said: list[str] = []
    made = make_tables(7, [ended(3, empty_part, too_large, fine)], texts, [0], warn=said.append)
    rows = made["rows"].to_pylist()
    assert [(row["sample"], row["reward"], row["turns"]) for row in rows] == [
        (0, None, None),
        (1, None, None),
        (2, 0.5, 1),
    ]
    assert [row["sample"] for row in made["tokens"].to_pylist()] == [2]
    assert ["step 7, group 3, sample 0" in said[0], "IndexError" in said[0], "sample 1" in said[1], len(said)] == [
        *(True, True, True, 2)
    ]


def test_the_first_trajectory_that_is_not_recorded_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = turns("a", "b", num_turns=1e12)
    recorder = FileRecorder(tmp_path, byte_tokenizer(), is_whole=True, limit=2**30)
    recorder.record(1, [ended(0, unreadable)])
    recorder.record_evaluation("test", 1, [ended(0, unreadable, status="evaluated")])
    recorder.close()
    assert [record.getMessage()[:6] for record in caplog.records] == ["step 1"]
    assert [row["reward"] for row in recorded(tmp_path)] == [None]


def test_a_sample_has_the_first_groups_of_each_status_and_every_tenth_step_whole() -> None:
    statuses: list[Status] = ["trained", "failed", *["trained"] * 4, "filtered"]
    groups = [ended(number, None, status=status) for number, status in enumerate(statuses)]
    assert NUM_GROUPS == 2
    assert sampled(2, groups) == {0, 1, 2, 6}
    assert sampled(1, groups) == sampled(11, groups) == set(range(7))
    assert np.mean([len(sampled(step, groups)) == 7 for step in range(1, 101)]) == pytest.approx(0.1)
