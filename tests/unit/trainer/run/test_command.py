from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlite.assembly.command import check_launcher, run
from rlite.errors import (
    REBUILD,
    CheckpointError,
    ConfigError,
    DataError,
    FolderInUse,
    RemoteTraceback,
    RliteError,
    UnknownOptionError,
    WorkerDied,
    WorkerError,
)
from rlite.services.recovery import record
from rlite.trainer.options import LaunchOptions
from rlite.trainer.run.interruption import INTERRUPTION

SLEEP = """
import time
from rlite.assembly.command import run

def main(arguments):
    print("ready", flush=True)
    time.sleep(60)

run("sft", main, [])
"""


def test_an_error_of_ours_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: object) -> None:
        raise ConfigError("data.path=missing.json: no such file")

    with pytest.raises(SystemExit) as ended:
        run("sft", main, [])
    assert ended.value.code == "rlite sft: ConfigError: data.path=missing.json: no such file"


def test_several_devices_without_a_launcher_are_refused_with_the_line_that_starts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_launcher("dpo", LaunchOptions(num_devices=1))
    monkeypatch.setattr("rlite.assembly.command.find_spec", lambda name: None)
    line = "start it as `torchrun --nproc_per_node=2 -m rlite.cli dpo ...` with the same options"
    with pytest.raises(ConfigError, match=f"{re.escape(line)}, or install Ray .*; num_devices=1 uses one device"):
        check_launcher("dpo", LaunchOptions(num_devices=2))
    with pytest.raises(ConfigError, match=f"{re.escape(line)} and launcher=torchrun, or"):
        check_launcher("dpo", LaunchOptions(num_devices=2, launcher="ray"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    check_launcher("dpo", LaunchOptions(num_devices=2))


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, DataError, WorkerError])
def test_an_error_that_says_what_to_do_comes_without_the_traceback_of_its_worker(kind: type[RliteError]) -> None:
    def main(arguments: object) -> None:
        raise kind("weights hold NaN") from RemoteTraceback("raised in worker train-0")

    with pytest.raises(SystemExit) as ended:
        run("sft", main, [])
    message = f"rlite sft: {kind.__name__}: weights hold NaN"
    assert ended.value.code == (f"{message}raised in worker train-0" if kind is WorkerError else message)


def test_a_lost_worker_has_the_advice_of_a_command_and_not_that_of_a_program() -> None:
    def main(arguments: object) -> None:
        INTERRUPTION.begin("The same command goes on from the newest checkpoint.")
        raise WorkerDied(f"sync: worker process ended: rank 0. train-0 was stopped. {REBUILD}", ("rank 0",))

    with pytest.raises(SystemExit) as ended:
        run("grpo", main, [])
    told = (
        "sync: worker process ended: rank 0. train-0 was stopped. The same command goes on from the newest checkpoint."
    )
    assert ended.value.code == f"rlite grpo: WorkerDied: {told}"


@pytest.mark.parametrize(
    ("kind", "is_final"),
    [(ConfigError, True), (UnknownOptionError, True), (DataError, True), (FolderInUse, False), (WorkerError, False)],
)
def test_an_error_that_a_restart_would_repeat_is_reported_as_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RliteError], is_final: bool
) -> None:
    def main(arguments: object) -> None:
        raise kind("wrong")

    monkeypatch.setenv(record.FILE, str(tmp_path / "report.json"))
    with pytest.raises(SystemExit):
        run("sft", main, [])
    report = record.read(tmp_path / "report.json")
    assert (report.final_error if report else "") == (f"{kind.__name__}: wrong" if is_final else "")


def test_an_interruption_that_says_how_it_ended_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: object) -> None:
        raise KeyboardInterrupt("Job sums: step 3 is saved.")

    with pytest.raises(SystemExit) as ended:
        run("launch", main, [])
    assert (ended.value.code, capsys.readouterr().err) == (
        130,
        "rlite launch: ended by SIGINT. Job sums: step 3 is saved.\n",
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT])
def test_a_full_disk_is_named_wherever_it_is_met(number: int) -> None:
    def main(arguments: object) -> None:
        raise OSError(number, "?", "rows.arrow")

    with pytest.raises(SystemExit, match=r"rlite sft: (the disk is full|the disk quota|a file is larger).*rows\.arrow"):
        run("sft", main, [])


def test_an_error_of_others_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run("sft", lambda arguments: 1 / 0, [])  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_run_ends_it_with_a_word(number: int, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEP],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == status
    assert "ended by SIG" in complaint
    assert "The run had not begun, and nothing was changed." in complaint
    assert "Traceback" not in complaint


WAIT = """
import time
from rlite.assembly.command import run
from rlite.trainer.run.interruption import INTERRUPTION

def main(arguments):
    INTERRUPTION.begin("Start it again.")
    print("ready", flush=True)
    time.sleep(60)

run("sft", main, [])
"""


def test_the_second_signal_ends_a_run_that_waits_for_its_step() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"
        assert "a second signal ends the run at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=30)
    assert process.returncode == 143
    assert complaint == "rlite sft: ended by SIGTERM. Start it again.\n"


BUSY = WAIT.replace(
    '    print("ready", flush=True)\n    time.sleep(60)\n',
    """
    while True:
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("busy", flush=True)
""",
)


def test_the_third_signal_ends_a_process_that_is_busy_with_its_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "\n"  # two signals of a kind that are pending would be one
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "busy\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
