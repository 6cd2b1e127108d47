"""Alarms: conditions of a run that need attention, reported when they begin and not at every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlite.rollout.collector.lost_groups import Selection, kind_of
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.run.training_run import TrainingRun

LOST = "rollout/lost/"
DRIFT_LIMIT = 0.1
"""mean |log p(trainer) - log p(engine)| per token, in nats. Above it, the two are not the same policy; if rollouts run
ahead, the policy has moved too far"""
LOOK = {"look at": "the record (rlite view), the reward function, how hard the prompts are, and the temperature"}
REPEAT_AFTER = 50
"""steps after which an alarm whose cause lasts is given again"""


class Alarms:
    """Watch over the metrics of each step.

    Lost groups are reported once for each cause. Equal rewards, log-probabilities that differ between trainer and
    engine, and failures that choose among answers are reported when they begin, and again every `REPEAT_AFTER` steps
    while they last.

    Args:
        options: the run's config.
        run: counts the steps, and has the console.
    """

    def __init__(self, options: PpoConfig, run: TrainingRun) -> None:
        self._run = run
        self._is_ahead = options.rollout.max_head_offpolicyness > 0
        self._is_taught_by_uniform = bool(options.why_equal_rewards_teach())
        self._told: set[str] = set()
        self._given_at: dict[str, int] = {}

    def look(
        self, metrics: Mapping[str, float], first_losses: Mapping[str, str], selection: Selection | None = None
    ) -> None:
        """Report what is new in the metrics of the finished step.

        Args:
            metrics: metrics of the step.
            first_losses: an example of each cause of lost groups.
            selection: what failures have done to the answers of the step.
        """
        step = self._run.step
        self._look_at_losses(metrics, first_losses)
        for cause, rows in (*self._of_metrics(metrics), *(selection or Selection()).alarms()):
            if step - self._given_at.get(cause, step - REPEAT_AFTER) >= REPEAT_AFTER:
                self._given_at[cause] = step
                self._run.console.alarm(f"ALARM at step {step}: {cause}", rows)

    def _of_metrics(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield a cause, without numbers, and the facts of each alarm about the metrics of a step."""
        lowest, highest = metrics.get("reward_min"), metrics.get("reward_max")
        if lowest is not None and lowest == highest:
            found = {"reward": f"{lowest:g} for every response"}
            yield "all rewards are equal, and no response is better than another", {**found, **LOOK}
        elif metrics.get("uniform_groups") == 1 and not self._is_taught_by_uniform:
            found = {"rewards": f"from {lowest:g} to {highest:g}, but the same for all responses to a prompt"}
            yield "in every group all rewards are equal, and teach nothing", {**found, **LOOK}
        if number := metrics.get("num_unreplaced"):
            cause = "rollout.max_refills is spent, and groups of equal rewards are trained on, which teach nothing"
            yield cause, {"groups": f"{number:g}", **LOOK}
        if (drift := metrics.get("logprob_drift", 0.0)) > DRIFT_LIMIT:
            cause = "the rollouts are far from the policy" if self._is_ahead else "the engine does not serve the policy"
            yield f"{cause} that is trained", {"logprob_drift": f"{drift:.3f} nats per token (limit {DRIFT_LIMIT})"}

    def _look_at_losses(self, metrics: Mapping[str, float], first_losses: Mapping[str, str]) -> None:
        lost = {key: number for key, number in metrics.items() if key.startswith(LOST)}
        news = {
            key: [cause for cause in first_losses if f"{LOST}{kind_of(cause)}" == key and cause not in self._told]
            for key in lost
        }
        if not any(news.values()):
            return
        self._told |= {cause for causes in news.values() for cause in causes}
        num_lost, num_whole = sum(lost.values()), metrics.get("rollout/num_groups", 0)
        self._run.console.warn(
            f"step {self._run.step}: {num_lost:g} of {num_lost + num_whole:g} groups were lost, and others are trained "
            f"on; the metrics {LOST}... count on",
            [
                (f"{number:g} x", "\n".join(first_losses[cause] for cause in news[key]) or key.removeprefix(LOST))
                for key, number in lost.items()
            ],
        )
