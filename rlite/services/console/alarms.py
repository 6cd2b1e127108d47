"""Alarms about a run: what the metrics of a step say is wrong with it, told on the console."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlite.engine.inference import RliteInferenceEngine
from rlite.rollout.collector.lost_groups import Selection, kind_of
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.observer import DRIFT_LIMIT, Observer
from rlite.trainer.run.training_run import TrainingRun

LOST = "rollout/lost/"
DIFFERING_LIMIT = 0.25
"""share of choices of experts that the policy would not repeat. Other kernels and dtypes explain some per cent"""
LOOK = {
    "next": "look at the record (rlite view), the reward function, how hard the prompts are, and the temperature",
    "help": "docs, page Reading a run: My run does not learn",
}
LIMITED = 0.95
"""share of episodes that the limit of turns ends, from which on the limit is probably a mistake"""
REPEAT_AFTER = 50
"""steps after which an alarm whose cause lasts is given again"""


class Alarms(Observer):
    """Watch over the metrics of each step.

    Lost groups are reported once for each cause. Equal rewards, log-probabilities that differ between trainer and
    engine, and failures that choose among answers are reported when they begin, and again every `REPEAT_AFTER` steps
    while they last.
    """

    def __init__(
        self,
        engine: RliteInferenceEngine,
        is_ahead: bool,
        can_equal_rewards_teach: bool,
        learns_rewards: bool = True,
        turn_limit: str = "max_turns",
    ) -> None:
        self._engine, self._learns_rewards, self._turn_limit = engine, learns_rewards, turn_limit
        self._is_ahead, self._is_taught_by_uniform = is_ahead, can_equal_rewards_teach
        self._told: set[str] = set()
        self._given_at: dict[str, int] = {}

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Report what is new in the finished step."""
        collector = self._engine.collector
        self.look(run, metrics, collector.first_losses, collector.take_selection())

    def look(
        self,
        run: TrainingRun,
        metrics: Mapping[str, float],
        first_losses: Mapping[str, str],
        selection: Selection | None = None,
    ) -> None:
        """Report what is new in the metrics of the finished step."""
        self._look_at_losses(run, metrics, first_losses)
        for cause, rows in (*self._of_metrics(metrics), *(selection or Selection()).alarms()):
            if run.step >= self._given_at.get(cause, -REPEAT_AFTER) + REPEAT_AFTER:
                self._given_at[cause] = run.step
                run.console.alarm(f"ALARM at step {run.step}: {cause}", rows)

    def _of_metrics(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield a cause, without numbers, and the facts of each alarm about the metrics of a step."""
        lowest, highest = metrics.get("reward_min"), metrics.get("reward_max")
        if lowest is not None and lowest == highest and self._learns_rewards:
            found = {"reward": f"{lowest:g} for every response"}
            yield "all rewards are equal, and no response is better than another", {**found, **LOOK}
        elif metrics.get("uniform_groups") == 1 and not self._is_taught_by_uniform:
            found = {"rewards": f"from {lowest:g} to {highest:g}, but the same for all responses to a prompt"}
            yield "in every group all rewards are equal, and teach nothing", {**found, **LOOK}
        if number := metrics.get("num_unreplaced"):
            cause = "rollout.max_refills is spent, and groups of equal rewards are trained on, which teach nothing"
            yield cause, {"groups": f"{number:g}", **LOOK}
        if (share := metrics.get("turn_limited", 0.0)) >= LIMITED:
            found = {"turn_limited": f"{share:.0%} of the episodes", "limit": f"{self._turn_limit}; raise it"}
            yield "the limit of turns cuts off nearly every episode", found
        if (drift := metrics.get("logprob_drift", 0.0)) > DRIFT_LIMIT:
            cause = "the rollouts are far from the policy" if self._is_ahead else "the engine does not serve the policy"
            yield f"{cause} that is trained", {"logprob_drift": f"{drift:.3f} nats per token (limit {DRIFT_LIMIT})"}
        if (differs := metrics.get("moe/replay_differs", 0.0)) > DIFFERING_LIMIT:
            told = f"{differs:.1%} of the replayed choices (limit {DIFFERING_LIMIT:.0%})"
            cause = "the policy would choose other experts than those that it is trained with"
            yield cause, {"moe/replay_differs": told}

    def _look_at_losses(self, run: TrainingRun, metrics: Mapping[str, float], first_losses: Mapping[str, str]) -> None:
        lost = {key: number for key, number in metrics.items() if key.startswith(LOST)}
        news = {cause: f"{LOST}{kind_of(cause)}" for cause in first_losses if cause not in self._told}
        if not lost.keys() & news.values():
            return
        self._told |= {cause for cause, key in news.items() if key in lost}
        num_lost, num_whole = sum(lost.values()), metrics.get("rollout/num_groups", 0)
        title = f"step {run.step}: {num_lost:g} of {num_lost + num_whole:g} groups were lost, and others are trained "
        title += f"on; the metrics {LOST}... count on"
        examples = {key: "\n".join(first_losses[cause] for cause in news if news[cause] == key) for key in lost}
        rows = [(f"{number:g} x", examples[key] or key.removeprefix(LOST)) for key, number in lost.items()]
        run.console.warn(title, rows)
