"""Stores and the record of a job."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlite.errors import ConfigError, RliteError, StorageError
from rlite.runtime.storage.texts import FileStore, MemoryStore, StateStore
from rlite.services.recovery.failover import JobState, RoleState
from rlite.services.recovery.record import (
    MAX_ENDED,
    MAX_ENTRIES,
    JobRecord,
    LogEntry,
    forget_old,
    load_record,
    save_record,
)

RECORD = JobRecord("id", JobState(stage="RUNNING", roles={"ACTOR": RoleState(1, {3: 2}, (4,), 5)})).noted(
    LogEntry(1.0, "RUNNING", "ACTOR rank 3 dead", "restart it", "line 1\nline 2")
)


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "state")


def test_a_record_comes_back_from_any_store_as_it_was(store: StateStore) -> None:
    assert load_record(store, "job") is None
    assert store.names() == []
    save_record(store, "job", JobRecord())
    save_record(store, "job", RECORD)
    assert load_record(store, "job") == RECORD
    assert store.names() == ["job"]
    store.save("job", '{"state": {"stage": "NONSENSE"}}')
    with pytest.raises(RliteError, match="state of job 'job' cannot be read"):
        load_record(store, "job")


def test_records_of_running_jobs_and_of_the_latest_ended_jobs_stay(store: StateStore) -> None:
    save_record(store, "running", RECORD)
    store.save("unreadable", "{}{")
    for number in range(MAX_ENDED + 3):
        ended = JobRecord("id", JobState(stage="FINISHED" if number % 2 else "ERROR"))
        save_record(store, f"job-{99 - number}", ended.noted(LogEntry(float(number), "FINISHED", "done")))
    forget_old(store)
    assert store.names() == [*(f"job-{99 - number}" for number in range(MAX_ENDED + 2, 2, -1)), "running", "unreadable"]
    store.remove("running")
    store.remove("running")
    assert load_record(store, "running") is None


def test_files_can_be_read_by_their_owner_only_and_are_written_whole(tmp_path: Path) -> None:
    os.umask(0o022)
    store = FileStore(tmp_path / "state")
    store.save("job", "one")
    assert stat.S_IMODE((tmp_path / "state" / "job.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
    store.save("job", "two")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["job.json"]
    for name in ("../job", "a/b", ""):
        with pytest.raises(ConfigError, match="job name"):
            store.save(name, "text")


def test_a_store_that_cannot_write_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file.*job\.json"):
        FileStore(tmp_path / "file").save("job", "text")


def test_the_log_is_readable_and_bounded() -> None:
    text = str(RECORD.log[0])
    assert "RUNNING  ACTOR rank 3 dead -> restart it\n    line 1\n    line 2" in text
    record = JobRecord()
    for number in range(MAX_ENTRIES + 5):
        record = record.noted(LogEntry(0.0, "RUNNING", str(number)))
    assert (len(record.log), record.log[-1].event) == (MAX_ENTRIES, str(MAX_ENTRIES + 4))
