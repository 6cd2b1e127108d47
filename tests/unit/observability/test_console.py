from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from rlite.services.console.terminal import ConsoleReporter

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STEP = {"reward": 0.25, "actor/loss": -0.012345, "seconds": 12.345, "tokens_per_second": 12345.6, "kl": 2e-5}


MANY = [f"a_long_metric_{number}" for number in range(12)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """The text without colours and without the bar, which is drawn over itself."""
        lines = [line.rsplit("\r", 1)[-1] for line in ESCAPES.sub("", self.getvalue()).split("\n")]
        return [line.rstrip() for line in lines if not line.startswith("training")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """terminal(width, **options): a terminal and a reporter on it."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(width: int = 80, total: int | None = 60, **options: Any) -> tuple[Terminal, ConsoleReporter]:
        monkeypatch.setenv("COLUMNS", str(width))
        out = Terminal()
        return out, ConsoleReporter(total, file=out, **options)

    return make


# -- in a pipe ---------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_plain_line_per_step_with_the_time_left() -> None:
    seconds = iter([0.0, 0.0, 0.0, 2.0, 2.0, 4.0, 4.0])
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
        "step 1/60   loss 0.1235     reward 0.25       2 s/step  0:01:58 left",
        "step 2/60   loss -1e-07                       2 s/step  0:01:56 left",
    ]


def test_lines_of_a_pipe_are_aligned_and_hold_plain_numbers() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(60, metrics=tuple(STEP), choice="all", file=out, clock=lambda: 0.0)
    reporter.log(9, STEP)
    reporter.log(10, {**STEP, "reward": -0.012345, "rollout/num_lost": 2.0, "rollout/num_groups": 14.0})
    assert out.getvalue().splitlines() == [
        "step 9/60   reward 0.25       actor/loss -0.01235   seconds 12.35      tokens_per_second 12346"
        "      kl 2e-05      0 s/step  0:00:00 left",
        "step 10/60  reward -0.01235   actor/loss -0.01235   seconds 12.35      tokens_per_second 12346"
        "      kl 2e-05      rollout/num_lost 2          rollout/num_groups 14         2 of 16 groups lost"
        "  0 s/step  0:00:00 left",
    ]


@pytest.mark.parametrize(("choice", "shows_all"), [("auto", False), ("all", True), (MANY, True)])
def test_a_line_of_a_pipe_has_at_most_200_characters_unless_more_is_asked_for(choice: Any, shows_all: bool) -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(60, metrics=MANY, choice=choice, file=out, clock=lambda: 0.0)
    for step in (1, 2):
        reporter.log(step, dict.fromkeys(MANY, 1.2345678))
    first, second = out.getvalue().splitlines()
    assert first[12:] == second[12:]
    assert first.startswith("step 1/60   a_long_metric_0 1.235")
    assert (MANY[-1] in first) is shows_all
    assert (len(first) <= 200) is not shows_all


def test_the_lines_of_a_table_in_a_file_stand_below_each_other_and_fit() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(file=out)
    reporter.report("title", {"text": "first\n  second\n\nlast", "long": "word " * 90, "path": "/" + "x" * 300})
    lines = out.getvalue().splitlines()
    assert lines[:5] == ["title", "  text  first", "          second", "        ", "        last"]
    assert max(map(len, lines[:-1])) <= 200
    assert lines[-1] == "  path  /" + "x" * 300, "no word is broken"


def test_a_table_in_a_locale_without_some_characters_names_their_numbers(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        ConsoleReporter(file=file).report("title", {"text": "é→"})
    assert (tmp_path / "log").read_text() == "title\n  text  \\xe9\\u2192\n"


def test_a_resumed_run_measures_its_own_pace() -> None:
    seconds = iter([100.0, 100.0, 103.0, 103.0])
    out = io.StringIO()
    ConsoleReporter(12, done_steps=10, file=out, clock=lambda: next(seconds)).log(11, {})
    assert out.getvalue() == "step 11/12  3 s/step  0:00:03 left\n"


def test_a_pipe_gets_progress_only_after_half_a_minute_of_silence() -> None:
    now, out = [0.0], io.StringIO()
    reporter = ConsoleReporter(3, file=out, clock=lambda: now[0])
    for now[0] in range(0, 100, 10):
        reporter.note(f"rollout: {now[0]:g} of 100 episodes, 3,456 tokens")
    reporter.close()
    reporter.note("rollout: 100 of 100 episodes")
    assert out.getvalue().splitlines() == [
        f"rollout: {number} of 100 episodes, 3,456 tokens" for number in (30, 60, 90)
    ]


# -- on a terminal -----------------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_panel_columns_and_a_bar(terminal: Any) -> None:
    out, reporter = terminal(metrics=("reward", "loss", "seconds", "tokens_per_second", "kl"))
    reporter.report("rlite ppo", [("model", "tiny")])
    reporter.log(1, STEP)
    reporter.log(2, {**STEP, "reward": -1.0, "seconds": 0.01234})
    reporter.close()
    assert "╭─ rlite ppo ─╮" in out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "2/60" in out.getvalue()
    assert [line for line in out.lines() if "0.0123" in line or "step" in line] == [
        " step    reward      loss   seconds  tokens/s        kl",
        " 1/60    0.2500   -0.0123      12.3    12,346   2.0e-05",
        " 2/60   -1.0000   -0.0123     0.012    12,346   2.0e-05",
    ]


@pytest.mark.parametrize(("width", "num_columns"), [(40, 3), (80, 7), (120, 11)])
def test_columns_that_do_not_fit_are_left_out_from_the_end(terminal: Any, width: int, num_columns: int) -> None:
    names = [f"metric{number:02d}" for number in range(20)]
    out, reporter = terminal(width, metrics=names)
    reporter.log(1, dict.fromkeys(names, 0.5))
    reporter.close()
    (header,) = (line for line in out.lines() if "step" in line)
    assert header.split() == ["step", *names[:num_columns]]
    assert len(header) <= width


def test_the_header_comes_again_after_twenty_steps_and_for_a_metric_that_is_new(terminal: Any) -> None:
    out, reporter = terminal(metrics=("loss", "accuracy"), total=100)
    for step in range(1, 31):
        reporter.log(step, {"loss": 0.5} | ({"accuracy": 0.25} if step == 25 else {}))
    reporter.close()
    lines = out.lines()
    assert [lines[number + 1].split()[0] for number, line in enumerate(lines) if "step" in line] == [
        *("1/100", "21/100", "25/100")
    ]
    assert [line.split() for line in lines if line.split()[:1] in (["24/100"], ["26/100"])] == [
        ["24/100", "0.5000"],
        ["26/100", "0.5000", "-"],
    ]


def test_all_metrics_of_a_step_stand_below_it_in_pairs(terminal: Any) -> None:
    out, reporter = terminal(40, choice="all", metrics=("loss",))
    reporter.log(1, {"loss": 0.5, "seconds_rollout": 1.5, "a": 1e-9, "b": 0.0})
    reporter.close()
    start = out.lines().index("step 1/60")
    assert out.lines()[start : start + 4] == ["step 1/60", "  loss 0.5000", "  seconds_rollout 1.50", "  a 1.0e-09"]


def test_lost_groups_and_alarms_are_said_in_words_and_in_colour(terminal: Any) -> None:
    out, reporter = terminal(metrics=("loss",))
    reporter.log(1, {"loss": 0.5, "rollout/num_lost": 2.0, "rollout/num_groups": 14.0})
    reporter.alarm("ALARM at step 1: nothing is learnt", {"look at": "the reward"})
    reporter.close()
    assert "       2 of 16 groups lost" in out.lines()
    assert "\x1b[33m2 of 16 groups lost" in out.getvalue().replace("\x1b[33m       ", "\x1b[33m")
    assert "\x1b[31m╭─" in out.getvalue()
    assert "\x1b[1;31m ALARM at step 1: nothing is learnt" in out.getvalue()


def test_a_title_that_is_longer_than_the_line_is_not_cut(terminal: Any) -> None:
    out, reporter = terminal(40)
    reporter.warn("one two three four five six seven eight nine ten", {"a": "b"})
    assert " ".join(out.lines()[:2]) == "one two three four five six seven eight nine ten"


def test_progress_is_followed_until_the_console_is_closed(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlite.services.console.terminal._POLL_S", 0.01)
    out, reporter = terminal(120)
    others = {*threading.enumerate()}
    polled = threading.Semaphore(0)

    def poll() -> str:
        polled.release()
        return "rollout: 12 of 64 episodes, 3,456 tokens"

    reporter.follow(poll)
    assert polled.acquire(timeout=10)
    assert polled.acquire(timeout=10)
    reporter.close()
    assert "rollout: 12 of 64 episodes, 3,456 tokens" in ESCAPES.sub("", out.getvalue())
    assert [thread for thread in {*threading.enumerate()} - others if thread.name == "rlite-console"] == []


def test_markup_in_names_and_values_is_shown_as_it_is(terminal: Any) -> None:
    out, reporter = terminal()
    reporter.report("run", {"stop": "[/INST] [bold]x"})
    assert "[/INST] [bold]x" in out.getvalue()


def test_a_name_that_is_no_metric_is_reported_once_with_the_nearest() -> None:
    out = io.StringIO()
    reporter = ConsoleReporter(
        3, choice=["rewrd", "accuracy", "kl"], metrics=("kl",), evaluated=("accuracy",), file=out
    )
    for step in range(3):
        reporter.log(step, {"reward": 1.0} if step else {"score": 0.0})
    assert out.getvalue().splitlines()[1:3] == ["trainer.console: no such metric", "  'rewrd'  did you mean 'reward'?"]
    assert out.getvalue().count("no such metric") == 1


def test_metrics_of_evaluations_have_columns_by_their_whole_names_only() -> None:
    out = io.StringIO()
    names = ("math/accuracy", "code/accuracy", "math/truncated")
    reporter = ConsoleReporter(3, metrics=("accuracy", "truncated", "code/accuracy"), evaluated=names, file=out)
    reporter.log(1, {"math/accuracy": 0.25, "math/truncated": 0.5, "actor/truncated": 0.75})
    reporter.log(2, {"code/accuracy": 1.0})
    first, second = out.getvalue().splitlines()
    assert "truncated 0.75" in first
    assert "code/accuracy 1" in second
    assert " accuracy" not in out.getvalue()


def test_the_step_of_the_evaluated_weights_is_said_if_it_is_an_earlier_one(terminal: Any) -> None:
    metrics = {"math/accuracy": 1.0, "math/lag_steps": 2.0, "code/lag_steps": 0.0}
    out, plain = terminal(metrics=("math/accuracy",)), io.StringIO()
    for reporter in (out[1], ConsoleReporter(20, metrics=("math/accuracy",), file=plain)):
        reporter.log(14, metrics)
        reporter.close()
    assert "       evaluation math of step 12" in out[0].lines()
    assert "math/accuracy 1          evaluation math of step 12" in plain.getvalue()


def test_nothing_is_cut_off_on_a_terminal_of_40_characters(terminal: Any) -> None:
    out, reporter = terminal(40, metrics=("reward", "loss"))
    path = "/a/folder/with/a/rather/long/name/metrics.jsonl"
    reporter.report("rlite ppo", {"curves": path})
    reporter.log(1, STEP)
    reporter.note("rollout: 12 of 64 episodes")
    reporter.close()
    text = ESCAPES.sub("", out.getvalue())
    assert "".join(re.findall(r"│ (?:curves)? +(\S+) +│", text)) == path
    assert "1/60" in text
    assert max(len(line.rsplit("\r", 1)[-1]) for line in text.split("\n")) <= 40
