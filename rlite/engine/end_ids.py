"""End tokens of a model."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedConfig


def end_ids(path: str | Path, config: PreTrainedConfig) -> frozenset[int]:
    """Return the model's own end tokens, from generation_config.json if it exists, else from the config.

    Args:
        path: folder of the checkpoint.
        config: the model's config.
    """
    if (Path(path) / "generation_config.json").exists():
        found = GenerationConfig.from_pretrained(path).eos_token_id
    else:
        found = config.get_text_config().eos_token_id
    return frozenset([found] if isinstance(found, int) else found or [])
