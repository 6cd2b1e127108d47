"""The metrics of a checkpoint, and the difference between two.

    rlite eval MODEL --data test.jsonl --reward my.py:correct --samples 16
    rlite eval BEFORE AFTER --env game.py --samples 4
    rlite eval runs/eval-before runs/eval-after        of two earlier evaluations, without a model

Every sample is on disk as soon as it ends, and the same command continues what was interrupted.
"""

from __future__ import annotations

import re
import shlex
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich import box
from rich.table import Table

from rlite import config
from rlite.assembly.evaluate.answers import EvaluationRequest, PromptAnswers, TaskAnswers, tell
from rlite.assembly.evaluate.options import EvalConfig, default_temperature
from rlite.assembly.launch import has_waiting_ranks, serve_if_worker, session_of
from rlite.data.chat.template import CLOCK
from rlite.errors import ConfigError, RliteError, writing
from rlite.evaluation import folder as storage
from rlite.evaluation import metrics as measures
from rlite.evaluation.folder import RESULTS, Answered, Candidate, EvaluatedModel, EvaluationResult
from rlite.evaluation.journal import changed_settings
from rlite.evaluation.metrics import Sample, compare, selection_of, standard_error_of, summary
from rlite.evaluation.record import write_record
from rlite.evaluation.sets import Rows
from rlite.output import Result
from rlite.rollout.collector.lost_groups import in_a_line
from rlite.services.console.terminal import TextConsole
from rlite.trainer.run.folder import PRINTS
from rlite.trainer.run.interruption import INTERRUPTION
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects
from rlite.wording import counted

Answers = PromptAnswers | TaskAnswers
SAME = ("questions", "scores", "tasks")
"""settings that two models which are compared must share"""


def main(argv: Sequence[str]) -> Result:
    """Evaluate one model or two, print the metrics, and name their folder.

    Returns:
        Metrics and comparison, as in results.json, and the folder.
    """
    options = config.load(EvalConfig, EvalConfig.arguments(argv), aliases=EvalConfig.aliases)
    result = evaluate(options)
    print_result(result)
    if (folder := options.folder) is not None:
        print(f"{folder / RESULTS} holds these results")
        print(f"rlite view {shlex.quote(str(folder))} shows the samples")
    return Result({**result.to_json(), "folder": None if folder is None else str(folder)})


def evaluate(options: EvalConfig, given: ProgramObjects = NOTHING) -> EvaluationResult:
    """Evaluate in the program's session, or in one of its own.

    Args:
        options: options of the command.
        given: rows and rewards of a program, in place of those that the options name.

    Returns:
        Metrics and samples; of two models also the comparison.

    Raises:
        ConfigError: an option or a model cannot be used, or the folder holds samples of other settings, a run or a
            model.
        DataError: some rows cannot be used, or the two models answered other items.
        FolderInUse: another evaluation is under way in the folder.
        StorageError: the folder cannot be written.
    """
    serve_if_worker(options)
    request = EvaluationRequest(options, given)
    with ExitStack() as until_end:
        if (folder := options.folder) is None:
            folder = Path(until_end.enter_context(tempfile.TemporaryDirectory(prefix="rlite-eval-")))
        else:
            storage.check_no_run(folder)
            until_end.enter_context(storage.held(folder))
        models = _answered(request, folder, until_end)
        check_comparable(models)
        result = result_of(models, options.k, options.solved_at, options.confidence, options.seed)
        if options.folder is not None:
            storage.write_results(folder, models, result)
        return result


