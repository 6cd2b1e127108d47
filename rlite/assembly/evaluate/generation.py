"""Answers of one model to the questions that it has not answered yet.

The items of an evaluation, and the workflow that asks and scores them.

Tasks of lm-evaluation-harness, answered by one model. Only `find_tasks` and `TaskAnswers.run` import the package.

Metrics of tasks of lm-evaluation-harness, and of several samples of their answers.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

import rlite
from rlite.assembly.evaluate.folder import CACHE, Candidate
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.evaluate.report import continuing, showing_progress
from rlite.data.chat.template import check_template_options
from rlite.data.prompts import check_prompts
from rlite.data.rows import place_of, read_source
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, did_you_mean
from rlite.evaluation.journal import Sample
from rlite.evaluation.metrics import clustered_standard_error, summary
from rlite.evaluation.sets import EndedEpisode, EpisodeRunner, Place, Row, row_of, sample_of
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import mix
from rlite.rollout.environments.workflow import environment_workflow
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.workflow import RolloutError
from rlite.services.record.recorder import TokenTexts
from rlite.trainer.model.prompt_lengths import longest_prompt, model_limit, vocab_size_of
from rlite.trainer.run.program_objects import ProgramObjects
from rlite.types import GenerationHyperparameters
from rlite.wording import counted

NUM_EPISODES = 100
"""episodes of an environment that needs no data"""
MAX_MODEL_LEN = 16_384
"""longest sequence, in tokens, if neither `max_model_len` nor the prompts say it"""
Items = Sequence[Mapping[str, Any]]
MakeWorkflow = Callable[[GenerationHyperparameters, PreTrainedTokenizerBase, Callable[[], int]], RolloutWorkflow]
"""makes a workflow of its sampling, the tokenizer, and a function that returns the longest sequence of several turns"""


@dataclass(frozen=True)
class Questions:
    """The items, and how they are asked and scored."""

    items: Items
    ids: Sequence[str]
    """id of each item"""
    make_workflow: MakeWorkflow


def read_questions(options: EvalConfig, given: ProgramObjects) -> Questions:
    """Return the items that the options name, and the maker of their workflow.

    Args:
        options: options of the command.
        given: rows and rewards of a program, in place of those of the paths.

    Raises:
        ConfigError: a source of items is missing, or a source of items or scores cannot be used.
        DataError: some rows cannot be used.
    """
    options.check_complete()
    items, where = _read_items(options, given), f"data.path={options.data.path}"
    make = _workflow_maker(options, given, items, where)
    return Questions(items, item_ids(items, where), make)


def item_ids(items: Items, where: str) -> list[str]:
    """Return the id of each item: its `id`, else its number.

    Args:
        items: rows of the data.
        where: their name in messages.

    Raises:
        DataError: two items have the same id.
    """
    places: dict[str, int] = {}
    for number, item in enumerate(items):
        id = str(number if item.get("id") is None else item["id"])
        if id in places:
            raise DataError(
                f"{place_of(items, number, where)}: its id {id!r} is also that of row index {places[id]}; give each "
                "its own, or number the rows (data.columns.id=null)"
            )
        places[id] = number
    return list(places)


def model_tokenizer(folder: str, options: EvalConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint.

    Args:
        folder: folder or hub name of the checkpoint.
        options: options of the command.

    Raises:
        CheckpointError: the tokenizer is unusable.
        ConfigError: the checkpoint has no tokenizer, or no chat template for the options.
    """
    tokenizer = load_tokenizer(folder)
    if options.data.chat_template_options:
        check_template_options(tokenizer, options.data.chat_template_options, "data.chat_template_options")
    return tokenizer


def context_limit(folder: str, options: EvalConfig) -> int:
    """Return the longest sequence that a model and `max_model_len` allow, in tokens.

    Args:
        folder: folder or hub name of the checkpoint.
        options: options of the command.
    """
    own = model_limit(folder)
    if own and options.max_model_len is not None and options.max_model_len > own:
        cap = f"at most {own} tokens, the model's max_position_embeddings"
        print(f"{folder}: max_model_len={options.max_model_len}: {cap}", file=sys.stderr, flush=True)
    return min(own or sys.maxsize, options.max_model_len or sys.maxsize)


