"""Sets of prompts, and their evaluation: every episode becomes a sample, and a failed episode is a wrong one.

A trainer waits for all episodes of a set (`evaluate`). The command takes each episode as it ends (`run_episodes`), so
that no ended episode can be lost. The collector's runner runs both.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, Self

import pyarrow as pa
from tensordict import TensorDict

import rlite
from rlite.data.packs import check_one_per_row
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, EvaluationInterrupted, writing
from rlite.evaluation.metrics import Sample, summary
from rlite.help import UNNAMED, check_name
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.bookkeeping import evaluated
from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, GroupRunner, Queue
from rlite.rollout.episode import mix
from rlite.runtime.replicas.engine import Engine
from rlite.services.record.files import ROWS, TOKENS, all_files, drop_later, write_table
from rlite.services.record.recorder import NoRecorder, Recorder, TokenTexts, make_recorder, make_tables
from rlite.trainer.callbacks import Metrics
from rlite.trainer.held_out import KEY, SOLVED_AT, GeneratedOptions, HeldOutPromptOptions, key_of, metric_of, metrics_of
from rlite.trainer.options import RecordOptions, SamplingOptions, ServingOptions, SetSamplingOptions
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.schedule import interval, sampling_plan
from rlite.trainer.run.training_run import TrainingRun
from rlite.types import AsyncInference
from rlite.wording import counted

Rows = Sequence[Mapping[str, Any]]
Place = tuple[int, int]
"""place of an episode: the number of its item in the data, and its number among the samples of the item"""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and the way in which they are answered and scored.

    Raises:
        DataError: there are no rows.
    """

    name: str
    """"" for the only set of a run"""
    rows: Rows
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

    def plan(self, own: GeneratedOptions, test_freq: int, rewards: Collection[str] = ()) -> str:
        """Return how many answers are generated, how they are sampled and judged, and when.

        Args:
            own: options of the set.
            test_freq: steps between two evaluations, if the set does not say.
            rewards: names of the run's rewards, for a set without a source of rewards.
        """
        sampling = self.workflow.gconfig
        parts = [counted(len(self.rows), "prompt") + (f" x {self.samples}" if self.samples > 1 else "")]
        if sampling is not None:
            temperature = 0.0 if sampling.greedy else sampling.temperature
            how = sampling_plan(temperature, sampling.top_p, sampling.top_k)
            parts[0] += f" {how}" if temperature else f", {how}"
            parts.append(f"at most {sampling.max_new_tokens} new tokens")
        if own.workflow:
            parts.append(f"workflow {own.workflow}")
        elif names := own.reward or rewards:
            parts.append(f"reward {' + '.join(names)}")
        parts += [f"pass@{self.k}"] if self.k > 1 else []
        is_first = isinstance(own, HeldOutPromptOptions) and own.first
        return ", ".join([*parts, f"{'before step 1 and ' if is_first else ''}{interval(own.every or test_freq)}"])


def make_set(name: str, rows: Rows, workflow: RolloutWorkflow, own: GeneratedOptions) -> EvaluationSet:
    """Return a set of `test_data`.

    Args:
        name: name of the set.
        rows: all rows of its table.
        workflow: answers and scores them.
        own: options of the set.

    Raises:
        ConfigError: the samples of a prompt are all the same.
        DataError: there are no rows.
    """
    rows = rows if own.limit is None else rows[: own.limit]
    made = EvaluationSet(name, rows, workflow, own.samples, own.k or own.samples, own.solved_at)
    gconfig = workflow.gconfig
    if made.samples > 1 and gconfig is not None and (gconfig.greedy or gconfig.temperature == 0):
        key = key_of(name)
        raise ConfigError(
            f"{key}.samples={made.samples}: at temperature 0 all responses to a prompt are the same; set "
            f"{key}.sampling.temperature above 0"
        )
    return made


