"""The record of a step: every group has one status, and a run that ends tells what was under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.observers import EQUAL_REWARDS, LEFT_OUT, UNLIKE, Outcome, RunRecord
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.assembly.rl import PartsMaker
from rlite.data.packs import TokenHistory, with_keys
from rlite.data.prompts import Prompt, PromptStream, ShuffledOrder
from rlite.data.rows import prompt_stream
from rlite.errors import StreamedDataError
from rlite.rollout import LLMRequest, RolloutCollector, RolloutWorkflow, ScriptedEngine, trajectory
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.lost_groups import NOT_ACCEPTED
from rlite.rollout.collector.runner import Group
from rlite.rollout.workflow import of_trajectory
from rlite.services.record.files import read_gaps
from rlite.services.record.recorder import NO_TOKENS, NOT_FINITE
from rlite.services.record.writer import drop_later
from rlite.trainer.options import TrainerOptions
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.rl.rollouts import BAD_DATA, NOT_AHEAD
from tests.recorded import recorded

ROWS = [{"id": f"row {number}", "input_ids": [65], "number": number} for number in range(8)]


class Ask(RolloutWorkflow):
    """Rewards of a group differ, are equal for every fourth row, and cannot be had for every fourth after one."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        response = await engine.agenerate(LLMRequest(input_ids=data["input_ids"]))
        if data["number"] % 4 == 1:
            raise ValueError("no reward")
        return trajectory(response, reward=float(data["number"] % 4 and response.output_tokens[0] % 2))


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """Makes the parts of a trainer that rollouts pass through, around a scripted engine."""
    collectors = []

    def make(ahead: int, prompts: PromptStream | None = None, **trainer: Any) -> Any:
        options = PpoConfig(
            actor=ActorOptions(model_name="x"),
            train_data=PromptOptions(prompts_per_rollout=2, responses_per_prompt=2),
            rollout=RolloutOptions(max_head_offpolicyness=ahead, request_retries=0),
            trainer=TrainerOptions(save_dir=str(tmp_path), **trainer),
        )
        engine = ScriptedEngine([[66], [67]])
        collectors.append(RolloutCollector(engine, options.collector_options()))
        rollout = collectors[-1]
        rollout.collector, rollout.tokenizer = rollout, byte_tokenizer()  # type: ignore[attr-defined]
        engines: Any = SimpleNamespace(rollout=rollout)
        said: list[Any] = []
        console = SimpleNamespace(warn=lambda title, rows: said.append((title, rows)))
        saved = SimpleNamespace(checkpoints=SimpleNamespace(oldest=None))
        run: Any = SimpleNamespace(folder=tmp_path, step=0, console=console, is_interrupted=False, saved=saved)
        prompts = prompts or prompt_stream(ROWS, 2, seed=0)
        record = RunRecord(options.trainer, run, rollout, options.has_dynamic_filtering)  # type: ignore[arg-type]
        record.begin()
        rollouts = PartsMaker(options).rollouts(engines, Ask(), prompts)
        return SimpleNamespace(run=run, record=record, rollouts=rollouts, engine=engine, said=said)

    yield make
    for collector in collectors:
        collector.close()


@contextmanager
def recording(parts: Any) -> Iterator[None]:
    """Close the record at the end of the block, as a run does."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        parts.record.close(parts.run, error)


def train(parts: Any, num_steps: int) -> list[list[int]]:
    """Train on nothing, and return the groups of each step's batch."""
    trained = []
    for _ in range(num_steps):
        batch = parts.rollouts.next_batch()
        parts.run.step += 1
        parts.engine.set_version(parts.run.step)
        parts.record.step(batch)
        trained.append(sorted(set(batch["group_ids"].tolist())))
    return trained


