from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.data.rows import Rows, prompt_stream
from rlite.errors import CallbackError, CheckpointError, ConfigError, DataError
from rlite.rollout import CollectorOptions, RewardFunction, RolloutCollector, ScriptedEngine, SingleTurnWorkflow
from rlite.trainer.callbacks import Callback
from rlite.trainer.rl.filtering import VariedGroups
from rlite.trainer.rl.options import PromptOptions
from rlite.trainer.sampling import CurriculumSampler, IntermediateSampler, PromptResult, PromptSampler
from rlite.trainer.sampling.prompts import ROW, SampledPrompts, results_of, sampled

ROWS = [{"prompt": f"p{n}", "level": (7 * n) % 10, "id": f"row{n}"} for n in range(10)]


def stream_of(sampler: PromptSampler, rows: Any = ROWS, seed: int = 3) -> SampledPrompts:
    stream = sampled([sampler], Rows(rows), prompt_stream(rows, 2, seed), 2, seed)
    assert isinstance(stream, SampledPrompts)
    return stream


def test_without_a_sampler_the_stream_is_the_uniform_one() -> None:
    uniform = prompt_stream(ROWS, 2, 3)
    assert sampled([Callback()], Rows(ROWS), uniform, 2, 3) is uniform


def test_a_curriculum_asks_the_easiest_rows_first_and_ends_with_all() -> None:
    stream = stream_of(CurriculumSampler(by="level", start=0.2, epochs=2.0))
    early = {prompt["level"] for _ in range(2) for prompt in stream.next()}
    later = {prompt["level"] for _ in range(60) for prompt in stream.next()}
    assert early <= {0, 1, 2, 3}
    assert later == set(range(10))


def hardness(row: dict[str, Any]) -> float:
    return -row["level"]


def test_a_curriculum_takes_a_function_of_a_row() -> None:
    stream = stream_of(CurriculumSampler(by=f"{__file__}:hardness", start=0.2, epochs=10.0))
    assert {prompt["level"] for prompt in stream.next()} == {8, 9}


@pytest.mark.parametrize(
    ("by", "error"), [("lvl", "did you mean 'level'"), ("prompt", "row index 0"), ("nowhere.py:f", "no such file")]
)
def test_a_curriculum_names_the_column_that_it_cannot_rank(by: str, error: str) -> None:
    with pytest.raises((ConfigError, DataError, ImportError, CallbackError), match=error):
        stream_of(CurriculumSampler(by=by))


def test_rows_of_intermediate_success_are_drawn_by_their_variance() -> None:
    rows = ROWS[:4]
    sampler = IntermediateSampler(floor=0.1, memory=0.0)
    sampler.begin(rows, seed=0)
    for number, mean in enumerate((0.0, 0.5, 1.0, 0.25)):
        sampler.observe(PromptResult(number, (mean,)))
    expected = [0.1, 1.1, 0.1, 0.85]  # 4 p (1 - p) + floor
    assert sampler.weights(1).tolist() == pytest.approx(expected)
    num = 4000
    drawn = Counter(number for _ in range(num) for number in sampler.choose(1))
    for number, weight in enumerate(expected):
        share = weight / sum(expected)
        assert abs(drawn[number] / num - share) < 5 * math.sqrt(share * (1 - share) / num)


def test_a_choice_holds_no_row_twice() -> None:
    sampler = IntermediateSampler()
    sampler.begin(ROWS, seed=0)
    assert all(len(set(sampler.choose(10))) == 10 for _ in range(20))


def observed(stream: SampledPrompts, prompts: list[Any]) -> None:
    """Solve prompts of even levels."""
    stream.observe([PromptResult(prompt[ROW], (float(prompt["level"] % 2 == 0), 0.0)) for prompt in prompts])


