"""Answers of one model to the questions that it has not answered yet."""

from __future__ import annotations

import functools
import time

import rlite
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError
from rlite.evaluation.episodes import EndedEpisode, EpisodeRunner, Place
from rlite.evaluation.rows import Row, row_of
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.record.texts import TokenTexts
from rlite.rollout.workflow import RolloutError
from rlite.trainer.evaluate.models import Candidate
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.evaluate.progress import continuing, showing_progress
from rlite.trainer.evaluate.questions import (
    Questions,
    context_limit,
    context_to_serve,
    model_tokenizer,
    unknown_context,
)
from rlite.trainer.prompt_lengths import vocab_size_of

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
