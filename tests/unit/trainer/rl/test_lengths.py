"""Longest sequences of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.assembly.workflows import Context, RunWorkflows, check_openings
from rlite.data.readers.streaming import WINDOW
from rlite.data.rows import prompt_stream, streamed_source
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError, StreamedDataError
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.trainer.rl.options import ActorOptions, KlOptions, PpoConfig, ReferenceOptions, RolloutOptions
from tests.tiny import build_model_dir


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("m") / "long", hidden=32, max_position_embeddings=16384)


def options(model: Path, rollout: dict[str, Any] | None = None, **changes: Any) -> PpoConfig:
    return PpoConfig(actor=ActorOptions(model_name=str(model)), rollout=RolloutOptions(**rollout or {}), **changes)


def single(max_new_tokens: int) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(lambda **_: 0.0, {"max_new_tokens": max_new_tokens}, byte_tokenizer())


class Unbounded(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


def test_one_turn_serves_the_longest_prompt_and_all_new_tokens(model: Path) -> None:
    limit = RunWorkflows(options(model)).context_limit
    assert limit == 16384
    assert RunWorkflows(options(model)).make_context(limit, [(single(5000), 12), (single(6000), 40)]) == Context(
        6040, 40
    )
    assert RunWorkflows(options(model)).make_context(limit, [(single(16380), 12)]) == Context(16384, 12)


def test_unbounded_prompts_get_the_largest_supported_context(model: Path, tmp_path: Path) -> None:
    for prompts in ([(Unbounded(), 12)], [(single(8), 12), (Unbounded(), 0)], [(single(8), 0)]):
        assert RunWorkflows(options(model)).make_context(16384, prompts).length == 16384
    short = build_model_dir(tmp_path / "short", hidden=32, max_position_embeddings=512)
    assert RunWorkflows(options(short)).context_limit == 512
    reference = ReferenceOptions(model_name=str(short))
    assert RunWorkflows(options(model, ref_actor=reference, kl=KlOptions(type="loss"))).context_limit == 512
    assert RunWorkflows(options(model, {"max_model_len": 100})).context_limit == 100
    assert RunWorkflows(options(model, {"max_model_len": 100})).make_context(100, [(single(8), 12)]) == Context(100, 12)


def test_the_plan_says_how_much_of_an_answer_fits() -> None:
    assert Context(5012, 12).describe(5000) == "at most 5012 tokens; prompts of at most 12"
    assert "after which 84 of 5000 new tokens fit" in Context(4096, 4012).describe(5000)


def test_a_prompt_that_the_workflow_refuses_is_named_by_its_row() -> None:
    class Picky(Unbounded):
        def opening(self, data: Any) -> list[int]:
            if data["number"] == 3:
                raise DataError("no system")
            return data["input_ids"]

    rows = [{"input_ids": [number], "number": number} for number in range(1, 25)]
    with pytest.raises(DataError, match="train_data, row index 2: no system"):
        check_openings(rows, Picky(), 8, "train_data")


def test_streamed_prompts_are_served_at_any_length_and_checked_as_they_come(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    prompts = ["p", *["q"] * WINDOW, "r" * 100]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    rows = streamed_source(Source(str(path), "train_data"), "prompts", buffer_size=1)
    given = options(model, {"max_model_len": 64})
    assert RunWorkflows(given).check_lengths([(single(8), rows, "train_data")]) == Context(64, 0)
    assert RunWorkflows(options(model)).check_lengths([(single(8), rows, "train_data")]) == Context(16384, 0)
    RunWorkflows(given).check_lengths([(single(8), rows, "train_data")])
    stream = prompt_stream(rows, 1000, seed=0)
    assert [len(stream.next()) for _ in range(4)] == [1000] * 4
    with pytest.raises(StreamedDataError, match=rf"x\.jsonl, line {WINDOW + 2}: its prompt has 100 tokens, .* in 64 "):
        stream.next()


def test_more_sequences_than_the_machine_can_hold_are_refused_before_the_start(model: Path) -> None:
    prompts = [{"prompt": "1+1="}]
    for many in (10**12, 10**9):
        own = options(model, train_data={"prompts_per_rollout": 32, "responses_per_prompt": many})
        with pytest.raises(
            ConfigError, match=rf"{32 * many:,} sequences in a step take at least [\d,]+ GiB of host mem"
        ):
            RunWorkflows(own).check_lengths([(single(8), prompts, "train_data")])
    context = RunWorkflows(options(model)).check_lengths([(single(8), prompts, "train_data")])
    assert context.host_gib(2_000_000, context.length) == pytest.approx(2e6 * (4096 + 40 * 12) / 2**30)