def _answered(request: EvaluationRequest, folder: Path, until_end: ExitStack) -> list[Answered]:
    """Return the models with all their samples. Those that are missing are generated now.

    Args:
        request: what the command asks.
        folder: folder of the evaluation.
        until_end: closes the journals at its end.

    Raises:
        ConfigError: there is no source of scores for a model without results.
    """
    options, names = request.options, request.options.names
    asked = dict(zip(names, filter(None, (options.model, options.other)), strict=True))
    if not options.overwrite:
        storage.check_alone(folder, names)
    earlier = {name: found for name in names if (found := _earlier(asked[name], name, folder))}
    models, answers = list(earlier.values()), list[Answers]()
    if unanswered := [asked[name] for name in names if name not in earlier]:
        if not options.sources_of_scores:
            raise ConfigError(
                f"missing: a source of scores for {' and '.join(unanswered)} (reward.path=file.py:function with "
                "data.path=FILE, env_path=FILE, or tasks=[NAME]). Only an earlier evaluation that is complete, a "
                f"folder with {RESULTS}, needs none; run with --help to see every option"
            )
        items, answers_of = _source(request, folder)
        settings = request.settings(items)
        models = [
            earlier[name] if name in earlier else request.candidate(model, name, settings, folder, until_end)
            for name, model in asked.items()
        ]
        check_comparable(models)
        now = CLOCK.now()
        time = min(filter(None, (model.time for model in models)), default=now)
        if time.date() != now.date():
            tell(f"chat templates that write the date write {time:%Y-%m-%d}, as in the samples that are there")
        until_end.enter_context(CLOCK.fixed(time))
        candidates = [each for each in models if isinstance(each, Candidate)]
        answers = [answers_of(each) for each in candidates]
        storage.remove_others(folder, names)
        if options.overwrite:
            with writing(folder / PRINTS):
                (folder / PRINTS).unlink(missing_ok=True)
        for each in candidates:
            each.begin(folder)
    if options.folder is not None:
        INTERRUPTION.advice = advice(options.folder, options.overwrite)
    pending = [own for own in answers if own.missing]
    # one session for all; ranks that wait for a session get one in any case
    with session_of(options) if pending or has_waiting_ranks(options) else nullcontext():
        for own in pending:
            with nullcontext() if options.folder is None else recorded(own.candidate, folder):
                own.run()
    return models


def _earlier(given: str, name: str, folder: Path) -> Answered | None:
    """Return the result of an earlier evaluation under a name; None if the path is none.

    Raises:
        ConfigError: the result cannot be used, or it is in the folder that this evaluation writes.
    """
    if (found := storage.earlier_result(given)) is None:
        return None
    if folder.resolve() == Path(given).expanduser().resolve():
        raise ConfigError(f"out={folder}: it holds the earlier evaluation that is read; choose another folder")
    return replace(found, name=name)


def _source(request: EvaluationRequest, folder: Path) -> tuple[Rows, Callable[[Candidate], Answers]]:
    """Return the items, which tasks have not, and a function that returns what a model has still to answer."""
    if request.options.tasks:
        manager = request.find_tasks()
        return [], lambda model: TaskAnswers(model, manager, request, folder)
    items, make_workflow = request.questions()
    return items, lambda model: PromptAnswers(model, items, make_workflow, request)


def advice(folder: Path, overwrites: bool) -> str:
    """Return how an interrupted evaluation continues."""
    how = "the same command without overwrite=true" if overwrites else "the same command"
    return f"Finished samples are in {folder}; {how} continues."


def check_comparable(models: Sequence[Answered]) -> None:
    """Check that all models have the same questions, scored in the same way.

    Raises:
        ConfigError: the models differ. The message names the settings.
    """
    first, *others = models
    for other in others:
        shared = [{key: model.settings.get(key) for key in SAME} for model in (first, other)]
        if different := changed_settings(*shared):
            remedy = "evaluate both with the same data and the same source of scores"
            raise ConfigError(f"{first.name} and {other.name} cannot be compared: {different}; {remedy}")


