"""Evaluation of a set of prompts: its episodes, their scores, rows and samples, and its result.

Each episode is returned as soon as it ends, so that no ended episode can be lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from tensordict import TensorDict

from rlite.data.packs import check_one_per_row
from rlite.errors import DataError, EvaluationInterrupted, writing
from rlite.evaluation.compare import Comparison
from rlite.evaluation.journal import SOLVED_AT, Sample
from rlite.evaluation.metrics import summary
from rlite.rollout.collector.collector import RolloutCollector
from rlite.rollout.collector.group import Ended, Group
from rlite.rollout.collector.lost_groups import CANCELLED, RETURNED_NONE, reason_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import EpisodeFailed, Episodes, status_of
from rlite.rollout.collector.seeds import mix
from rlite.rollout.deadlines import side_by_side
from rlite.rollout.loop import LoopThread
from rlite.rollout.workflow import RolloutError, RolloutWorkflow
from rlite.services.record.files import all_files, write_table
from rlite.services.record.recorder import SEPARATOR, TokenTexts, make_tables
from rlite.services.record.schema import ROWS, TOKENS
from rlite.types import AsyncInference


@dataclass(frozen=True)
class EvaluatedModel:
    """The samples of one model, and their metrics."""

    name: str
    """name in tables and in the record"""
    model: str
    """folder or hub name"""
    metrics: Mapping[str, float]
    """metrics from `rlite.evaluation.metrics.summary`; those of tasks are named TASK/METRIC"""
    samples: Sequence[Sample] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """settings that decided the samples"""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict, repr=False)
    """direction of metrics: true if a higher value is better; of the metrics of tasks that say it"""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    models: Sequence[EvaluatedModel]
    """one, or two that answered the same items"""
    comparison: Comparison | None = None
    """the second model less the first; None for one model, or if there is no common measure"""
    no_comparison: str = ""
    """why two models are not compared"""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the first model."""
        return self.models[0].metrics

    @property
    def samples(self) -> Sequence[Sample]:
        """Samples of the first model."""
        return self.models[0].samples

    def to_json(self) -> dict[str, Any]:
        """Return metrics and comparison as values of JSON."""
        models = {each.name: _to_json(each) for each in self.models}
        comparison = None
        if self.comparison is not None:
            first, second = (each.name for each in self.models)
            comparison = {"first": first, "second": second, **asdict(self.comparison)}
        reason = {"no_comparison": self.no_comparison} if self.no_comparison else {}
        return {"models": models, "comparison": comparison, **reason}


def _to_json(model: EvaluatedModel) -> dict[str, Any]:
    directions = {"higher_is_better": dict(model.higher_is_better)} if model.higher_is_better else {}
    return {"model": model.model, "metrics": dict(model.metrics), **directions}


def score_column(trajectory: TensorDict) -> str:
    """Return the key of a trajectory's score: `scores`, or `rewards` if the workflow gives no scores.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    key = "scores" if "scores" in trajectory else "rewards"
    if key not in trajectory:
        raise DataError("an evaluated trajectory has neither scores nor rewards; expected one of them")
    check_one_per_row(trajectory, key)
    return key


def measured(trajectory: TensorDict) -> dict[str, Any]:
    """Return the score of a trajectory, whether it is truncated, and its length, as fields of a `Sample`.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    return {
        "score": float(trajectory[score_column(trajectory)][0]),
        "truncated": "truncated" in trajectory and bool(trajectory["truncated"].any()),
        "length": int(trajectory["loss_mask"].sum()) if "loss_mask" in trajectory else 0,
    }


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and the way in which they are answered and scored.

    Raises:
        DataError: there are no rows.
    """

    name: str
    """"" for the only set of a run"""
    rows: Sequence[Mapping[str, Any]]
    """at least one"""
    workflow: RolloutWorkflow
    """makes an episode of a row, with its score"""
    samples: int = 1
    """episodes of each row"""
    k: int = 1
    """largest k of pass@k, at most `samples`"""
    solved_at: float = SOLVED_AT
    """score from which an episode counts as solved"""

    def __post_init__(self) -> None:
        if not len(self.rows):
            raise DataError(f"the evaluation set {self.name!r} has no rows; expected at least one")

    @property
    def num_episodes(self) -> int:
        """Episodes of one evaluation."""
        return len(self.rows) * self.samples


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation of a set."""

    set: EvaluationSet
    samples: Sequence[Sample]
    """one for each episode, in the order of the rows"""
    episodes: Sequence[Ended] = field(default=(), repr=False)
    """the episodes with their tokens, for the record; `group` is the item's index"""

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by their names without the set's; see `summary`."""
        return summary(self.samples, self.set.k, self.set.solved_at)

    @property
    def lost(self) -> Counter[str]:
        """Failed episodes by reason."""
        return Counter(sample.reason for sample in self.samples if sample.score is None)

    def without_episodes(self) -> Self:
        """Return the evaluation without its tokens, which take memory and are needed for the record alone."""
        return replace(self, episodes=())


