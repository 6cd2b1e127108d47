"""Questions of `rlite eval`, and the answers of one model that are still missing: to prompts, or to tasks of a harness.

The settings of an evaluation are all that decides its samples: the questions, the code that scores, the model, the
sampling. Samples of other settings are not mixed. Only `find_tasks` and `TaskAnswers` import lm-evaluation-harness.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import marshal
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import FunctionType
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlite import config
from rlite.assembly.commands.generate import check_writes, model_folder
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.prints import Prints
from rlite.assembly.workflows import own_rewards
from rlite.data.chat.template import check_template_options, with_template
from rlite.data.rows import check_prompts, place_of, read_source
from rlite.errors import ConfigError, DataError, RolloutError, did_you_mean
from rlite.evaluation.episodes import run_episodes, serving_engine
from rlite.evaluation.folder import CACHE, SAMPLES, Candidate
from rlite.evaluation.journal import Journal, missing_places, time_of
from rlite.evaluation.metrics import directions, lower_is_better, task_metrics, task_values
from rlite.evaluation.record import Row, row_of, task_rows
from rlite.evaluation.sets import EvaluationSet, make_set
from rlite.nn.pretrained import load_tokenizer, local_checkpoint
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.collector.ended import Ended
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.environments.file import code_file
from rlite.rollout.episode import mix
from rlite.rollout.registry import WORKFLOWS, find_reward
from rlite.rollout.rewards.adapters import TrlReward
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.models import reward_models
from rlite.rollout.rewards.options import RewardOptions
from rlite.runtime.sandbox.prints import listening
from rlite.services.console.terminal import ConsoleReporter
from rlite.services.environments.contracts import contract_workflow
from rlite.services.record.recorder import TokenTexts
from rlite.trainer.held_out import GeneratedOptions, held_out_sources, key_of
from rlite.trainer.model.prompt_lengths import Rows, longest_prompt, model_limit, vocab_size_of
from rlite.trainer.options import SamplingOptions, TableOptions
from rlite.trainer.rl.reward_engines import RewardEngines
from rlite.trainer.run.folder import PRINTS
from rlite.trainer.run.program_objects import ProgramObjects
from rlite.types import GenerationHyperparameters
from rlite.wording import counted

WEIGHTS = (".safetensors", ".bin", ".json", ".jinja", ".model")
"""files of a checkpoint that decide its answers"""
TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl")
"""files of a folder with tasks that decide its questions"""
_SCORED_BY = ("env_path", "env_timeout", "env_memory_limit_gib", "max_turns", "workflow")
_TASKS = ("tasks", "num_fewshot", "chat", "limit")
_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k")
_SAMPLED_BY = ("samples", "seed", "executor", "dtype", "deterministic", "max_model_len")
_REWARD = ("path", "weight", "timeout", "memory_limit_gib", "in_process")
NUM_EPISODES = 100
"""episodes of an environment that needs no data"""
MakeWorkflow = Callable[[GenerationHyperparameters, PreTrainedTokenizerBase, Callable[[], int]], RolloutWorkflow]
"""makes a workflow of its sampling, the tokenizer, and a function that returns the longest sequence of several turns"""
MAX_MODEL_LEN = 16_384
"""longest sequence, in tokens, if neither `max_model_len` nor the prompts say it"""
MAX_RECOVERIES = 3
"""most recoveries of the engine of a reward model in an hour, as many as of replicas"""
MAX_FAILURES = 16
"""items with failures, and no success before them, that end the command"""
HARNESS = "rlite.evaluation.lm_eval"
"""module that imports the harness"""
BOOTSTRAP_ITERS = 100_000
"""draws for the standard errors of metrics that are no means, as in the harness's own command"""
QUIET_S = 10.0
"""seconds between two lines in a file or a pipe"""