def result_of(
    models: Sequence[Answered], k: int | None, solved_at: float, confidence: float, seed: int
) -> EvaluationResult:
    """Return the metrics of the models, and of two the comparison.

    Args:
        models: with all their samples.
        k: largest k of pass@k; None: the number of samples.
        solved_at: score from which a sample is solved.
        confidence: level of the intervals.
        seed: seed of the draws of the test.

    Raises:
        DataError: `k` is larger than the number of samples.
    """
    evaluated = [_evaluated(model, k, solved_at, confidence) for model in models]
    if len(evaluated) != 2 or not evaluated[0].samples:
        return EvaluationResult(evaluated)
    first, second = (model.samples for model in evaluated)
    lowest = measures.lowest_tasks([line for model in models if model.is_of_tasks for line in model.lines])
    if highest := lowest and {measures.task_of(sample) for sample in first} - lowest:
        low, high = (", ".join(sorted(tasks)) for tasks in (lowest, highest))
        reason = f"lower is better in {low}, and higher in {high}; compare tasks of one direction in a command"
        return EvaluationResult(evaluated, no_comparison=reason)
    return EvaluationResult(evaluated, compare(first, second, confidence, seed, lower_is_better=bool(lowest)))


def _evaluated(model: Answered, k: int | None, solved_at: float, confidence: float) -> EvaluatedModel:
    samples = sorted((Sample.of_row(row) for row in model.rows), key=lambda sample: sample.sample)
    directions = (line.get("higher_is_better", {}).items() for line in model.lines if model.is_of_tasks)
    if model.is_of_tasks:
        metrics = measures.summary_of_tasks(model.lines, k)
    else:
        fewest = min(Counter(sample.item for sample in samples).values())
        metrics = summary(samples, k or fewest, solved_at, confidence)
    return EvaluatedModel(model.name, model.model, metrics, samples, model.settings, dict(chain(*directions)))


COUNTS = ("num_", "errors/", "failed_attempts/", "redrawn/")
"""beginnings of the names of metrics that count"""
BESIDE = ("standard_error", "_stderr", "_low", "_high")
"""endings of metrics that stand beside another one in the table"""
_PASS_AT_K = re.compile(r"((?:.*/)?)pass@(\d+)")


def print_result(result: EvaluationResult) -> None:
    """Print metrics and comparison."""
    console, table = TextConsole(), Table(box=box.SIMPLE_HEAD)
    table.add_column("metric", overflow="fold")
    for model in result.models:
        table.add_column(model.name, justify="right", overflow="fold")
    lowest = {name for model in result.models for name, is_higher in model.higher_is_better.items() if not is_higher}
    for name in shown_metrics([model.metrics for model in result.models]):
        label = f"{name} (lower is better)" if name in lowest else name
        table.add_row(label, *(shown(name, model.metrics) for model in result.models))
    console.print(title(result), soft_wrap=True)
    console.print(table)
    for model in result.models:
        if reasons := Counter(in_a_line(sample.reason) for sample in model.samples if sample.score is None):
            failed, most = f"{reasons.total()} of {len(model.samples)} samples failed", reasons.most_common(1)[0][0]
            console.print(f"{model.name}: {failed}; most often: {most}", soft_wrap=True)
        for cause, facts in selection_of(model.samples).alarms():
            told = "; ".join(f"{name}: {fact}" for name, fact in facts.items())
            console.print(f"{model.name}: {cause} ({told})", soft_wrap=True)
    if (sentence := difference(result)) is not None:
        console.print(sentence, soft_wrap=True)


def title(result: EvaluationResult) -> str:
    """Return what was measured, in words and numbers: a line, or one for each model if they differ."""
    told = {model.name: questions(model) for model in result.models}
    if len(set(told.values())) == 1:
        return questions(result.models[0])
    return "\n".join(f"{name}: {own}" for name, own in told.items())


