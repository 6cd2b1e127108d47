"""Attacks on the record of finished runs, each of which `rlite audit` has to find.

    python -m benchmarks.audit_mutations [--num 100] [--seed 0] [--only SEED] [--stale | --consistent]

A small GRPO run with evaluations is made, and a second one that is killed and resumed. Each mutation changes one thing
in a copy: a byte of a record file, a reward, a log-probability, an advantage, a version, a value of metrics.jsonl, two
rows that are swapped, a rollout that is removed or doubled, a tensor of a checkpoint. *Stale*: hashes stay as they are.
*Consistent*: manifests and the chain are written anew, so that only what can be computed again tells. What contradicts
nothing is left out: times and other quantities of EXEMPT, and changes after which the content is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from rlite.assembly.proof.audit import HASHES, audit, check_chain
from rlite.assembly.proof.bundle import open_source
from rlite.assembly.proof.comparison import checkpoint_tensors
from rlite.assembly.proof.options import AuditConfig, ReplayConfig
from rlite.assembly.proof.report import Finding, Report
from rlite.assembly.quickstart.run import build_tiny_qwen3
from rlite.errors import CheckpointError
from rlite.runtime.storage.atomic import FACTS, MANIFEST, hash_files
from rlite.services.record.chain import ChainWriter, read_chain
from rlite.trainer.run.folder import CHAIN

EXEMPT = ("seconds", "tokens_per_second", "memory", "mfu", "sync_", "rollout/num", "lag_steps", "usage", "step")
"""metrics that nothing else implies"""
UNKNOWN = ("item", "data", "answer", "reason", "failed_attempts", "redrawn", "ended", "events")
UNKNOWN += ("seconds_queue", "seconds_generate", "seconds_environment", "seconds_reward")
"""columns that nothing else implies"""
REWARD = """
def score(prompt, completions, answer, **row):
    return sum(character in answer for character in completions) + 0.1 * len(completions)