def evaluate(
    collector: RolloutCollector, chosen: EvaluationSet, is_interrupted: Callable[[], bool] = lambda: False
) -> Evaluation:
    """Return an evaluation that is made now. The engine must not get other weights meanwhile.

    Args:
        collector: collector of the engine that serves the policy.
        chosen: the set.
        is_interrupted: becomes true when the evaluation is to end early.

    Raises:
        DataError: the tokens come from several policy versions.
        EvaluationInterrupted: the evaluation was interrupted.
    """
    episodes = collector.evaluate(chosen.rows, chosen.workflow, chosen.samples, is_interrupted=is_interrupted)
    _check_one_version(episodes, chosen.name)
    return Evaluation(chosen, samples_of(episodes), episodes)


def evaluate_each(
    collector: RolloutCollector, sets: Sequence[EvaluationSet], is_interrupted: Callable[[], bool]
) -> list[Evaluation]:
    """Return the evaluations of several sets that end before an interruption.

    Args:
        collector: collector of the engine that serves the policy.
        sets: the sets.
        is_interrupted: becomes true when the evaluations are to end early.
    """
    found: list[Evaluation] = []
    with suppress(EvaluationInterrupted):
        for each in sets:
            found.append(evaluate(collector, each, is_interrupted))
    return found


def samples_of(episodes: Sequence[Ended]) -> list[Sample]:
    """Return one sample for each episode of an evaluation.

    Its score is `scores` of the trajectory, or `rewards` if the workflow gives no scores.

    Args:
        episodes: the result of `RolloutCollector.evaluate`.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    return [_sample(ended) for ended in episodes]


def _sample(ended: Ended) -> Sample:
    [episode] = ended.episodes
    own: dict[str, Any] = {"item": str(ended.group), "sample": ended.first_sample}  # two rows may have the same id
    own |= {"failed_attempts": tuple(episode.failed_attempts), "redrawn": episode.redrawn}
    if ended.reason or (trajectory := episode.trajectory) is None:
        return Sample(**own, score=None, reason=ended.reason, length=ended.num_tokens.get(0, 0))
    return Sample(**own, answer=episode.answer, **measured(trajectory))


def _check_one_version(episodes: Sequence[Ended], name: str) -> None:
    rows = [episode.trajectory for ended in episodes for episode in ended.episodes if not ended.reason]
    versions = [row["versions"] for row in rows if row is not None and "versions" in row]
    made = sorted({version for own in versions for version in own[own >= 0].unique().tolist()})
    if len(made) > 1:
        raise DataError(
            f"evaluation {name}: tokens of the policy versions {made}; expected one. The engine got other weights "
            "during the evaluation, or the workflow reports versions of its own"
        )


@dataclass(frozen=True)
class Place:
    """The place of an episode in an evaluation."""

    item: int
    """number of the item in the data"""
    sample: int
    """number among the samples of the item"""


@dataclass(frozen=True)
class EndedEpisode:
    """An episode that has ended."""

    place: Place
    group: Group
    """holds the episode alone"""
    reason: str = ""
    """why it failed"""
    error: BaseException | None = None
    """the exception behind the reason"""

    @property
    def has_succeeded(self) -> bool:
        """True if there is a trajectory."""
        return self.group.episodes[0].trajectory is not None


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs episodes of a workflow, a bounded number at a time.

    The random numbers of an episode depend on the seed and on its place alone, not on the episodes that ran before.
    """

    engine: AsyncInference
    workflow: RolloutWorkflow
    items: Sequence[Mapping[str, Any]]
    options: CollectorOptions
    """time-out and number of attempts"""
    seed: int
    max_concurrent: int
    """episodes that run at the same time"""

    def run(self, places: Sequence[Place], on_end: Callable[[EndedEpisode], None]) -> None:
        """Run the episodes of these places. The first error of the engine, or of `on_end`, ends all.

        Args:
            places: are started in this order.
            on_end: called for each episode in the order of their ends, one call at a time, in a thread of its own.

        Raises:
            RolloutError: user code has ended the event loop of the episodes.
            CallTimeout: user code blocks the event loop for longer than an episode may take.
        """
        loop = LoopThread("evaluation", lambda _: None, block_limit=self.options.request_timeout)
        taker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evaluation-taker")

        has_failed = False

        def take_unless_failed(ended: EndedEpisode) -> None:
            nonlocal has_failed
            if has_failed:  # waiting episodes are no longer started
                return
            try:
                on_end(ended)
            except BaseException:
                has_failed = True
                raise

        async def take(ended: EndedEpisode) -> None:
            await asyncio.get_running_loop().run_in_executor(taker, take_unless_failed, ended)

        running = loop.submit(self._run_all(iter(places), min(self.max_concurrent, len(places)), take))
        try:
            loop.result(running)
        except CancelledError as error:
            raise RolloutError("the evaluation was stopped: user code has ended the episodes' event loop") from error
        finally:
            running.cancel()
            loop.stop()
            loop.join()
            taker.shutdown()

    async def _run_all(
        self, places: Iterator[Place], count: int, take: Callable[[EndedEpisode], Awaitable[None]]
    ) -> None:
        async def work() -> None:
            for place in places:
                await take(await self._episode(place))

        await side_by_side([work() for _ in range(count)])

    async def _episode(self, place: Place) -> EndedEpisode:
        seed = mix(mix(self.seed, place.item), place.sample)
        group = Group(place.item, self.items[place.item], self.workflow, size=1, seed=seed, first_sample=place.sample)
        try:
            found = await Episodes(group, self.engine, self.options, Counter()).run()
        except EpisodeFailed as failed:
            return EndedEpisode(place, group, reason_of(failed.error), failed.error)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return EndedEpisode(place, group, CANCELLED)  # by the workflow
        return EndedEpisode(place, group, "" if found else RETURNED_NONE)


