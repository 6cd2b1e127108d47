"""The `rlite` command: rlite COMMAND [arguments] [key=value ...].

Begin
  quickstart                    a small model learns a task by reinforcement learning, in a few minutes
  doctor                        versions, devices, missing packages, and a self-test of ten seconds

Train from rows (data.path=rows.jsonl)
  sft                           on demonstrations
  rm                            a reward model, on preference pairs
  dpo                           on preference pairs, by a loss of DPO's family
  orpo, simpo, cpo              on preference pairs without a reference model: dpo with other defaults
  kto                           on single answers with a label: desirable or not

Train from rewards (train_data.path=prompts.jsonl)
  ppo                           Dr. GRPO by default, PPO with a critic, and their relatives
  grpo                          GRPO: ppo with other defaults
  distill                       on-policy distillation: ppo with a teacher in place of rewards, or beside them

Look at runs
  view RUN [RUN2 ...]           rollouts, curves and lost work in the browser; --export FILE.html writes one file
  replay RUN --step N           makes a recorded step again, on any machine, and compares; --bundle FILE.zip packs it
  audit RUN                     computes again what follows from record and checkpoints, and names what does not fit
  why RUN                       why the log-probabilities of engine and trainer disagree, with what was excluded

Before training
  env check SPEC                runs an environment or a workflow against a scripted model, and says what is wrong

Use a model
  generate MODEL "PROMPT"       answers of a model, or of a run's newest model
  serve MODEL                   a server for clients of OpenAI's and Anthropic's interfaces, with a token
  tinker --model MODEL          a server for clients of the Tinker API, which train and sample adapters
  eval MODEL [MODEL2]           metrics of a model on data with a reward, an environment or tasks; compares two
  merge ADAPTER OUT             an adapter (LoRA) and its base as one model
  plan                          memory of a model on each device; reads no weights
  simulate [RUN]                steps per hour of asynchronous rollouts with other settings, by simulation

Jobs on a cluster (docs/control.md)
  launch job.yaml               a job of the control plane, or a trainer kept running
  status [NAME]                 state of a job, or of all jobs; NAME is also the folder of its run
  logs NAME [--follow]          its events, and the output of its processes by role
  stop NAME                     its end; a trainer saves before

Help
  COMMAND --help [GROUP]        every option of a command by group, or one group, with its defaults
  COMMAND --config FILE.yaml    options from a file; key=value takes precedence
  TRAINER --import my_code.py   losses, advantages, rewards, workflows and callbacks that a file registers
  schema COMMAND                JSON schema of a command's yaml files, for editors
  completion SHELL              completion of commands, keys and values for bash or zsh: eval "$(rlite completion bash)"
  --version                     the version

doctor, env check, plan, status and eval print one JSON value with --json. Exit status (docs/commands.md): 0 done, 1 an
error or a failed check, 130 Ctrl-C, 143 SIGTERM, 141 the reader of the output is gone.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import rlite
from rlite import config
from rlite.assembly.command import run, start
from rlite.assembly.trainers import TRAINERS
from rlite.errors import ConfigError, did_you_mean
from rlite.help import help_topic


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
    "quickstart": Command("rlite.assembly.quickstart.run", "rlite.assembly.commands.options:QuickstartConfig"),
    "doctor": Command("rlite.assembly.commands.doctor", "rlite.assembly.commands.doctor:DoctorConfig"),
    **{name: Command(trainer.module, trainer.options) for name, trainer in TRAINERS.items()},
    "env": Command("rlite.assembly.commands.env_check", "rlite.assembly.commands.env_options:EnvConfig"),
    "why": Command("rlite.assembly.why.command", "rlite.assembly.why.options:WhyConfig"),
    "view": Command("rlite.viewer.command", "rlite.viewer.options:ViewConfig"),
    "replay": Command("rlite.assembly.proof.replay", "rlite.assembly.proof.options:ReplayConfig"),
    "audit": Command("rlite.assembly.proof.audit", "rlite.assembly.proof.options:AuditConfig"),
    "generate": Command("rlite.assembly.commands.generate", "rlite.assembly.commands.options:GenerateConfig"),
    "serve": Command("rlite.assembly.commands.serve", "rlite.assembly.commands.options:ServeConfig"),
    "tinker": Command("rlite.assembly.commands.tinker", "rlite.assembly.commands.options:TinkerConfig"),
    "eval": Command("rlite.assembly.evaluate.command", "rlite.assembly.evaluate.options:EvalConfig"),
    "merge": Command("rlite.assembly.commands.merge", "rlite.assembly.commands.options:MergeConfig"),
    "plan": Command("rlite.assembly.commands.plan", "rlite.assembly.commands.options:PlanConfig"),
    "simulate": Command("rlite.assembly.simulate.command", "rlite.assembly.simulate.options:SimulateConfig"),
    "launch": Command("rlite.control.command", "rlite.control.command:LaunchConfig", "launch"),
    "status": Command("rlite.control.command", "rlite.control.command:JobQuery", "status"),
    "logs": Command("rlite.control.command", "rlite.control.command:LogQuery", "logs"),
    "stop": Command("rlite.control.command", "rlite.control.command:StopQuery", "stop"),
}


SIMILAR = {"chat": "generate", "complete": "generate", "infer": "generate", "train": "sft", "reward": "rm"}
"""names of commands elsewhere -> the command with the same purpose"""


def main() -> None:
    """Run the command named by the first argument; errors of ours end it with one readable message."""
    command, *arguments = sys.argv[1:] or ["--help"]
    printed = {"-h": __doc__, "--help": __doc__, "--version": rlite.__version__}
    if command in printed:
        run(command, lambda arguments: print(printed[command]), arguments)
    elif command in DESCRIBING:
        run(command, DESCRIBING[command], arguments)
    elif command not in COMMANDS:
        known = [SIMILAR[command]] if command in SIMILAR else [*COMMANDS, *DESCRIBING]
        sys.exit(f"rlite: unknown command {command!r}; {did_you_mean(SIMILAR.get(command, command), known)}")
    else:
        chosen = COMMANDS[command]
        start(command, chosen.module, chosen.find_options(), arguments, chosen.function)


def print_schema(arguments: Sequence[str]) -> None:
    """Print the JSON schema of the yaml files that a command reads, or with `--help` the names of the commands."""
    if help_topic(arguments) is not None:
        print(f"usage: rlite schema COMMAND\n\nJSON schema of a command's yaml files. Commands: {', '.join(COMMANDS)}")
        return
    if len(arguments) != 1 or arguments[0] not in COMMANDS:
        hint = did_you_mean(" ".join(arguments), COMMANDS)
        raise ConfigError(f"{' '.join(['schema', *arguments])}: expected one command; {hint}")
    print(json.dumps(config.schema(COMMANDS[arguments[0]].find_options()), indent=2))


def print_completion(arguments: Sequence[str]) -> None:
    """Print the program by which a shell completes commands, keys and values."""
    options = {name: command.find_options() for name, command in COMMANDS.items()}
    importlib.import_module("rlite.assembly.commands.completion").main(arguments, options, [*DESCRIBING])


DESCRIBING: Mapping[str, Callable[[Sequence[str]], None]] = {"schema": print_schema, "completion": print_completion}
"""commands that describe the others"""


if __name__ == "__main__":
    main()
