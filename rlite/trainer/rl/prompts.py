"""The prompts of the command `rlite ppo`: tables in any known format, one or several that are mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlite.data.rows import Rows, mixed_rows, read_source, streamed_source
from rlite.trainer.given import NOTHING, Given
from rlite.trainer.rl.config import PpoConfig


def read_prompts(options: PpoConfig, given: Given = NOTHING) -> tuple[Rows, Sequence[Mapping[str, Any]]]:
    """Return the rows of train_data, and of test_data if it is given.

    Args:
        options: the run's config.
        given: rows of a program, in place of those of the paths.
    """
    data = options.train_data
    sources = {name: given.source(source) for name, source in data.sources("train_data").items()}
    if data.streaming:
        rows = streamed_source(sources[""], "prompts", data.shuffle_buffer)
    else:
        parts = {name: read_source(source, "prompts") for name, source in sources.items()}
        rows = mixed_rows(parts, data.weights) if data.mixture else parts[""]
    test_source = options.test_data.source(data)
    return rows, [] if test_source is None else read_source(given.source(test_source), "prompts")
