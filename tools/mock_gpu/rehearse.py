"""Run the programs on the mock GPU, compare their figures with the budgets, and write the record and its table.

    make gpu-rehearsal                                  all programs
    make gpu-rehearsal ARGS="--only decode training"    some of them
    make gpu-rehearsal ARGS="--record"                  also write the record and the page

It needs the CUDA build of torch. The exit status is 1 if a program failed or a budget is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.mock_gpu.build import build, environment
from tools.mock_gpu.record import Record, exceeded, read_budgets, read_record, table, write_record, write_tables

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, int] = {
    "decode": 1,
    "training": 1,
    "cycle": 1,
    "handles": 1,
    "ranks": 2,
    "shapes": 1,
    "decoding_shapes": 1,
}
"""programs, and the GPUs that each sees"""
TIMEOUT = 3600
"""seconds for one program; one that hangs at shutdown has failed"""


def run(name: str, libraries: Path, tree: Path) -> dict[str, float] | None:
    """Return the figures of a program in processes of its own; None if it failed."""
    devices = PROGRAMS[name]
    launcher = [] if devices == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        command = [sys.executable, *launcher, "-m", "tools.mock_gpu.run", name, str(out)]
        paths = {"PYTHONPATH": os.pathsep.join(dict.fromkeys([str(tree), str(ROOT)])), "TMPDIR": scratch}
        try:
            subprocess.run(
                command, env=environment(libraries, devices) | paths, cwd=scratch, timeout=TIMEOUT, check=True
            )
        except subprocess.SubprocessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return None
        return json.loads(out.read_text())


def revision(tree: Path) -> str:
    """Return the commit of a working tree, "-changed" if files differ from it."""
    described = ["git", "-C", str(tree), "describe", "--always", "--abbrev=8", "--dirty=-changed", "--exclude=*"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


def rehearse(names: Iterable[str], libraries: Path, tree: Path) -> tuple[dict[str, float], list[str]]:
    """Return the figures of all programs, as "program: figure", and the programs that failed."""
    figures, failed = {}, []
    for name in names:
        print(f"== {name}", flush=True)
        found = run(name, libraries, tree)
        if found is None:
            failed.append(name)
        figures |= {f"{name}: {figure}": value for figure, value in (found or {}).items()}
    return figures, failed


def main(argv: Sequence[str]) -> int:
    """Run, print, compare and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--libraries", type=Path, default=Path(sys.prefix) / "mock-gpu", help="where to compile them")
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout whose rlite runs, such as one of an earlier commit"
    )
    parser.add_argument("--record", nargs="?", const="now", help='name of the record to write: "now", or "before"')
    args = parser.parse_args(argv)
    build(args.libraries)
    figures, failed = rehearse(args.only, args.libraries, args.tree.resolve())
    print(table({"": Record("", "", figures)}, list(figures)))
    if args.record:
        before = read_record(args.record)
        kept = {} if before is None else before.figures
        write_record(args.record, Record(revision(args.tree), _torch(), kept | figures))
        write_tables(ROOT / "docs" / "gpu_rehearsal.md")
    over = list(exceeded(read_budgets(), figures, set(args.only) - set(failed)))
    print(*over, *(f"{name}: failed" for name in failed), sep="\n")
    return 1 if over or failed else 0


def _torch() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
