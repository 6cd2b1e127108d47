"""Required columns of prompt rows, and the order in which rows are dealt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlite.data.rows import Rows, check_prompts, mixed_rows, prompt_stream, streamed_source
from rlite.data.source import Source
from rlite.errors import CheckpointError, ConfigError, DataError, StreamedDataError

MESSAGES = [{"role": "user", "content": "a"}]


def test_a_prompt_is_messages_or_a_text_or_tokens() -> None:
    check_prompts([{"prompt": "a"}, {"prompt": MESSAGES}, {"messages": MESSAGES}, {"input_ids": [1]}], "x")
    check_prompts([{"prompt": "a", "messages": None}], "x")  # tables fill what a row lacks with nulls


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "a"}, r"found none; the row has answer\. .*: train_data\.columns\.prompt=COLUMN$"),
        ({"answer": "a", "question": "b"}, r"found none; .*: train_data\.columns\.prompt=question$"),
        ({"prompt": "a", "messages": MESSAGES}, r"found messages and prompt; train_data\.columns\.prompt=null leaves"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": 4}, "'prompt' is int 4; expected a text or a list of messages"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: 'role' is None"),
        (["a"], "expected an object, found list"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "b"}]}, "ends with the assistant"),
    ],
)
def test_a_row_without_a_prompt_is_named(row: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"train_data.path=x.json, row index 1.*{message}"):
        check_prompts([{"prompt": "a"}, row], "train_data.path=x.json")


def test_stream_yields_every_row_once_per_epoch_and_resumes_from_a_position() -> None:
    rows = [{"prompt": str(number)} for number in range(5)]
    stream = prompt_stream(rows, 3, seed=1)
    dealt = [row["prompt"] for _ in range(5) for row in stream.next()]
    for epoch in range(3):
        assert sorted(dealt[5 * epoch : 5 * epoch + 5]) == list("01234")
    assert dealt[:5] != dealt[5:10]
    resumed = prompt_stream(rows, 3, seed=1)
    resumed.order.take(6)
    assert [row["prompt"] for row in resumed.next()] == dealt[6:9]
    again = prompt_stream(rows, 3, seed=2)
    again.load_state_dict(resumed.state_dict())
    assert [row["prompt"] for row in again.next()] == dealt[9:12]


def test_a_batch_larger_than_the_table_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts_per_rollout=4: "):
        prompt_stream([{"prompt": str(number)} for number in range(3)], 4, seed=0)


def test_a_stream_of_other_rows_is_refused_and_one_of_the_same_goes_on() -> None:
    rows = [{"prompt": str(number), "extra_info": {"at": object(), 3: number}} for number in range(6)]
    stream = prompt_stream(rows, 2, seed=0)
    stream.next()
    state = stream.state_dict()
    same = prompt_stream([{**row, "extra_info": {"at": object(), 3: row["extra_info"][3]}} for row in rows], 2, seed=0)
    same.load_state_dict(state)
    assert same.order.position == 2
    for others in ([{**rows[0], "prompt": "x"}, *rows[1:]], rows[::-1]):
        with pytest.raises(CheckpointError, match="another content"):
            prompt_stream(others, 2, seed=0).load_state_dict(state)
    prompt_stream(rows[::-1], 2, seed=0).load_state_dict({key: state[key] for key in state if key != "content"})


def test_streamed_rows_fill_batches_that_span_epochs_and_go_on_from_a_state(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"question": str(number)}) + "\n" for number in range(5)))
    source = Source(str(path), "train_data", {"prompt": "question"})
    rows = streamed_source(source, "prompts", buffer_size=3)
    stream = prompt_stream(rows, 4, seed=1)
    dealt = [row["prompt"] for _ in range(5) for row in stream.next()]
    for epoch in range(4):
        assert sorted(dealt[5 * epoch : 5 * epoch + 5]) == list("01234")
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [stream.next() for _ in range(3)]
    resumed = prompt_stream(streamed_source(source, "prompts", buffer_size=3), 4, seed=2)
    resumed.load_state_dict(state)
    assert [resumed.next() for _ in range(3)] == expected
    with pytest.raises(CheckpointError, match="made with streaming"):
        prompt_stream(rows.rows, 4, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="there are 5 rows"):
        prompt_stream(rows, 6, seed=1)


def test_no_prompt_is_left_out_if_the_next_epoch_meets_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [json.dumps({"prompt": str(number)}) + "\n" for number in range(5)]
    path.write_text("".join(rows))
    stream = prompt_stream(streamed_source(Source(str(path), "train_data"), "prompts", buffer_size=1), 3, seed=1)
    assert [row["prompt"] for row in stream.next()] == ["0", "1", "2"]
    path.write_text("{\n" * 5)
    with pytest.raises(StreamedDataError):
        stream.next()
    path.write_text("".join(rows))
    assert [row["prompt"] for row in stream.next()] == ["3", "4", "0"]


def test_a_row_of_a_mixture_is_named_in_its_source() -> None:
    rows = mixed_rows({"a": Rows([{"prompt": "p"}] * 3), "b": Rows([{"prompt": "p"}, {"prompt": ""}])}, None)
    with pytest.raises(DataError, match=r"^train_data\.mixture\.b, row index 1: 'prompt' is empty"):
        check_prompts(rows, "train_data")


def test_a_row_of_a_file_is_named_with_the_file() -> None:
    sources = {name: Rows([{"question": "q"}], paths={"": f"{name}.jsonl"}) for name in "ab"}
    with pytest.raises(
        DataError, match=r"^train_data\.path=a\.jsonl, row index 0: .*train_data\.columns\.prompt=question"
    ):
        check_prompts(sources["a"], "train_data")
    named = r"^train_data\.mixture\.a\.path=a\.jsonl, row index 0: .*train_data\.mixture\.a\.columns\.prompt=question"
    with pytest.raises(DataError, match=named):
        check_prompts(mixed_rows(sources, None), "train_data")
