"""Rows from every kind of table, and errors that name file, line and row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pytest

from rlite.data.tables import check_columns, read_rows
from rlite.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1=", "messages": [{"role": "user", "content": "a"}], "extra_info": {"answer": "2", "hard": None}},
    {
        "prompt": 'a\u2028b, "c"\n\x85',
        "messages": [{"role": "user", "content": "☃"}],
        "extra_info": {"answer": "3", "hard": 1},
    },
    {"prompt": "007", "messages": [], "extra_info": {"answer": "4", "hard": 2}},
]


def write_json(path: Path) -> None:
    path.write_text(json.dumps(ROWS))


def write_json_lines(path: Path) -> None:
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\r\n", encoding="utf-8")


def write_json_with_mark(path: Path) -> None:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8-sig")


def write_csv(path: Path) -> None:
    cells = [{key: value if key == "prompt" else json.dumps(value) for key, value in row.items()} for row in ROWS]
    pandas.DataFrame(cells).to_csv(path, index=False)


def write_parquet(path: Path) -> None:
    pandas.DataFrame(ROWS).to_parquet(path)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write(table)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write(table)


def write_dataset(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.json", write_json),
        ("rows.json", write_json_with_mark),
        ("lines.json", write_json_lines),
        ("rows.jsonl", write_json_lines),
        ("rows.csv", write_csv),
        ("rows.parquet", write_parquet),
        ("file.arrow", write_arrow_file),
        ("stream.arrow", write_arrow_stream),
        ("folder", write_dataset),
    ],
)
def test_the_same_rows_come_from_every_kind_of_table(name: str, write: Any, tmp_path: Path) -> None:
    write(tmp_path / name)
    assert read_rows(tmp_path / name) == ROWS
    assert read_rows(f"train[1:]@{tmp_path / name}") == ROWS[1:]


def test_a_split_and_parts_of_it_are_chosen_by_name(tmp_path: Path) -> None:
    parts = {name: [{"prompt": f"{name} {i}"} for i in range(10)] for name in ("train", "test")}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}).save_to_disk(
        tmp_path / "both"
    )
    assert read_rows(tmp_path / "both") == parts["train"]
    assert read_rows(f"test@{tmp_path}/both") == parts["test"]
    assert read_rows(f"test[-20%:]@{tmp_path}/both") == parts["test"][8:]
    assert read_rows(f"train[:70%]@{tmp_path}/both") + read_rows(f"train[70%:]@{tmp_path}/both") == parts["train"]
    with pytest.raises(ConfigError, match=r"no split 'tset'; did you mean 'test'"):
        read_rows(f"tset@{tmp_path}/both")


def test_the_folder_that_one_is_in_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.chdir(tmp_path / "saved")
    assert read_rows(".") == [{"prompt": "a"}]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"prompt": "b"}\n')
    monkeypatch.chdir(tmp_path / "files")
    assert read_rows(".") == [{"prompt": "b"}]


def test_a_folder_of_files_is_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"prompt": "a"}\n')
    assert read_rows(f"test@{folder}") == [{"prompt": "a"}]
    assert read_rows(folder) == [{"prompt": "a"}]  # the only split


def test_columnar_tables_add_no_keys_to_messages(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    other = {"role": "assistant", "content": "a", "tool_calls": [{"name": "g", "arguments": {"y": 2}}]}
    rows = [{"messages": [call, other], "extra_info": {"x": 1}}, {"messages": [other], "extra_info": {"y": 2}}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder")
    for name in ("rows.parquet", "folder"):
        read = read_rows(tmp_path / name)
        assert [row["messages"] for row in read] == [row["messages"] for row in rows]
        assert read[0]["extra_info"] == {"x": 1, "y": None}  # an environment may look up any key


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path) -> None:
    (tmp_path / "me@home").mkdir()
    (tmp_path / "me@home" / "rows.jsonl").write_text('{"prompt": "a"}')
    assert read_rows(tmp_path / "me@home" / "rows.jsonl") == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("source", "text", "error", "message"),
    [
        ("missing.json", None, ConfigError, "no such file"),
        ("missing.josnl", None, ConfigError, "no such file; did you mean '.jsonl'"),
        ("./no/such/folder", None, ConfigError, "no such file or folder"),
        ("rows.txt", "a", ConfigError, r"\.txt is no kind of table; known: \.json, \.jsonl, \.csv"),
        ("test@rows.json", "[]", ConfigError, "a file has the one split train"),
        ("a b@rows.json", "[]", ConfigError, "expected split@path"),
        ("rows.json", "[]", DataError, "no rows"),
        ("rows.jsonl", "\n", DataError, "no rows"),
        ("rows.csv", "prompt,response\n", DataError, "no rows"),
        ("rows.json", '[{"a": 1},\n{"a": ]', DataError, "line 2: not valid JSON"),
        ("rows.jsonl", '{"a": 1}\n{"a": \n', DataError, "line 2: not valid JSON"),
        ("rows.jsonl", '{"a": 1}\n[1]\n', DataError, "line 2: expected an object, found a list"),
        ("rows.json", '[{"a": 1}, "b"]', DataError, "row 1: expected an object of named columns, found a text"),
        ("rows.csv", "a,b\n1,2\n3\n", DataError, "line 3: expected 2 cells"),
        ("rows.csv", 'a,b\n1,2\n"3,4\n', DataError, "line 3: not valid CSV"),
        ("rows.csv", "messages\n{a\n", DataError, "row 0: 'messages' is not valid JSON"),
        ("rows.parquet", "no", DataError, "not a Parquet file"),
        ("rows.arrow", "no", DataError, "not an Arrow file"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_option(
    source: str, text: str | None, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(source.rpartition("@")[2]).write_text(text)
    with pytest.raises(error, match=rf"^data\.path={re.escape(source)}[:,] ?.*{message}"):
        read_rows(source, key="data.path")


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        (tmp_path / name).write_bytes('prompt\n"é"'.encode("latin-1"))
        with pytest.raises(DataError, match=rf"{name}: not UTF-8"):
            read_rows(tmp_path / name)


def test_a_column_that_is_absent_or_of_another_type_is_named() -> None:
    columns = {"prompt": str, "margin": (float, int)}
    check_columns({"prompt": "", "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: no 'prompt'; the row has text, margin"):
        check_columns({"text": "a", "prompt": None, "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: 'prompt' is int 4; expected a text"):
        check_columns({"prompt": 4, "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: 'margin' is bool True; expected a number or a whole number"):
        check_columns({"prompt": "a", "margin": True}, columns, "row 3")