def unknown_context(folder: str, options: EvalConfig, limit: int) -> int:
    """Return the longest sequence, in tokens, if the prompts do not say it.

    Args:
        folder: folder or hub name of the checkpoint.
        options: options of the command.
        limit: longest sequence that is allowed.
    """
    if options.max_model_len is not None or limit <= MAX_MODEL_LEN:
        return limit
    cap = f"sequences of at most {MAX_MODEL_LEN} tokens, the default; max_model_len=N allows up to {limit}"
    print(f"{folder}: {cap}", file=sys.stderr, flush=True)
    return MAX_MODEL_LEN


def context_to_serve(
    workflow: RolloutWorkflow, items: Items, limit: int, where: str, if_unknown: Callable[[], int], vocab_size: int
) -> int:
    """Return the longest sequence to serve, in tokens, after a check of all prompts.

    Args:
        workflow: asks the items.
        items: rows of the data.
        limit: longest sequence that is allowed.
        where: name of the items in messages.
        if_unknown: returns the longest sequence if prompts and workflow do not say it.
        vocab_size: size of the model's vocabulary.
    """
    if not workflow.needs_prompt:
        return if_unknown()
    check_prompts(items, where)
    limits = "(the least of the model's max_position_embeddings and max_model_len); drop the row"
    longest = longest_prompt(items, workflow, limit, where, limits, vocab_size=vocab_size)
    needed = workflow.longest_sequence(longest) if longest else None
    return if_unknown() if needed is None else min(limit, needed)


def _read_items(options: EvalConfig, given: ProgramObjects) -> Items:
    """Return the rows of the data, or seeds of an environment."""
    if options.data.path is None:
        return [{"seed": seed} for seed in range(options.limit or NUM_EPISODES)]
    return read_source(given.source(options.data.source()), "prompts")[: options.limit]


def _workflow_maker(options: EvalConfig, given: ProgramObjects, items: Items, where: str) -> MakeWorkflow:
    if (name := options.workflow) is not None:
        return lambda sampling, tokenizer, _: WORKFLOWS[name](sampling, tokenizer)
    own = {"chat_template_options": options.data.chat_template_options}
    if options.env_path is not None:
        make = environment_workflow(options.env_path, **options.process_options)
        turns = options.max_turns
        return lambda sampling, tokenizer, limit: make(sampling, tokenizer, max_turns=turns, max_length=limit(), **own)
    rewards = ChosenRewards(options.reward, given.functions())
    rewards.check_columns(items, where)
    reward = rewards.make()
    return lambda sampling, tokenizer, _: SingleTurnWorkflow(reward, sampling, tokenizer, **own)


MAX_FAILURES = 16
"""items with failures, and no success before them, that end the command"""


class Generation:
    """The answers that a model has still to give. Making it checks the model and all prompts; no weights are read.

    Args:
        candidate: the model, and the samples that it has.
        questions: the items, and how they are asked.
        options: options of the command.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
        DataError: a prompt cannot be asked.
    """

    def __init__(self, candidate: Candidate, questions: Questions, options: EvalConfig) -> None:
        self.candidate, self._questions, self._options = candidate, questions, options
        done = {(line["group"], line["sample"]) for line in candidate.journal.lines}
        self._all = [Place(item, sample) for item in range(len(questions.items)) for sample in range(options.samples)]
        self.missing = [place for place in self._all if (place.item, place.sample) not in done]
        """samples that are missing"""
        self._held: list[Row] = []
        self._has_succeeded = any(line["status"] == "evaluated" for line in candidate.journal.lines)
        if self.missing:
            tokenizer = model_tokenizer(candidate.model, options)
            self._texts = TokenTexts(model_tokenizer(candidate.model, options))
            limit = context_limit(candidate.model, options)
            if_unknown = functools.cache(lambda: unknown_context(candidate.model, options, limit))
            self._workflow = questions.make_workflow(options.sampling, tokenizer, if_unknown)
            where = f"data.path={options.data.path}"
            self._context = context_to_serve(
                self._workflow, questions.items, limit, where, if_unknown, vocab_size_of(candidate.model)
            )

    def run(self) -> None:
        """Generate the missing samples in the current session; each goes to the journal as it ends.

        Raises:
            RolloutError: all samples failed.
        """
        continuing(self.candidate.name, len(self._all) - len(self.missing), len(self._all), "samples")
        engine = build_engine(self.candidate.model, self._options, self._context)
        limits = CollectorOptions(
            request_timeout=self._options.timeout, request_retries=self._options.retries, keep_ended=True
        )
        concurrent = self._options.num_concurrent(len(engine.executors))
        runner = EpisodeRunner(engine, self._workflow, self._questions.items, limits, self._options.seed, concurrent)
        begun = time.monotonic()
        try:
            with showing_progress(lambda: self._progress(begun)):
                runner.run(self.missing, self._keep)
            if self._held:
                raise self._nothing_but_failures()
        finally:
            engine.release()

    def _keep(self, episode: EndedEpisode) -> None:
        """Write a sample. Failed samples are held back until one succeeds: a broken reward gives no result.

        Raises:
            RolloutError: all samples failed.
        """
        item = episode.place.item
        has_tokens = item < self._options.record_tokens
        self._held.append(row_of(episode, self._questions.ids[item], self._texts, has_tokens))
        self._has_succeeded |= episode.has_succeeded
        if self._has_succeeded:
            while self._held:
                self.candidate.journal.append(self._held[0])
                self._held.pop(0)
        elif len({held["group"] for held in self._held}) == MAX_FAILURES:
            raise self._nothing_but_failures()

    def _nothing_but_failures(self) -> RolloutError:
        num_episodes, reason = len(self._held), self._held[-1]["reason"]
        return RolloutError(f"the first {num_episodes} episodes failed, the last with {reason}; none of them counts")

    def _progress(self, begun: float) -> str:
        before, now = len(self._all) - len(self.missing), len(self.candidate.journal.lines)
        pace = (now - before) / max(time.monotonic() - begun, 1e-9)
        return f"{self.candidate.name}: {now} of {len(self._all)} samples, {pace:.1f} per second"


