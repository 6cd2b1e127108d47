"""Folders that earlier versions wrote still resume and open.

Each archive of `tests/data` holds runs of one version, killed after a checkpoint, and what that version made of them
when it resumed them. Unpacking puts the folder's new place into the files, as a user does who has moved a run.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rlite
from rlite import config
from rlite.assembly.proof.audit import audit
from rlite.assembly.proof.options import AuditConfig
from rlite.cli import main
from rlite.engine.train import RliteTrainEngine
from rlite.errors import DataError
from rlite.nn import LoraOptions
from rlite.runtime.storage.texts import FileStore
from rlite.services.console.sinks import read_metrics
from rlite.services.record.batches import read_batch
from rlite.services.record.files import record_files
from rlite.services.record.reader import RecordReader
from rlite.services.recovery.record import load_record
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.supervised_options import DpoConfig, KtoConfig, SftConfig
from rlite.viewer.export import export
from rlite.viewer.run import UNFINISHED, open_runs
from rlite.yaml_texts import flat, read_saved
from tests import forked_python
from tests.data.make import PLACE, digests, replace
from tests.integration.worlds import environment, free_port
from tests.recorded import recorded

DATA = Path(__file__).parents[1] / "data"
TOLERANCE: dict[str, float] = {"rel": 1e-3, "abs": 1e-5}
"""between machines, whose matrix products add up in another order"""
RECORDS = {"grpo": ("train", "eval.test"), "critic": ("train",)}
"""sources of the records of runs that sample the same tokens again"""
COMPARED = ("step", "group", "sample", "item", "status", "reward", "segments")
"""columns of rollouts that are equal"""
MAY_DIFFER = ("second", "memory", "mfu", "standard_error")
"""parts of names of metrics of the machine, and of metrics that later versions compute in another way"""
CONFIGS: dict[str, type[Any]] = {
    "sft": SftConfig,
    "ends": SftConfig,
    "lora": SftConfig,
    "dpo": DpoConfig,
    "kto": KtoConfig,
    "grpo": PpoConfig,
    "critic": PpoConfig,
    "ahead": PpoConfig,
}


@pytest.fixture(params=sorted(DATA.glob("*.tar.xz")), ids=lambda path: path.name.removesuffix(".tar.xz"))
def old(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked folder of one version, as the working directory."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    replace(folder, PLACE, bytes(folder))
    monkeypatch.chdir(folder)
    return folder


def resume(name: str, *further: str, status: int = 0) -> str:
    """Give the command of a run again, with further options; returns what the command printed."""
    command = json.loads(Path("commands.json").read_text())[name]
    if "torch.distributed.run" in command:
        command.insert(1, f"--master_port={free_port()}")
    program = [forked_python.python(), "-m", *command, *further]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["sft", "lora", "dpo", "kto", "grpo", "critic"])
def test_an_old_run_ends_as_its_own_version_ended_it(old: Path, name: str) -> None:
    assert f"{name}/state/step-2" in resume(name)
    check_end(name)


def check_end(name: str) -> None:
    """Compare a run with the run that the old version ended: metrics, weights, and rollouts that are sampled again."""
    found, expected = (read_metrics(Path(folder, "metrics.jsonl")) for folder in (name, f"resumed/{name}"))
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, before in zip(found, expected, strict=True):
        same = {key: value for key, value in before.items() if not any(part in key for part in MAY_DIFFER)}
        assert {key: row[key] for key in same} == pytest.approx(same, **TOLERANCE)
    weights = load_file(f"{name}/latest/model.safetensors")
    for tensor, values in load_file(f"resumed/{name}/model.safetensors").items():
        torch.testing.assert_close(weights[tensor], values, rtol=1e-3, atol=1e-4)
    for source in RECORDS.get(name, ()):
        rows, earlier = (
            [{column: row[column] for column in COMPARED} for row in recorded(Path(folder), source)]
            for folder in (name, f"resumed/{name}")
        )
        assert rows == earlier


def test_an_old_run_with_other_ends_of_answers_names_the_option_that_keeps_them(old: Path) -> None:
    assert "another content" in (refusal := resume("ends", status=1).splitlines()[-1])
    assert "data.end_token=keep" in refusal
    resume("ends", "data.end_token=keep")
    check_end("ends")


def test_old_rollouts_that_ran_ahead_go_on_and_none_is_lost(old: Path) -> None:
    """Two ranks that share nothing sample in an order of their own, so only counts are compared."""
    resume("ahead")
    assert [row["step"] for row in read_metrics(Path("ahead/metrics.jsonl"))] == list(range(1, 7))
    rows = [row for row in recorded(Path("ahead")) if row["status"] == "trained"]
    assert len({(row["group"], row["sample"]) for row in rows}) == len(rows) == 6 * 2 * 3, "each rollout once"
    assert Counter(row["item"] for row in rows) == {f"sum-{n}": 2 * 3 for n in range(6)}, "two whole epochs"


@pytest.fixture
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


@pytest.mark.parametrize("name", ["sft", "lora"])
def test_an_old_checkpoint_loads_bit_by_bit(old: Path, session: None, name: str) -> None:
    expected = json.loads((old / "checkpoints.json").read_text())[name]
    checkpoint = old / name / "state/step-2"
    assert digests(checkpoint) == expected
    lora = LoraOptions(rank=2) if name == "lora" else None
    options = OptimizerOptions(lr=0.01, weight_decay=0.01, scheduler="cosine", warmup_steps=0, total_steps=6)
    engine = RliteTrainEngine(policy_module("model", options, lora))
    engine.build()
    assert engine.load_state(checkpoint)["step"] == 2
    engine.save_state(old / "again").result()
    engine.release()
    assert digests(old / "again") == expected, "weights and optimizer state"


def test_old_records_open(old: Path) -> None:
    names = ["sft", "lora", "dpo", "kto", "grpo", "critic", "ahead", "evaluation", "evaluation-killed"]
    runs = open_runs(names)
    assert [run.problems for run in runs] == [[]] * len(names)
    assert runs[-1].notes == [UNFINISHED]
    for run in runs:
        assert set(run.record.sources) == {file.source for file in record_files(run.folder)}
        for file in record_files(run.folder):
            told = pq.read_table(file.path).to_pylist()
            reader = RecordReader(run.folder)
            assert reader.refresh()
            read = reader.rollouts if file.kind == "rows" else reader.tokens
            found = [row for step in sorted({row["step"] for row in told}) for row in read(file.source, step)]
            assert [{column: row[column] for column in told[0]} for row in found] == told
    told = export(runs, Path("runs.html"), [], 10)
    assert told["texts"] == told["rollouts"] > 0
    assert told["left_out"] == []


def test_an_old_adapter_loads_and_merges(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "merge", "lora/latest/adapter", "again")
    merged, expected = load_file("again/model.safetensors"), load_file("merged/model.safetensors")
    assert merged.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(merged[name], values)
    base = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, "lora/latest/adapter").merge_and_unload()
    for name, values in expected.items():
        torch.testing.assert_close(adapted.state_dict()[name], values)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_old_config_is_accepted(old: Path, name: str) -> None:
    saved = dict(flat(read_saved(Path(name, "config.yaml"))))
    others = {"imports": [], "trainer.callbacks": []}  # its own code cannot be imported twice in this process
    changes = [f"{key}={value}" for key, value in others.items()]
    now = dict(flat(config.to_container(config.load(CONFIGS[name], ["--config", f"{name}/config.yaml", *changes]))))
    assert {**saved, **others}.items() <= now.items()


def test_an_old_evaluation_goes_on_and_is_compared(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Path("evaluation-killed/samples/model.jsonl")
    before = journal.read_bytes()
    num_kept = before.count(b"\n") - 1
    assert f"continuing: {num_kept} of 12 samples are there" in resume("evaluation-killed")
    assert journal.read_bytes().startswith(before)
    found, expected = map(metrics_of, ("evaluation-killed", "resumed/evaluation-killed"))
    same = {name: value for name, value in expected.items() if "standard_error" not in name}
    assert {name: found[name] for name in same} == pytest.approx(same)
    command(monkeypatch, "eval", "evaluation", "evaluation-killed", "out=compared")
    assert json.loads(Path("compared/results.json").read_text())["comparison"]["difference"] == 0


def metrics_of(evaluation: str) -> dict[str, float]:
    metrics: dict[str, float] = json.loads(Path(evaluation, "results.json").read_text())["models"]["model"]["metrics"]
    return metrics


def test_old_records_of_jobs_open(
    old: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FileStore("jobs")
    for name, stage in {"small": "FINISHED", "under-way": "RUNNING"}.items():
        record = load_record(store, name)
        assert record is not None
        assert record.state.stage == stage
        command(monkeypatch, "status", name, "store=jobs")
        assert f"{name}: {stage}, 0 restarts" in capsys.readouterr().out


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["rlite", *arguments])
    main()


def test_old_runs_are_audited_as_far_as_they_reach(old: Path) -> None:
    for name in ("grpo", "critic", "sft"):
        findings = audit(AuditConfig(run=name, replay="none"))
        assert findings.found == []
        assert any("no chain.jsonl" in note for note in findings.notes)
    assert findings.checked["hashes"]
    reader = RecordReader(Path("grpo"))
    reader.refresh()
    with pytest.raises(DataError, match="earlier version of rlite, which did not keep whole batches"):
        read_batch(reader, 1)
