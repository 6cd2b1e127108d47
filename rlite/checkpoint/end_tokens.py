"""The end tokens of a Hugging Face checkpoint: the tokens at which its model stops."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

FILE = "generation_config.json"


def end_ids(folder: str | Path, config: PreTrainedConfig | None = None) -> tuple[int, ...]:
    """Return the model's own end tokens, from generation_config.json if it exists, else from the config.

    Args:
        folder: the checkpoint.
        config: its config, if it is known already.
    """
    if (Path(folder) / FILE).exists():
        found = GenerationConfig.from_pretrained(str(folder)).eos_token_id
    else:
        config = config or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        found = config.get_text_config().eos_token_id
    return (found,) if isinstance(found, int) else tuple(found or ())


def add_end_ids(folder: Path, tokens: Collection[int]) -> None:
    """Add end tokens to generation_config.json of a checkpoint, which is made if it does not exist."""
    if not tokens:
        return
    own, path = end_ids(folder), folder / FILE
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, "eos_token_id": [*dict.fromkeys((*own, *tokens))]}, indent=2) + "\n")
