"""The `rlite` command.

rlite quickstart [key=value ...]            a small model learns a task by reinforcement learning, in a few minutes
rlite sft | rm | dpo | ppo key=value ...    the trainers; also python -m rlite.trainer.ppo ...
rlite plan model_name=... num_devices=...   what a model would take on each device; reads no weights
rlite launch job.yaml [key=value ...]       a job of the control plane, or a trainer kept running; docs/control.md
rlite status [NAME] | logs NAME | stop NAME its state, its event log, its end
rlite COMMAND --help [GROUP]                every option of a command by group, or one group, with its defaults
rlite TRAINER --import my_code.py ...       losses, advantages, rewards, workflows and callbacks that a file registers
rlite schema COMMAND                        JSON schema of a command's yaml files, for editors
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import rlite
from rlite import config
from rlite.errors import ConfigError, did_you_mean
from rlite.trainer.run.command import run, start


class Command(NamedTuple):
    """A command's module, which is imported to run it, and its options, which import no torch."""

    module: str
    options: str
    function: str = "main"

    def find_options(self) -> type[config.Options]:
        """Return the class of the options, which is imported now."""
        module, name = self.options.split(":")
        return getattr(importlib.import_module(module), name)


COMMANDS = {
    "quickstart": Command("rlite.quickstart.run", "rlite.quickstart.options:QuickstartConfig"),
    "sft": Command("rlite.trainer.sft", "rlite.trainer.options:SftConfig"),
    "rm": Command("rlite.trainer.rm", "rlite.trainer.options:RmConfig"),
    "dpo": Command("rlite.trainer.dpo", "rlite.trainer.options:DpoConfig"),
    "ppo": Command("rlite.trainer.ppo", "rlite.trainer.rl.config:PpoConfig"),
    "launch": Command("rlite.control.command", "rlite.control.command:LaunchConfig", "launch"),
    "status": Command("rlite.control.command", "rlite.control.command:JobQuery", "status"),
    "logs": Command("rlite.control.command", "rlite.control.command:JobQuery", "logs"),
    "stop": Command("rlite.control.command", "rlite.control.command:JobQuery", "stop"),
    "plan": Command("rlite.trainer.plan", "rlite.trainer.options:PlanConfig"),
}


def main() -> None:
    """Run the command named by the first argument; errors of ours end it with one readable message."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
    elif command == "--version":
        print(rlite.__version__)
    elif command == "schema":
        run(command, print_schema, arguments)
    elif command not in COMMANDS:
        sys.exit(f"rlite: unknown command {command!r}; {did_you_mean(command, [*COMMANDS, 'schema'])}")
    else:
        chosen = COMMANDS[command]
        start(command, chosen.module, chosen.find_options(), arguments, chosen.function)


def print_schema(arguments: Sequence[str]) -> None:
    """Print the JSON schema of the yaml files that a command reads.

    Raises:
        ConfigError: the arguments are not the name of one command.
    """
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        hint = did_you_mean(" ".join(arguments), COMMANDS)
        raise ConfigError(f"schema {' '.join(arguments)}: expected one command; {hint}")
    print(json.dumps(config.schema(COMMANDS[arguments[0]].find_options()), indent=2))


if __name__ == "__main__":
    main()
