"""The weight of the KL to the reference during a run. The rule that adapts it is `algorithms.adaptive_kl_coef`."""

from __future__ import annotations

from collections.abc import Mapping

from rlite.algorithms import adaptive_kl_coef
from rlite.trainer.rl.options import KlOptions


class KlCoefficient:
    """The weight of the KL. With `kl.adaptive_target` it follows the KL that each step measures."""

    def __init__(self, options: KlOptions) -> None:
        self.coef = options.coef
        self._options = options

    def adapt(self, kl: float | None, num_sequences: int) -> dict[str, float]:
        """Adapt the weight after a step, if there is a target.

        Args:
            kl: mean KL of a token in this step; None if the step measured none.
            num_sequences: sequences in the step.

        Returns:
            The metric `kl_coef`, the weight that the step had; {} without a target.
        """
        target, used = self._options.adaptive_target, self.coef
        if target is None or self._options.type is None:
            return {}
        if kl is not None:
            horizon = self._options.adaptive_horizon
            self.coef = adaptive_kl_coef(used, kl, target=target, horizon=horizon, num_steps=num_sequences)
        return {"kl_coef": used}

    def state_dict(self) -> dict[str, float]:
        """Return the weight, to resume from."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved weight if there is a target; otherwise the weight is this run's option."""
        if self._options.adaptive_target is not None:
            self.coef = state.get("coef", self.coef)