def build_engine(
    model: str, options: EvalConfig, max_model_len: int | None, seed: int | None = None
) -> RliteInferenceEngine:
    """Return an engine of the current session that serves a model on all devices.

    Args:
        model: folder or hub name of the checkpoint.
        options: options of the command.
        max_model_len: longest sequence, in tokens; None is the engine's default.
        seed: seed of requests without a seed of their own; default: the seed of the options.

    Raises:
        ConfigError: the replicas do not divide the devices.
    """
    world = len(rlite.current_session().devices)
    if world % options.tp_size:
        raise ConfigError(f"tp_size={options.tp_size} does not divide {world} devices")
    engine = RliteInferenceEngine(model, executor=options.executor)
    seed = options.seed if seed is None else seed
    engine.build(**options.build_options(world), max_model_len=max_model_len, seed=seed)
    return engine


Lines = Sequence[Mapping[str, Any]]
"""lines of a journal: a task that has ended, or one sample of its answers"""


def task_metrics(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of tasks: TASK/METRIC and TASK/METRIC_stderr, with the harness's filter if it has a name.

    A metric that is not finite, such as the standard error of a single question, is left out.

    Args:
        results: the harness's `results`, by task.
    """
    for task, own in results.items():
        for key, value in own.items():
            metric, _, name = key.partition(",")
            if name and _is_finite(value):
                end = "_stderr" if metric.endswith("_stderr") else ""
                yield f"{_name(task, metric.removesuffix('_stderr'), name)}{end}", float(value)


def directions(
    results: Mapping[str, Mapping[str, Any]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> Iterator[tuple[str, bool]]:
    """Yield whether a higher value is better, for each metric of `task_metrics` of which the task says it.

    Args:
        results: the harness's `results`, by task.
        higher_is_better: the harness's `higher_is_better`, by task and metric.
    """
    for task, own in results.items():
        for key in own:
            metric, _, name = key.partition(",")
            is_higher = higher_is_better.get(task, {}).get(metric)
            if name and is_higher is not None:
                yield _name(task, metric, name), is_higher


def lower_is_better(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], higher_is_better: Mapping[str, Mapping[str, bool | None]]
) -> list[str]:
    """Return the tasks whose score, the first metric, is better the lower it is.

    Args:
        samples: the harness's `samples`, by task.
        higher_is_better: the harness's `higher_is_better`, by task and metric.
    """
    scored = {task: own[0]["metrics"][0] for task, own in samples.items() if own and own[0]["metrics"]}
    return [task for task, metric in scored.items() if higher_is_better.get(task, {}).get(metric) is False]


def task_values(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return the values of each metric, one for each question in order, by the names of `task_metrics`.

    A metric with a value that is no finite number is left out.

    Args:
        samples: the harness's `samples`, by task.
    """
    found: dict[str, list[Any]] = {}
    for task, own in samples.items():
        for question in own:
            for metric in question["metrics"]:
                found.setdefault(_name(task, metric, question["filter"]), []).append(question[metric])
    return {name: [float(value) for value in values] for name, values in found.items() if all(map(_is_finite, values))}


def summary_of_tasks(lines: Lines, k: int | None = None) -> dict[str, float]:
    """Return the metrics of all tasks. Of several samples: their means, with errors clustered by question, and pass@k.

    Args:
        lines: all lines of a journal.
        k: largest k of pass@k; None: the number of samples.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(line["task"] for line in lines):
        runs = [line for line in lines if line["task"] == name]
        metrics |= runs[0]["metrics"] if len(runs) == 1 else {**_means(runs), **dict(_passes(runs, k))}
    return metrics


def _means(runs: Lines) -> dict[str, float]:
    """Return the mean of each metric over the samples.

    A metric that is the mean of its values over the questions has a standard error. Of others, such as BLEU, the error
    of a mean over samples is unknown.
    """
    metrics: dict[str, float] = {}
    for name in runs[0]["metrics"]:
        found = [run["metrics"].get(name) for run in runs]
        if name.endswith("_stderr") or None in found:
            continue
        metrics[name] = math.fsum(found) / len(found)
        if (error := _error(name, runs)) is not None:
            metrics[f"{name}_stderr"] = error
    return metrics


def _error(name: str, runs: Lines) -> float | None:
    if len({run["metrics"][name] for run in runs}) == 1 and not any(name in run["values"] for run in runs):
        return runs[0]["metrics"].get(f"{name}_stderr")  # log-likelihoods of a group of tasks: the same in all samples
    values = [run["values"].get(name, ()) for run in runs]
    is_mean = [
        len(own) > 1 and math.isclose(math.fsum(own) / len(own), run["metrics"][name], rel_tol=1e-9, abs_tol=1e-12)
        for own, run in zip(values, runs, strict=True)
    ]
    return clustered_standard_error(list(zip(*values, strict=True))) if all(is_mean) else None


def _passes(runs: Lines, k: int | None) -> Iterator[tuple[str, float]]:
    """Yield TASK/pass@k, with its standard error, of the tasks whose scores are all 0 or 1, and better if higher."""
    tasks: dict[str, list[Sample]] = {}
    for sample in (sample_of(row) for run in runs for row in run["rows"]):
        tasks.setdefault(task_of(sample), []).append(sample)
    for task in lowest_tasks(runs):
        tasks.pop(task, None)
    for task, own in tasks.items():
        num_samples = min(Counter(sample.item for sample in own).values())  # fewer where a score was no number
        if num_samples > 1 and all(sample.score in (0.0, 1.0, None) for sample in own):
            metrics = summary(own, min(num_samples, k or num_samples))
            yield from ((f"{task}/{name}", value) for name, value in metrics.items() if name.startswith("pass@"))


def task_of(sample: Sample) -> str:
    """Return the task of a sample."""
    return sample.item.rpartition("/")[0]


def lowest_tasks(lines: Lines) -> set[str]:
    """Return the tasks whose score is better the lower it is.

    Args:
        lines: lines of a journal.
    """
    return {task for line in lines for task in line.get("lower_is_better", ())}


def _name(task: str, metric: str, filter_name: str) -> str:
    return f"{task}/{metric}" + ("" if filter_name == "none" else f",{filter_name}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


HARNESS = "rlite.evaluation.lm_eval"
"""module that imports the harness"""
BOOTSTRAP_ITERS = 100_000
"""draws for the standard errors of metrics that are no means, as in the harness's own command"""


def find_tasks(options: EvalConfig) -> Any:
    """Return the harness's task manager, which knows all tasks of the options.

    Args:
        options: options of the command.

    Raises:
        ConfigError: the package is missing, or a task is unknown.
    """
    harness = import_module(HARNESS)
    if options.task_path is not None and not Path(options.task_path).is_dir():
        raise ConfigError(f"task_path={options.task_path}: no such folder")
    own = harness.TaskManager(include_path=options.task_path, include_defaults=False) if options.task_path else None
    if own is not None and not _unknown(own, options.tasks):
        return own  # the harness takes seconds to find its thousands of tasks
    manager = harness.TaskManager(include_path=options.task_path)
    for name in _unknown(manager, options.tasks):
        raise ConfigError(f"tasks: no task {name!r}; {_hint(name, manager.all_tasks)}")
    return manager


class TaskAnswers:
    """The tasks that a model has still to do. Making it checks the model; no weights are read.

    The journal has a line for each task that has ended, or for each sample of a task that generates text. The harness's
    cache has greedy answers and log-likelihoods of the task under way.

    Args:
        candidate: the model, and the tasks that it has done.
        manager: the harness's task manager.
        options: options of the command.
        folder: folder of the evaluation.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """

    def __init__(self, candidate: Candidate, manager: Any, options: EvalConfig, folder: Path) -> None:
        self.candidate, self._manager, self._options = candidate, manager, options
        self._cache = folder / CACHE / candidate.name
        self._num_samples = {line["task"]: line.get("samples", 1) for line in candidate.lines}
        self._done = Counter(line["task"] for line in candidate.lines)
        self.missing = [name for name in options.tasks if self._done[name] < self._num_samples.get(name, 1)]
        """tasks that have not ended"""
        model_tokenizer(candidate.model, options)

    def run(self) -> None:
        """Do the missing tasks in the current session; each goes to the journal as it ends."""
        num_tasks = len(self._options.tasks)
        continuing(self.candidate.name, num_tasks - len(self.missing), num_tasks, "tasks")
        name, options = self.candidate.model, self._options
        context = unknown_context(name, options, context_limit(name, options))
        num_before = len(self.candidate.lines)
        # the engine numbers its requests from 0: with the same seed, further samples would repeat the first ones
        seed = mix(self._options.seed, num_before) % 2**32 if num_before else self._options.seed  # as NumPy takes it
        engine = build_engine(name, options, context, seed)
        self._cache.mkdir(parents=True, exist_ok=True)
        try:
            batch_size = options.num_concurrent(len(engine.executors))
            model = import_module(HARNESS).RliteLM(engine, batch_size=batch_size)
            for task in self.missing:
                self._do(task, model)
        finally:
            engine.release()

    def _do(self, name: str, model: Any) -> None:
        """Do the missing samples of a task. The first one shows whether there are others."""
        num_samples, sample = self._num_samples.get(name, 1), self._done[name]
        continuing(f"{self.candidate.name}, task {name}", sample, num_samples, "samples")
        num_cut = model.num_cut
        while sample < num_samples:
            with showing_progress(partial(self._progress, name, sample, model)):
                line = self._line(name, sample, model)
            self.candidate.journal.append(line)
            num_samples, sample = line["samples"], sample + 1
        if num_samples < self._options.samples:
            self._tell(name, "its log-likelihoods are the same for every sample; it was done once")
        if num_cut := model.num_cut - num_cut:
            longest = f"the model reads {model.max_length} tokens; max_model_len=N may allow more"
            self._tell(name, f"{counted(num_cut, 'context')} lost the beginning ({longest})")

    def _tell(self, task: str, what: str) -> None:
        print(f"{self.candidate.name}, task {task}: {what}", file=sys.stderr, flush=True)

    def _progress(self, name: str, sample: int, model: Any) -> str:
        of = f" (sample {sample + 1} of {self._options.samples})" if sample else ""
        return f"{self.candidate.name}: task {name}{of}, {model.num_answered} of {model.num_requests} requests so far"

    def _line(self, name: str, sample: int, model: Any) -> dict[str, Any]:
        options = self._options
        found = import_module(HARNESS).simple_evaluate(
            model=model,
            tasks=[name],
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.chat,
            task_manager=self._manager,
            use_cache=str(self._cache / "answers"),
            random_seed=options.seed,
            gen_kwargs=options.sampling_of_tasks,
            bootstrap_iters=0 if sample else BOOTSTRAP_ITERS,
        )
        kinds = {task: config.get("output_type") for task, config in found["configs"].items()}
        generated = {task: own for task, own in found["samples"].items() if kinds[task] == "generate_until"}
        return {
            "task": name,
            "sample": sample,
            "samples": options.samples if generated else 1,
            "metrics": dict(task_metrics(found["results"])),
            "higher_is_better": dict(directions(found["results"], found["higher_is_better"])),
            "lower_is_better": lower_is_better(found["samples"], found["higher_is_better"]),
            "values": task_values(generated) if generated and options.samples > 1 else {},
            "rows": list(task_rows(generated if sample else found["samples"], sample)),
        }


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


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


def _hint(name: str, known: Sequence[str]) -> str:
    """Return the nearest task; there are too many to name them all."""
    told = did_you_mean(name, known)
    return told if told.startswith("did you mean") else "`lm-eval ls tasks` names all; task_path=FOLDER adds some"
