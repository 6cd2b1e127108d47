from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlite.errors import CheckpointError, DamagedCheckpointError
from rlite.runtime.storage import atomic, huggingface
from rlite.runtime.storage.atomic import FACTS, MANIFEST, publish, seal, staging, verify
from rlite.runtime.storage.sharded import load_values


def write(path: Path, text: str, **facts: object) -> None:
    folder = staging(path)
    (folder / "deep").mkdir()
    (folder / "deep" / "file").write_text(text)
    seal(folder, facts)
    publish(folder, path)


def test_a_checkpoint_appears_whole_with_its_facts_and_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path, "first", step=1)
    write(path, "second", step=2)
    assert verify(path)["step"] == 2
    assert (path / "deep" / "file").read_text() == "second"
    assert [child.name for child in tmp_path.iterdir()] == ["checkpoint"], "nothing else is left"


def test_a_write_that_was_cut_short_leaves_the_one_before_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path, "first", step=1)
    (staging(path) / "half").write_text("...")
    assert verify(path)["step"] == 1
    write(path, "second", step=2)
    assert not (path / "half").exists()


def test_damaged_missing_and_unfinished_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(CheckpointError, match="no such folder"):
        verify(path)
    write(path, "text")
    (path / "deep" / "file").write_text("texT")
    with pytest.raises(DamagedCheckpointError, match="deep/file is damaged"):
        verify(path)
    (path / "deep" / "file").write_text("tex")
    with pytest.raises(DamagedCheckpointError, match="deep/file has 3 bytes, and had 4"):
        verify(path)
    (path / "deep" / "file").unlink()
    with pytest.raises(DamagedCheckpointError, match="deep/file is missing"):
        verify(path)
    (path / MANIFEST).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{MANIFEST} is missing"):
        verify(path)


def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "PIECE_BYTES", 32)  # the file below has several, and a rest
    path = tmp_path / "checkpoint"
    write(path, "0123456789" * 10, step=7)
    for file in (path / "deep" / "file", path / FACTS, path / MANIFEST):
        whole = file.read_bytes()
        for place in range(len(whole)):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            if file.name == MANIFEST and whole[place : place + 1].isspace():
                continue  # says nothing
            with pytest.raises(DamagedCheckpointError):
                verify(path)
        file.write_bytes(whole)
    assert verify(path) == {"step": 7}


def test_pieces_that_change_places_change_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "PIECE_BYTES", 4)
    path = tmp_path / "checkpoint"
    write(path, "aaaabbbb")
    (path / "deep" / "file").write_text("bbbbaaaa")
    with pytest.raises(DamagedCheckpointError, match="deep/file"):
        verify(path)


def test_a_model_larger_than_a_file_is_split_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "MAX_FILE_BYTES", 100)
    tensors = {name: torch.full((16,), float(i)) for i, name in enumerate("abc")}
    writer = huggingface.Writer(tmp_path / "model")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 * 64
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "model" / file)[name], tensors[name])


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path, is_dangling: bool) -> None:
    path, target = tmp_path / "latest", tmp_path / "base model"
    if not is_dangling:
        target.mkdir()
        (target / "file").write_text("precious")
    path.symlink_to(target)
    for text in ("first", "second"):
        write(path, text)
        assert not path.is_symlink()
        assert (path / "deep" / "file").read_text() == text
    assert is_dangling or (target / "file").read_text() == "precious"
    assert {child.name for child in tmp_path.iterdir()} == {"latest"} | (set() if is_dangling else {"base model"})


def test_values_that_are_cut_off_anywhere_are_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save({"accumulated": {}, "weights": torch.arange(300)}, whole)
    content, cut = whole.read_bytes(), tmp_path / "rank-0.pt"
    for length in range(0, len(content), 7):
        cut.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError, match=r"rank-0\.pt cannot be read"):
            load_values(cut)
    assert load_values(whole)["accumulated"] == {}
