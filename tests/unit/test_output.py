"""The standard output of commands: readers that are gone, locales without characters, and JSON without other text."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rlite.assembly.command import run
from rlite.cli import main
from rlite.output import LOST_READER, Result
from rlite.services.console.terminal import ConsoleReporter
from rlite.trainer.run.interruption import INTERRUPTION

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def unread(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "rlite.cli", *arguments]
        return subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", [["--help"], ["ppo", "--help"], ["schema", "ppo"], ["completion", "bash"]])
def test_a_command_whose_reader_is_gone_ends_without_a_traceback(arguments: Sequence[str]) -> None:
    done = unread(*arguments)
    assert (done.returncode, done.stderr) == (LOST_READER, "")


def test_a_run_whose_reader_is_gone_says_how_it_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    def train(arguments: Sequence[str]) -> None:
        INTERRUPTION.begin("The same command continues from step 3.")
        print("step 4", flush=True)

    with open(writer, "w", encoding="utf-8") as lost:
        monkeypatch.setattr(sys, "stdout", lost)
        with pytest.raises(SystemExit) as ended:
            run("sft", train, [])
    assert ended.value.code == LOST_READER
    told = "rlite sft: ended: its standard output was closed. The same command continues from step 3.\n"
    assert capsys.readouterr().err == told


def test_another_pipe_that_breaks_is_no_lost_reader(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: Sequence[str]) -> None:
        raise BrokenPipeError("of a worker")

    with pytest.raises(BrokenPipeError, match="of a worker"):
        run("sft", fail, [])


def test_a_character_that_the_locale_lacks_is_escaped() -> None:
    program = (
        "from rlite.assembly.command import run\n"
        "run('eval', lambda arguments: print('0.5 \\u00b1 0.1 \\ud800'), [])\n"
        "print('after')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **ASCII}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0.5 \\xb1 0.1 \\ud800\nafter\n", "")


def test_the_status_of_a_result_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor", lambda arguments: Result({}), [])
    with pytest.raises(SystemExit) as ended:
        run("doctor", lambda arguments: Result({}, status=1), [])
    assert ended.value.code == 1


def test_json_has_the_standard_output_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "doctor", "self_test=false", "--json"])
    main()
    told = capsys.readouterr()
    value = json.loads(told.out)
    assert value["failed"] == []
    assert {"rlite", "python", "processor"} <= {finding["topic"] for finding in value["findings"]}
    assert "all checks passed" in told.err
    assert all(finding["text"] in told.err for finding in value["findings"])


def test_json_is_refused_by_commands_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "sft", "--json"])
    with pytest.raises(SystemExit, match="argument '--json': expected key=value"):
        main()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_help_and_findings_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, is_wrapped in (["ppo", "--help", "kl"], "    "), (["doctor", "self_test=false"], "        "):
        terminal = Terminal()
        monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("COLUMNS", "40")
        main()
        wrapped = [line for line in terminal.getvalue().splitlines() if line.startswith(is_wrapped)]
        assert wrapped
        assert [line for line in wrapped if len(line) > 40 and " " in line.strip()] == []


def test_without_colours_nothing_but_colours_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {}
    monkeypatch.delenv("NO_COLOR", raising=False)  # rich 13 takes an empty one for set
    for no_color in ("", "1"):
        if no_color:
            monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", "xterm-256color")
        terminal = Terminal()
        ConsoleReporter(file=terminal).alarm("ALARM at step 1: nothing is learnt", {"look at": "the reward"})
        texts[no_color] = terminal.getvalue()
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", texts[""])
    assert not re.search(r"\x1b\[[0-9;]*(3|4|9|10)[0-7]m", texts["1"])
    assert re.sub(r"\x1b\[[0-9;]*m", "", texts[""]) == re.sub(r"\x1b\[[0-9;]*m", "", texts["1"])
