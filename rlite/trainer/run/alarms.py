"""Alarms: conditions that a person should hear of during a run, reported when they begin and not at every step."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.observability.console import ConsoleReporter
from rlite.trainer.rl.config import PpoConfig

LOST = "rollout/lost/"
DRIFT_LIMIT = 0.1
"""mean |log p(trainer) - log p(engine)| per token, in nats, above which the two are not the same policy, or, where
rollouts run ahead, the policy has moved too far since"""
LOOK = {"look at": "rollouts.jsonl, the reward function, how hard the prompts are, and the temperature of sampling"}
REPEAT_AFTER = 50
"""steps after which an alarm whose cause lasts is given again"""


class Alarms:
    """Watch over the metrics of each step.

    Lost groups are reported once for each reason. Equal rewards, and log-probabilities that differ between trainer and
    engine, are reported when they begin and again every `REPEAT_AFTER` steps while they last.
    """

    def __init__(self, options: PpoConfig) -> None:
        self._is_ahead = options.rollout.max_head_offpolicyness > 0
        self._is_taught_by_uniform = options.is_taught_by_equal_rewards
        self._told: set[str] = set()
        self._given_at: dict[str, int] = {}

    def look(
        self, step: int, metrics: Mapping[str, float], first_losses: Mapping[str, str], console: ConsoleReporter
    ) -> None:
        """Report what is new in the metrics of a step.

        Args:
            step: number of the step.
            metrics: its metrics.
            first_losses: an example of each reason for lost groups.
            console: where alarms are shown.
        """
        self._look_at_losses(step, metrics, first_losses, console)
        for cause, rows in (self._equal_rewards(metrics), self._drift(metrics)):
            if cause and self._is_due(cause, step):
                console.report(f"ALARM at step {step}: {cause}", rows)

    def _is_due(self, cause: str, step: int) -> bool:
        if step - self._given_at.get(cause, step - REPEAT_AFTER) < REPEAT_AFTER:
            return False
        self._given_at[cause] = step
        return True

    def _equal_rewards(self, metrics: Mapping[str, float]) -> tuple[str, dict[str, str]]:
        """Return why the rewards of a step teach nothing; an empty text if they teach something."""
        lowest, highest = metrics.get("reward_min"), metrics.get("reward_max")
        if lowest is not None and lowest == highest:
            found = {"reward": f"{lowest:g} for every response"}
            return "all rewards are equal, and no response is better than another", {**found, **LOOK}
        if metrics.get("uniform_groups") == 1 and not self._is_taught_by_uniform:
            found = {"rewards": f"from {lowest:g} to {highest:g}, but the same for all responses to a prompt"}
            return "in every group all rewards are equal, and teach nothing", {**found, **LOOK}
        return "", {}

    def _drift(self, metrics: Mapping[str, float]) -> tuple[str, dict[str, str]]:
        """Return why the log-probabilities of trainer and engine differ; an empty text if they agree."""
        drift = metrics.get("logprob_drift", 0.0)
        if not drift > DRIFT_LIMIT:
            return "", {}
        cause = "the rollouts are far from the policy" if self._is_ahead else "the engine does not serve the policy"
        return f"{cause} that is trained", {"logprob_drift": f"{drift:.3f} nats per token (limit {DRIFT_LIMIT})"}

    def _look_at_losses(
        self, step: int, metrics: Mapping[str, float], first_losses: Mapping[str, str], console: ConsoleReporter
    ) -> None:
        lost = {key: number for key, number in metrics.items() if key.startswith(LOST)}
        if lost.keys() <= self._told:
            return
        self._told |= lost.keys()
        num_lost, num_whole = sum(lost.values()), metrics.get("rollout/num_groups", 0)
        console.report(
            f"step {step}: {num_lost:g} of {num_lost + num_whole:g} groups were lost, and others are trained on; the "
            f"metrics {LOST}... count on",
            [(f"{number:g} x", first_losses.get(key.removeprefix(LOST), key)) for key, number in lost.items()],
        )
