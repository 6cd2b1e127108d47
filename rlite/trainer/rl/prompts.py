"""The prompts of the command `rlite ppo`: tables in any known format, one or several that are mixed."""

from __future__ import annotations

from rlite.data.rows import Rows, mixed_rows, read_source, streamed_source
from rlite.trainer.held_out.options import held_out_sources
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects


def read_prompts(options: PpoConfig, given: ProgramObjects = NOTHING) -> tuple[Rows, dict[str, Rows]]:
    """Return the rows of train_data, and the rows of each set of test_data.

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
    tests = held_out_sources(options.test_data, data.columns, data.system_prompt)
    return rows, {name: read_source(given.source(source), "prompts") for name, source in tests.items()}