@pytest.mark.parametrize("ahead", [0, 1])
def test_every_group_has_the_rows_of_one_step_with_its_status(made: Any, tmp_path: Path, ahead: int) -> None:
    parts = made(ahead)
    with recording(parts):
        trained = train(parts, 5)
    rows = recorded(tmp_path)
    for step, groups in enumerate(trained, start=1):
        own = [row for row in rows if row["step"] == step]
        assert sorted({row["group"] for row in own if row["status"] == "trained"}) == groups
    places = [(row["group"], row["sample"]) for row in rows]
    assert places == sorted(set(places), key=lambda place: places.index(place)), "each once"
    assert {group for group, _ in places} == set(range(max(places)[0] + 1)), "every submitted group"
    kinds = {(row["status"], row["reason"]) for row in rows if row["step"] <= 5}
    assert ("trained", "") in kinds
    assert ("filtered", EQUAL_REWARDS) in kinds
    assert any(status == "failed" and "ValueError: no reward" in reason for status, reason in kinds)
    assert {row["status"] for row in rows if row["step"] == 6} <= {"aborted", "failed", "filtered"}
    assert {row["item"] for row in rows} <= {row["id"] for row in ROWS}
    assert all(row["reward"] == 0 for row in rows if row["status"] == "filtered" and row["item"] in ("row 0", "row 4"))


def consumed(number: int, rewards: Sequence[float] = (0.0, 1.0), **more: float) -> Ended:
    group = Group(number, {}, Ask(), 2)
    for reward, episode in zip(rewards, group.episodes, strict=True):
        history = TokenHistory()
        history.read([65])
        episode.trajectory = history.row().update(of_trajectory(1, rewards=reward, **more))
    return Ended.of(group, None)


def test_a_group_outside_the_batch_has_the_true_reason() -> None:
    batch = [consumed(0), consumed(1, scores=1.0)]
    outcome = Outcome(ended=batch, trained={0, 1}, is_filtering=True)
    assert outcome.decide(batch[0]).status == "trained"
    for own, status, reason in (
        (consumed(2), "refused", LEFT_OUT),
        (consumed(3, scores=2.0), "refused", LEFT_OUT),
        (consumed(4, num_turns=1.0), "refused", UNLIKE),
        (consumed(5, (1.0, 1.0)), "filtered", EQUAL_REWARDS),
        (consumed(6, (1.0, 1.0), num_turns=1.0), "refused", UNLIKE),
    ):
        found = outcome.decide(own)
        assert (found.status, found.reason) == (status, reason)


def test_rollouts_of_a_skipped_update_are_not_called_trained(made: Any, tmp_path: Path) -> None:
    parts = made(0)
    with recording(parts):
        batch = parts.rollouts.next_batch()
        parts.run.step += 1
        is_skipped = torch.arange(len(batch)) > 0  # the first row alone is in an update that was made
        parts.record.step(
            with_keys(batch, is_skipped=is_skipped, loss_mask=batch["loss_mask"] & (batch["rewards"] > 0)[:, None])
        )
    rows = [row for row in recorded(tmp_path) if row["status"] in ("trained", "skipped")]
    assert [row["status"] for row in rows] == ["trained"] + ["skipped"] * (len(batch) - 1)
    assert [row["reason"] for row in rows[1:]] == [NOT_FINITE if row["reward"] else NO_TOKENS for row in rows[1:]]
    assert {NOT_FINITE, NO_TOKENS} == {row["reason"] for row in rows[1:]}


def test_nothing_is_filtered_without_dynamic_filtering() -> None:
    outcome = Outcome(trained={0})
    left_out, refused = consumed(1, (1.0, 1.0)), replace(consumed(2), status="refused", reason=NOT_ACCEPTED.reason)
    assert [(found.status, found.reason) for found in map(outcome.decide, (left_out, refused))] == [
        ("refused", LEFT_OUT),
        ("refused", NOT_ACCEPTED.reason),
    ]


def groups_of(rows: list[dict[str, Any]]) -> list[int]:
    return sorted(row["group"] for row in rows if row["sample"] == 0)


def test_a_run_that_no_longer_runs_ahead_records_what_it_does_not_use(made: Any, tmp_path: Path) -> None:
    ahead = made(1)
    train(ahead, 2)
    ahead.record.before_save(ahead.run)
    state = ahead.rollouts.state_dict()
    begun = {group["id"] for group in state["groups"]}
    assert begun
    parts = made(0)
    parts.run.step = 2
    parts.rollouts.load_state_dict(state)
    with recording(parts):
        train(parts, 1)
    rows = recorded(tmp_path)
    assert groups_of(rows) == list(range(max(groups_of(rows)) + 1)), "every submitted group, once"
    given_up = [row for row in rows if row["reason"] == NOT_AHEAD]
    assert {row["group"] for row in given_up} == begun
    assert {(row["step"], row["status"]) for row in given_up} == {(3, "aborted")}
    finished = {group["id"] for group in state["groups"] if group["trajectories"] is not None}
    assert {row["group"] for row in given_up if row["reward"] is not None} == finished


