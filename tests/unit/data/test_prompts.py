"""Rows of prompts from files, and the order in which they are dealt."""

import json

import pytest

from rlite.data.prompts import PromptStream, read_rows
from rlite.errors import DataError


def test_a_text_may_hold_any_character_that_json_allows(tmp_path):
    rows = [{"prompt": "a\u2028b\x85c\x0bd"}, {"prompt": "e"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n", encoding="utf-8")
    assert read_rows(file) == rows


def test_a_row_that_is_not_json_is_named_by_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: not valid JSON"):
        read_rows(file)


def test_a_stream_deals_every_row_once_per_epoch_and_goes_on_from_a_position():
    rows = [{"prompt": str(number)} for number in range(5)]
    stream = PromptStream(rows, 3, seed=1)
    dealt = [row["prompt"] for _ in range(5) for row in stream.next()]
    for epoch in range(3):
        assert sorted(dealt[5 * epoch : 5 * epoch + 5]) == list("01234")
    assert dealt[:5] != dealt[5:10]
    resumed = PromptStream(rows, 3, seed=1)
    resumed.position = 6
    assert [row["prompt"] for row in resumed.next()] == dealt[6:9]
