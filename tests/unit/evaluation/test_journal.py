from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from rlite.errors import ConfigError, StorageError
from rlite.evaluation.journal import Journal, changed_settings, read_journal

SETTINGS = {"samples": 2, "reward": {"path": "my.py:f"}}
LINES = [{"item": "a", "score": 1.0}, {"item": "\u202e\ud800 <b>", "score": None}]


def journal(path: Path, settings: dict = SETTINGS, lines: list = LINES) -> None:
    made = Journal(path, settings)
    made.begin()
    for line in lines:
        made.append(line)
    made.close()


def test_a_journal_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "a.jsonl"
    journal(path)
    continued = Journal(path, SETTINGS)
    continued.begin()
    assert continued.lines == LINES
    continued.append({"item": "c"})
    continued.close()
    assert read_journal(path) == (SETTINGS, [*LINES, {"item": "c"}])


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_is_removed(cut: int, tmp_path: Path) -> None:
    journal(path := tmp_path / "a.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n") - 1
    assert read_journal(path)[1] == LINES[:kept]
    continued = Journal(path, SETTINGS)
    continued.begin()
    assert continued.lines == LINES[:kept]
    for line in LINES[kept:]:
        continued.append(line)
    continued.close()
    assert path.read_bytes() == whole


def test_a_first_line_that_was_cut_off_begins_a_new_journal(tmp_path: Path) -> None:
    journal(path := tmp_path / "a.jsonl", lines=[])
    whole = path.read_bytes()
    path.write_bytes(whole[:5])
    journal(path, lines=[])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes", "expected the samples of an evaluation, found another file"),
        (b'{"version": 9, "settings": {}}\n', "samples of format 9, and this version of rlite writes 1"),
        (b'{"version": 1, "settings": {}}\nx\n', "line 2: expected JSON"),
        (b'{"version": 1, "settings": {}}\n[1]\n', "line 2: expected an object of JSON"),
        (b'{"version": 1, "settings": 3}\n', "no settings of samples in it"),
        (b'{"version": 1, "settings": {"samples": 3}}\n', r"samples: 3 there, 2 here; reward\.path: nothing there"),
    ],
)
def test_another_file_is_refused_and_left_as_it_is(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content
    anew = Journal(path, SETTINGS, overwrite=True)
    assert path.read_bytes() == content, "`begin` is the first change"
    anew.begin()
    anew.close()
    assert read_journal(path) == (SETTINGS, [])


def test_making_a_journal_removes_nothing_that_another_process_has_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal(path := tmp_path / "a.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)  # it appears after this
        made = Journal(path, SETTINGS)
    assert made.lines == LINES
    assert read_journal(path) == (SETTINGS, LINES)
    made.close()


def test_a_full_disk_is_told_once_and_loses_only_the_line_that_was_cut_off(tmp_path: Path) -> None:
    journal(path := tmp_path / "a.jsonl")
    full = Journal(path, SETTINGS)
    full.begin()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"a\.jsonl: could not be written: a file is larger"):
            full.append({"item": "c"})
        assert path.read_bytes().endswith(b"\n"), "another line may follow"
        full.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert full.lines == LINES
    assert read_journal(path) == (SETTINGS, LINES)
    journal(path, lines=[{"item": "c"}])
    assert read_journal(path) == (SETTINGS, [*LINES, {"item": "c"}])


def test_a_journal_that_is_not_begun_leaves_no_file(tmp_path: Path) -> None:
    Journal(tmp_path / "samples" / "a.jsonl", SETTINGS).close()
    assert list(tmp_path.iterdir()) == []


def test_many_differences_are_counted() -> None:
    found = changed_settings({str(n): n for n in range(20)}, {}).split("; ")
    assert found[0] == "0: 0 there, nothing here"
    assert (len(found), found[-1]) == (9, "and 12 more")


def test_a_missing_journal_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl: No such file"):
        read_journal(Path("nowhere.jsonl"))


def test_a_pipe_in_the_place_of_a_journal_is_an_error_and_no_wait(tmp_path: Path) -> None:
    made = Journal(tmp_path / "a.jsonl", SETTINGS)
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(StorageError):
        made.begin()
    made.close()
