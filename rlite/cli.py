"""The `rlite` command.

rlite quickstart [key=value ...]            a small model learns a task by reinforcement learning, in a few minutes
rlite sft | rm | dpo | ppo key=value ...    the trainers; also python -m rlite.trainer.ppo ...
rlite plan model_name=... num_devices=...   what a model would take on each device; reads no weights
"""

from __future__ import annotations

import importlib
import sys

import rlite
from rlite.errors import did_you_mean
from rlite.trainer.run.command import run

TRAINERS = {name: f"rlite.trainer.{name}" for name in ("sft", "rm", "dpo", "ppo", "plan")}
COMMANDS = {"quickstart": "rlite.quickstart.run", **TRAINERS}


def main() -> None:
    """Run the command named by the first argument; errors of ours end it with one readable message."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
        return
    if command == "--version":
        print(rlite.__version__)
        return
    if command not in COMMANDS:
        sys.exit(f"rlite: unknown command {command!r}; {did_you_mean(command, COMMANDS)}")
    run(command, importlib.import_module(COMMANDS[command]).main, arguments)


if __name__ == "__main__":
    main()
