"""The benchmark of recording compares whole steps, and fails if its limit is missed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from benchmarks import recording
from benchmarks.recording import Step, shares_of
from rlite.services.record.recorder import Amount


def steps(*ratios: float) -> list[Step]:
    return [Step(number, wall=2.0 * ratio, cpu=3.0 * ratio) for number, ratio in enumerate(ratios, start=1)]


@pytest.mark.parametrize(("ratio", "told"), [(1.001, "reached"), (1.5, "missed")])
def test_a_missed_limit_is_the_exit_status(
    ratio: float, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {mode: steps(*[1.0 if mode == "none" else ratio] * 11) for mode in recording.MODES}
    monkeypatch.setattr(recording, "measured", lambda *args: found)
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


def test_a_share_is_of_whole_steps_and_counts_each_tenth_step_of_a_sample() -> None:
    dear, cheap = 1.2, [1.1] * 9
    found: dict[Amount, list[Step]] = {"none": steps(*[1.0] * 11), "sample": steps(dear, *cheap, dear)}
    assert shares_of("sample", found) == pytest.approx({"wall": 0.11, "cpu": 0.11})
    assert shares_of("all", {**found, "all": found["sample"]}) == pytest.approx({"wall": 0.1, "cpu": 0.1})
