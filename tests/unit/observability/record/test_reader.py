from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset

from rlite.services.record.files import ROWS, TOKENS, VERSION, VERSION_KEY
from rlite.services.record.reader import Part, RecordReader, _footer_of, read_file_part
from rlite.services.record.writer import write_table


def row(step: int, sample: int = 0, **values: Any) -> dict[str, Any]:
    return {"step": step, "group": step, "sample": sample, "item": "0", "status": "trained", "reason": "", **values}


def rows(*given: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(given), schema=ROWS)


def path_of(folder: Path, name: str) -> Path:
    return folder / "record" / name


@pytest.fixture
def reader(tmp_path: Path) -> RecordReader:
    for step in (1, 2):
        write_table(tmp_path, "train", step, "rows", rows(row(step), row(step, 1, reward=0.5)))
    found = RecordReader(tmp_path)
    found.refresh()
    return found


def test_all_steps_are_one_table_without_texts(reader: RecordReader) -> None:
    table = reader.table("train")
    assert table["step"].to_pylist() == [1, 1, 2, 2]
    assert "segments" not in table.column_names
    assert reader.sources == ["train"]
    assert reader.problems == {}


def test_a_file_that_a_crash_cut_off_is_named_and_the_others_are_read(tmp_path: Path, reader: RecordReader) -> None:
    path = path_of(tmp_path, "train-00000002.rows.parquet")
    path.write_bytes(path.read_bytes()[:-60])
    reader.refresh()
    assert reader.table("train")["step"].to_pylist() == [1, 1]
    assert list(reader.problems) == [path.name]


def test_every_length_of_a_cut_file_is_survived(tmp_path: Path) -> None:
    path = write_table(tmp_path, "train", 1, "rows", rows(row(1)))
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        reader = RecordReader(tmp_path)
        reader.refresh()
        assert reader.table("train").num_rows == 0
        assert "cannot be read" in reader.problems[path.name]


def test_damage_inside_a_file_is_named(tmp_path: Path) -> None:
    texts = [{"role": "model", "text": f"{number:x}" * 40} for number in range(3000)]
    path = write_table(tmp_path, "train", 1, "rows", rows(row(1, segments=texts)))
    whole = bytearray(path.read_bytes())
    whole[2000:4000] = bytes(2000)
    path.write_bytes(whole)
    reader = RecordReader(tmp_path)
    reader.refresh()
    assert reader.rollouts("train", 1) == [] or reader.table("train").num_rows == 0
    assert path.name in reader.problems


def test_another_version_is_refused_by_its_name(tmp_path: Path, reader: RecordReader) -> None:
    path = path_of(tmp_path, "train-00000002.rows.parquet")
    newer = pq.read_table(path).replace_schema_metadata({VERSION_KEY: b"7"})
    pq.write_table(newer, path)
    reader.refresh()
    assert reader.table("train").num_rows == 2
    expected = f"written in version 7 of the format; this rlite reads version {VERSION}"
    assert reader.problems == {path.name: expected}


def test_a_foreign_table_is_no_record(tmp_path: Path, reader: RecordReader) -> None:
    pq.write_table(pa.table({"a": [1]}), path_of(tmp_path, "train-00000003.rows.parquet"))
    reader.refresh()
    assert reader.table("train").num_rows == 4
    assert "no table of a record" in reader.problems["train-00000003.rows.parquet"]


@pytest.mark.parametrize("name", ["step", "group", "sample", "item", "status", "reason"])
def test_a_file_with_rows_without_a_place_or_status_is_named(tmp_path: Path, reader: RecordReader, name: str) -> None:
    write_table(tmp_path, "train", 3, "rows", rows(row(3), row(3, 1) | {name: None}))
    reader.refresh()
    assert reader.table("train").num_rows == 4
    expected = f"cannot be read: rows without a value of {name}"
    assert reader.problems == {"train-00000003.rows.parquet": expected}


def test_files_are_found_while_the_run_goes_on(tmp_path: Path, reader: RecordReader) -> None:
    assert reader.table("train").num_rows == 4
    assert not reader.refresh()
    write_table(tmp_path, "train", 3, "rows", rows(row(3)))
    write_table(tmp_path, "eval.math", 3, "rows", rows(row(3, status="evaluated")))
    assert reader.refresh()
    assert reader.table("train").num_rows == 5
    assert reader.sources == ["train", "eval.math"]


