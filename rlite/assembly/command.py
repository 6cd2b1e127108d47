"""A trainer as a command: errors of rlite become one readable message, and signals say how to continue.

`start` checks the options before it imports the trainer: loading torch takes seconds, so option errors and the first
line are printed before. This module imports no torch.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from rlite import config, errors, output
from rlite.config import Options
from rlite.data.readers.tables import check_exists
from rlite.errors import ConfigError, DataError, RliteError, why_not_written
from rlite.help import help_topic
from rlite.imports import check_file, find_function
from rlite.nn.options import model_folder
from rlite.rollout.environments.file import code_file, contract_of
from rlite.rollout.registry import find_reward
from rlite.services.recovery import record
from rlite.trainer.options import AnnouncedOptions, LaunchOptions
from rlite.trainer.run.interruption import INTERRUPTION, NOT_BEGUN, Terminated
from rlite.yaml_texts import flat

OF_MODELS = ("model_name", "model", "other", "base_model")
"""last parts of the keys of options that name a model"""


def check_named_files(options: Options) -> None:
    """Check that every model, table, reward and Python file of the options exists, unless it is a name on the hub."""
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


def check_launcher(name: str, options: LaunchOptions) -> None:
    """Refuse several devices that nothing can start, with the line that starts them. Options may hold secrets."""
    is_under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ or options.launcher in ("torchrun", "inprocess")
    if (number := options.num_devices or 1) == 1 or is_under_torchrun or find_spec("ray") is not None:
        return
    line = f"torchrun --nproc_per_node={number} -m rlite.cli {name} ..."
    same = "with the same options" + (" and launcher=torchrun" if options.launcher else "")
    ways = f"start it as `{line}` {same}, or install Ray (pip install 'rlite[ray]'); num_devices=1 uses one device"
    raise ConfigError(f"num_devices={number}: several devices need a launcher: {ways}")


EXPLAINED = (ConfigError, DataError, errors.CheckpointError, errors.StorageError, errors.OwnCodeError)
FINAL = (ConfigError, DataError, errors.UnknownOptionError, errors.DivergedError)
"""errors that the same command would repeat"""


AS_JSON = "--json"


def start(
    name: str, module: str, options: type[config.Options], arguments: Sequence[str], function: str = "main"
) -> None:
    """Print the help of a command, or run the command.

    With `--json`, the standard output gets the JSON of the command's `output.Result` alone, and the standard error gets
    the text.

    `options`: class of the command's options. For a trainer, they are checked and shown before the import.
    """

    def main(arguments: Sequence[str]) -> Any:
        if (topic := help_topic(arguments)) is not None:
            print(config.describe(options, topic, f"rlite {name}"))
            return
        if issubclass(options, AnnouncedOptions):
            with config.quick_checks():  # the module's own `load` makes the others
                chosen = config.load(options, options.arguments(arguments), aliases=options.aliases)
            chosen.check_complete()
            if isinstance(chosen, LaunchOptions) and name != "eval":  # which may need no session at all
                check_launcher(name, chosen)
            if os.environ.get("RANK", "0") == "0":  # the process of its launcher that speaks
                check_named_files(chosen)
                if headline := chosen.headline():
                    print(f"rlite {name}: {headline}; loading torch", flush=True)
        return getattr(importlib.import_module(module), function)(arguments)

    def main_as_json(arguments: Sequence[str]) -> output.Result:
        with redirect_stdout(sys.stderr):
            result = main([each for each in arguments if each != AS_JSON])
        print(json.dumps(result.value, indent=2))
        return result

    is_as_json = options.prints_json and AS_JSON in arguments and help_topic(arguments) is None
    run(name, main_as_json if is_as_json else main, arguments)


def run_module(name: str, options: type[config.Options]) -> NoReturn:
    """Run the command of a trainer whose module was started by `python -m`, before the module imports torch."""
    start(name, f"rlite.trainer.{name}", options, sys.argv[1:])
    sys.exit()


def run(name: str, main: Callable[[Sequence[str]], Any], arguments: Sequence[str]) -> None:
    """Call `main`; if it fails, end the process with a message.

    The exit status is 1 for an error of rlite, 130 or 143 for SIGINT or SIGTERM, and 141 if the reader of the standard
    output has closed it. Any other exception is a defect or comes from other code, and keeps its traceback.

    `main`: the command. The status of an `output.Result` that it returns ends the process if it is not 0.
    """
    INTERRUPTION.follow()
    output.escape_unknown_characters()
    try:
        result = main(arguments)
        output.flush()
        if isinstance(result, output.Result) and result.status:
            sys.exit(result.status)
    except BrokenPipeError:
        if not output.has_lost_reader():
            raise
        if INTERRUPTION.advice != NOT_BEGUN:
            with suppress(OSError):  # the same reader may have read the errors
                print(f"rlite {name}: ended: its standard output was closed. {INTERRUPTION.advice}", file=sys.stderr)
        sys.exit(output.LOST_READER)
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
        output.finish()
