"""No file of a checkpoint runs code, even if an attacker wrote it."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import CheckpointError
from rlite.nn.pretrained import load_tokenizer
from rlite.runtime.storage.atomic import FACTS, MANIFEST, hash_files, seal
from rlite.runtime.storage.sharded import METADATA
from rlite.trainer.model.modules import policy_module
from tests.integration.modules import Qwen2Policy, make_batch, num_counted, on_meta, token_loss
from tests.tiny import build_model_dir


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.mark,)


def as_pickle(mark: Path) -> bytes:
    return pickle.dumps(Hostile(mark), protocol=2)


def as_saved_by_torch(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save({"random": Hostile(mark)}, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RliteTrainEngine]:
    rlite.init(num_devices=1, num_threads=1)
    engine = RliteTrainEngine(on_meta(Qwen2Policy, build_model_dir(tmp_path_factory.mktemp("models") / "m", hidden=32)))
    engine.build()
    engine.train_batch(make_batch([5, 4]), token_loss, num_counted)
    yield engine
    rlite.shutdown()


@pytest.fixture(scope="module")
def sound(engine: RliteTrainEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "sound"
    engine.save_state(path, step=3, kept={"tensor": torch.ones(2)})
    return path


def reseal(path: Path) -> None:
    """Give every file the hash that it has now."""
    (path / MANIFEST).unlink()
    facts = (path / FACTS).read_bytes()
    seal(path, {})
    (path / FACTS).write_bytes(facts)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"] |= hash_files(path, [FACTS])
    (path / MANIFEST).write_text(json.dumps(manifest))


def put(path: Path, name: str, content: bytes) -> None:
    """Replace a file; of one with tensors every part is then the whole of it."""
    (path / name).write_bytes(content)
    if name.endswith(".distcp"):
        table = json.loads((path / METADATA).read_text())
        table["places"] = [[*place[:4], 0, len(content)] for place in table["places"]]
        (path / METADATA).write_text(json.dumps(table))


@pytest.mark.parametrize("is_resealed", [False, True], ids=["", "with new hashes"])
@pytest.mark.parametrize("hostile", [as_pickle, as_saved_by_torch])
def test_no_file_of_a_checkpoint_runs_code_and_the_error_names_it(
    engine: RliteTrainEngine, sound: Path, tmp_path: Path, hostile: Any, is_resealed: bool
) -> None:
    mark, names = tmp_path / "mark", sorted(file.name for file in sound.iterdir())
    assert {"__0_0.distcp", "driver.pt", "rank-0.pt", FACTS, MANIFEST, METADATA} == set(names)
    for name in names:
        path = shutil.copytree(sound, tmp_path / name / "state")
        put(path, name, hostile(mark))
        if is_resealed and name != MANIFEST:
            reseal(path)
        with pytest.raises(CheckpointError, match=f"the file {name} "):
            engine.load_state(path)
        assert not mark.exists(), name
    assert engine.load_state(sound)["step"] == 3
    assert engine.load_state(sound)["tensor"].tolist() == [1, 1]


def test_a_file_that_was_cut_off_is_named_though_its_hash_fits(
    engine: RliteTrainEngine, sound: Path, tmp_path: Path
) -> None:
    for name in ("__0_0.distcp", "driver.pt", "rank-0.pt"):
        whole = (sound / name).read_bytes()
        for number in range(16):
            path = shutil.copytree(sound, tmp_path / f"{name}-{number}")
            (path / name).write_bytes(whole[: len(whole) * number // 16])
            reseal(path)
            with pytest.raises(CheckpointError, match=f"the file {name} "):
                engine.load_state(path)
    assert engine.load_state(sound)["step"] == 3


def test_every_part_of_a_file_with_tensors_is_read_without_running_code(
    engine: RliteTrainEngine, sound: Path, tmp_path: Path
) -> None:
    table = json.loads((sound / METADATA).read_text())
    values = [name for name, entry in table["entries"].items() if entry is None]
    assert any("param_groups" in name or "lr" in name for name in values), "not everything is a tensor"
    blob = as_saved_by_torch(tmp_path / "mark")
    for name in [values[0], next(name for name in table["entries"] if name not in values)]:
        path = shutil.copytree(sound, tmp_path / name)
        end = (path / "__0_0.distcp").stat().st_size
        with (path / "__0_0.distcp").open("ab") as file:
            file.write(blob)
        places = [[*place[:4], end, len(blob)] if place[0] == name else place for place in table["places"]]
        (path / METADATA).write_text(json.dumps({**table, "places": places}))
        reseal(path)
        with pytest.raises(CheckpointError, match=r"the file __0_0\.distcp "):
            engine.load_state(path)
        assert not (tmp_path / "mark").exists()
    engine.load_state(sound)


def test_a_checkpoint_with_a_pickle_for_its_table_is_refused_unread(
    engine: RliteTrainEngine, sound: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(sound, tmp_path / "state")
    (path / METADATA).unlink()
    (path / ".metadata").write_bytes(as_pickle(tmp_path / "mark"))
    reseal(path)
    with pytest.raises(CheckpointError, match=r"earlier version of rlite.*is a pickle.*latest/"):
        engine.load_state(path)
    assert not (tmp_path / "mark").exists()
    engine.load_state(sound)


@pytest.mark.parametrize(
    "edit",
    [
        {"format": 9},
        {"entries": {"model.x": {"dtype": "load", "shape": [1], "chunks": []}}},
        {"places": [["model.x", None, None, "../other/__0_0.distcp", 0, 1]]},
        {"places": 3},
    ],
    ids=["format", "dtype", "elsewhere", "kind"],
)
def test_a_table_of_another_form_is_refused(
    engine: RliteTrainEngine, sound: Path, tmp_path: Path, edit: dict[str, Any]
) -> None:
    path = shutil.copytree(sound, tmp_path / "state")
    (path / METADATA).write_text(json.dumps({**json.loads((path / METADATA).read_text()), **edit}))
    reseal(path)
    with pytest.raises(CheckpointError, match=f"the file {METADATA} cannot be read"):
        engine.load_state(path)
    engine.load_state(sound)


def test_code_beside_a_model_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_model_dir(tmp_path / "model", hidden=32)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'mark')!r})\n")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    for load in (RliteInferenceEngine, policy_module, load_tokenizer):
        with suppress(ValueError):  # a tokenizer can do without
            load(str(path))
    assert not (tmp_path / "mark").exists()
