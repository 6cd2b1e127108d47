"""Files of a run's folder as a stranger could make them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rlite.services.record.files import ROWS


def often(text: str, number: int) -> pa.DictionaryArray:
    """One text for many rows: a few bytes of a file for each row."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), pa.array([text]))


def texts_often(text: str, number: int) -> pa.ListArray:
    """One text for many rows, as their only segment."""
    segments = pa.StructArray.from_arrays([often("model", number), often(text, number)], ["role", "text"])
    return pa.ListArray.from_arrays(pa.array(range(number + 1), pa.int32()), segments)


def write_bomb(folder: Path, step: int, number: int, **columns: pa.Array) -> Path:
    """Write the rows of a step: a small file, which takes a lot of memory when it is read."""
    given = {
        "step": pa.array([step] * number, pa.int32()),
        "group": pa.array([0] * number, pa.int64()),
        "sample": pa.array(range(number), pa.int32()),
        **{name: often("trained", number) for name in ("item", "status", "reason")},
        **columns,
    }
    path = folder / "record" / f"train-{step:08d}.rows.parquet"
    table, options = pa.table(given), {"compression": "zstd", "dictionary_pagesize_limit": 1 << 30}
    with pq.ParquetWriter(path, table.schema, store_schema=False, **options) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(ROWS.metadata)
    assert path.stat().st_size < 2_000_000
    return path


def lead_out(run: Path, names: Sequence[str], elsewhere: Path) -> None:
    """Put links to files elsewhere in the place of some files of a run."""
    elsewhere.mkdir()
    for name in names:
        target = elsewhere / Path(name).name
        shutil.move(run / name, target)
        (run / name).symlink_to(target)
