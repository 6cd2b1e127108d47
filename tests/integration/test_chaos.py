"""The fault-injection command: a disturbed run is resumed, compared, and told in a table."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos import FileSizeFault, Row, SignalFault, build_settings, merge, run_setting, show

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.nightly
def test_disturbed_run_resumes_bit_identically(tmp_path: Path) -> None:
    (setting,) = build_settings(tmp_path, [("one", "sft")])
    faults = [
        SignalFault(role="driver", signal="SIGSTOP"),
        FileSizeFault(role="driver"),
        SignalFault(role="worker", signal="SIGKILL"),
    ]
    rows = run_setting(setting, tmp_path, faults, random.Random(0))
    assert [row.fault for row in rows] == ["SIGSTOP driver", "full disk driver", "SIGKILL worker"]
    assert [row.survived for row in rows] == [1, 1, 0], rows
    assert [row.identical for row in rows] == [1, 1, 1], rows
    assert [len(row.seconds) for row in rows] == [0, 1, 0]
    assert "has no worker now" in rows[-1].reasons[0]


def test_the_table_has_a_line_for_each_fault_of_a_setting_and_a_sum() -> None:
    rows = [
        Row("one sft", "SIGKILL driver", tried=1, survived=1, identical=1, seconds=[0.5]),
        Row("one sft", "SIGKILL driver", tried=1, identical=1, reasons=["a process was left"]),
        Row("services", "long message", tried=1, survived=1),
    ]
    lines = show(merge(rows)).splitlines()
    assert lines[1].split() == ["one", "sft", "SIGKILL", "driver", "2", "1", "2", "0.5", "s"]
    assert lines[2].strip() == "a process was left"
    assert lines[3].split() == ["services", "long", "message", "1", "1", "-", "-"]
    assert lines[4].split() == ["all", "3", "2", "2", "0.5", "s"]
