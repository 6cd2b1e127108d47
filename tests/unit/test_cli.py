import json
import sys

import pytest

from rlite.cli import COMMANDS, main


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["rlite", *arguments])
    main()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_describes_its_options(monkeypatch, capsys, command):
    run(monkeypatch, "schema", command)
    made = json.loads(capsys.readouterr().out)
    assert made["$schema"].startswith("https://json-schema.org/")
    run(monkeypatch, command, "--help")
    listed = capsys.readouterr().out
    assert all(f"\n{name}" in listed for name in made["properties"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pop"], "unknown command 'pop'; did you mean 'ppo'?"),
        (["shcema", "ppo"], "did you mean 'schema'?"),
        (["schema", "pop"], "expected one command; did you mean 'ppo'?"),
        (["schema"], "expected one command; known: dpo, launch, logs, plan, ppo"),
        (["schema", "sft", "ppo"], "expected one command"),
    ],
)
def test_a_command_that_does_not_exist_is_refused_with_the_nearest(monkeypatch, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert message in str(stopped.value)
