"""Files that are streamed: rows by their places, and names of what cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlite.data.readers.streaming import JsonLinesFile, open_files
from rlite.data.source import Source
from rlite.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [{"text": f"row {number} \u2028 ü", "n": number} for number in range(50)]


def write(path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
        path.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_rows_are_read_in_windows_and_again_by_their_places(name: str, tmp_path: Path) -> None:
    [file] = open_files(Source(str(write(tmp_path / name))))
    first, place = file.read_from(0, 20)
    second, place = file.read_from(place, 40)
    assert [row for _, row in first + second] == ROWS
    assert file.read_from(place, 40)[0] == []
    places = [at for at, _ in first + second]
    assert file.read([places[number] for number in (0, 3, 21, 49)]) == [ROWS[number] for number in (0, 3, 21, 49)]


def test_a_relative_path_is_that_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x.parquet")
    [first] = open_files(Source(str(tmp_path / "x.parquet")))
    assert first.read([3]) == [ROWS[3]], "in a kept process that begins here"
    monkeypatch.chdir(tmp_path)
    [file] = open_files(Source("x.parquet"))
    assert file.read([5]) == [ROWS[5]]


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for text, message in ((b'{"a": 1}\n\n{"a": \n', "not valid JSON"), (b'{"a": 1}\n\n[1]\n', "expected an object")):
        path.write_bytes(text)
        with pytest.raises(DataError, match=rf"data\.path=.*x\.jsonl, line 3: {message}"):
            open_files(Source(str(path)))[0].read_from(0, 9)
    path.write_bytes(b'{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"line 2: not UTF-8 at byte 16"):
        open_files(Source(str(path)))[0].read_from(0, 9)


def test_a_damaged_parquet_file_and_a_missing_row_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet")
    [file] = open_files(Source(str(path)))
    with pytest.raises(DataError, match=r"x\.parquet, row index 50: no such row"):
        file.read([3, 50])
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=r"x\.parquet: not a Parquet file"):
        file.read_from(0, 9)


def names_of(path: str) -> list[str]:
    return [Path(file.name).name for file in open_files(Source(path))]


def test_a_folder_gives_the_files_of_the_split(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train-1.jsonl", "train-0.parquet", "test-0.jsonl", "README.md", "info.json"):
        (folder / name).write_text("{}")
    assert names_of(str(folder)) == ["train-0.parquet", "train-1.jsonl"]
    assert names_of(f"test@{folder}") == ["test-0.jsonl"]
    with pytest.raises(ConfigError, match=f"its files lie in folders of it; name one of them: {folder}$"):
        open_files(Source(str(tmp_path)))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{}/missing.jsonl", "no such file"),
        ("{}/x.csv", r"reads \.jsonl and \.parquet files"),
        ("{}/array.json", "a JSON array is read as a whole; write one object per line"),
        ("org/name", "hf download NAME"),
        ("{}/x.jsonl.gz", r"reads \.jsonl and \.parquet files"),
        ("{}/empty", r"reads \.jsonl and \.parquet files"),
        ("train[:9]@{}/empty", "reads whole files, or split@folder"),
        ("train@{}/x.jsonl", "reads whole files, or split@folder"),
        ("org/name:subset", "leave out parts and subsets"),
    ],
)
def test_other_tables_are_refused_with_a_remedy(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.csv").write_text("a\n1\n")
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    (tmp_path / "array.json").write_text(" [\n{}]\n")
    with pytest.raises(ConfigError, match=rf"^train_data\.(path|streaming)=.*{message}"):
        open_files(Source(path.format(tmp_path), key="train_data"))


def test_a_place_past_the_end_of_a_file_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert JsonLinesFile(tmp_path / "a.jsonl", "data").name_of(10**18).endswith("a.jsonl, line 3")
