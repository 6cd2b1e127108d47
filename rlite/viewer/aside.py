"""Read the files of a record in a sandbox process: a run's folder may come from anyone, and a file may kill its reader.

The process has the memory limit of one part, and no environment variables that may be secret.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from rlite.errors import DataError
from rlite.runtime.sandbox.calls import Call, Code, SandboxError
from rlite.runtime.sandbox.child import printable
from rlite.runtime.sandbox.pool import shared_pool
from rlite.services.record.reader import MAX_PART, read_file_part

MEMORY = 2 << 30
"""bytes that the process may take"""
SECONDS = 60.0
"""time for one part"""


def read_part_aside(
    path: Path, schema: pa.Schema, chosen: pc.Expression | None, last_first: bool, start: int
) -> tuple[pa.Table, int | None]:
    """Return what `read_file_part` returns, from another process.

    Args:
        path: the file.
        schema: columns of the table.
        chosen: condition of the rows; None for all rows.
        last_first: True to begin with the last row group.
        start: place of the first row group to read.

    Raises:
        FileNotFoundError: the file is not there.
        DataError: the file cannot be read, or its reader was killed, with the reason.
    """
    arguments = {"path": path, "schema": schema, "chosen": chosen, "last_first": last_first, "start": start}
    call = Call(_CODE, cloudpickle.dumps({"arguments": arguments}), SECONDS, MEMORY)
    try:
        match shared_pool(1).submit(call).result():
            case ["read", int() | None as place, bytes() as content]:
                table = pa.ipc.open_stream(content).read_all()
                table.validate(full=True)
                if table.schema == schema:
                    return table, place
            case ["gone"]:
                raise FileNotFoundError(path)
            case ["damaged", str() as text]:
                raise DataError(printable(text))
    except (SandboxError, pa.ArrowException) as error:
        reason, _, _ = str(error).partition("\n")
        raise DataError(f"cannot be read: {reason}") from error
    raise DataError("cannot be read: its reader answered something else")


def read_in_process(arguments: dict[str, Any]) -> list[Any]:
    """Return the answer of the process: a part in Arrow's stream format, or why there is none."""
    try:
        table, place = read_file_part(**arguments)
    except FileNotFoundError:
        return ["gone"]
    except DataError as error:
        return ["damaged", str(error)]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return ["read", place, sink.getvalue()]


_CODE = Code.of(read_in_process, what="its reader", max_answer=2 * MAX_PART)
