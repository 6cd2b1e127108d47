"""Sets that a supervised trainer evaluates by answers that the model generates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import rlite
from rlite.data.prompts import check_prompts
from rlite.data.rows import read_source
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.evaluation.sets import Evaluation, EvaluationSet, evaluate_each
from rlite.nn.pretrained import load_tokenizer
from rlite.rollout import RolloutWorkflow, SingleTurnWorkflow
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.registry import WORKFLOWS
from rlite.trainer.held_out.options import GeneratedOptions, held_out_sources, key_of
from rlite.trainer.held_out.prompt_sets import check_samples, own_rewards
from rlite.trainer.model.prompt_lengths import longest_prompt, vocab_size_of
from rlite.trainer.options import SamplingOptions
from rlite.trainer.run.program_objects import ProgramObjects
from rlite.trainer.supervised_options import SftConfig


class Generation:
    """Answers prompts with the weights of the trained engine, in turns with training and on the same devices.

    On GPUs the trained model leaves the devices meanwhile. Without sets nothing is built.

    Args:
        options: the trainer's config.
        trained: the engine that is trained.
        sets: the sets by name.
    """

    def __init__(self, options: SftConfig, trained: RliteTrainEngine, sets: Mapping[str, EvaluationSet]) -> None:
        self._options, self._trained, self._sets = options, trained, sets
        self._takes_turns = False

    def build(self) -> None:
        """Place the engine that answers.

        Raises:
            ConfigError: generation.tp_size does not divide the devices.
        """
        if not self._sets:
            return
        own, session = self._options.generation, rlite.current_session()
        if len(session.devices) % own.tp_size:
            raise ConfigError(f"generation.tp_size={own.tp_size} does not divide {len(session.devices)} devices")
        self._takes_turns = session.device == "cuda"
        if self._takes_turns:
            self._trained.cpu()
        self._serving = RliteInferenceEngine(self._options.actor.model_name, executor=own.executor)
        self._serving.build(
            **own.build_options(len(session.devices)),
            max_model_len=_longest(self._sets.values()),
            seed=self._options.trainer.seed,
            colocate_with=self._trained,
        )
        self._serving.rollout_options = CollectorOptions(seed=self._options.trainer.seed)
        if self._takes_turns:
            self._serving.meta()
            self._trained.cuda()

    def evaluate(
        self, sets: Sequence[EvaluationSet], version: int, is_interrupted: Callable[[], bool]
    ) -> list[Evaluation]:
        """Return evaluations of the weights as they are now.

        Args:
            sets: the sets.
            version: finished steps of training.
            is_interrupted: becomes true when the evaluations are to end early.

        Returns:
            The evaluations that have ended before.
        """
        with self._serving_weights(version):
            return evaluate_each(self._serving.collector, sets, is_interrupted)

    @property
    def first_losses(self) -> Mapping[str, str]:
        """The first reason of each cause of failed episodes."""
        return self._serving.collector.first_losses if self._sets else {}

    @contextmanager
    def _serving_weights(self, version: int) -> Iterator[None]:
        """Serve the trained weights inside of the block; on GPUs the trained engine is away meanwhile.

        Yields:
            None.
        """
        if self._takes_turns:
            self._serving.cuda("weights")
        self._trained.p2p_weight_sync(self._serving)
        self._serving.set_version(version)
        if self._takes_turns:
            self._trained.cpu()
            self._serving.cuda("kv_cache")
        yield
        if self._takes_turns:
            self._serving.meta()
            self._trained.cuda()


def read_generated(options: SftConfig, given: ProgramObjects) -> dict[str, EvaluationSet]:
    """Return the sets that the model answers, by name.

    Args:
        options: the trainer's config.
        given: rows and functions of a program, in place of those of the paths.

    Raises:
        ConfigError: a set samples several answers that are all the same, or a reward cannot be used.
        DataError: a row has no prompt, or lacks a column that a reward needs.
    """
    sets = {name: own for name, own in options.test_data.items() if own.is_generated}
    sources, found = held_out_sources(sets, options.data.columns, options.data.system_prompt), {}
    for name, source in sources.items():
        own = sets[name]
        rows = read_source(given.source(source), "prompts")[: own.limit]
        workflow = _workflow(options, own, rows, key_of(name), given)
        if workflow.needs_prompt:
            check_prompts(rows, key_of(name))
            vocab_size = vocab_size_of(options.actor.model_name)
            longest_prompt(rows, workflow, sys.maxsize, key_of(name), limits="", vocab_size=vocab_size)
        found[name] = EvaluationSet(name, rows, workflow, own.samples, own.largest_k, own.solved_at)
        check_samples(found[name])
    return found


def stopping(each: EvaluationSet, end_ids: Sequence[int]) -> EvaluationSet:
    """Return a set whose answers also end with tokens that the served model does not know as its ends."""
    gconfig = each.workflow.gconfig
    if gconfig is None or gconfig.ignore_eos or not end_ids:
        return each
    gconfig = replace(gconfig, stop_token_ids=(*gconfig.stop_token_ids, *end_ids))
    return replace(each, workflow=each.workflow.sampled_by(gconfig))


def _workflow(
    options: SftConfig, own: GeneratedOptions, rows: Sequence[Mapping[str, Any]], key: str, given: ProgramObjects
) -> RolloutWorkflow:
    default = SamplingOptions(temperature=0.0, max_new_tokens=options.generation.max_new_tokens)
    sampling = own.sampling.completed_by(default).gconfig()
    tokenizer = load_tokenizer(options.actor.model_name)
    if own.workflow is not None:
        return WORKFLOWS[own.workflow](sampling, tokenizer)
    rewards = own_rewards(own, key, given)
    rewards.check_columns(rows, key)
    return SingleTurnWorkflow(rewards.make(), sampling, tokenizer, options.data.chat_template_options)


def _longest(sets: Iterable[EvaluationSet]) -> int | None:
    """Return the most tokens of a sequence of some sets; None if a workflow does not know it."""
    lengths = []
    for each in sets:
        openings = [each.workflow.opening(row) for row in each.rows] if each.workflow.needs_prompt else [None]
        if None in openings:
            return None
        lengths.append(each.workflow.longest_sequence(max(len(opening or ()) for opening in openings)))
    return None if None in lengths else max(length for length in lengths if length is not None)
