"""Tasks of lm-evaluation-harness, answered by one model. Only `find_tasks` and `TaskAnswers.run` import the package."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError, did_you_mean
from rlite.evaluation.rows import Row
from rlite.rollout.collector.seeds import mix
from rlite.trainer.evaluate.folder import CACHE
from rlite.trainer.evaluate.generation import build_engine
from rlite.trainer.evaluate.models import Candidate
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.evaluate.progress import continuing, showing_progress
from rlite.trainer.evaluate.questions import context_limit, model_tokenizer, unknown_context
from rlite.trainer.evaluate.task_metrics import directions, lower_is_better, task_metrics, task_values
from rlite.wording import counted

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
