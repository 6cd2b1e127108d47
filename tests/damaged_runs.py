"""Random damage of a run's folder, or of a bundle: values out of range and of other types, and files that are cut off.

    python -m tests.damaged_runs RUN COMMAND [--num 100] [--seed 0] [--only SEED]

runs a command over damaged copies, and prints the traceback of each error that is no message of rlite. COMMAND is
audit, replay, why, simulate, or bundle: a replay of a damaged bundle of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file, save_file

from rlite.assembly.proof import audit, replay
from rlite.assembly.simulate import command as simulation
from rlite.assembly.why import command as mismatch
from rlite.errors import RliteError, why_not_written
from rlite.runtime.storage.atomic import MANIFEST, hash_files

COMMANDS: dict[str, Callable[[str], None]] = {
    "audit": lambda run: audit.main([run, "replay=none"]),
    "replay": lambda run: replay.main([run, "--step", "6", "any_versions=true"]),
    "why": lambda run: mismatch.main([run, "sequences=1", "tokens=2"]),
    "simulate": lambda run: simulation.main([run, "steps=20"]),
    "bundle": lambda run: replay.main([f"{run}.zip", "any_versions=true"]),
}
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 2**70, 10**400, -(2**63), 0.5, 1e308, -1e308, math.nan, math.inf),
    *("", "x", "1", "\0", "../..", "x" * 5000, "${oc.env:HOME}", "${a.b}", [], [None], [[[1]]], ["x"], {}, {"a": None}),
)
"""values of a tree of JSON or yaml"""
SECONDS = 120
"""time for one command"""


class Damage:
    """One change of a folder.

    Args:
        folder: the folder, which is changed.
        seed: decides the change.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)

    def apply(self, kinds: Sequence[str] = ()) -> str:
        """Change something.

        Args:
            kinds: patterns of the files that may be changed; empty for all.

        Returns:
            What was changed.
        """
        chosen = [path for kind in kinds or ("**/*",) for path in self.folder.glob(kind)]
        groups: dict[str, list[Path]] = {}
        for path in sorted(path for path in chosen if path.is_file() and path.name != "audit.json"):
            groups.setdefault(re.sub(r"\d+", "N", f"{path.parent.name}/{path.name}"), []).append(path)
        path = self.random.choice(self.random.choice([*groups.values()]))
        told = self._bytes(path) if self.random.random() < 0.15 else self._content(path)
        if path.parent.parent.name == "state" and path.name != MANIFEST and (path.parent / MANIFEST).is_file():
            names = [file.name for file in path.parent.iterdir() if file.name != MANIFEST and file.is_file()]
            (path.parent / MANIFEST).write_text(json.dumps({"files": hash_files(path.parent, names)}))
        return f"{path.relative_to(self.folder)}: {told}"

    def _content(self, path: Path) -> str:
        match path.suffix:
            case ".yaml":
                tree = yaml.safe_load(path.read_text())
                told, tree = self.tree(tree)
                path.write_text(yaml.safe_dump(tree))
            case ".json":
                told, tree = self.tree(json.loads(path.read_text()))
                path.write_text(json.dumps(tree))
            case ".jsonl":
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                number = self.random.randrange(len(lines))
                told, lines[number] = self.tree(lines[number])
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
                told = f"line {number + 1}: {told}"
            case ".parquet":
                told = self.table(path)
            case ".safetensors":
                told = self.tensors(path)
            case _:
                told = self._bytes(path)
        return told

    def _bytes(self, path: Path) -> str:
        content = bytearray(path.read_bytes())
        match self.random.randrange(5):
            case 0:
                del content[self.random.randrange(len(content) + 1) :]
                told = f"cut off after {len(content)} bytes"
            case 1:
                path.unlink()
                return "removed"
            case 2:
                path.unlink()
                path.mkdir()
                return "a folder"
            case _:
                for _ in range(self.random.choice([1, 20])):
                    content[self.random.randrange(len(content))] = self.random.randrange(256)
                told = "other bytes"
        path.write_bytes(content)
        return told

    def tree(self, tree: Any) -> tuple[str, Any]:
        """Return what was changed in a tree of plain values, and the tree."""
        places: list[tuple[Any, Any, str]] = []

        def gather(node: Any, path: str) -> None:
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                places.append((node, key, f"{path}.{key}"))
                if isinstance(value, dict | list):
                    gather(value, f"{path}.{key}")

        root = [tree]
        gather(root, "")
        parent, key, path = self.random.choice(places)
        chance = self.random.random()
        if chance < 0.15 and parent is not root:
            del parent[key]
            return f"{path} removed", root[0]
        value = self.random.choice(ODD)
        if chance < 0.25 and isinstance(parent[key], dict):
            parent[key]["planted"] = value
            return f"{path}.planted = {value!r:.60}", root[0]
        parent[key] = value
        return f"{path} = {value!r:.60}", root[0]

    def table(self, path: Path) -> str:
        """Change a table of the record."""
        table = pq.read_table(path)
        name = self.random.choice(table.column_names)
        place = table.column_names.index(name)
        match self.random.randrange(8):
            case 0:
                changed, told = table.drop_columns([name]), "removed"
            case 1:
                kind = self.random.choice([pa.string(), pa.float64(), pa.bool_(), pa.list_(pa.int8()), pa.binary()])
                column = pa.nulls(len(table), kind)
                with contextlib.suppress(pa.ArrowException):
                    column = table[name].cast(kind)
                changed, told = table.set_column(place, name, column), f"as {kind}"
            case 2:
                changed, told = table.slice(0, 0), "no rows"
            case 3:
                changed = pa.concat_tables([table] * self.random.choice([2, 50]))
                told = "more rows"
            case number:
                kind, values = table.schema.field(name).type, table[name].to_pylist()
                rows = range(len(values)) if number == 4 else [self.random.randrange(len(values))]
                value = self.value(kind)
                for row in rows:
                    values[row] = value
                column = pa.array(values, kind)
                changed, told = table.set_column(place, table.schema.field(name), column), f"= {value!r:.60}"
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        return f"{name} {told}"

    def value(self, kind: pa.DataType) -> Any:
        """Return an odd value of a type."""
        if self.random.random() < 0.15:
            return None
        if pa.types.is_dictionary(kind):
            return self.value(kind.value_type)
        if pa.types.is_integer(kind):
            most = 2 ** (kind.bit_width - 1)
            return self.random.choice([-1, 0, 1, 10**6, most - 1, -most])
        if pa.types.is_floating(kind):
            return self.random.choice([math.nan, math.inf, -math.inf, 1e30, -1e30, 0.0, -1.0])
        if pa.types.is_boolean(kind):
            return self.random.random() < 0.5
        if pa.types.is_binary(kind):
            return self.random.choice([b"", b"\0", b"\xff" * 100])
        if pa.types.is_string(kind):
            return self.random.choice(["", "x", "\0", "trained", "filtered", "x" * 5000])
        if pa.types.is_map(kind):
            names = ["x", "input_ids", "rewards", "attention_mask", "reward"]
            return [(self.random.choice(names), self.value(kind.item_type)) for _ in range(self.random.randrange(3))]
        if pa.types.is_list(kind):
            return [self.value(kind.value_type)] * self.random.choice([0, 1, 2, 9, 2000])
        if pa.types.is_struct(kind):
            return {field.name: self.value(field.type) for field in kind}
        return None

    def tensors(self, path: Path) -> str:
        """Change a tensor of a file of safetensors."""
        found = load_file(path)
        name = self.random.choice(sorted(found))
        value = found[name]
        match self.random.randrange(8):
            case 0:
                del found[name]
                told = "removed"
            case 1:
                found["planted"] = value.clone()
                told = "doubled"
            case 2 | 3:
                dtype = self.random.choice([torch.float64, torch.int8, torch.bool, torch.int64, torch.bfloat16])
                found[name], told = value.to(dtype), f"as {dtype}"
            case 4:
                shapes = [(0,), (), (1, *value.shape), (*value.shape, 1), (value.numel(),), value.shape[::-1]]
                shape = self.random.choice(shapes)
                told = f"of shape {shape}"
                found[name] = torch.zeros(shape, dtype=value.dtype)
            case _:
                number = self.random.choice([-1, 2**31 - 1, 0, -(2**31)])
                odd = self.random.choice([math.nan, math.inf, -1e30]) if value.is_floating_point() else number
                found[name], told = value.clone(), f"has {odd}"
                if value.numel():
                    flat = found[name].view(-1)
                    flat[self.random.randrange(len(flat)) if self.random.random() < 0.5 else slice(None)] = odd
        save_file(found, path)
        return f"{name} {told}"


