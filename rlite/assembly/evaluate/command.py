"""The metrics of a checkpoint, and the difference between two.

    rlite eval MODEL --data test.jsonl --reward my.py:correct --samples 16
    rlite eval BEFORE AFTER --env game.py --samples 4
    rlite eval runs/eval-before runs/eval-after        of two earlier evaluations, without a model

Every sample is on disk as soon as it ends, and the same command continues what was interrupted.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlite import config, files
from rlite.assembly.evaluate.folder import (
    RESULTS,
    Answered,
    Candidate,
    EarlierResult,
    begin,
    candidate,
    check_alone,
    check_no_run,
    earlier_result,
    held,
    is_of_tasks,
    remove_others,
    rows_of,
    settings_of,
)
from rlite.assembly.evaluate.generation import (
    Generation,
    Items,
    TaskAnswers,
    find_tasks,
    lowest_tasks,
    read_questions,
    summary_of_tasks,
    task_of,
)
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.evaluate.report import print_result, recorded
from rlite.assembly.launch import has_waiting_ranks, serve_if_worker, session_of
from rlite.data.chat.template import CLOCK
from rlite.errors import ConfigError, writing
from rlite.evaluation.compare import compare
from rlite.evaluation.journal import differences
from rlite.evaluation.metrics import summary
from rlite.evaluation.sets import EvaluatedModel, EvaluationResult, sample_of, write_record
from rlite.trainer.run.interruption import INTERRUPTION
from rlite.trainer.run.program_objects import NOTHING, ProgramObjects

Answers = Generation | TaskAnswers
SAME = ("questions", "scores", "tasks")
"""settings that two models which are compared must share"""


def main(argv: Sequence[str]) -> None:
    """Evaluate one model or two, print the metrics, and name their folder."""
    options = config.load(EvalConfig, EvalConfig.arguments(argv), aliases=EvalConfig.aliases)
    print_result(evaluate(options))
    if (folder := options.folder) is not None:
        print(f"{folder / RESULTS} holds these results", f"{view_command(folder)} shows the samples", sep="\n")


def view_command(folder: Path) -> str:
    """Return the command that shows an evaluation in the browser."""
    return f"rlite view {shlex.quote(str(folder))}"


def evaluate(options: EvalConfig, given: ProgramObjects = NOTHING) -> EvaluationResult:
    """Evaluate in the program's session, or in one of its own.

    Args:
        options: options of the command.
        given: rows and rewards of a program, in place of those that the options name.

    Returns:
        Metrics and samples; of two models also the comparison.

    Raises:
        ConfigError: an option or a model cannot be used, or the folder holds samples of other settings.
        DataError: some rows cannot be used, or the two models answered other items.
    """
    serve_if_worker(options)
    with _folder(options) as folder, ExitStack() as until_end:
        models = _find_models(options, given, folder, until_end)
        check_comparable(models)
        result = result_of(models, options)
        if options.folder is not None:
            write_results(folder, models, result)
        return result


def _find_models(options: EvalConfig, given: ProgramObjects, folder: Path, until_end: ExitStack) -> list[Answered]:
    """Return the models with all their samples. Those that are missing are generated now."""
    names = options.names
    asked = dict(zip(names, filter(None, (options.model, options.other)), strict=True))
    if not options.overwrite:
        check_alone(folder, names)
    earlier = {name: found for name in names if (found := _earlier(asked[name], name, folder))}
    if len(earlier) == len(asked):
        _generate([], options)
        return list(earlier.values())
    check_source(options, [model for name, model in asked.items() if name not in earlier])
    items, answers_of = _source(options, given, folder)
    settings = settings_of(options, given, items)
    models: list[Answered] = [
        earlier[name] if name in earlier else candidate(model, name, settings, folder, options, until_end)
        for name, model in asked.items()
    ]
    check_comparable(models)
    now = CLOCK.now()
    time = min(filter(None, (model.time for model in models)), default=now)
    if time.date() != now.date():
        told = f"chat templates that write the date write {time:%Y-%m-%d}, as in the samples that are there"
        print(told, file=sys.stderr, flush=True)
    until_end.enter_context(CLOCK.fixed(time))
    candidates = [each for each in models if isinstance(each, Candidate)]
    answers = [answers_of(each) for each in candidates]
    remove_others(folder, names)
    begin(candidates, folder)
    _generate(answers, options)
    return models


def check_source(options: EvalConfig, models: Sequence[str]) -> None:
    """Check that there is a source of scores for models without results.

    Args:
        options: options of the command.
        models: paths of the models.

    Raises:
        ConfigError: there is no source of scores.
    """
    if not options.sources_of_scores:
        raise ConfigError(
            f"missing: a source of scores for {' and '.join(models)} (reward.path=file.py:function with "
            f"data.path=FILE, env_path=FILE, or tasks=[NAME]). Only an earlier evaluation that is complete, a folder "
            f"with {RESULTS}, needs none; run with --help to see every option"
        )


def _earlier(given: str, name: str, folder: Path) -> EarlierResult | None:
    """Return the result of an earlier evaluation under a name; None if the path is none.

    Raises:
        ConfigError: the result cannot be used, or it is in the folder that this evaluation writes.
    """
    if (found := earlier_result(given)) is None:
        return None
    if folder.resolve() == Path(given).expanduser().resolve():
        raise ConfigError(f"out={folder}: it holds the earlier evaluation that is read; choose another folder")
    return replace(found, name=name)


def _source(options: EvalConfig, given: ProgramObjects, folder: Path) -> tuple[Items, Callable[[Candidate], Answers]]:
    """Return the items, which tasks have not, and a function that returns what a model has still to answer."""
    if options.tasks:
        manager = find_tasks(options)
        return [], lambda model: TaskAnswers(model, manager, options, folder)
    questions = read_questions(options, given)
    return questions.items, lambda model: Generation(model, questions, options)


def _generate(answers: Sequence[Answers], options: EvalConfig) -> None:
    """Generate missing samples, in one session for all models. Ranks that wait for a session get one in any case."""
    pending = [each for each in answers if each.missing]
    folder = options.folder
    if folder is not None:
        INTERRUPTION.advice = advice(options)
    with session_of(options) if pending or has_waiting_ranks(options) else nullcontext():
        for each in pending:
            with nullcontext() if folder is None else recorded(each.candidate, folder):
                each.run()


def advice(options: EvalConfig) -> str:
    """Return how an interrupted evaluation continues."""
    how = "the same command without overwrite=true" if options.overwrite else "the same command"
    return f"Finished samples are in {options.folder}; {how} continues."


def check_comparable(models: Sequence[Answered]) -> None:
    """Check that all models have the same questions, scored in the same way.

    Raises:
        ConfigError: the models differ. The message names the settings.
    """
    first = models[0]
    for other in models[1:]:
        if different := differences(_shared(first), _shared(other)):
            raise ConfigError(
                f"{first.name} and {other.name} cannot be compared: {'; '.join(different)}; evaluate both with the "
                "same data and the same source of scores"
            )


def _shared(model: Answered) -> dict[str, Any]:
    return {key: model.settings.get(key) for key in SAME}


def result_of(models: Sequence[Answered], options: EvalConfig) -> EvaluationResult:
    """Return the metrics of the models, and of two the comparison.

    Args:
        models: with all their samples.
        options: options of the command.

    Raises:
        DataError: `k` is larger than the number of samples.
    """
    evaluated = [_evaluated(model, options) for model in models]
    if len(evaluated) != 2 or not evaluated[0].samples:
        return EvaluationResult(evaluated)
    first, second = (model.samples for model in evaluated)
    lowest = lowest_tasks([line for model in models if is_of_tasks(model) for line in model.lines])
    if highest := lowest and {task_of(sample) for sample in first} - lowest:
        low, high = (", ".join(sorted(tasks)) for tasks in (lowest, highest))
        reason = f"lower is better in {low}, and higher in {high}; compare tasks of one direction in a command"
        return EvaluationResult(evaluated, no_comparison=reason)
    comparison = compare(first, second, options.confidence, options.seed, lower_is_better=bool(lowest))
    return EvaluationResult(evaluated, comparison)


def _evaluated(model: Answered, options: EvalConfig) -> EvaluatedModel:
    samples = sorted((sample_of(row) for row in rows_of(model)), key=lambda sample: sample.sample)
    higher_is_better: dict[str, bool] = {}
    if is_of_tasks(model):
        metrics = summary_of_tasks(model.lines, options.k)
        for line in model.lines:
            higher_is_better |= line.get("higher_is_better", {})
    else:
        fewest = min(Counter(sample.item for sample in samples).values())
        metrics = summary(samples, options.k or fewest, options.solved_at, options.confidence)
    return EvaluatedModel(model.name, model.model, metrics, samples, model.settings, higher_is_better)


def write_results(folder: Path, models: Sequence[Answered], result: EvaluationResult) -> None:
    """Write the record, and then results.json, which appears when everything is written.

    Args:
        folder: folder of the evaluation.
        models: with all their samples.
        result: their metrics.

    Raises:
        StorageError: a file cannot be written.
    """
    remove_others(folder, [model.name for model in models])
    for model in models:
        write_record(folder, model.name, rows_of(model))
    written = {**result.to_json(), "settings": {model.name: model.settings for model in models}}
    with writing(folder / RESULTS):
        files.replace(folder / RESULTS, json.dumps(written, indent=2, allow_nan=False).encode())


@contextmanager
def _folder(options: EvalConfig) -> Iterator[Path]:
    """Hold the folder of the evaluation; if nothing is to be written, one that ends with the block.

    Yields:
        The folder.

    Raises:
        ConfigError: it is the folder of a training run or of a model.
        FolderInUse: another evaluation is under way in it.
        StorageError: it cannot be written.
    """
    if (folder := options.folder) is not None:
        check_no_run(folder)
        with held(folder):
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="rlite-eval-") as temporary:
        yield Path(temporary)
