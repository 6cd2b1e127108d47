"""The page as one file: the answers to its questions are in it, so it opens from disk and asks nobody."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from rlite import files
from rlite.errors import ConfigError, writing
from rlite.observability.record.reader import Place
from rlite.viewer.answers import answer, sample_answer
from rlite.viewer.page import single_page
from rlite.viewer.query import Query
from rlite.viewer.run import ViewedRun

MEGABYTE = 1_000_000


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
    answers.ask("runs")  # once more: it names the files that could not be read
    content = single_page(gzip.compress(json.dumps(answers.found, allow_nan=False).encode(), mtime=0)).encode()
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
        """Return the answer to a question, and keep it."""
        made = answer(self._runs, name, Query((key, str(value)) for key, value in parameters.items()))
        self.found[_question(name, **parameters)] = made
        return made

    def ask_overview(self) -> None:
        """Keep everything but texts and tokens."""
        for number, run in enumerate(self.ask("runs")):
            self.ask("overview", run=number)
            self.ask("config", run=number)
            self.ask("timeline", run=number)
            for name in run["metrics"]:
                self.ask("series", run=number, names=name)
            items = self.ask("items", run=number, text="")["items"]
            for place in zip(items.get("set", ()), items.get("item", ()), strict=True):
                self.ask("item", run=number, set=place[0], item=place[1])
            for source, about in run["sources"].items():
                self._ask_source(number, source, about["steps"])

    def ask_samples(self, steps: Sequence[int], limit: int) -> int:
        """Keep texts and tokens of some steps.

        Args:
            steps: the steps; empty: the newest.
            limit: limit in bytes.

        Returns:
            The number of rollouts.

        Raises:
            ConfigError: there are no such steps, or they do not fit.
        """
        chosen = list(self._steps(steps))
        if steps and not chosen:
            raise ConfigError(f"export_steps={list(steps)}: the record has none of these steps")
        size = number = 0
        for run, source, step in chosen:
            for question, made in self._samples(run, source, step):
                size += len(json.dumps(made))
                if size > limit and steps:
                    raise ConfigError(f"export_steps={list(steps)}: more than {limit // MEGABYTE} MB; raise export_mb")
                if size > limit:
                    return number
                self.found[question] = made
                number += 1
        return number

    def _steps(self, steps: Sequence[int]) -> Iterator[tuple[int, str, int]]:
        """Yield run, source and step of some steps, or of all steps, the newest first."""
        found = [
            (number, source, step)
            for number, run in enumerate(self._runs)
            for source in run.record.sources
            for step in pc.unique(run.record.table(source)["step"]).to_pylist()
            if not steps or step in steps
        ]
        yield from sorted(found, key=lambda place: -place[2])

    def _samples(self, run: int, source: str, step: int) -> Iterator[tuple[str, Any]]:
        """Yield question and answer for each rollout of a step."""
        record = self._runs[run].record
        sequences: dict[Place, list[Any]] = {}
        for sequence in record.tokens(source, step):
            sequences.setdefault((sequence["group"], sequence["sample"]), []).append(sequence)
        for row in record.rollouts(source, step):
            group, sample = row["group"], row["sample"]
            question = _question("sample", run=run, source=source, step=step, group=group, sample=sample)
            yield question, sample_answer(row, sequences.get((group, sample), []))

    def _ask_source(self, run: int, source: str, steps: Sequence[int]) -> None:
        for step in steps:
            self.ask("rows", run=run, source=source, step=step)
        for row in self.ask("ledger", run=run, source=source)["kinds"]:
            place = {"run": run, "source": source, "status": row["status"], "offset": 0}
            for own in self.ask("ledger_reasons", kind=row["kind"], **place)["reasons"]:
                self.ask("ledger_rows", reason=own["reason"], **place)


def _question(name: str, **parameters: Any) -> str:
    """Return a question in the form in which `static/api.js` looks up its answer."""
    texts = sorted((key, str(value)) for key, value in parameters.items())
    return json.dumps([name, texts], ensure_ascii=False, separators=(",", ":"))
