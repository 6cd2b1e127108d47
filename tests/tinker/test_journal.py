"""The journal of one model: cut records, replacement, and errors."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlite.services.tinker.journal import REQUEST, STATE, Journal, Record


def filled(path: Path) -> list[Record]:
    records = [Record(REQUEST, number, bytes([number]) * 20) for number in range(1, 4)]
    journal = Journal(path)
    for record in records:
        journal.append(record)
    assert journal.num_bytes == path.stat().st_size
    return records


def test_every_cut_of_the_file_leaves_whole_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "journal"
    records = filled(path)
    whole = path.read_bytes()
    size = len(whole) // 3
    caplog.set_level(logging.ERROR)
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = Journal(path)
        assert journal.read() == records[: length // size]
        assert path.stat().st_size == journal.num_bytes
        journal.append(records[0])
        assert journal.read()[-1] == records[0]


def test_a_changed_byte_ends_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = filled(path)
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)
    assert Journal(path).read() == records[:1]


def test_a_rewritten_journal_begins_with_the_state_and_keeps_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records, state = filled(path), Record(STATE, 2, b"{}")
    Journal(path).rewrite([state], lambda record: record.seq_id > 2)
    assert Journal(path).read() == [state, records[2]]