def questions(model: EvaluatedModel) -> str:
    """Return what a model was asked, and how its answers were sampled."""
    num_items = len({sample.item for sample in model.samples})
    if tasks := model.settings.get("tasks"):
        asked = f"{num_items} questions of {', '.join(tasks['tasks'])}"
        return f"{asked} x {_sampled(model)}" if any(sample.sample for sample in model.samples) else asked
    at_most = model.settings["sampling"]["max_new_tokens"]
    return f"{counted(num_items, 'prompt')} x {_sampled(model)}, at most {at_most} new tokens"


def _sampled(model: EvaluatedModel) -> str:
    own = model.settings["sampling"]
    num_samples, temperature = own["samples"], own["temperature"]
    default = f" (the default of samples={num_samples})" if temperature == default_temperature(num_samples) else ""
    return f"{counted(num_samples, 'sample')}, temperature {temperature:g}{default}"


def shown_metrics(models: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics for the table, in order: of pass@k, k = 1, 2, 4, ... and the largest."""
    names = list(dict.fromkeys(name for metrics in models for name in metrics))
    ks: dict[str, list[int]] = {}
    for name in names:
        if match := _PASS_AT_K.fullmatch(name):
            ks.setdefault(match[1], []).append(int(match[2]))
    hidden = {f"{task}pass@{k}" for task, own in ks.items() for k in own if k & (k - 1) and k != max(own)}
    return [name for name in names if name not in hidden and not name.endswith(BESIDE)]


def shown(name: str, metrics: Mapping[str, float]) -> str:
    """Return a metric for the table, with its interval or standard error; "" if the model has no such metric."""
    if name not in metrics:
        return ""
    value = metrics[name]
    if name.startswith(COUNTS):
        return f"{value:.0f}"
    if (low := metrics.get(f"{name}_low")) is not None:
        return f"{value:.4f} [{low:.4f}, {metrics[f'{name}_high']:.4f}]"
    error = metrics.get(f"{name}_stderr", metrics.get(standard_error_of(name)))
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def difference(result: EvaluationResult) -> str | None:
    """Return the comparison in a sentence, or why there is none; None for one model."""
    if result.no_comparison:
        return f"no difference of {' and '.join(model.name for model in result.models)}: {result.no_comparison}"
    if (found := result.comparison) is None:
        return None
    first, second = (model.name for model in result.models)
    what = "score (lower is better)" if found.lower_is_better else "accuracy"
    interval = "" if found.low is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
    return (
        f"{what} of {second} - {first}: {found.difference:+.4f}{interval} ({100 * found.confidence:g}% interval of "
        f"{found.num_items} paired items), p = {found.p_value:.2g} (two-sided sign-flip test); better at "
        f"{found.better} items, worse at {found.worse}"
    )


PAUSE_S = 0.5
"""least seconds between two versions of the record"""
COST = 0.05
"""share of the time that goes into the record, which is longer to write the more samples it has"""


@contextmanager
def recorded(candidate: Candidate, folder: Path) -> Iterator[None]:
    """Keep the record of a model up to date during the block, and write it once more at the end of the block.

    Each version of the record is made of the whole journal, so that no sample is in it twice. After a kill, the record
    lacks the samples that have ended since its last version. The continued evaluation writes it again.

    Args:
        candidate: the model, whose journal grows.
        folder: folder of the evaluation.

    Yields:
        None.
    """
    stopped = threading.Event()
    thread = threading.Thread(target=_follow, args=(candidate, folder, stopped), name="eval-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with suppress(RliteError):  # the block's own error counts, or the next error of the same cause
            write_record(folder, candidate.name, candidate.rows)


def _follow(candidate: Candidate, folder: Path, stopped: threading.Event) -> None:
    num_written, pause = 0, 0.0
    while not stopped.wait(pause):
        begun = time.monotonic()
        if len(candidate.lines) > num_written:
            num_written = len(candidate.lines)
            try:
                write_record(folder, candidate.name, candidate.rows)
            except RliteError:
                return  # the record that is written at the end raises it; until then only readers lack something
        pause = max(PAUSE_S, (time.monotonic() - begun) / COST)
