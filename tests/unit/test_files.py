"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlite import files

WRITER = """
import sys
from pathlib import Path
from rlite import files
while True:
    for letter in (b"a", b"b"):
        files.replace(Path(sys.argv[1]), letter * 2_000_000)
        print(flush=True)
"""


def test_a_reader_sees_the_old_content_or_the_new_and_so_does_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    for _ in range(100):
        assert path.read_bytes() in (b"a" * 2_000_000, b"b" * 2_000_000)
    writer.kill()
    writer.wait()
    assert path.read_bytes() in (b"a" * 2_000_000, b"b" * 2_000_000)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    files.replace(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_permissions_are_those_asked_for(tmp_path: Path) -> None:
    files.replace(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_place_of_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"of the user")
    (tmp_path / f".file.{os.getpid()}.partial").symlink_to(other)
    files.replace(tmp_path / "file", b"new")
    assert (other.read_bytes(), (tmp_path / "file").read_bytes()) == (b"of the user", b"new")
