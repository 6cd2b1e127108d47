"""Memory and time of a data set that is streamed, and of the same one read as a whole.

    python -m benchmarks.streaming --mib 512

Writes prompts as JSON lines and as Parquet, and reads an epoch of each in new processes: streamed, with a checkpoint
halfway from which another stream goes on, and as a whole. Memory is the peak beyond that after the imports; a process
that reads Parquet for the stream counts as a whole. Exits with 1 if streamed rows take more than `--limit-mib`, if a
row is missing or occurs twice, or if the other stream yields other rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rlite.data.prompts import PromptStream
from rlite.data.rows import prompt_stream, read_source, streamed_source
from rlite.data.source import Source

MIB = 1 << 20
BATCH = 256
ROW_GROUP = 10_000
TEXT = "word " * 240


def write_rows(folder: Path, mib: int) -> tuple[int, dict[str, Path]]:
    """Write numbered prompts of some 1.2 KB in both forms; return how many, and the files."""
    num_groups = -(-mib * MIB // (ROW_GROUP * (len(TEXT) + 30)))
    files = {"jsonl": folder / "rows.jsonl", "parquet": folder / "rows.parquet"}
    schema = pa.schema({"prompt": pa.string()})
    with files["jsonl"].open("w", encoding="utf-8") as lines, pq.ParquetWriter(files["parquet"], schema) as table:
        for group in range(num_groups):
            rows = [{"prompt": f"{group * ROW_GROUP + number} {TEXT}"} for number in range(ROW_GROUP)]
            lines.writelines(f"{json.dumps(row)}\n" for row in rows)
            table.write_table(pa.Table.from_pylist(rows, schema), row_group_size=ROW_GROUP)
    return num_groups * ROW_GROUP, files


def deal(stream: PromptStream, num_rows: int) -> list[int]:
    """Return the numbers of the next rows of a stream."""
    found: list[int] = []
    while len(found) < num_rows:
        found += [int(row["prompt"].split(maxsplit=1)[0]) for row in stream.next(min(BATCH, num_rows - len(found)))]
    return found


def streamed(path: Path, num_rows: int, buffer: int) -> dict[str, float]:
    """Deal an epoch; go on from its middle in another stream, and compare."""

    def open_stream() -> PromptStream:
        return prompt_stream(streamed_source(Source(str(path), "train_data"), "prompts", buffer), BATCH, seed=0)

    clock = [time.perf_counter()]
    stream = open_stream()
    first = deal(stream, num_rows // 2)
    clock.append(time.perf_counter())
    state = json.dumps(stream.state_dict())
    clock.append(time.perf_counter())
    second = deal(stream, num_rows - len(first))
    del stream
    clock.append(time.perf_counter())
    resumed = open_stream()
    resumed.load_state_dict(json.loads(state))
    clock.append(time.perf_counter())
    is_right = sorted(first + second) == list(range(num_rows)) and deal(resumed, len(second)) == second
    half_s, save_s, other_half_s, resume_s = (end - begin for begin, end in pairwise(clock))
    return {"is_right": is_right, "epoch_s": half_s + other_half_s, "checkpoint_s": save_s, "resume_s": resume_s}


def whole(path: Path, num_rows: int, buffer: int) -> dict[str, float]:
    """Read all rows, and deal an epoch."""
    begin = time.perf_counter()
    stream = prompt_stream(read_source(Source(str(path), "train_data"), "prompts"), BATCH, seed=0)
    is_right = sorted(deal(stream, num_rows)) == list(range(num_rows))
    return {"is_right": is_right, "epoch_s": time.perf_counter() - begin}


WAYS: dict[str, Callable[[Path, int, int], dict[str, float]]] = {"streamed": streamed, "whole": whole}


def peak_mib() -> float:
    """Return the largest memory that this process and the readers that it started have had."""
    own = psutil.Process()
    return sum(_peak_of(process.pid) for process in [own, *own.children(recursive=True)])


def _peak_of(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def measure(way: str, path: Path, num_rows: int, buffer: int) -> dict[str, float]:
    """Return the figures of one way in this process."""
    before = peak_mib()
    figures = WAYS[way](path, num_rows, buffer)
    return {"mib": peak_mib() - before, **figures}


def main() -> None:
    """Write the files and measure both ways, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the JSON lines")
    parser.add_argument("--buffer", type=int, default=10_000, help="rows of the shuffle buffer")
    parser.add_argument("--limit-mib", type=float, default=256, help="memory that streamed rows may take")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "FILE", "ROWS"), help="measure one way in this process")
    options = parser.parse_args()
    if options.one:
        way, path, num_rows = options.one
        print(json.dumps(measure(way, Path(path), int(num_rows), options.buffer)))
        return
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        num_rows, files = write_rows(Path(folder), options.mib)
        print(f"{num_rows} rows, {files['jsonl'].stat().st_size / MIB:.0f} MiB of JSON lines; buffer {options.buffer}")
        for kind, path in files.items():
            for way in WAYS:
                command = ["-m", "benchmarks.streaming", f"--buffer={options.buffer}", "--one", way, str(path)]
                output = subprocess.check_output([sys.executable, *command, str(num_rows)], text=True)
                figures = json.loads(output)
                is_right &= figures["is_right"] and (way == "whole" or figures["mib"] <= options.limit_mib)
                values = "  ".join(f"{name}={value:.3g}" for name, value in figures.items() if name != "is_right")
                print(f"{kind:8} {way:9} {values}", flush=True)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
