"""Training on data that is streamed: a run that was killed, or met a bad row, ends as one that was not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rlite
from rlite.assembly.supervised import read_tokens
from rlite.config import load
from rlite.data.readers.streaming import WINDOW
from rlite.errors import CheckpointError, StreamedDataError
from rlite.observability import stats_tracker
from rlite.trainer import ppo
from rlite.trainer.sft import SftTrainer
from rlite.trainer.supervised_options import SftConfig
from tests.recorded import recorded
from tests.tiny import build_model_dir

CLOCKED = ("seconds", "tokens_per_second", "memory_gib")
REWARD = """
def varied(prompt, completions, prompt_ids, completion_ids, key, **row):
    return 0.0 if key == "03?" else sum(completion_ids) % 97
"""


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    rlite.shutdown()


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demonstrations(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number % 97}", "response": f"{number}"} for number in range(count)]


def trainer(folder: Path, out: str, *settings: str) -> SftTrainer:
    """A trainer in a new session, on rows of `folder/rows.jsonl`."""
    options = load(
        SftConfig,
        [
            *(f"actor.model_name={folder / 'model'}", "actor.lr=3e-3", "actor.gradient_checkpointing=false"),
            *(f"data.path={folder / 'rows.jsonl'}", "data.streaming=true", "data.max_length=16"),
            *("trainer.total_steps=6", f"trainer.save_dir={folder / out}", *settings),
        ],
    )
    rlite.shutdown()
    rlite.init(num_devices=1, num_threads=1)
    name = options.actor.model_name
    rows = read_tokens(options.data, options.test_data, name, SftTrainer.tokenise, SftTrainer.kind)
    return SftTrainer(options, *rows)


def steps(out: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if not key.startswith(CLOCKED)} for row in rows]


def assert_same(one: Path, other: Path) -> None:
    assert steps(one) == steps(other)
    weights = [load_file(out / "latest" / "model.safetensors") for out in (one, other)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_killed_run_resumes_bit_identically(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_model_dir(tmp_path / "model", hidden=32)
    write(tmp_path / "rows.jsonl", demonstrations(WINDOW + 40))
    settings = ("data.batch_size=8", f"data.shuffle_buffer={WINDOW + 2}", "trainer.save_freq=2")
    trainer(tmp_path, "whole", *settings).fit()
    assert f" streaming, buffer of {WINDOW + 2} rows; raw prompts and responses" in capsys.readouterr().out
    killed = trainer(tmp_path, "killed", *settings)
    killed.start()
    for _, batch in zip(range(5), killed.loader, strict=False):  # the newest checkpoint is of step 4
        with stats_tracker.record_timing("step"):
            stats = killed.update(killed.prepare(batch))
        killed.finish_step(batch, stats)
    killed.run.saved.held.close()
    trainer(tmp_path, "killed", *settings).fit()
    assert len(steps(tmp_path / "whole")) == 6
    assert_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.nightly
def test_a_bad_row_ends_the_run_with_a_checkpoint_that_goes_on_once_it_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_model_dir(tmp_path / "model", hidden=32)
    rows = demonstrations(WINDOW + 900)
    settings = ("data.batch_size=1024", "data.shuffle_buffer=64", "trainer.save_freq=100")
    write(tmp_path / "rows.jsonl", rows)
    trainer(tmp_path, "whole", *settings).fit()
    write(tmp_path / "rows.jsonl", [*rows[: WINDOW + 7], {"prompt": "7"}, *rows[WINDOW + 8 :]])
    with pytest.raises(StreamedDataError, match=rf"rows\.jsonl, line {WINDOW + 8}: no 'response'; the row has prompt"):
        trainer(tmp_path, "stopped", *settings).fit()
    assert "bad data: stop after step 3, which is saved" in capsys.readouterr().out
    write(tmp_path / "rows.jsonl", [{"prompt": "1", "response": "2"}, *rows])
    with pytest.raises(CheckpointError, match="another content of the data"):
        trainer(tmp_path, "stopped", *settings).fit()
    write(tmp_path / "rows.jsonl", rows)
    trainer(tmp_path, "stopped", *settings).fit()
    assert_same(tmp_path / "stopped", tmp_path / "whole")


def prompts_command(folder: Path, num_rows: int, *settings: str) -> list[str]:
    """`rlite ppo` on two files of distinct prompts, `{file}{row}?`. The rewards of 03? are equal."""
    build_model_dir(folder / "model", hidden=32)
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts").mkdir()
    for number in range(2):
        rows = [{"question": f"{number}{row}?", "key": f"{number}{row}?"} for row in range(num_rows)]
        write(folder / "prompts" / f"train-{number}.jsonl", rows)
    return [
        *(f"actor.model_name={folder / 'model'}", "actor.gradient_checkpointing=false"),
        *(f"train_data.path={folder / 'prompts'}", "train_data.streaming=true"),
        *("train_data.columns.prompt=question", f"reward.path={folder / 'reward.py'}:varied"),
        *("rollout.train_sampling_params.max_new_tokens=4", "rollout.max_model_len=32", "launcher=inprocess"),
        "trainer.record=all",
        *settings,
    ]


def asked(run: Path) -> list[str]:
    return [row["segments"][0]["text"] for row in recorded(run) if row["status"] == "trained"]


@pytest.mark.nightly
def test_prompts_are_streamed_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=1")
    given = prompts_command(tmp_path, 9, "train_data.shuffle_buffer=5", *sizes)
    ppo.main([*given, f"trainer.save_dir={tmp_path / 'whole'}", "trainer.total_steps=6"])
    assert "streaming, 2 files, buffer of 5 rows" in capsys.readouterr().out
    for total_steps in (2, 6):
        ppo.main([*given, f"trainer.save_dir={tmp_path / 'run'}", f"trainer.total_steps={total_steps}"])
    assert asked(tmp_path / "run") == asked(tmp_path / "whole")
    assert len(set(asked(tmp_path / "whole")[:18])) == 18


@pytest.mark.nightly
def test_a_bad_prompt_ends_the_run_and_no_prompt_is_left_out_once_it_is_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("train_data.prompts_per_rollout=2", "train_data.responses_per_prompt=2", "rollout.dynamic_filtering=true")
    given = prompts_command(tmp_path, 4, "train_data.shuffle_buffer=1", *sizes)
    second = tmp_path / "prompts" / "train-1.jsonl"
    whole = second.read_text()
    second.write_text(whole.replace('"question": "12?"', '"question": 12'))
    given += [f"trainer.save_dir={tmp_path / 'run'}", "trainer.total_steps=3"]
    with pytest.raises(StreamedDataError, match=r"train-1\.jsonl, line 3: 'prompt' is int 12; expected"):
        ppo.main(given)  # the second file is read when another prompt is needed in place of 03?
    assert "bad data: stop after step 1, which is saved" in capsys.readouterr().out
    second.write_text(whole)
    ppo.main(given)
    assert sorted(set(asked(tmp_path / "run"))) == ["00?", "01?", "02?", "10?", "11?", "12?"]


class Produced:
    """Rows that are made while they are iterated."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(demonstrations(100))


def test_rows_that_a_program_produces_are_streamed_and_resumed(tmp_path: Path) -> None:
    build_model_dir(tmp_path / "model", hidden=32)
    options = {"data.streaming": True, "data.shuffle_buffer": 20, "data.batch_size": 16, "data.max_length": 16}
    for out, total_steps in (("whole", 9), ("run", 3), ("run", 9)):
        rlite.train(
            "sft",
            model=tmp_path / "model",
            data=Produced(),
            save_dir=tmp_path / out,
            total_steps=total_steps,
            **{"actor.lr": 3e-3, "actor.scheduler": "constant", **options},
        )
    assert [row["step"] for row in steps(tmp_path / "whole")] == list(range(1, 10))
    assert_same(tmp_path / "run", tmp_path / "whole")