@dataclass(frozen=True)
class EvaluationRequest:
    """Request of a command to its models."""

    options: EvalConfig
    given: ProgramObjects
    """rows and rewards of a program, in place of those that the options name"""

    def code(self) -> dict[str, str]:
        """Return a digest of the code behind each source of scores, by the file or the name of the source.

        Raises:
            ConfigError: a reward does not exist.
            ImportFailed: the file or module of a reward does not exist, or raised an exception.
        """
        options, functions = self.options, self.given.functions()
        found: dict[str, str] = {}
        for name, own in options.reward.items():
            if own.path is None:
                found[own.source] = digest([json.dumps(scored_by(own), sort_keys=True)])
                continue
            file = Path(own.path.rpartition(":")[0])
            if name in functions or not file.is_file():
                found[own.path] = digest_of(functions.get(name) or find_reward(own.path, f"reward.{name}.path"))
            else:
                found[str(file)] = digest([file.read_bytes()])
        if options.env_path is not None and (file := Path(code_file(options.env_path))).is_file():
            found[options.env_path] = digest([file.read_bytes()])
        if options.workflow is not None:
            found[options.workflow] = digest_of(WORKFLOWS[options.workflow])
        return found

    def settings(self, rows: Rows) -> dict[str, Any]:
        """Return the settings that decide the samples, except for the model's, as values of JSON.

        Args:
            rows: the prompts, as they are asked.
        """
        options, plain = self.options, config.to_container(self.options)
        sampling = {name: getattr(options.sampling, name) for name in _SAMPLING}
        if options.stop_token_ids:  # absent from settings of older versions
            sampling["stop_token_ids"] = options.stop_token_ids
        rewards = {name: {key: own[key] for key in _REWARD} for name, own in plain["reward"].items()}
        sources = {name: plain[name] for name in _SCORED_BY}
        if options.env_config:  # absent from settings of older versions
            sources["env_config"] = plain["env_config"]
        content = (json.dumps(row, sort_keys=True, default=str) for row in rows)
        return {
            "questions": {"number": len(rows), "content": digest(content)} if rows else {},
            "chat_template_options": plain["data"]["chat_template_options"],
            "scores": {"reward": rewards, **sources, "code": self.code()},
            "tasks": self._tasks(plain) if options.tasks else {},
            "sampling": {**sampling, "stop": plain["stop"], **{name: plain[name] for name in _SAMPLED_BY}},
        }

    def _tasks(self, plain: Mapping[str, Any]) -> dict[str, Any]:
        files = sorted(Path(plain["task_path"]).rglob("*")) if plain["task_path"] else []
        own = [file.read_bytes() for file in files if file.suffix in TASK_FILES]
        sampling = self.options.sampling_of_tasks
        generation = {} if sampling is None else {"generation": sampling}
        return {**{name: plain[name] for name in _TASKS}, "task_path": digest(own), **generation}

    def candidate(
        self, given: str, name: str, settings: Mapping[str, Any], folder: Path, journals: ExitStack
    ) -> Candidate:
        """Return a model with the samples that its journal holds.

        Args:
            given: folder of a model or of a run, or hub name.
            name: name of the model in the record.
            settings: further settings that decide the samples.
            folder: holds the journals.
            journals: closes the journal at its end.

        Raises:
            ConfigError: there is no such model, it writes no text, or the journal holds samples of other settings,
                or lines that are no samples.
        """
        model = model_folder(given)
        check_writes(model)
        own = {"model": model_settings(model), **settings}
        journal = Journal(folder / SAMPLES / f"{name}.jsonl", own, self.options.overwrite)
        journals.callback(journal.close)
        missing_places(own, journal.lines, journal.path)
        time = None if journal.is_new else time_of(journal.path)
        return Candidate(name, model, own, journal.lines, time, journal=journal)

    def questions(self) -> tuple[Rows, MakeWorkflow]:
        """Return the items that the options name, and the maker of the workflow that asks and scores them.

        Raises:
            ConfigError: a source of items is missing, or a source of items or scores cannot be used.
            DataError: some rows cannot be used.
        """
        options = self.options
        options.check_complete()
        if options.data.path is None:
            items: Rows = [{"seed": seed} for seed in range(options.limit or NUM_EPISODES)]
        else:
            items = read_source(self.given.source(options.data.source()), "prompts")[: options.limit]
        return items, self._workflow_maker(items)

    @property
    def where(self) -> str:
        """Name of the items in messages."""
        return f"data.path={self.options.data.path}"

    def _workflow_maker(self, items: Rows) -> MakeWorkflow:
        options = self.options
        if (name := options.workflow) is not None:
            return lambda sampling, tokenizer, _: WORKFLOWS[name](sampling, tokenizer)
        own = {"chat_template_options": options.data.chat_template_options}
        if options.env_path is not None:
            make = partial(contract_workflow(options.env_path, options.env_config, **options.process_options), **own)
            turns = options.max_turns
            return lambda sampling, tokenizer, limit: make(sampling, tokenizer, max_turns=turns, max_length=limit())
        rewards = ChosenRewards(options.reward, self.given.functions())
        rewards.check_columns(items, self.where)
        reward = rewards.make()
        return lambda sampling, tokenizer, _: SingleTurnWorkflow(reward, sampling, tokenizer, **own)

    def tokenizer(self, folder: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a checkpoint.

        Args:
            folder: folder or hub name of the checkpoint.

        Raises:
            CheckpointError: the tokenizer is unusable.
            ConfigError: the checkpoint has no tokenizer, or no chat template for the options.
        """
        data = self.options.data
        tokenizer, own = load_tokenizer(folder), data.chat_template_options
        tokenizer = with_template(tokenizer, data.chat_template_path, "data.chat_template_path")
        if own:
            check_template_options(tokenizer, own, "data.chat_template_options")
        return tokenizer

    def context_limit(self, folder: str) -> int:
        """Return the longest sequence that a model and `max_model_len` allow, in tokens.

        Args:
            folder: folder or hub name of the checkpoint.
        """
        own, asked = model_limit(folder), self.options.max_model_len
        if own and asked is not None and asked > own:
            tell(f"{folder}: max_model_len={asked}: at most {own} tokens, the model's max_position_embeddings")
        return min(own or sys.maxsize, asked or sys.maxsize)

    def known_context(self, asked: EvaluationSet, folder: str, limit: int) -> int | None:
        """Return the longest sequence, in tokens, after a check of all prompts; None if the prompts do not say it.

        Args:
            asked: the prompts, and the workflow that asks them.
            folder: folder or hub name of the checkpoint.
            limit: longest sequence that is allowed.
        """
        if not asked.workflow.needs_prompt:
            return None
        check_prompts(asked.rows, self.where)
        limits = "(the least of the model's max_position_embeddings and max_model_len); drop the row"
        vocab_size = vocab_size_of(folder)
        longest = longest_prompt(asked.rows, asked.workflow, limit, self.where, limits, vocab_size=vocab_size)
        needed = asked.workflow.longest_sequence(longest) if longest else None
        return None if needed is None else min(limit, needed)

    def unknown_context(self, folder: str, limit: int) -> int:
        """Return the longest sequence, in tokens, if the prompts do not say it.

        Args:
            folder: folder or hub name of the checkpoint.
            limit: longest sequence that is allowed.
        """
        if self.options.max_model_len is not None or limit <= MAX_MODEL_LEN:
            return limit
        cap = f"sequences of at most {MAX_MODEL_LEN} tokens, the default; max_model_len=N allows up to {limit}"
        tell(f"{folder}: {cap}")
        return MAX_MODEL_LEN

    def find_tasks(self) -> Any:
        """Return the harness's task manager, which knows all tasks of the options.

        Raises:
            ConfigError: the package is missing, or a task is unknown.
        """
        harness, path, tasks = import_module(HARNESS), self.options.task_path, self.options.tasks
        if path is not None and not Path(path).is_dir():
            raise ConfigError(f"task_path={path}: no such folder")
        own = harness.TaskManager(include_path=path, include_defaults=False) if path else None
        if own is not None and not _unknown(own, tasks):
            return own  # the harness takes seconds to find its thousands of tasks
        manager = harness.TaskManager(include_path=path)
        for name in _unknown(manager, tasks):
            told = did_you_mean(name, manager.all_tasks)  # there are too many to name them all
            others = "`lm-eval ls tasks` names all; task_path=FOLDER adds some"
            raise ConfigError(f"tasks: no task {name!r}; {told if told.startswith('did you mean') else others}")
        return manager


def scored_by(own: RewardOptions) -> dict[str, Any]:
    """Return what decides the scores of a reward model or a judge: the files of the model, or request and rubric."""
    if own.model is not None:
        return model_settings(own.model)
    assert own.judge is not None
    return {**own.judge.model_dump(exclude={"key_env", "key_file"}), "rubric": own.judge.rubric_text("judge")}


def _unknown(manager: Any, names: Sequence[str]) -> list[str]:
    return [name for name in names if not manager.match_tasks([name])]


def tell(text: str) -> None:
    """Print a remark on the evaluation."""
    print(text, file=sys.stderr, flush=True)


def digest_of(scorer: Any) -> str:
    """Return a digest of the code of a function, a class or a callable object.

    The code is the whole file of the definition. For code of the program itself (`__main__`) and code without a file it
    is the function alone. An object without any Python code gets a digest that equals no other.

    Args:
        scorer: a reward or the maker of a workflow.
    """
    contents = {_content(function) for function in _functions(scorer)}
    return digest(sorted(contents)) if contents else f"unknown {secrets.token_hex(8)}"


def digest(parts: Iterable[str | bytes]) -> str:
    """Return a short digest of texts or bytes, in this order."""
    made = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        made.update(hashlib.sha256(content).digest())
    return made.hexdigest()[:16]


def _functions(scorer: Any) -> Iterator[FunctionType]:
    """Yield the functions behind a callable object, or those of its class."""
    if isinstance(scorer, partial):
        for each in (scorer.func, *filter(callable, scorer.args)):
            yield from _functions(each)
    elif isinstance(scorer, RewardFunction):
        yield from _functions(scorer.fn)
    elif isinstance(scorer, TrlReward):
        for each in scorer.fns:
            yield from _functions(each)
    elif isinstance(own := inspect.unwrap(getattr(scorer, "__func__", scorer)), FunctionType):
        yield own
    else:
        kind = own if isinstance(own, type) else type(own)
        yield from (each for each in vars(kind).values() if isinstance(each, FunctionType))


def _content(function: FunctionType) -> bytes:
    file = Path(function.__code__.co_filename)
    if function.__module__ != "__main__" and file.is_file():
        return file.read_bytes()
    try:
        return inspect.getsource(function).encode()
    except (OSError, TypeError):
        return marshal.dumps(function.__code__, 2)  # the later formats depend on reference counts


def model_settings(folder: str) -> dict[str, str]:
    """Return the identity of a checkpoint: its folder, and sizes and times of its files."""
    path = local_checkpoint(folder).resolve()
    files = sorted(file for file in path.iterdir() if file.suffix in WEIGHTS and file.is_file())
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return {"folder": str(path), "files": digest(stamps)}


def item_ids(items: Rows, where: str) -> list[str]:
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
            told = f"{place_of(items, number, where)}: its id {id!r} is also that of row index {places[id]}"
            raise DataError(f"{told}; give each its own, or number the rows (data.columns.id=null)")
        places[id] = number
    return list(places)


def read_generated(
    sets: Mapping[str, GeneratedOptions],
    data: TableOptions,
    model_name: str,
    max_new_tokens: int,
    given: ProgramObjects,
) -> dict[str, EvaluationSet]:
    """Return the sets that a model answers, by name.

    Args:
        sets: options of these sets by name.
        data: options of the training data, whose columns, system prompt and template options the sets share.
        model_name: the model that is trained.
        max_new_tokens: length of an answer, unless a set says another.
        given: rows and functions of a program, in place of those of the paths.

    Raises:
        ConfigError: a set samples several answers that are all the same, or a reward cannot be used.
        DataError: a row has no prompt, or lacks a column that a reward needs.
    """
    found: dict[str, EvaluationSet] = {}
    default = SamplingOptions(temperature=0.0, max_new_tokens=max_new_tokens)
    for name, source in held_out_sources(sets, data.columns, data.system_prompt, data.map).items():
        own, key = sets[name], key_of(name)
        tokenizer = with_template(load_tokenizer(model_name), data.chat_template_path, "data.chat_template_path")
        rows = read_source(given.source(source), "prompts")[: own.limit]
        sampling = own.sampling.completed_by(default).gconfig()
        workflow: RolloutWorkflow
        if own.workflow is not None:
            workflow = WORKFLOWS[own.workflow](sampling, tokenizer)
        else:
            rewards = own_rewards(own, key, given)
            rewards.check_columns(rows, key)
            workflow = SingleTurnWorkflow(rewards.make(), sampling, tokenizer, data.chat_template_options)
            if models := reward_models(workflow.reward_fn):
                raise ConfigError(f"{models[0].what}: sft puts no reward model on devices; use `rlite eval` afterwards")
        if workflow.needs_prompt:
            check_prompts(rows, key)
            longest_prompt(rows, workflow, sys.maxsize, key, limits="", vocab_size=vocab_size_of(model_name))
        found[name] = make_set(name, rows, workflow, own)
    return found


class PromptAnswers:
    """The answers that a model has still to give. Making it checks the model and all prompts; no weights are read.

    Args:
        candidate: the model, and the samples that it has.
        items: rows of the data.
        make_workflow: makes the workflow that asks the items.
        request: what the command asks.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
        DataError: a prompt cannot be asked.
    """

    def __init__(
        self, candidate: Candidate, items: Rows, make_workflow: MakeWorkflow, request: EvaluationRequest
    ) -> None:
        self.candidate, self._options = candidate, (options := request.options)
        self._ids = item_ids(items, request.where)
        done = {(line["group"], line["sample"]) for line in candidate.lines}
        places = list(product(range(len(items)), range(options.samples)))
        self._num_expected = len(places)
        self.missing = [place for place in places if place not in done]
        """samples that are missing"""
        self._held: list[Row] = []
        self._has_succeeded = any(line["status"] == "evaluated" for line in candidate.lines)
        if self.missing:
            model = candidate.model
            tokenizer = request.tokenizer(model)
            self._texts = TokenTexts(request.tokenizer(model))
            limit = request.context_limit(model)
            if_unknown = cache(lambda: request.unknown_context(model, limit))
            workflow = make_workflow(options.sampling, tokenizer, if_unknown)
            self._set = EvaluationSet(candidate.name, items, workflow, options.samples)
            self._context = request.known_context(self._set, model, limit) or if_unknown()
            asked = [(workflow, items, request.where)]
            self._rewards = RewardEngines.of(asked, self._context, options.deterministic, MAX_RECOVERIES)

    def run(self) -> None:
        """Generate the missing samples in the current session; each goes to the journal as it ends.

        Raises:
            RolloutError: all samples failed.
        """
        options, name = self._options, self.candidate.name
        continuing(name, self._num_expected - len(self.missing), self._num_expected, "samples")
        engine = serving_engine(self.candidate.model, options, self._context, options.seed)
        self._rewards.build_beside(engine, len(engine.group), options.seed)
        limits = CollectorOptions(
            request_timeout=options.timeout,
            request_retries=options.retries,
            keep_ended=True,
            seed=options.seed,
            max_concurrent_rollouts=options.num_concurrent(len(engine.copies)),
        )
        begun = time.monotonic()
        try:
            with showing_progress(lambda: self._progress(begun)) as console, self._keeping_prints(console):
                run_episodes(engine, self._set, self.missing, limits, self._keep)
            if self._held:
                raise self._nothing_but_failures()
        finally:
            self._rewards.release()
            engine.release()

    def _keeping_prints(self, console: ConsoleReporter) -> AbstractContextManager[None]:
        path = None if self._options.folder is None else self._options.folder / PRINTS
        return listening(Prints(console, self._options, path, lambda episode: {"model": self.candidate.name}).take)

    def _keep(self, ended: Ended) -> None:
        """Write a sample. Failed samples are held back until one succeeds: a broken reward gives no result.

        Raises:
            RolloutError: all samples failed.
        """
        has_tokens = ended.group < self._options.record_tokens
        self._held.append(row_of(ended, self._ids[ended.group], self._texts, has_tokens))
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


class TaskAnswers:
    """The tasks that a model has still to do. Making it checks the model; no weights are read.

    The journal has a line for each task that has ended, or for each sample of a task that generates text. The harness's
    cache has greedy answers and log-likelihoods of the task under way.

    Args:
        candidate: the model, and the tasks that it has done.
        manager: the harness's task manager.
        request: what the command asks.
        folder: folder of the evaluation.

    Raises:
        ConfigError: the checkpoint has no tokenizer.
    """

    def __init__(self, candidate: Candidate, manager: Any, request: EvaluationRequest, folder: Path) -> None:
        self.candidate, self._manager, self._request, self._options = candidate, manager, request, request.options
        self._cache = folder / CACHE / candidate.name
        self._num_samples = {line["task"]: line.get("samples", 1) for line in candidate.lines}
        self._done = Counter(line["task"] for line in candidate.lines)
        self.missing = [name for name in self._options.tasks if self._done[name] < self._num_samples.get(name, 1)]
        """tasks that have not ended"""
        request.tokenizer(candidate.model)

    def run(self) -> None:
        """Do the missing tasks in the current session; each goes to the journal as it ends."""
        num_tasks = len(self._options.tasks)
        continuing(self.candidate.name, num_tasks - len(self.missing), num_tasks, "tasks")
        name, options = self.candidate.model, self._options
        context = self._request.unknown_context(name, self._request.context_limit(name))
        num_before = len(self.candidate.lines)
        # the engine numbers its requests from 0: with the same seed, further samples would repeat the first ones
        seed = mix(self._options.seed, num_before) % 2**32 if num_before else self._options.seed  # as NumPy takes it
        engine = serving_engine(name, options, context, seed)
        self._cache.mkdir(parents=True, exist_ok=True)
        try:
            model = import_module(HARNESS).RliteLM(engine, batch_size=options.num_concurrent(len(engine.copies)))
            for task in self.missing:
                self._do(task, model)
        finally:
            engine.release()

    def _do(self, name: str, model: Any) -> None:
        """Do the missing samples of a task. The first one shows whether there are others."""
        num_samples, sample = self._num_samples.get(name, 1), self._done[name]
        what = f"{self.candidate.name}, task {name}"
        continuing(what, sample, num_samples, "samples")
        num_cut = model.num_cut
        while sample < num_samples:
            with showing_progress(partial(self._progress, name, sample, model)):
                line = self._line(name, sample, model)
            self.candidate.journal.append(line)
            num_samples, sample = line["samples"], sample + 1
        if num_samples < self._options.samples:
            tell(f"{what}: its log-likelihoods are the same for every sample; it was done once")
        if num_cut := model.num_cut - num_cut:
            longest = f"the model reads {model.max_length} tokens; max_model_len=N may allow more"
            tell(f"{what}: {counted(num_cut, 'context')} lost the beginning ({longest})")

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


def showing_progress(progress: Callable[[], str]) -> closing[ConsoleReporter]:
    """Show the progress of the evaluation until the end of the block.

    Args:
        progress: returns it in words; called in another thread.

    Returns:
        The block's context manager.
    """
    console = ConsoleReporter(file=sys.stderr, quiet_s=QUIET_S)
    console.follow(progress)
    return closing(console)


def continuing(name: str, num_there: int, num_expected: int, what: str) -> None:
    """Print that an evaluation continues, if a part of it exists.

    Args:
        name: name of the model.
        num_there: parts that an earlier command has written.
        num_expected: parts of the whole evaluation.
        what: the parts, such as "samples".
    """
    if num_there:
        tell(f"{name}: continuing: {num_there} of {num_expected} {what} are there")
