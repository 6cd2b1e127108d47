"""The record of evaluations: of the sets of a run as it trains, and of the rows of a finished evaluation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import pyarrow as pa

from rlite.errors import DataError, writing
from rlite.evaluation.episodes import sample_of_episode, score_column
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout.collector.ended import Ended
from rlite.services.record.files import ROWS, TOKENS, all_files
from rlite.services.record.recorder import NoRecorder, Recorder, TokenTexts, make_recorder, make_tables
from rlite.services.record.writer import drop_later, write_table
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RecordOptions
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun

logger = logging.getLogger(__name__)
SINGLE = "test"
"""name under which a single set is recorded"""


class EvaluationRecord(Observer):
    """Records evaluations. A run that resumes at step S deletes records of later steps.

    A record that cannot be written ends with a warning; the run goes on.

    `model`: folder or hub name of the model, for its tokenizer; "" if nothing is recorded.
    """

    def __init__(self, options: RecordOptions, run: TrainingRun, model: str = "") -> None:
        self._amounts, self._run, self._model = options, run, model
        self._has_told = False
        self._recorder: Recorder = NoRecorder()

    def open(self, tokenizer: Any) -> None:
        """Begin, after the run has opened its folder."""
        limit = int(self._amounts.record_limit * 2**30)
        self._recorder = make_recorder(self._run.folder, tokenizer, self._amounts.record, limit)

    def evaluation(self, name: str, step: int, episodes: Sequence[Ended]) -> None:
        """Record an evaluation.

        `name`: name of the set; a single set without a name is recorded as `test`.
        """
        self._recorder.record_evaluation(name or SINGLE, step, episodes)
        self._tell_of_limit()

    def begin(self) -> None:
        """Begin, after the run has opened its folder and the engines are built."""
        if self._model:
            self.open(load_tokenizer(self._model))

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Delete the records of later steps, and begin."""
        drop_later(run.folder, run.step or -1)
        self.begin()

    def on_answers(self, run: TrainingRun, step: int, evaluations: Sequence[Any]) -> None:
        """Record evaluations."""
        for each in evaluations:
            self.evaluation(each.set.name, step, each.episodes)

    def before_save(self, run: TrainingRun) -> None:
        """Write everything to disk. A run that is resumed from the checkpoint does not record it again."""
        self._recorder.flush()

    def on_save(self, run: TrainingRun, metrics: Metrics) -> None:
        """Merge the files of steps to which no checkpoint goes back."""
        if (oldest := run.saved.checkpoints.oldest) is not None:
            self._recorder.compact(oldest)

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """End the record, with the reason for which rollouts under way are lost."""
        kind = KeyboardInterrupt if run.is_interrupted else type(error)
        try:
            self._end("the run ended" if kind is NoneType else f"the run ended with {kind.__name__}")
        except Exception:  # of any kind: the run's own error must not be hidden
            if error is None:
                raise
            logger.exception("the end of the record could not be written")

    def _end(self, reason: str) -> None:
        """Write everything to disk. Later evaluations are not recorded."""
        recorder, self._recorder = self._recorder, NoRecorder()
        recorder.close()

    def _tell_of_limit(self) -> None:
        if self._recorder.has_removed and not self._has_told:
            self._has_told = True
            limit = f"trainer.record_limit={self._amounts.record_limit:g} GiB"
            rows = {"limit": limit, "removed": "texts and tokens of the oldest steps first"}
            self._run.console.warn(f"step {self._run.step}: the record has reached its limit", rows)


Row = dict[str, Any]
"""a row of ROWS, whose `tokens` are rows of TOKENS; plain values, which JSON keeps"""


def row_of(ended: Ended, item: str, texts: TokenTexts, has_tokens: bool) -> Row:
    """Return the row of an episode. The columns of its sample exist even if the record cannot read the trajectory."""
    sample, trajectory = sample_of_episode(ended, item), ended.episodes[0].trajectory
    tables = make_tables(0, [replace(ended, item=item)], texts, {0})
    (row,) = tables["rows"].to_pylist()
    if trajectory is not None:
        row[{"scores": "score", "rewards": "reward"}[score_column(trajectory)]] = sample.score
        row["response_tokens"] = sample.length
        row |= {"truncated": sample.truncated} if "truncated" in trajectory else {}
    return row | {"tokens": tables["tokens"].to_pylist()} if has_tokens else row


def write_record(folder: Path, name: str, rows: Iterable[Row]) -> None:
    """Write the record of an evaluation, in the order of items and samples. A former record of the name is replaced.

    Each file is replaced at once, so that a reader finds the former record or this one.
    """
    ordered = sorted(rows, key=lambda row: (row["group"], row["sample"]))
    tokens = [own for row in ordered for own in row.get("tokens", ())]
    try:
        table = pa.Table.from_pylist([_with_pairs(row) for row in ordered], schema=ROWS)
        table_of_tokens = pa.Table.from_pylist(tokens, schema=TOKENS)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"the samples of {name} cannot be recorded, a value is damaged: {error}") from error
    written = [write_table(folder, source_of(name), 0, "rows", table)]
    if tokens:
        written.append(write_table(folder, source_of(name), 0, "tokens", table_of_tokens))
    remove_record(folder, name, keep=written)


def remove_record(folder: Path, name: str, keep: Collection[Path] = ()) -> None:
    """Remove the record of an evaluation."""
    for file in all_files(folder):
        if file.source == source_of(name) and file.path not in keep:
            with writing(file.path):
                file.path.unlink(missing_ok=True)


def source_of(name: str) -> str:
    """Return the source in the record of an evaluation."""
    return f"eval.{name}"


def _with_pairs(row: Row) -> Row:
    """Return a row whose maps have pairs again, which JSON does not tell from lists."""
    maps = {name: row[name] for name in ("reward_parts", "data") if row.get(name) is not None}
    return row | {name: [(key, value) for key, value in pairs] for name, pairs in maps.items()}


def task_rows(samples: Mapping[str, Sequence[Mapping[str, Any]]], sample: int = 0) -> Iterator[Row]:
    """Yield a row of the record for each question whose first metric is a number, of the first filter of its task.

    A number that is not finite is no score: the sample has failed.
    """
    for task, own in samples.items():
        for question in own:
            metric = question["metrics"][0] if question["metrics"] else ""
            score = question.get(metric)
            if question["filter"] == own[0]["filter"] and isinstance(score, int | float):
                is_finite = math.isfinite(score)
                yield {
                    "step": 0,
                    "group": question["doc_id"],
                    "sample": sample,
                    "item": f"{task}/{question['doc_id']}",
                    "status": "evaluated" if is_finite else "failed",
                    "reason": "" if is_finite else f"{metric} is {score}",
                    "score": float(score) if is_finite else None,
                    "segments": list(_segments(question)),
                    "ended": time.time(),
                }


def _segments(question: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the prompt, and the answer: a text, or the likeliest of the choices."""
    arguments, answers = question["arguments"], [answer[0] for answer in question["resps"]]
    yield {"role": "prompt", "text": str(arguments[0][0])}
    if isinstance(answers[0], str):
        yield {"role": "model", "text": answers[0]}
    elif len(arguments[0]) > 1:
        likeliest = max(range(len(answers)), key=lambda number: answers[number][0])
        yield {"role": "model", "text": str(arguments[likeliest][1])}