def make_sets(
    options: Mapping[str, HeldOutPromptOptions],
    sampling_of: Callable[[SetSamplingOptions], SamplingOptions],
    workflow: RolloutWorkflow,
    rows: Rows | Mapping[str, Rows],
    workflows: RolloutWorkflow | Mapping[str, RolloutWorkflow] | None,
) -> dict[str, EvaluationSet]:
    """Return the sets to evaluate on, by name.

    Args:
        options: `test_data`; a set without options has the defaults.
        sampling_of: completes the sampling of a set without a workflow.
        workflow: workflow of training. Its copy with the sampling for evaluation evaluates sets without a workflow.
        rows: rows of a single set, which may be none, or of several by name.
        workflows: workflow of all sets, or of some by name.

    Raises:
        ConfigError: a set samples several responses that are all the same, a workflow or options are of no set, or a
            name is not valid.
    """
    by_name = rows if isinstance(rows, Mapping) else {UNNAMED: rows} if len(rows) else {}
    own = workflows if isinstance(workflows, Mapping) else dict.fromkeys(by_name, workflows)
    if unknown := own.keys() - by_name.keys():
        there = ", ".join(by_name) or "no set"
        raise ConfigError(f"test_workflow of {sorted(unknown)[0]!r}: there are rows of {there}")
    asked = {name for name, chosen in options.items() if name != UNNAMED or chosen.path is not None}
    if unknown := asked - by_name.keys():
        key, there = key_of(sorted(unknown)[0]), ", ".join(map(key_of, by_name)) or "no set"
        raise ConfigError(f"{key}: there are rows of {there}; expected some of {key}")
    found = {}
    for name, table in by_name.items():
        check_name(KEY, name)
        chosen, ours = options.get(name, HeldOutPromptOptions()), own.get(name)
        sampling = sampling_of(chosen.sampling) if ours is None else chosen.sampling
        found[name] = make_set(name, table, _sampled(workflow if ours is None else ours, sampling), chosen)
    return found


def _sampled(workflow: RolloutWorkflow, sampling: SetSamplingOptions) -> RolloutWorkflow:
    """Return the workflow with the sampling options that are set; a workflow without a `gconfig` stays as it is."""
    if workflow.gconfig is None or (wanted := sampling.gconfig(workflow.gconfig)) == workflow.gconfig:
        return workflow
    return workflow.sampled_by(wanted)


def reported_metrics(
    sets: Mapping[str, EvaluationSet], metrics: Sequence[str], of_steps: Sequence[str] = ()
) -> ReportedMetrics:
    """Return the metrics that a run shows: of evaluations the first, and at the end also the largest pass@k.

    Args:
        sets: the sets.
        metrics: metrics of every set, the most important first.
        of_steps: metrics of every step.
    """
    compared, evaluated = metrics_of(sets, metrics), metrics_of(sets, metrics)
    for name, each in sets.items():
        compared += [metric_of(name, f"{kind}@{each.k}") for kind in ("pass", "majority") if each.k > 1]
        evaluated += [metric_of(name, f"pass@{k}") for k in range(1, each.k + 1)]
        evaluated += [metric_of(name, metric) for metric in (f"majority@{each.k}", "truncated")]
    headlines = metrics_of(sets, metrics[:1])
    return ReportedMetrics(of_steps=of_steps, headlines=headlines, compared=compared, evaluated=evaluated)


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
        DataError: the tokens come from several policy versions, or a trajectory has no score.
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

    Raises:
        DataError: `scores` or `rewards` of a trajectory is missing, or not [N].
    """
    # two rows may have the same id
    return [sample_of_episode(ended, str(ended.group)) for ended in episodes]


def sample_of_episode(ended: Ended, item: str) -> Sample:
    """Return the sample of an episode. Its score is `scores` of the trajectory, or `rewards` without scores.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
    [episode] = ended.episodes
    own: dict[str, Any] = {"item": item, "sample": ended.first_sample}
    own |= {"failed_attempts": tuple(episode.failed_attempts), "redrawn": episode.redrawn}
    if ended.reason or (trajectory := episode.trajectory) is None:
        return Sample(**own, score=None, reason=ended.reason, length=ended.num_tokens.get(0, 0))
    return Sample(
        **own,
        answer=episode.answer,
        score=float(trajectory[score_column(trajectory)][0]),
        truncated="truncated" in trajectory and bool(trajectory["truncated"].any()),
        length=int(trajectory["loss_mask"].sum()) if "loss_mask" in trajectory else 0,
    )


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


def _check_one_version(episodes: Sequence[Ended], name: str) -> None:
    rows = [episode.trajectory for ended in episodes for episode in ended.episodes if not ended.reason]
    versions = [row["versions"] for row in rows if row is not None and "versions" in row]
    made = sorted({version for own in versions for version in own[own >= 0].unique().tolist()})
    if len(made) > 1:
        raise DataError(
            f"evaluation {name}: tokens of the policy versions {made}; expected one. The engine got other weights "
            "during the evaluation, or the workflow reports versions of its own"
        )


