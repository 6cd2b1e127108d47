"""Check that the files and folders that a command's options name exist. No torch here."""

from __future__ import annotations

from pathlib import Path

from rlite.arguments import flat
from rlite.config import Options
from rlite.data.tables import check_exists
from rlite.imports import check_file
from rlite.nn.folders import model_folder
from rlite.rollout.registry import find_reward

OF_MODELS = ("model_name", "model", "other", "base_model")
"""last parts of the keys of options that name a model"""


def check_named_files(options: Options) -> None:
    """Check that every model, table, reward and Python file that options name exists, unless it is a name on the hub.

    Raises:
        ConfigError: a model, a table or a function does not exist.
        ImportFailed: a Python file does not exist, or the file of a reward raised an exception.
    """
    for key, value in flat(options.model_dump()):
        *groups, name = key.split(".")
        if not isinstance(value, str):
            continue
        if name in OF_MODELS and (name == "model_name" or not Path(value).expanduser().is_dir()):
            model_folder(value)  # the other keys may name the folder of a run
        elif name == "env_path":
            check_file(value, f"{key}={value}")
        elif name == "path" and "reward" in groups:
            find_reward(value, f"reward.path={value}")
        elif name == "path":
            check_exists(value, ".".join(filter(None, [*groups, name])))
