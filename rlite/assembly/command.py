"""A trainer as a command: errors of rlite become one readable message, and signals say how to continue.

`start` checks the options before it imports the trainer: loading torch takes seconds, so option errors and the first
line are printed before. This module imports no torch.

Objects that a program gives a trainer, in place of what the options name.

Check that the files and folders that a command's options name exist.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from rlite import config, errors
from rlite.config import Options
from rlite.data.readers.tables import check_exists
from rlite.errors import ConfigError, DataError, RliteError, why_not_written
from rlite.help import help_topic
from rlite.imports import check_file, find_function
from rlite.nn.options import model_folder
from rlite.rollout.environments.file import code_file, contract_of
from rlite.rollout.registry import find_reward
from rlite.services.recovery import record
from rlite.trainer.options import AnnouncedOptions
from rlite.trainer.run.interruption import INTERRUPTION, Terminated
from rlite.yaml_texts import flat

OF_MODELS = ("model_name", "model", "other", "base_model")
"""last parts of the keys of options that name a model"""


def check_named_files(options: Options) -> None:
    """Check that every model, table, reward and Python file that options name exists, unless it is a name on the hub.

    Raises:
        ConfigError: a model, a table or a function does not exist.
        ImportFailed: a Python file does not exist, or the file of a reward raised an exception.
    """
    values = list(flat(options.model_dump()))
    served = {key.rpartition(".")[0] for key, value in values if key.endswith(".url") and value}
    for key, value in values:
        *groups, name = key.split(".")
        is_on_server = name == "model_name" and ".".join(groups) in served
        if not isinstance(value, str) or "env_config" in groups or is_on_server:
            continue
        if (
            name in OF_MODELS
            and "judge" not in groups
            and (name == "model_name" or not Path(value).expanduser().is_dir())
        ):
            model_folder(value)  # the other keys may name the folder of a run
        elif name == "env_path":
            if contract_of(value)[0] in ("", "trl"):
                check_file(code_file(value), f"{key}={value}")
        elif name == "map" or (name == "context" and "teacher" in groups):
            find_function(value, f"{'.'.join(filter(None, [*groups, name]))}={value}")
        elif name == "chat_template_path":
            check_file(value, f"{key}={value}")
        elif name == "path" and "reward" in groups:
            find_reward(value, f"reward.path={value}")
        elif name == "path":
            check_exists(value, ".".join(filter(None, [*groups, name])))


EXPLAINED = (ConfigError, DataError, errors.CheckpointError, errors.StorageError, errors.OwnCodeError)
FINAL = (ConfigError, DataError, errors.UnknownOptionError, errors.DivergedError)
"""errors that the same command would repeat"""


def start(
    name: str, module: str, options: type[config.Options], arguments: Sequence[str], function: str = "main"
) -> None:
    """Print the help of a command, or run the command.

    Args:
        name: name of the command.
        module: dotted name of the module to import.
        options: class of the command's options. For a trainer, they are checked and shown before the import.
        arguments: arguments of the command.
        function: name of the command's function in the module.
    """

    def main(arguments: Sequence[str]) -> None:
        if (topic := help_topic(arguments)) is not None:
            text = config.describe(options, topic, f"rlite {name}")
            try:
                print(text, flush=True)
            except BrokenPipeError:  # a reader such as `head` may want only the beginning
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
            return
        if issubclass(options, AnnouncedOptions):
            with config.quick_checks():  # the module's own `load` makes the others
                chosen = config.load(options, options.arguments(arguments), aliases=options.aliases)
            chosen.check_complete()
            if os.environ.get("RANK", "0") == "0":  # the process of its launcher that speaks
                check_named_files(chosen)
                if headline := chosen.headline():
                    print(f"rlite {name}: {headline}; loading torch", flush=True)
        getattr(importlib.import_module(module), function)(arguments)

    run(name, main, arguments)


def run_module(name: str, options: type[config.Options]) -> NoReturn:
    """Run the command of a trainer whose module was started by `python -m`, before the module imports torch.

    Args:
        name: name of the command and of its module in `rlite.trainer`.
        options: class of the command's options.
    """
    start(name, f"rlite.trainer.{name}", options, sys.argv[1:])
    sys.exit()


def run(name: str, main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> None:
    """Call `main`; if it fails, end the process with a message.

    The exit status is 1 for an error of rlite, and 130 or 143 for SIGINT or SIGTERM. Any other exception is a defect or
    comes from other code, and keeps its traceback.

    Args:
        name: name of the command.
        main: the command.
        arguments: its arguments.

    Raises:
        OSError: not caused by a full disk or a limit.
    """
    INTERRUPTION.follow()
    try:
        main(arguments)
    except RliteError as error:
        if isinstance(error, FINAL) and not isinstance(error, errors.FolderInUse):
            record.report_final_error(error)
        # what a worker raised has its traceback there; these errors say all that a user can act on
        is_traced = isinstance(error.__cause__, errors.RemoteTraceback) and not isinstance(error, EXPLAINED)
        details = f"{error.__cause__}" if is_traced else ""
        told = str(error).replace(errors.REBUILD, INTERRUPTION.advice)
        sys.exit(f"rlite {name}: {type(error).__name__}: {told}{details}")
    except OSError as error:
        if (reason := why_not_written(error)) == str(error):
            raise
        sys.exit(f"rlite {name}: {reason}{f': {error.filename}' if error.filename else ''}")
    except KeyboardInterrupt as error:
        is_terminated = Terminated in (type(error), INTERRUPTION.raised)  # Ray raises its own in place of ours
        ended_by, status = ("SIGTERM", 143) if is_terminated else ("SIGINT", 130)
        advice = error.args[0] if error.args else INTERRUPTION.advice  # `launch` knows what its trainer has said
        print(f"rlite {name}: ended by {ended_by}. {advice}", file=sys.stderr)
        sys.exit(status)
    finally:
        INTERRUPTION.release()