"""


def make_run(base: Path, name: str, is_killed: bool = False, steps: int = 8) -> Path:
    """Return the folder of a finished run of `rlite grpo`; one that is killed is resumed."""
    base.mkdir(parents=True, exist_ok=True)
    model, rows, reward = base / "model", base / "rows.jsonl", base / "score.py"
    if not model.exists():
        build_tiny_qwen3(model, seed=0)
    data = [{"prompt": f"What is {a} + {b}? Answer:", "answer": str(a + b)} for a in range(6) for b in range(6)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in data))
    reward.write_text(REWARD)
    command = [sys.executable, "-m", "rlite.trainer.grpo", f"actor.model_name={model}", f"train_data.path={rows}"]
    command += [f"reward.path={reward}:score", f"test_data.path={rows}", "test_data.limit=6", "trainer.test_freq=4"]
    command += ["train_data.prompts_per_rollout=3", "train_data.responses_per_prompt=3", "actor.lr=1e-3"]
    command += ["rollout.train_sampling_params.max_new_tokens=8", "trainer.record=all", "trainer.keep=99"]
    command += [f"trainer.total_steps={steps}", "trainer.save_freq=4", f"trainer.save_dir={base / name}"]
    if is_killed:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        while not (base / name / "state" / "step-4" / MANIFEST).exists() and process.poll() is None:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return base / name


class Mutation:
    """One change of a copy of a run.

    Args:
        run: the copy.
        seed: decides the change.
    """

    def __init__(self, run: Path, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        kinds: list[Callable[[], str | None]] = [
            *(self.byte, self.reward, self.logprob, self.advantage, self.version, self.metric, self.swap),
            *(self.remove, self.double, self.tensor),
        ]
        self.kind = kinds[seed % len(kinds)]

    def apply(self) -> str | None:
        """Change something, and return what; None if nothing that counts has changed."""
        return self.kind()

    def _file(self, kind: str, source: str = "train") -> Path:
        return self.random.choice(sorted((self.run / "record").glob(f"{source}-*.{kind}.parquet")))

    def _rewrite(self, path: Path, change: Callable[[list[dict[str, Any]]], str | None]) -> str | None:
        table = pq.read_table(path)
        rows = table.to_pylist()
        told = change(rows)
        if told is None:
            return None
        changed = type(table).from_pylist(rows, schema=table.schema)
        if changed.equals(table):
            return None
        pq.write_table(changed, path)
        return f"{path.name}: {told}"

    def byte(self) -> str | None:
        path = self.random.choice(sorted((self.run / "record").glob("*.parquet")))
        before, content = pq.read_table(path), bytearray(path.read_bytes())
        place = self.random.randrange(len(content))
        content[place] ^= 1 << self.random.randrange(8)
        path.write_bytes(content)
        try:
            after = pq.read_table(path)
            changed = [name for name in before.column_names if not after[name].equals(before[name])]
        except Exception:  # any damage that a reader of Parquet finds
            return f"{path.name}: byte {place}"
        told = ", ".join(changed)
        unknown = (*UNKNOWN, "logprobs", "row", "others") if path.name.startswith("eval.") else UNKNOWN
        counts = any(name not in unknown for name in changed)
        return f"{path.name}: byte {place}, in {told}{'' if counts else ' (the content is the same)'}"

    def _amount(self) -> float:
        return self.random.choice([-1, 1]) * self.random.choice([0.01, 0.1, 1.0])

    def reward(self) -> str | None:
        def change(rows: list[dict[str, Any]]) -> str | None:
            row = self.random.choice([row for row in rows if row["reward"] is not None])
            row["reward"] += self._amount()
            return f"reward of {row['group']}, {row['sample']}"

        return self._rewrite(self._file("rows"), change)

    def _token_value(self, names: list[str], only_mask: bool = True) -> str | None:
        def change(rows: list[dict[str, Any]]) -> str | None:
            name = self.random.choice(names)
            known = [row for row in rows if row[name] is not None]
            # nothing follows from what the engine said of a rollout that was not trained on
            row = self.random.choice([row for row in known if row["row"] is not None or name != "logprobs"])
            places = [place for place, counts in enumerate(row["mask"]) if counts or not only_mask]
            place = self.random.choice(places)
            row[name][place] += 1 if name == "versions" else self._amount()
            return f"{name} of {row['group']}, {row['sample']}, token {place}"

        return self._rewrite(self._file("tokens"), change)

    def logprob(self) -> str | None:
        return self._token_value(["logprobs", "trainer_logprobs", "entropy"])

    def advantage(self) -> str | None:
        return self._token_value(["advantages"])

    def version(self) -> str | None:
        return self._token_value(["versions"])

    def metric(self) -> str | None:
        path = self.run / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        line = self.random.choice(lines)
        name = self.random.choice([key for key in line if not key.startswith(EXEMPT)])
        line[name] += self._amount()
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
        return f"metrics.jsonl: {name} of step {line['step']}"

    def swap(self) -> str | None:
        columns = ["reward", "advantage", "response_tokens", "segments", "truncated", "status"]

        def change(rows: list[dict[str, Any]]) -> str | None:
            one, other = self.random.sample(rows, 2)
            name = self.random.choice(columns)
            one[name], other[name] = other[name], one[name]
            return f"{name} of two rows"

        def tokens(rows: list[dict[str, Any]]) -> str | None:
            one, other = self.random.sample(rows, 2)
            for name in ("ids", "text", "offsets", "mask", "versions", "logprobs"):
                one[name], other[name] = other[name], one[name]
            return "tokens of two rows"

        if self.random.random() < 0.5:
            return self._rewrite(self._file("rows"), change)
        return self._rewrite(self._file("tokens"), tokens)

    def remove(self) -> str | None:
        path = self._file("rows")
        chosen: dict[str, Any] = {}

        def change(rows: list[dict[str, Any]]) -> str | None:
            chosen.update(rows.pop(self.random.randrange(len(rows))))
            return f"removed {chosen['group']}, {chosen['sample']}"

        def with_tokens(rows: list[dict[str, Any]]) -> str | None:
            key = chosen["group"], chosen["sample"]
            rows[:] = [row for row in rows if (row["group"], row["sample"]) != key]
            return "and its tokens"

        told = self._rewrite(path, change)
        if self.random.random() < 0.5:
            self._rewrite(path.with_name(path.name.replace(".rows.", ".tokens.")), with_tokens)
        return told

    def double(self) -> str | None:
        source, target = self._file("rows"), self._file("rows")
        row = self.random.choice(pq.read_table(source).to_pylist())

        def change(rows: list[dict[str, Any]]) -> str | None:
            rows.append({**row, "step": rows[0]["step"]})
            return f"doubled {row['group']}, {row['sample']} of {source.name}"

        return self._rewrite(target, change)

    def tensor(self) -> str | None:
        path = self.random.choice(sorted((self.run / "state").glob("step-*/*.distcp")))
        table = json.loads((path.parent / "metadata.json").read_text())
        name, _, _, _, offset, length = self.random.choice(table["places"])
        content = bytearray(path.read_bytes())
        place = offset + self.random.randrange(length)
        before = checkpoint_tensors(path.parent)
        content[place] ^= 1 << self.random.randrange(6)
        path.write_bytes(content)
        try:
            after = checkpoint_tensors(path.parent)
        except CheckpointError:
            return f"{path.parent.name}: {name}, which cannot be read"
        is_same = all(torch.equal(value, after[key]) for key, value in before.items())
        return f"{path.parent.name}: {name}{' (the content is the same)' if is_same else ''}"


def make_consistent(run: Path) -> None:
    """Write manifests and the chain of a changed run anew."""
    chain = read_chain(run)
    for path in (run / "state").glob("step-*"):
        names = [file.name for file in path.iterdir() if file.name != MANIFEST]
        assert FACTS in names
        (path / MANIFEST).write_text(json.dumps({"files": hash_files(path, names)}, indent=2))
    (run / "chain.jsonl").unlink()
    writer = ChainWriter(run, None)
    for link in chain.begins:
        facts = {key: link[key] for key in ("options", "config", "code", "data", "versions", "devices")}
        writer.begin(link["step"], link.get("from"), facts)
    writer.append({"kind": "end", "step": 8})


def is_found(run: Path) -> str:
    """Return the first place that an audit names; "" if it finds nothing. Its parts are made one after another."""
    for how in (None, "none", "checkpoints"):
        found = hashes_of(run) if how is None else audit(AuditConfig(run=str(run), replay=how)).found
        if found:
            return f"{found[0].place}: {found[0].problem}"
    return ""


def hashes_of(run: Path) -> list[Finding]:
    """Return what the first part of an audit finds."""
    report = Report()
    with open_source(ReplayConfig(run=str(run), any_versions=True)) as source, report.checking(HASHES, CHAIN):
        check_chain(source, report)
    return report.found


def main() -> None:
    """Attack the runs, and print how many changes were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--stale", action="store_true")
    parser.add_argument("--consistent", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = given.folder or Path(scratch)
        runs = [base / "plain", base / "resumed"]
        if not (runs[1] / "chain.jsonl").exists():
            runs = [make_run(base, "plain"), make_run(base, "resumed", is_killed=True)]
        for run in runs:
            found = audit(AuditConfig(run=str(run), code=str(base / "score.py"))).found
            print(f"{run.name}, untouched: {'passes' if not found else found[:3]}", flush=True)
        missed = 0
        both = {"stale": given.stale or not given.consistent, "consistent": given.consistent or not given.stale}
        for kind in [kind for kind, wanted in both.items() if wanted]:
            counts: Counter[str] = Counter()
            seeds = [given.only] if given.only is not None else range(given.seed, given.seed + given.num)
            for seed in seeds:
                copy = Path(scratch) / "copy"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(runs[seed // 10 % 2], copy)
                mutation = Mutation(copy, seed)
                told = mutation.apply()
                if told is None or (kind == "consistent" and "content is the same" in told):
                    counts["changed nothing that counts"] += 1
                    continue
                if kind == "consistent":
                    make_consistent(copy)
                place = is_found(copy)
                counts["found" if place else "missed"] += 1
                if not place or given.only is not None:
                    missed += not place
                    print(f"{kind} {seed}: {told}: {place or 'MISSED'}", flush=True)
                if sum(counts.values()) % 50 == 0:
                    print(f"{kind}, up to seed {seed}: {dict(counts)}", flush=True)
            print(f"{kind}: {dict(counts)}", flush=True)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
