"""Answers of one model to the questions that it has not answered yet.

The items of an evaluation, and the workflow that asks and scores them.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

import rlite
from rlite.assembly.evaluate.folder import Candidate
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.evaluate.report import continuing, showing_progress
from rlite.data.chat.template import check_template_options
from rlite.data.prompts import check_prompts
from rlite.data.rows import place_of, read_source
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError
from rlite.evaluation.sets import EndedEpisode, EpisodeRunner, Place, Row, row_of
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.environments.workflow import environment_workflow
from rlite.rollout.registry import WORKFLOWS
from rlite.rollout.rewards.configured_rewards import ChosenRewards
from rlite.rollout.workflow import RolloutError
from rlite.services.record.rollout_tables import TokenTexts
from rlite.trainer.prompt_lengths import longest_prompt, model_limit, vocab_size_of
from rlite.trainer.run.command import ProgramObjects
from rlite.types import GenerationHyperparameters

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
