"""An adapter and its base as one model.

    rlite merge ADAPTER OUT [base_model=MODEL]          ADAPTER: a folder of PEFT, such as runs/sft/latest/adapter

A run with `actor.lora` has its merged model in `latest/` already. This command is for an adapter that was kept alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlite import config
from rlite.assembly.commands.options import MergeConfig
from rlite.backends.models.lora import adapter_config, merge_adapter
from rlite.errors import ConfigError
from rlite.nn.pretrained import quiet_transformers
from rlite.runtime.storage.atomic import discard, publish, staging


def main(argv: Sequence[str]) -> None:
    """Merge an adapter into its base, and write the model with its tokenizer."""
    options = config.load(MergeConfig, MergeConfig.arguments(argv))
    folder = adapter_folder(options.adapter)
    base = options.base_model or adapter_config(folder).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"adapter={folder}: its config does not name the model it belongs to; give base_model=MODEL")
    out = Path(options.out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out}: exists and is not an empty folder; choose another one")
    unfinished = staging(out)
    try:
        with quiet_transformers():
            merge_adapter(folder, base, unfinished)
        publish(unfinished, out)
    finally:
        discard(unfinished)
    print(f"rlite merge: {folder} merged into {base}; the model is in {out}")


def adapter_folder(given: str) -> Path:
    """Return the folder with the adapter: the given one, or `adapter/` of an export, or of a run's newest export."""
    folder = Path(given).expanduser()
    for place in (folder, folder / "adapter", folder / "latest" / "adapter"):
        if (place / "adapter_config.json").is_file():
            return place
    is_model = (folder / "config.json").exists()
    found = "a whole model, with nothing to merge" if is_model else "no adapter_config.json" if folder.is_dir() else ""
    expected = "expected a folder of PEFT with adapter_config.json, such as runs/sft/latest/adapter"
    raise ConfigError(f"adapter={given}: {found or 'no such folder'}; {expected}")