def run_episodes(
    engine: AsyncInference,
    chosen: EvaluationSet,
    places: Sequence[Place],
    options: CollectorOptions,
    on_end: Callable[[Ended], None],
) -> None:
    """Run some episodes of a set, a bounded number at a time. The first error of the engine, or of `on_end`, ends all.

    The random numbers of an episode depend on the seed and on its place alone, not on the episodes that ran before.

    Args:
        engine: serves the model.
        chosen: the set.
        places: places of the episodes, which begin in this order.
        options: seed, limits, time-out and number of attempts.
        on_end: called in this thread for each episode soon after its end; `group` is the item's index.

    Raises:
        RolloutError: user code has ended the event loop of the episodes.
        CallTimeout: user code blocks the event loop for longer than an episode may take.
    """
    limit = options.max_concurrent_rollouts or len(places)
    groups = (_group(chosen, *place, options.seed or 0) for place in places)
    queue, under_way = Queue(RolloutLedger(max_concurrent=limit), is_training=False), list[Group]()
    runner = GroupRunner(engine, options, (queue,))
    try:
        while True:
            begun = list(islice(groups, 2 * limit - len(under_way)))  # more than may run: some wait for their turn
            under_way += begun
            if not under_way:
                return
            runner.submit(queue, begun)
            runner.wait_until(lambda: any(group.has_ended for group in under_way), deadline=None)  # noqa: B023
            with runner.changed:
                ended = [group for group in under_way if group.has_ended]
                runner.consume(queue, [group for group in ended if group.loss is None])
            under_way = [group for group in under_way if group not in ended]
            for group in ended:
                on_end(evaluated(group, group.id, chosen.samples))
    finally:
        runner.loop.close()


def _group(chosen: EvaluationSet, item: int, sample: int, seed: int) -> Group:
    id, seed = item * chosen.samples + sample, mix(mix(seed, item), sample)
    return Group(id, chosen.rows[item], chosen.workflow, size=1, seed=seed, first_sample=sample)


def serving_engine(
    model: str,
    options: ServingOptions,
    max_model_len: int | None,
    seed: int,
    group: str = "",
    colocate_with: Engine | None = None,
) -> RliteInferenceEngine:
    """Return an engine of the current session that serves a model on all devices.

    Args:
        model: folder or hub name of the checkpoint.
        options: the engine's options.
        max_model_len: longest sequence, in tokens; None is the engine's default.
        seed: seed of requests without a seed of their own.
        group: beginning of the options' keys, for messages.
        colocate_with: engine on the same devices.

    Raises:
        ConfigError: the replicas do not divide the devices.
    """
    world = len(rlite.current_session().devices)
    if world % options.tp_size:
        raise ConfigError(f"{group}tp_size={options.tp_size} does not divide {world} devices")
    engine = RliteInferenceEngine(model, executor=options.executor)
    engine.build(**options.build_options(world), max_model_len=max_model_len, seed=seed, colocate_with=colocate_with)
    return engine


logger = logging.getLogger(__name__)
SINGLE = "test"
"""name under which a single set is recorded"""


class EvaluationRecord(Observer):
    """Records evaluations. A run that resumes at step S deletes records of later steps.

    A record that cannot be written ends with a warning; the run goes on.

    Args:
        options: say how much is recorded.
        run: counts the steps, and has the folder and the console.
        model: folder or hub name of the model, for its tokenizer; "" if nothing is recorded.
    """

    def __init__(self, options: RecordOptions, run: TrainingRun, model: str = "") -> None:
        self._amounts, self._run, self._model = options, run, model
        self._has_told = False
        self._recorder: Recorder = NoRecorder()

    def open(self, tokenizer: Any) -> None:
        """Begin, after the run has opened its folder.

        Args:
            tokenizer: the model's tokenizer.
        """
        limit = int(self._amounts.record_limit * 2**30)
        self._recorder = make_recorder(self._run.folder, tokenizer, self._amounts.record, limit)

    def evaluation(self, name: str, step: int, episodes: Sequence[Ended]) -> None:
        """Record an evaluation.

        Args:
            name: name of the set; a single set without a name is recorded as `test`.
            step: finished steps before the evaluation.
            episodes: what `RolloutCollector.evaluate` returned.
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
        """Record evaluations.

        Args:
            run: the run.
            step: finished steps of the evaluated weights.
            evaluations: evaluations with their episodes.
        """
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
        """Write everything to disk. Later evaluations are not recorded.

        Args:
            reason: how the run ended, in words.
        """
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
    """Return the row of an episode. The columns of its sample exist even if the record cannot read the trajectory.

    Args:
        ended: the episode, as `run_episodes` gives it.
        item: id of its data item.
        texts: decodes its sequences.
        has_tokens: keep the tokens, too.

    Raises:
        DataError: `scores` or `rewards` of the trajectory is missing, or not [N].
    """
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


def task_rows(samples: Mapping[str, Sequence[Mapping[str, Any]]], sample: int = 0) -> Iterator[Row]:
    """Yield a row of the record for each question whose first metric is a number, of the first filter of its task.

    A number that is not finite is no score: the sample has failed.

    Args:
        samples: the harness's `samples`, by task.
        sample: number of the sample.
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
