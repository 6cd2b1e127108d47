"""Rows from every kind of table, and errors that name file, line and row."""

from __future__ import annotations

import csv
import json
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.data.readers.tables import check_columns, read_rows
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
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in parts["train"]))
    first, second = (read_rows(f"train[{part}]@{tmp_path}/rows.jsonl") for part in (":70%", "70%:"))
    assert first + second == parts["train"]
    assert len(first) == 7
    with pytest.raises(ConfigError, match=r"no split 'tset'; did you mean 'test'"):
        read_rows(f"tset@{tmp_path}/both")


def test_current_folder_is_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def write_subsets(folder: Path) -> Path:
    """A folder with the subsets main and socratic, each with the splits train and test."""
    listed = []
    for subset in ("main", "socratic"):
        files = []
        for split in ("train", "test"):
            path = folder / subset / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"prompt": f"{subset} {split}"}) + "\n")
            files.append(f"  - split: {split}\n    path: {subset}/{split}.jsonl\n")
        listed.append(f"- config_name: {subset}\n  data_files:\n{''.join(files)}")
    (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(listed)}---\n")
    return folder


def test_a_subset_is_chosen_by_name_and_a_missing_one_lists_the_others(tmp_path: Path) -> None:
    folder = write_subsets(tmp_path / "data")
    assert read_rows(f"{folder}:main") == [{"prompt": "main train"}]
    assert read_rows(f"test[:100%]@{folder}:socratic") == [{"prompt": "socratic test"}]
    with pytest.raises(
        ConfigError, match=rf"no subset 'man'; did you mean 'main'\? Known: main, socratic; write {folder}:"
    ):
        read_rows(f"test@{folder}:man")
    with pytest.raises(ConfigError, match=rf"the dataset has the subsets main, socratic; write {folder}:SUBSET"):
        read_rows(f"test@{folder}")
    with pytest.raises(ConfigError, match=r"no split 'tset'; did you mean 'test'\?; write SPLIT@.*:main"):
        read_rows(f"tset@{folder}:main")


def test_files_and_saved_folders_have_no_subsets(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(ConfigError, match="a file has no subsets; leave out :main"):
        read_rows(f"train@{tmp_path}/rows.jsonl:main")
    datasets.Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="a folder that datasets saved has no subsets; leave out :main"):
        read_rows(f"{tmp_path}/saved:main")
    (tmp_path / "a:b.jsonl").write_text('{"prompt": "a"}')
    assert read_rows(tmp_path / "a:b.jsonl") == [{"prompt": "a"}]


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
        ("rows.json", '[{"a": 1}, "b"]', DataError, "row index 1: expected an object of named columns, found a text"),
        ("rows.csv", "a,b\n1,2\n3\n", DataError, "line 3: expected 2 cells"),
        ("rows.csv", 'a,b\n1,2\n"3,4\n', DataError, "line 3: not valid CSV"),
        ("rows.csv", "messages\n{a\n", DataError, "row index 0: 'messages': not valid JSON"),
        ("rows.parquet", "no", DataError, "not a Parquet file"),
        ("rows.arrow", "no", DataError, "not an Arrow file"),
    ],
)
def test_unreadable_tables_are_named_with_the_option(
    source: str, text: str | None, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(source.rpartition("@")[2]).write_text(text)
    with pytest.raises(error, match=rf"^data\.path={re.escape(source)}[:,] ?.*{message}"):
        read_rows(source, key="data.path")


@pytest.mark.parametrize("name", ["alpaca.jso", "alpca.json", "alpaca.jsonl"])
def test_a_missing_file_is_compared_with_the_files_beside_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "alpaca.json").write_text("[]")
    with pytest.raises(ConfigError, match=re.escape(f"no such file; did you mean '{tmp_path / 'alpaca.json'}'?")):
        read_rows(tmp_path / name)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        (tmp_path / name).write_bytes('prompt\n"é"'.encode("latin-1"))
        with pytest.raises(DataError, match=rf"{name}: not UTF-8"):
            read_rows(tmp_path / name)