def test_a_resumed_stream_draws_the_same_prompts_with_results_that_were_not_observed() -> None:
    stream = stream_of(IntermediateSampler())
    for _ in range(6):
        observed(stream, stream.next())
    saved, own = stream.state_dict(), stream.sampler.state_dict()
    assert len(saved["pending"]) == 2
    resumed = stream_of(IntermediateSampler())
    resumed.sampler.load_state_dict(own)
    resumed.load_state_dict(saved)
    for _ in range(20):
        expected, found = stream.next(), resumed.next()
        assert [prompt.item for prompt in found] == [prompt.item for prompt in expected]
        observed(stream, expected)
        observed(resumed, found)


def test_a_stream_refuses_the_state_of_other_rows() -> None:
    with pytest.raises(CheckpointError):
        stream_of(IntermediateSampler(), rows=ROWS[:5]).load_state_dict(stream_of(IntermediateSampler()).state_dict())


def test_results_are_in_the_order_of_the_groups_and_count_a_trajectory_once() -> None:
    batch = TensorDict(
        {
            "group_ids": torch.tensor([7, 7, 5, 5, 5]),
            "sequence_index": torch.tensor([0, 0, 0, 1, 0]),
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.5, 0.25]),
            ROW: torch.tensor([3, 3, 9, 9, 9]),
        },
        batch_size=[5],
    )
    assert results_of(batch) == [PromptResult(9, (0.5, 0.25)), PromptResult(3, (1.0, 0.0))]
    assert results_of(batch[:2].exclude("group_ids"), is_one_group=True) == [PromptResult(3, (1.0, 0.0))]


class Broken(PromptSampler):
    def choose(self, count: int) -> list[int]:
        return [99] * count if count == 2 else [1 // 0]


def test_the_error_of_an_own_sampler_names_it() -> None:
    stream = stream_of(Broken())
    with pytest.raises(ConfigError, match=r"Broken.choose\(2\) returned \[99, 99\]; expected 2 numbers from 0 to 9"):
        stream.next()
    with pytest.raises(CallbackError, match="the sampler Broken raised ZeroDivisionError in choose"):
        stream.next(1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sampler": {"name": "curiculum"}}, "did you mean 'curriculum'"),
        ({"sampler": {"name": "intermediate", "options": {"lo": 1}}}, "no option 'lo'"),
        ({"sampler": {"options": {"low": 1}}}, "has none"),
        ({"sampler": {"name": "curriculum"}, "streaming": True}, "streaming=true"),
    ],
)
def test_options_of_samplers_are_checked_before_a_run(options: dict[str, Any], error: str) -> None:
    with pytest.raises(Exception, match=error):
        PromptOptions(**options)


def test_two_samplers_are_refused() -> None:
    with pytest.raises(ConfigError, match="several samplers"):
        sampled([Broken(), IntermediateSampler()], Rows(ROWS), prompt_stream(ROWS, 2, 0), 2, 0)


def test_groups_that_run_ahead_tell_their_rows_also_if_they_are_refused() -> None:
    seen: list[set[str]] = []

    def reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **row: Any) -> float:
        seen.append({*row})
        return float(row["level"] % 2 and completion_ids[0] == 1)

    engine = ScriptedEngine([[1], [2]])
    workflow = SingleTurnWorkflow(RewardFunction(reward, in_process=True), {"max_new_tokens": 4}, byte_tokenizer())
    stream = stream_of(IntermediateSampler())
    generated = stream.generated()
    varied = VariedGroups(2, partial(generated.add, is_one_group=True))
    collector = RolloutCollector(engine, CollectorOptions(max_head_offpolicyness=1, is_filter_bounded=True))
    numbered = stream.numbered(workflow)
    for version in range(1, 4):
        batch = collector.prepare_batch(stream, numbered, should_accept=varied, group_size=2)
        generated.add(batch)
        assert batch[ROW].shape == batch["group_ids"].shape
        engine.set_version(version)
        collector.version_changed()
    collector.close()
    stream.next(1)  # observes
    observed = stream.sampler.success  # type: ignore[attr-defined]
    assert len(observed) >= 4
    for number, success in observed.items():
        assert success == 0 if ROWS[number]["level"] % 2 == 0 else 0 <= success <= 1
    assert all(ROW not in columns for columns in seen), "rewards do not see the number"