class BadLater(PromptStream):
    """The third call of `next` meets a row that cannot be used."""

    num_calls = 0

    def next(self, count: int | None = None) -> list[Prompt]:
        self.num_calls += 1
        if self.num_calls == 3:
            raise StreamedDataError("a bad row")
        return super().next(count)


def test_groups_of_a_batch_that_met_bad_data_are_recorded_by_the_run_that_goes_on(made: Any, tmp_path: Path) -> None:
    parts = made(0, prompts=BadLater(ROWS[:1] * 8, 2, ShuffledOrder(8, seed=0)))  # equal rewards, which are replaced
    with pytest.raises(StreamedDataError):
        train(parts, 1)
    state = parts.rollouts.state_dict()
    again = made(0)
    again.rollouts.load_state_dict(state)
    with recording(again):
        train(again, 1)
    rows = recorded(tmp_path)
    assert groups_of(rows) == list(range(max(groups_of(rows)) + 1))
    given_up = [(row["step"], row["status"]) for row in rows if row["reason"] == BAD_DATA]
    assert given_up == [(1, "aborted")] * 8


def test_a_run_that_fails_records_what_it_had_begun(made: Any, tmp_path: Path) -> None:
    parts = made(0)

    def fail() -> None:
        with recording(parts):
            train(parts, 1)
            parts.rollouts.next_batch()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    rows = [row for row in recorded(tmp_path) if row["step"] == 2 and row["status"] == "aborted"]
    assert {row["reason"] for row in rows} == {"the run ended with RuntimeError"}
    assert all(row["reward"] is not None for row in rows)


def test_an_error_of_the_record_does_not_hide_why_a_run_failed(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    parts = made(0)

    def fail() -> None:
        with recording(parts):
            parts.record._collector = object()
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert "the end of the record could not be written" in caplog.text


def test_a_full_disk_ends_the_record_and_a_resumed_run_is_recorded_again(made: Any, tmp_path: Path) -> None:
    first = made(0)
    train(first, 1)
    first.record.before_save(first.run)
    (tmp_path / "record").rename(tmp_path / "aside")
    (tmp_path / "record").touch()  # no folder
    with recording(first):
        train(first, 2)
        first.record.before_save(first.run)
        first.record._recorder._executor.submit(int).result()  # no note of the gap makes the folder before it is back
        (tmp_path / "record").unlink()
        (tmp_path / "aside").rename(tmp_path / "record")
        state = first.rollouts.state_dict()
    drop_later(tmp_path, 3)
    again = made(0)
    again.run.step = 3
    again.rollouts.load_state_dict(state)
    with recording(again):
        train(again, 1)
    assert {row["step"] for row in recorded(tmp_path)} == {1, 4}
    assert [(gap.first, gap.last) for gap in read_gaps(tmp_path)] == [(2, 3)]


def test_all_texts_are_there_only_if_all_are_asked_for(made: Any, tmp_path: Path) -> None:
    parts = made(0, record="all")
    with recording(parts):
        train(parts, 2)
    assert all(row["segments"] for row in recorded(tmp_path) if row["status"] != "failed")


def test_nothing_is_written_and_nothing_kept_without_a_record(made: Any, tmp_path: Path) -> None:
    parts = made(0, record="none")
    with recording(parts):
        train(parts, 2)
        assert parts.rollouts._engine.collector.take_ended() == []
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_told_once(made: Any, tmp_path: Path) -> None:
    parts = made(0, record="all", record_limit=3e-5)
    with recording(parts):
        for _ in range(4):
            train(parts, 1)
            parts.record.before_save(parts.run)
        train(parts, 1)
    assert [title for title, _ in parts.said] == ["step 3: the record has reached its limit"]
    assert parts.said[0][1]["limit"] == "trainer.record_limit=3e-05 GiB"
