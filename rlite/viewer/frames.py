"""A run as DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import pyarrow as pa

from rlite.errors import ConfigError
from rlite.imports import optional
from rlite.services.record.reader import SEGMENTS
from rlite.viewer.run import ViewedRun, open_runs
from rlite.viewer.tables import PARTS, reward_parts

with optional("DataFrames need", "view"):
    import pandas as pd


@dataclass(frozen=True)
class RunFrames:
    """The metrics and the record of a run."""

    metrics: pd.DataFrame
    """one row for each step, the index; one column for each metric"""
    rows: pd.DataFrame
    """one row for each rollout, without its texts; `source` is `train` or `eval.NAME`, parts of rewards are columns
    `reward/NAME`"""
    config: dict[str, Any]
    """options of the run; empty if its folder has none"""
    _run: ViewedRun

    @property
    def problems(self) -> list[str]:
        """Reasons why something could not be read so far."""
        return self._run.problems

    def texts(self, steps: Sequence[int] | None = None, source: str = "train") -> pd.DataFrame:
        """Return step, group, sample and segments of the rollouts whose texts are recorded.

        Args:
            steps: steps to read; None for all.
            source: `train`, or `eval.NAME`.

        Raises:
            ConfigError: the record has no such source.
        """
        self._look(source)
        table = pa.concat_tables([SEGMENTS.empty_table(), *self._run.record.segments(source, steps)])
        return table.to_pandas().dropna().reset_index(drop=True)

    def tokens(self, steps: Sequence[int] | None = None, source: str = "train") -> pd.DataFrame:
        """Return one row for each sequence whose tokens are recorded; its lists have one entry for each token.

        Args:
            steps: steps to read; None for all.
            source: `train`, or `eval.NAME`.

        Raises:
            ConfigError: the record has no such source.
        """
        self._look(source)
        return self._run.record.token_table(source, steps).to_pandas()

    def _look(self, source: str) -> None:
        self._run.record.refresh()
        known = self._run.record.sources or ["train"]
        if source not in known:
            raise ConfigError(f"source={source}: the record of {self._run.name} has {', '.join(known)}")


def load(run: str | PathLike[str]) -> RunFrames:
    """Return the metrics and the record of a run as DataFrames. Unreadable files are left out, see `problems`.

    Args:
        run: the run's folder.

    Raises:
        ConfigError: the folder holds no run.
    """
    [viewed] = open_runs([str(run)])
    record = viewed.record
    rows = [_frame(record.table(source), source) for source in record.sources or ["train"]]
    metrics = pd.DataFrame({name: pd.Series(values) for name, values in viewed.metrics.series.items()})
    metrics = metrics.astype(float).sort_index().rename_axis("step")
    return RunFrames(metrics, pd.concat(rows, ignore_index=True), viewed.config, viewed)


def _frame(table: pa.Table, source: str) -> pd.DataFrame:
    frame = table.drop_columns([PARTS]).to_pandas()
    frame.insert(0, "source", source)
    for name, values in reward_parts(table).items():
        frame[name] = values.to_pandas().to_numpy()
    return frame