def run_command(name: str, run: Path) -> tuple[str, str]:
    """Return how a command over a damaged run ended: "done", "message" or "traceback"; and the text."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
            COMMANDS[name](str(run))
    except RliteError as error:
        return "message", f"{type(error).__name__}: {error}"
    except OSError as error:
        if why_not_written(error) == str(error):
            return "traceback", traceback.format_exc()
        return "message", f"{error}"
    except Exception:
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
    return "done", printed.getvalue()


def damage(run: Path, name: str, seed: int, copy: Path, kinds: Sequence[str] = ()) -> str:
    """Return what was changed in a copy of a run; for `bundle`, in a copy of the bundle RUN.zip."""
    for path in (copy, copy.with_name(f"{copy.name}.zip")):
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    if name != "bundle":
        shutil.copytree(run, copy)
        return Damage(copy, seed).apply(kinds)
    with zipfile.ZipFile(f"{run}.zip") as file:
        file.extractall(copy)
    told = Damage(copy, seed).apply(kinds)
    with zipfile.ZipFile(f"{copy}.zip", "w") as file:
        for path in sorted(path for path in copy.rglob("*") if path.is_file()):
            file.write(path, path.relative_to(copy))
    return told


def main() -> None:
    """Run a command over damaged copies of a run, and print what has ended with a traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("command", choices=[*COMMANDS])
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--kind", action="append", default=[], help="pattern of the files that are changed")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    seeds = range(given.seed, given.seed + given.num) if given.only is None else [given.only]
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as scratch:
        if given.command == "bundle" and not given.run.with_name(f"{given.run.name}.zip").exists():
            how = ["--bundle", f"{given.run}.zip", "--with-data", "--with-weights"]
            replay.main([str(given.run), "--step", "6", *how])
        for seed in seeds:
            told = damage(given.run, given.command, seed, Path(scratch) / "run", given.kind)
            ended, text = run_command(given.command, Path(scratch) / "run")
            counts[ended] += 1
            if ended != "done" or given.only is not None:
                print(f"{given.command} {seed}: {told}\n    {ended}: {text.replace(scratch, '')}", flush=True)
    print(f"{given.command}: {dict(counts)}", flush=True)
    sys.exit(bool(counts["traceback"]))


if __name__ == "__main__":
    main()
