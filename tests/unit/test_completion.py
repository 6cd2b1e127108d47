"""Completion of commands, keys and values, by the program that bash reads, as docs/commands.md says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlite.assembly.commands import completion
from rlite.cli import COMMANDS, DESCRIBING, main

OPTIONS = {name: command.find_options() for name, command in COMMANDS.items()}
COMPLETE = """
complete_line() {
  COMP_LINE=$1 COMP_POINT=${#1}
  read -ra COMP_WORDS <<< "$1"
  [[ $1 == *" " ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _rlite
  printf '%s\\t' "${COMPREPLY[@]}"
  echo
}
while IFS= read -r line; do complete_line "$line"; done
"""
LINES = {
    "rlite gr": ["grpo "],
    "rlite completion ": ["bash ", "zsh "],
    "rlite schema quick": ["quickstart "],
    "rlite grpo adv.est": ["adv.estimator="],
    "rlite grpo a=1 adv.estimator=reinforce_pp": ["reinforce_pp ", "reinforce_pp_baseline "],
    "rlite grpo actor.optimizer=": ["adamw ", "muon "],
    "rlite grpo kl.type=l": ["loss "],
    "rlite sft trainer.overwrite=": ["true ", "false "],
    "rlite sft data.path=": [],
    "rlite sft ~/rows": [],
    "rlite doctor --j": ["--json "],
    "rlite sft --j": [],
    "rlite nothing x": [],
}


def test_bash_completes_commands_keys_and_enumerated_values() -> None:
    program = completion.script("bash", OPTIONS, [*DESCRIBING]) + COMPLETE
    lines = "".join(f"{line}\n" for line in LINES)
    done = subprocess.run(["bash", "-uc", program], input=lines, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    found = [[word for word in line.split("\t") if word] for line in done.stdout.splitlines()]
    assert dict(zip(LINES, found, strict=True)) == LINES


def test_every_command_has_its_keys_and_both_shells_the_same_words() -> None:
    bash, zsh = (completion.script(shell, OPTIONS, [*DESCRIBING]) for shell in ("bash", "zsh"))
    table = bash.partition("\n_rlite() {")[0].partition("\n")[2]
    assert table
    assert table == zsh.partition("\n_rlite() {")[0].partition("\n")[2]
    for command, options in OPTIONS.items():
        [line] = [line for line in table.splitlines() if line.strip().startswith(f"{command}) ")]
        assert {f"{name}=" for name, option in options.model_fields.items() if option.annotation is str} <= {
            *line.partition('"')[2].rstrip('" ;').split()
        }


@pytest.mark.parametrize("arguments", [[], ["fish"], ["bash", "zsh"]])
def test_another_shell_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rlite", "completion", *arguments])
    with pytest.raises(SystemExit, match=r"rlite completion: ConfigError: completion.*: expected one shell"):
        main()