Row = dict[str, Any]
"""a row of ROWS, whose `tokens` are rows of TOKENS; plain values, which JSON keeps"""


def row_of(episode: EndedEpisode, item: str, texts: TokenTexts, has_tokens: bool) -> Row:
    """Return the row of an episode. The columns of its sample exist even if the record cannot read the trajectory.

    Args:
        episode: has ended.
        item: id of its data item.
        texts: decodes its sequences.
        has_tokens: keep the tokens, too.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
    place, group = episode.place, episode.group
    trajectory = group.episodes[0].trajectory
    own = {} if trajectory is None else _sample_columns(trajectory)
    status = "evaluated" if episode.has_succeeded else status_of(episode.reason, episode.error)
    ended = replace(group.ended(status, episode.reason), group=place.item, item=item)
    tables = make_tables(0, [ended], texts, {0})
    (row,) = tables["rows"].to_pylist()
    row |= own
    return row | {"tokens": tables["tokens"].to_pylist()} if has_tokens else row


def _sample_columns(trajectory: TensorDict) -> Row:
    """Return the columns of a row that its sample needs.

    Raises:
        DataError: `scores` or `rewards` is missing, or not [N].
    """
    made = measured(trajectory)
    column = {"scores": "score", "rewards": "reward"}[score_column(trajectory)]
    truncated = {"truncated": made["truncated"]} if "truncated" in trajectory else {}
    return {column: made["score"], "response_tokens": made["length"], **truncated}


def sample_of(row: Row) -> Sample:
    """Return the sample of a row."""
    return Sample(
        item=row["item"],
        sample=row["sample"],
        score=row.get("reward") if row.get("score") is None else row["score"],
        reason=row["reason"],
        truncated=bool(row.get("truncated")),
        answer=row.get("answer"),
        length=row.get("response_tokens") or 0,
        failed_attempts=tuple(filter(None, (row.get("failed_attempts") or "").split(SEPARATOR))),
        redrawn=row.get("redrawn") or "",
    )


def write_record(folder: Path, name: str, rows: Iterable[Row]) -> None:
    """Write the record of an evaluation, in the order of items and samples. A former record of the name is replaced.

    Each file is replaced at once, so that a reader finds the former record or this one.

    Args:
        folder: holds `record/`.
        name: name of the evaluation.
        rows: rows of all samples of the evaluation.

    Raises:
        DataError: a value has another type than its column. The former record is left.
        StorageError: a file cannot be written.
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
    """Remove the record of an evaluation.

    Args:
        folder: holds `record/`.
        name: name of the evaluation.
        keep: files that stay.

    Raises:
        StorageError: a file cannot be removed.
    """
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
