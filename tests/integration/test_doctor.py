"""The command `rlite doctor`: it tells what is there, and fails if something is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlite.assembly.commands.doctor import GIB, attempt, needed, space_of, state_of, state_of_transformers
from rlite.cli import main

REQUIREMENTS = [
    Requirement(line)
    for line in (
        "numpy>=2.0",
        'gone>=1; sys_platform == "nowhere"',
        'peft>=0.18; extra == "lora"',
        'rlite[lora]; extra == "dev"',
        'pytest>=9; extra == "dev"',
    )
]
INSTALLED = {"numpy": "2.4.6", "peft": "0.17.1"}


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "doctor", *arguments])
    main()


def test_a_sound_machine_passes_all_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(monkeypatch)
    out, err = capsys.readouterr()
    assert err == ""
    topics = {line[8:28].strip() for line in out.splitlines() if line[:6].strip() in ("ok", "note")}
    assert {"rlite", "python", "required packages", "processor", "GPU", "training", "generation"} <= topics
    assert {"extra ray", "extra vllm", "disk (runs)"} <= topics
    assert "FAILED" not in out
    assert out.endswith("all checks passed\n")


def test_a_failed_check_is_named_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        doctor(monkeypatch, "executor=trch")
    assert stopped.value.code == 1
    out = capsys.readouterr().out
    assert "FAILED  self-test" in out
    assert "did you mean 'torch'" in out
    assert out.endswith("1 of the checks failed: self-test\n")


def test_an_exception_in_a_check_is_a_failed_check() -> None:
    def check() -> list[object]:
        raise OSError("libcudart.so.13: cannot open shared object file")

    [finding] = attempt("devices", check)  # type: ignore[arg-type]
    assert str(finding) == "FAILED  devices             OSError: libcudart.so.13: cannot open shared object file"


def test_requirements_of_an_extra_are_read_from_the_metadata() -> None:
    assert [each.name for each in needed(REQUIREMENTS)] == ["numpy"]
    assert [each.name for each in needed(REQUIREMENTS, "lora")] == ["peft"]
    assert [each.name for each in needed(REQUIREMENTS, "dev")] == ["peft", "pytest"]


def test_missing_packages_fail_unless_an_extra_adds_them() -> None:
    base = state_of("required packages", needed(REQUIREMENTS), INSTALLED.get)
    assert (base.level, base.text) == ("ok", "numpy 2.4.6")
    assert state_of("required packages", [Requirement("numpy>=3")], INSTALLED.get).level == "FAILED"
    extra = state_of("extra dev", needed(REQUIREMENTS, "dev"), INSTALLED.get, "dev")
    lacks = "lacks peft>=0.18 (found 0.17.1), pytest>=9 (found none): pip install 'rlite[dev]'"
    assert (extra.level, extra.text) == ("note", lacks)


@pytest.mark.parametrize(("free", "level"), [(100 * GIB, "ok"), (2 * GIB, "note"), (GIB // 100, "FAILED")])
def test_a_full_disk_fails(free: int, level: str) -> None:
    assert space_of("disk (runs)", Path("runs"), free).level == level


@pytest.mark.parametrize(
    ("version", "level", "told"),
    [
        ("5.17.0", "note", "5.17.0: expert parallelism (ep_size) needs 5.22: pip install 'transformers>=5.22'"),
        ("5.22.0", "ok", "5.22.0 has all that rlite can use"),
        ("5.24.1", "ok", "5.24.1 has all"),
        ("5.25.0", "note", "tested with releases up to 5.24"),
    ],
)
def test_an_older_release_of_transformers_is_told_what_it_lacks(version: str, level: str, told: str) -> None:
    found = state_of_transformers(version)
    assert found.level == level
    assert told in found.text
