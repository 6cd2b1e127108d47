"""The benchmark of recording fails if its limit is missed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from benchmarks import recording
from benchmarks.recording import Seconds


@pytest.mark.parametrize(("seconds", "told"), [(0.001, "reached"), (0.5, "missed")])
def test_a_missed_limit_is_the_exit_status(
    seconds: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {mode: [(Seconds(1.0, seconds), Seconds(1.0, seconds))] for mode in recording.MODES}
    monkeypatch.setattr(recording, "seconds_of_steps", lambda *args: found)
    monkeypatch.setattr(recording, "build_model", lambda path, **options: path)
    monkeypatch.setattr(recording, "rlite", SimpleNamespace(init=lambda **options: None, shutdown=lambda: None))
    monkeypatch.setattr(sys, "argv", ["recording"])
    if told == "reached":
        recording.main()
    else:
        with pytest.raises(SystemExit) as ending:
            recording.main()
        assert ending.value.code == 1
    assert capsys.readouterr().out.endswith(f"limit 2% for sample: {told}\n")