def test_a_column_that_is_absent_or_of_another_type_is_named() -> None:
    columns = {"prompt": str, "margin": (float, int)}
    check_columns({"prompt": "", "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: no 'prompt'; the row has text, margin"):
        check_columns({"text": "a", "margin": 1}, columns, "row 3")
    for null in (None, float("nan")):
        with pytest.raises(DataError, match="row 3: 'prompt' is null; drop the row, or fill the column"):
            check_columns({"text": "a", "prompt": null, "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: 'prompt' is int 4; expected a text"):
        check_columns({"prompt": 4, "margin": 1}, columns, "row 3")
    with pytest.raises(DataError, match="row 3: 'margin' is bool True; expected a number or a whole number"):
        check_columns({"prompt": "a", "margin": True}, columns, "row 3")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": ' + "1" * 5000 + "}", "line 2: a whole number of 5000 digits; at most 4300"),
        ("rows.json", '[{"a": 1},\n{"a": ' + "1" * 5000 + "}]", "line 2: a whole number of 5000 digits"),
        ("rows.csv", "messages\n" + "1" * 5000 + "\n", "row index 0: 'messages': a whole number of 5000 digits"),
        ("rows.jsonl", '{"a": "[[["}\n{"a": ' + DEEP + "}", "line 2: JSON that is nested 100001 deep"),
        ("rows.json", '[{"a": 1},\n{"a": ' + DEEP + "}]", "line 2: JSON that is nested 100002 deep"),
    ],
)
def test_numbers_and_depths_that_python_does_not_read_are_named(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name}, {message}"):
        read_rows(tmp_path / name)


def many_rows() -> pa.Table:
    return pa.table({"prompt": [f"{number} " * 20 for number in range(5000)], "n": list(range(5000))})


def write_many(name: str, path: Path) -> None:
    if name.endswith(".parquet"):
        pq.write_table(many_rows(), path, row_group_size=1000)
        return
    new = pa.ipc.new_stream if name == "stream.arrow" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, many_rows().schema) as writer:
        writer.write_table(many_rows(), max_chunksize=1000)


@pytest.mark.parametrize("name", ["rows.parquet", "file.arrow", "stream.arrow"])
def test_damage_anywhere_in_a_columnar_file_is_a_data_error_or_other_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write_many(name, path)
    sound = path.read_bytes()
    assert len(read_rows(path)) == 5000
    draw = random.Random(0)
    messages = []
    for cut in (0, 10, len(sound) // 2, len(sound) - 3):
        path.write_bytes(sound[:cut])
        with pytest.raises(DataError, match=name) as error:
            read_rows(path)
        messages.append(str(error.value))
    for _ in range(3):
        data = bytearray(sound)
        for _ in range(300):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)
        try:
            read_rows(path)
        except DataError as failure:
            messages.append(str(failure))
    assert all(message.startswith(f"data.path={path}") for message in messages)


def test_a_reader_that_dies_costs_its_process_and_the_rows_before_are_named(tmp_path: Path) -> None:
    path = tmp_path / "stream.arrow"
    write_many("stream.arrow", path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"stream\.arrow, row index 2000 or one after it: not an Arrow file: "):
        read_rows(path)


def test_a_csv_file_that_is_not_text_leaves_the_limit_of_the_programs_own_cells(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "bad.csv").write_bytes(b"a,b\n\xff,1\n")
    with pytest.raises(DataError, match="not UTF-8 at byte 4"):
        read_rows(tmp_path / "bad.csv")
    assert csv.field_size_limit() == before


def test_deep_nesting_is_found_without_a_list_of_all_brackets(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 1_000_000 + "\n")
    tracemalloc.start()
    with pytest.raises(DataError, match="nested"):
        read_rows(tmp_path / "deep.jsonl")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