def test_a_file_that_was_mended_is_read_again(tmp_path: Path, reader: RecordReader) -> None:
    path = path_of(tmp_path, "train-00000002.rows.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    reader.refresh()
    assert reader.table("train").num_rows == 2
    path.write_bytes(whole)
    reader.refresh()
    assert reader.table("train").num_rows == 4
    assert reader.problems == {}


def test_steps_of_compacted_files_count_once(tmp_path: Path, reader: RecordReader) -> None:
    compacted = path_of(tmp_path, "train-00000001_00000003.rows.parquet")
    pq.write_table(rows(row(1, reward=9.0), row(2, reward=9.0), row(3, reward=9.0)), compacted)
    reader.refresh()
    table = reader.table("train")
    assert table["step"].to_pylist() == [1, 2, 3]
    assert table["reward"].to_pylist() == [9.0, 9.0, 9.0]
    [found] = reader.rollouts("train", 3, (3, 0))
    assert found["reward"] == 9.0


def test_a_file_that_is_compacted_while_it_is_read_is_no_problem(tmp_path: Path, reader: RecordReader) -> None:
    path_of(tmp_path, "train-00000002.rows.parquet").unlink()
    assert reader.table("train").num_rows == 2
    assert reader.rollouts("train", 2) == []
    assert reader.problems == {}


def test_steps_that_were_merged_are_read_from_the_merged_file(tmp_path: Path, reader: RecordReader) -> None:
    merged = path_of(tmp_path, "train-00000001_00000003.rows.parquet")
    pq.write_table(rows(row(1), row(2), row(3)), merged)
    for step in (1, 2):
        path_of(tmp_path, f"train-{step:08d}.rows.parquet").unlink()
    assert [table["step"].to_pylist() for table in reader.segments("train")] == [[1], [2]]
    assert reader.refresh(), "nobody has heard of the merged file yet"
    assert not reader.refresh()


def test_rows_that_were_merged_are_read_from_the_merged_file(tmp_path: Path, reader: RecordReader) -> None:
    merged = path_of(tmp_path, "train-00000001_00000003.rows.parquet")
    pq.write_table(rows(row(1), row(2), row(3)), merged)
    for step in (1, 2):
        path_of(tmp_path, f"train-{step:08d}.rows.parquet").unlink()
    assert reader.table("train")["step"].to_pylist() == [1, 2, 3]
    assert reader.rollouts("train", 2)[0]["step"] == 2


def test_nothing_is_kept_of_a_file_that_was_merged_while_it_was_read(tmp_path: Path, reader: RecordReader) -> None:
    first, second = (path_of(tmp_path, f"train-{step:08d}.rows.parquet") for step in (1, 2))
    content = first.read_bytes()
    reader.table("train")
    write_table(tmp_path, "train", 3, "rows", rows(row(3)))
    reader.refresh()
    merged = path_of(tmp_path, "train-00000001_00000003.rows.parquet")
    pq.write_table(rows(row(1, reward=1.0), row(2), row(3)), merged)
    for path in (first, second, path_of(tmp_path, "train-00000003.rows.parquet")):
        path.unlink()
    assert reader.table("train").num_rows == 3
    assert [path.name for path in reader._kept] == [merged.name]
    merged.unlink()
    first.write_bytes(content)
    reader.refresh()
    assert reader.table("train")["reward"].to_pylist() == [None, 0.5]


def test_one_rollout_of_long_ones_is_read_from_a_part_of_its_file(tmp_path: Path) -> None:
    texts = [{"role": "model", "text": "x" * 2**20}]
    long = [row(1, sample, group=group, segments=texts) for group in range(16) for sample in range(4)]
    path = write_table(tmp_path, "train", 1, "rows", rows(*long))
    place = (pc.field("group") == 10) & (pc.field("sample") == 3)
    [fragment] = dataset(path).get_fragments()
    assert len(fragment.row_groups) == 5
    assert len(fragment.split_by_row_group((pc.field("step") == 1) & place)) == 1
    reader = RecordReader(tmp_path)
    reader.refresh()
    assert [(found["group"], found["sample"]) for found in reader.rollouts("train", 1, (10, 3))] == [(10, 3)]
    assert reader.table("train").num_rows == 64
    short = write_table(tmp_path, "train", 2, "rows", rows(*(row(2, sample) for sample in range(5000))))
    assert pq.ParquetFile(short).num_row_groups == 1, "all rows of many small parts would be read more slowly"


def test_columns_of_an_older_writer_are_null(tmp_path: Path) -> None:
    table = rows(row(1)).drop_columns(["answer", "events", "score"])
    write_table(tmp_path, "train", 1, "rows", table)
    reader = RecordReader(tmp_path)
    reader.refresh()
    assert reader.table("train")["answer"].to_pylist() == [None]
    [found] = reader.rollouts("train", 1, (1, 0))
    assert found["events"] is None


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    bad = pa.array([b"a\xff\xed\xa0\x80b"], pa.binary()).view(pa.string())
    segments = pa.ListArray.from_arrays(
        [0, 1], pa.StructArray.from_arrays([pa.array(["model"]), bad], ["role", "text"])
    )
    table = rows(row(1))
    table = table.set_column(ROWS.get_field_index("reason"), ROWS.field("reason"), bad)
    table = table.set_column(ROWS.get_field_index("segments"), ROWS.field("segments"), segments)
    write_table(tmp_path, "train", 1, "rows", table)
    reader = RecordReader(tmp_path)
    reader.refresh()
    [found] = reader.rollouts("train", 1, (1, 0))
    for text in (found["reason"], found["segments"][0]["text"], reader.table("train")["reason"][0].as_py()):
        assert (text[0], text[-1], "\ufffd" in text) == ("a", "b", True)


def test_tokens_of_one_rollout_are_found(tmp_path: Path) -> None:
    sequences = [
        {"step": 1, "group": 1, "sample": sample, "sequence": sequence, "text": f"{sample}{sequence}", "ids": [sample]}
        for sample in range(30)
        for sequence in (1, 0)
    ]
    write_table(tmp_path, "train", 1, "tokens", pa.Table.from_pylist(sequences, schema=TOKENS))
    reader = RecordReader(tmp_path)
    reader.refresh()
    assert [found["text"] for found in reader.tokens("train", 1, (1, 17))] == ["170", "171"]
    assert reader.tokens("train", 1, (1, 30)) == []
    assert reader.tokens("train", 2, (1, 17)) == []
    assert reader.token_table("train", [1]).num_rows == 60


def test_all_sequences_of_a_rollout_are_found_in_several_parts_of_a_file_whose_footer_is_read_once(
    tmp_path: Path,
) -> None:
    sequences = [{"step": 1, "group": 1, "sample": sample, "sequence": n} for sample in range(3) for n in range(20)]
    write_table(tmp_path, "train", 1, "tokens", pa.Table.from_pylist(sequences, schema=TOKENS))
    reader = RecordReader(tmp_path)
    reader.refresh()
    _footer_of.cache_clear()
    for sample in range(3):
        assert [found["sequence"] for found in reader.tokens("train", 1, (1, sample))] == list(range(20))
    assert _footer_of.cache_info().misses == 1
    write_table(tmp_path, "train", 1, "tokens", pa.Table.from_pylist(sequences[:1], schema=TOKENS))
    assert len(reader.tokens("train", 1, (1, 0))) == 1, "a file that was replaced is another one"


def test_a_folder_whose_name_looks_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "lr=3"
    write_table(folder, "train", 1, "rows", rows(row(1)))
    reader = RecordReader(folder)
    reader.refresh()
    assert reader.table("train").num_rows == 1


def test_a_file_that_is_merged_between_two_parts_is_read_once_and_whole(tmp_path: Path) -> None:
    given = [row(1, sample, reward=float(sample)) for sample in range(6)]
    path = write_table(tmp_path, "train", 1, "rows", rows(*given[:1]))
    pq.write_table(rows(*given), path, row_group_size=2)

    def read_part(part: Part) -> Any:
        if part.path == path and part.start > 0:
            path.rename(path_of(tmp_path, "train-00000001_00000100.rows.parquet"))
        return read_file_part(part)

    reader = RecordReader(tmp_path, read_part)
    reader.refresh()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rlite.services.record.reader.PART", 1)
        assert reader.table("train")["sample"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert reader.problems == {}
