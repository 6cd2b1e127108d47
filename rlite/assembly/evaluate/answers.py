"""Answers of one model that are still missing: to the prompts of a set, or to tasks of lm-evaluation-harness.

Only `find_tasks` and `TaskAnswers.run` import the harness.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.evaluate.questions import Items, Questions
from rlite.assembly.evaluate.report import continuing, showing_progress
from rlite.data.chat.template import check_template_options
from rlite.data.prompts import check_prompts
from rlite.errors import ConfigError, did_you_mean
from rlite.evaluation.folder import CACHE, Candidate
from rlite.evaluation.record import Row, row_of
from rlite.evaluation.sets import EvaluationSet, places, run_episodes, serving_engine
from rlite.evaluation.tasks import directions, lower_is_better, task_metrics, task_rows, task_values
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow
from rlite.rollout.collector.group import Ended
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.seeds import mix
from rlite.rollout.workflow import RolloutError
from rlite.services.record.recorder import TokenTexts
from rlite.trainer.prompt_lengths import longest_prompt, model_limit, vocab_size_of
from rlite.wording import counted

MAX_MODEL_LEN = 16_384
"""longest sequence, in tokens, if neither `max_model_len` nor the prompts say it"""


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


MAX_FAILURES = 16
"""items with failures, and no success before them, that end the command"""


class PromptAnswers:
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
        done = {(line["group"], line["sample"]) for line in candidate.lines}
        self._num_expected = len(questions.items) * options.samples
        self.missing = [place for place in places(len(questions.items), options.samples) if place not in done]
        """samples that are missing"""
        self._held: list[Row] = []
        self._has_succeeded = any(line["status"] == "evaluated" for line in candidate.lines)
        if self.missing:
            model = candidate.model
            tokenizer, self._texts = model_tokenizer(model, options), TokenTexts(model_tokenizer(model, options))
            limit, where = context_limit(model, options), f"data.path={options.data.path}"
            if_unknown = functools.cache(lambda: unknown_context(model, options, limit))
            workflow = questions.make_workflow(options.sampling, tokenizer, if_unknown)
            self._set = EvaluationSet(candidate.name, questions.items, workflow, options.samples)
            self._context = context_to_serve(workflow, questions.items, limit, where, if_unknown, vocab_size_of(model))

    def run(self) -> None:
        """Generate the missing samples in the current session; each goes to the journal as it ends.

        Raises:
            RolloutError: all samples failed.
        """
        options, name = self._options, self.candidate.name
        continuing(name, self._num_expected - len(self.missing), self._num_expected, "samples")
        engine = serving_engine(self.candidate.model, options, self._context, options.seed)
        limits = CollectorOptions(
            request_timeout=options.timeout,
            request_retries=options.retries,
            keep_ended=True,
            seed=options.seed,
            max_concurrent_rollouts=options.num_concurrent(len(engine.executors)),
        )
        begun = time.monotonic()
        try:
            with showing_progress(lambda: self._progress(begun)):
                run_episodes(engine, self._set, self.missing, limits, self._keep)
            if self._held:
                raise self._nothing_but_failures()
        finally:
            engine.release()

    def _keep(self, ended: Ended) -> None:
        """Write a sample. Failed samples are held back until one succeeds: a broken reward gives no result.

        Raises:
            RolloutError: all samples failed.
        """
        has_tokens = ended.group < self._options.record_tokens
        self._held.append(row_of(ended, self._questions.ids[ended.group], self._texts, has_tokens))
        self._has_succeeded |= ended.status == "evaluated"
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
        before, now = self._num_expected - len(self.missing), len(self.candidate.lines)
        pace = (now - before) / max(time.monotonic() - begun, 1e-9)
        return f"{self.candidate.name}: {now} of {self._num_expected} samples, {pace:.1f} per second"


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
        engine = serving_engine(name, options, context, seed)
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


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


def _hint(name: str, known: Sequence[str]) -> str:
    """Return the nearest task; there are too many to name them all."""
    told = did_you_mean(name, known)
    return told if told.startswith("did you mean") else "`lm-eval ls tasks` names all; task_path=FOLDER adds some"
