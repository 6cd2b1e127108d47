from __future__ import annotations

import io

import pytest

from rlite.observability.console import ConsoleReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_plain_line_per_step_with_the_time_left() -> None:
    seconds = iter([0.0, 2.0, 4.0])
    out = io.StringIO()
    reporter = ConsoleReporter(60, metrics=("loss", "reward"), file=out, clock=lambda: next(seconds))
    reporter.report("rlite ppo", {"model": "tiny", "batch": "16 prompts x 4 responses = 64 sequences"})
    reporter.log(1, {"reward": 0.25, "actor/loss": 0.123456, "other": 1.0})
    reporter.log(2, {"loss": -1e-7, "eval/loss": 5.0})
    reporter.close()
    assert out.getvalue().splitlines() == [
        "rlite ppo",
        "  model  tiny",
        "  batch  16 prompts x 4 responses = 64 sequences",
        "step 1/60  loss 0.1235  reward 0.25  2 s/step  0:01:58 left",
        "step 2/60  loss -1e-07  2 s/step  0:01:56 left",
    ]


def test_a_resumed_run_measures_its_own_pace() -> None:
    seconds = iter([100.0, 103.0])
    out = io.StringIO()
    ConsoleReporter(12, done_steps=10, file=out, clock=lambda: next(seconds)).log(11, {})
    assert out.getvalue() == "step 11/12  3 s/step  0:00:03 left\n"


def test_a_terminal_gets_a_panel_and_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    reporter = ConsoleReporter(3, file=out)
    reporter.report("rlite sft", [("model", "tiny")])
    for step in (1, 2, 3):
        reporter.log(step, {"loss": 1 / step})
    reporter.close()
    shown = out.getvalue()
    assert "╭─" in shown
    assert "3/3" in shown
    assert "loss 0.3333" in shown


def test_markup_in_names_and_values_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    ConsoleReporter(file=out).report("run", {"stop": "[/INST] [bold]x"})
    assert "[/INST] [bold]x" in out.getvalue()
