"""Episodes of an evaluation: every episode becomes a sample, and a failed episode is a wrong one.

A trainer waits for all episodes of a set (`evaluate`). The command takes each episode as it ends (`run_episodes`), so
that no ended episode can be lost. The collector's runner runs both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Self

from tensordict import TensorDict

import rlite
from rlite.data.packs import check_one_per_row
from rlite.data.prompts import item_name
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, EvaluationInterrupted
from rlite.evaluation.metrics import Sample, summary
from rlite.evaluation.sets import EvaluationSet
from rlite.rollout.collector.calls import RolloutCollector
from rlite.rollout.collector.ended import Ended, evaluated
from rlite.rollout.collector.ledger import RolloutLedger
from rlite.rollout.collector.options import CollectorOptions
from rlite.rollout.collector.runner import Group, GroupRunner, Queue
from rlite.rollout.episode import mix
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.options import ServingOptions
from rlite.types import AsyncInference

Place = tuple[int, int]
"""place of an episode: the number of its item in the data, and its number among the samples of the item"""


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
        return Sample(**own, score=None, reason=ended.reason, length=episode.num_tokens)
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
        remedy = "The engine got other weights during the evaluation, or the workflow reports versions of its own"
        raise DataError(f"evaluation {name}: tokens of the policy versions {made}; expected one. {remedy}")


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
    row = chosen.rows[item]
    return Group(id, row, chosen.workflow, size=1, seed=seed, item=item_name(row, item), first_sample=sample)


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
