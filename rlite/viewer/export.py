"""The page as one file: the answers to its questions are in it, so it opens from disk and asks nobody."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlite import files
from rlite.errors import ConfigError, writing
from rlite.observability.record.reader import Place
from rlite.viewer.answers import MAX_ITEMS, answer
from rlite.viewer.page import single_page
from rlite.viewer.query import Query
from rlite.viewer.run import ViewedRun

MEGABYTE = 1_000_000
LEDGER_PAGES = 1
"""pages of each reason"""


def export(runs: Sequence[ViewedRun], path: Path, steps: Sequence[int], limit_mb: int) -> dict[str, int]:
    """Write the page to a file.

    Metrics, all rows and the ledger are always there. Texts and tokens are there for some steps.

    Args:
        runs: the runs.
        path: the file; an older file is replaced.
        steps: steps whose texts and tokens the file has; empty: the newest, as many as fit.
        limit_mb: limit of the texts and tokens, in megabytes.

    Returns:
        The number of rollouts, of rollouts with text, and of bytes.

    Raises:
        ConfigError: the runs have no such steps.
        StorageError: the file cannot be written.
    """
    answers = Answers(runs)
    answers.ask_overview()
    num_texts = answers.ask_samples(steps, limit_mb * MEGABYTE)
    content = single_page(gzip.compress(json.dumps(answers.found).encode(), mtime=0)).encode()
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, content)
    rollouts = sum(run.record.table(source).num_rows for run in runs for source in run.record.sources)
    return {"rollouts": rollouts, "texts": num_texts, "bytes": len(content)}


class Answers:
    """Answers by question, as `static/api.js` looks them up.

    Args:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self.found: dict[str, Any] = {}
        self._runs = runs

    def ask(self, name: str, **parameters: Any) -> Any:
        """Keep the answer to a question, and return it."""
        texts = {key: str(value) for key, value in parameters.items()}
        made = answer(self._runs, name, Query(texts))
        self.found[json.dumps([name, sorted(texts.items())], ensure_ascii=False, separators=(",", ":"))] = made
        return made

    def ask_overview(self) -> None:
        """Keep everything but texts and tokens."""
        for number, run in enumerate(self.ask("runs")):
            self.ask("overview", run=number)
            self.ask("config", run=number)
            self.ask("timeline", run=number)
            for name in run["metrics"]:
                self.ask("series", run=number, names=name)
            for item in self.ask("items", run=number, text="")["items"].get("item", [])[:MAX_ITEMS]:
                self.ask("item", run=number, item=item)
            for source, about in run["sources"].items():
                self._ask_source(number, source, about["steps"])

    def ask_samples(self, steps: Sequence[int], limit: int) -> int:
        """Keep texts and tokens of some steps. Return the number of rollouts.

        Args:
            steps: the steps; empty: the newest.
            limit: limit in bytes.

        Raises:
            ConfigError: there are no such steps, or they do not fit.
        """
        places = list(self._places(steps))
        if steps and not places:
            raise ConfigError(f"export_steps={list(steps)}: the record has none of these steps")
        size = number = 0
        for run, source, place in places:
            step, group, sample = place
            made = self.ask("sample", run=run, source=source, step=step, group=group, sample=sample)
            size += len(json.dumps(made))
            if size > limit:
                if steps:
                    raise ConfigError(f"export_steps={list(steps)}: more than {limit // MEGABYTE} MB; raise export_mb")
                break
            number += 1
        return number

    def _ask_source(self, run: int, source: str, steps: Sequence[int]) -> None:
        for step in steps:
            self.ask("rows", run=run, source=source, step=step)
        for row in self.ask("ledger", run=run, source=source)["reasons"]:
            reason = {"status": row["status"], "reason": row["reason"]}
            self.ask("ledger_rows", run=run, source=source, offset=0, **reason)

    def _places(self, steps: Sequence[int]) -> Iterator[tuple[int, str, Place]]:
        """Yield the rollouts of some steps, or of all steps, the newest first."""
        for number, run in enumerate(self._runs):
            for source in run.record.sources:
                table = run.record.table(source).select(["step", "group", "sample"])
                rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
                chosen = [row for row in rows if not steps or row[0] in steps]
                for place in sorted(chosen, key=lambda row: (-row[0], row[1], row[2])):
                    yield number, source, place
