"""Model folders, before anything of them is read. No torch here."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rlite.errors import ConfigError


def model_folder(path: str | Path) -> Path | None:
    """Return the folder of a checkpoint, None if `path` is a name on the hub.

    Raises:
        ConfigError: the folder is no checkpoint, or `path` is neither a folder nor a name.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model folder {str(path)!r}: expected a config.json in it, found none")
        return folder
    try:
        validate_repo_id(str(path))
    except HFValidationError as error:
        raise ConfigError(f"model {str(path)!r}: no such folder; check the path") from error
    return None
