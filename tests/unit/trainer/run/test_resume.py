"""A run in a used folder continues or refuses; it never deletes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlite.errors import ConfigError
from rlite.trainer.options import TrainerOptions
from rlite.trainer.run.resume import MAY_DIFFER, begins_anew, checkpoint_to_load
from rlite.trainer.supervised_options import EpochOptions
from tests.unreadable import UNREADABLE

OPTIONS: dict[str, Any] = {
    "actor": {"lr": 1e-3, "lora": None},
    "num_devices": None,
    "trainer": {"total_steps": 10, "sinks": ["jsonl"], "console": "auto", "seed": 1, "load_ckpt_from": None},
}


def changed(key: str, value: Any) -> dict[str, Any]:
    group, _, name = key.partition(".")
    return {**OPTIONS, group: {**OPTIONS[group], name: value} if name else value}


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """The folder of a run that has saved a checkpoint."""
    (tmp_path / "state" / "step-4").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OPTIONS))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    return tmp_path


def decide(folder: Path, options: dict[str, Any], load: str | None = None, is_overwritten: bool = False) -> str | None:
    return checkpoint_to_load(folder, load, is_overwritten, options)


def test_a_new_folder_begins_as_asked(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("data of the user's")
    assert decide(tmp_path, OPTIONS) is None
    assert decide(tmp_path / "not there", OPTIONS, "/elsewhere/state/step-1") == "/elsewhere/state/step-1"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("trainer.total_steps", 20), ("trainer.sinks", ["wandb"]), ("trainer.console", ["reward"])],
        *[("num_devices", 2), ("trainer.seed", 1)],
    ],
)
def test_the_same_run_goes_on_with_other_limits_and_logs(used: Path, key: str, value: Any) -> None:
    assert decide(used, changed(key, value)) == "latest"


@pytest.mark.parametrize("name", ["gradient_checkpointing", "offload_optimizer"])
def test_a_run_of_a_version_that_always_saved_memory_goes_on(used: Path, name: str) -> None:
    (used / "config.yaml").write_text(yaml.safe_dump(changed(f"actor.{name}", True)))
    assert decide(used, changed(f"actor.{name}", "auto")) == "latest"


def test_every_option_of_a_run_but_its_seed_may_differ() -> None:
    options = {*TrainerOptions.model_fields, *EpochOptions.model_fields}
    assert {name for name in options if f"trainer.{name}" not in MAY_DIFFER} == {"seed"}


def test_an_option_that_the_old_run_did_not_have_yet_is_no_difference(used: Path) -> None:
    assert decide(used, changed("actor.new", 3)) == "latest"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("actor.lr", 1e-4, r"actor\.lr: 0\.001 there, 0\.0001 here"),
        ("actor.lora", {"rank": 8}, r"actor\.lora: null there, \{'rank': 8\} here"),
        ("trainer.seed", 2, r"trainer\.seed: 1 there, 2 here"),
        ("actor", {"lora": None}, r"actor\.lr: 0\.001 there, nothing here"),
    ],
)
def test_another_run_is_refused_with_what_differs_and_the_ways_out(used: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"({said}).*another folder.*load_ckpt_from=latest.*overwrite=true"):
        decide(used, changed(key, value))
    assert decide(used, changed(key, value), is_overwritten=True) is None
    assert decide(used, changed(key, value), "latest") == "latest", "asked for by name"
    assert decide(used, changed(key, value), str(used / "state" / "step-4")) == str(used / "state" / "step-4")


@pytest.mark.parametrize("metrics", [None, "", '{"step": 0, "accuracy": 0.5}\n'])
def test_a_run_that_ended_before_its_first_step_does_not_block_its_folder(tmp_path: Path, metrics: str | None) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OPTIONS))
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
        (tmp_path / "record").mkdir()
        (tmp_path / "record" / "train-00000001.rows.parquet").touch()  # of a first step that failed
    assert decide(tmp_path, changed("actor.lr", 1e-4)) is None
    assert decide(tmp_path, OPTIONS, "/elsewhere/state/step-9") == "/elsewhere/state/step-9"


@pytest.mark.parametrize(
    ("result", "content"),
    [
        *[("metrics.jsonl", '{"step": 0}\n{"step": 1}\n'), ("metrics.jsonl", "not JSON"), ("best/model", "")],
        *[("state/step-1/model", ""), ("record/train-00000001.rows.parquet", "")],
    ],
)
def test_any_result_of_a_step_keeps_another_run_out(tmp_path: Path, result: str, content: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(OPTIONS))
    (tmp_path / result).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / result).write_text(content)
    with pytest.raises(ConfigError, match="another run"):
        decide(tmp_path, changed("actor.lr", 1e-4))


@pytest.mark.parametrize("content", [None, b"- a list", b"\xff\xfe\x00", b"a: \xff", b"", *UNREADABLE])
def test_results_without_a_config_that_can_be_read_are_not_touched(used: Path, content: bytes | str | None) -> None:
    if content is None:
        (used / "config.yaml").unlink()
    else:
        (used / "config.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    known = r"results of another run \(config\.yaml( is|: cannot be read|: not the config).*Choose another folder"
    with pytest.raises(ConfigError, match=known):
        decide(used, OPTIONS)


def test_the_results_of_another_trainer_are_named_as_such(used: Path) -> None:
    options = {"critic": OPTIONS["actor"], "trainer": OPTIONS["trainer"], "num_devices": None}
    with pytest.raises(ConfigError, match=r"of another trainer \(actor: no option of this one\)") as refused:
        decide(used, options)
    assert "load_ckpt_from" not in str(refused.value), "its checkpoints are of no use here"
    assert decide(used, options, is_overwritten=True) is None


def test_a_run_that_began_elsewhere_goes_on_from_its_own_newest(used: Path) -> None:
    start = "/elsewhere/state/step-9"
    with pytest.raises(ConfigError, match=rf"load_ckpt_from: null there, {start} here"):
        decide(used, OPTIONS, start)
    (used / "config.yaml").write_text(yaml.safe_dump(changed("trainer.load_ckpt_from", start)))
    assert decide(used, OPTIONS, start) == "latest"
    (used / "state" / "step-4").rmdir()
    assert decide(used, OPTIONS, start) == start, "it had not come to a checkpoint of its own"


def test_a_link_to_the_folder_is_the_folder(used: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(used)
    assert not begins_anew(tmp_path / "link", str(used / "state" / "step-4"))
    assert begins_anew(used, "/elsewhere/state/step-4")
