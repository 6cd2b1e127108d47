"""What a person should hear of while a run goes on, said when it begins and not at every step."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.observability.console import ConsoleReporter

LOST = "rollout/lost/"


class Alarms:
    """Looks at the metrics of each step.

    Lost groups are told once for each reason.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def look(
        self, step: int, metrics: Mapping[str, float], first_losses: Mapping[str, str], console: ConsoleReporter
    ) -> None:
        """Tell what is new in the metrics of a step. `first_losses` has an example of each reason."""
        self._look_at_losses(step, metrics, first_losses, console)

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
