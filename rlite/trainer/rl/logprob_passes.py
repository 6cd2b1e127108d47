"""Log-probabilities of rollouts under the policy before its updates, and under the reference."""

from __future__ import annotations

from tensordict import TensorDict

from rlite.algorithms import importance_weights, off_policy_metrics, weight_metrics
from rlite.batch import with_keys
from rlite.observability import stats_tracker
from rlite.trainer.losses import BothLogprobs, OwnLogprobs
from rlite.trainer.rl.engines import Engines
from rlite.trainer.rl.options import PpoConfig


class LogprobPasses:
    """The forward passes that compute log-probabilities of rollouts under other policies.

    Args:
        options: the run's config.
        engines: take turns on the device.
    """

    def __init__(self, options: PpoConfig, engines: Engines) -> None:
        self._options, self._engines = options, engines
        self._full = OwnLogprobs(temperature=options.temperature, is_full=True)
        self._both = BothLogprobs(temperature=options.temperature)

    def with_reference(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `ref_logprobs` [N, L] in the whole vocabulary, if leaving the reference costs something.

        The reference is a model of its own, or the actor without its adapters.
        """
        options, engines = self._options, self._engines
        if not options.has_reference:
            return batch
        with stats_tracker.record_timing("reference"):
            engine, longest = engines.reference or engines.actor, options.inference_length(options.ref_actor)
            engines.move_to_device(engine)
            logprobs = engine.forward(batch, self._full, longest, without_adapters=options.is_base_reference)
        return with_keys(batch, ref_logprobs=logprobs)

    def with_old(self, batch: TensorDict) -> TensorDict:
        """Return a batch with `old_logprobs` [N, L], from before the updates, if something compares with them.

        If the batch has kept ids, they are over these, and `full_old_logprobs` [N, L] in the whole vocabulary.
        """
        options, engines = self._options, self._engines
        if not options.has_old_logprobs:
            return batch
        with stats_tracker.record_timing("old_logprobs"):
            engines.move_to_device(engines.actor)
            found = engines.actor.forward(batch, self._both, options.inference_length())
        columns = {"old_logprobs": found[..., 0].contiguous()}
        if "kept_counts" in batch:
            columns["full_old_logprobs"] = found[..., 1].contiguous()
        batch = with_keys(batch, **columns)
        if options.actor.off_policy_metrics:
            report_off_policy(batch, options.actor.tis_coef)
        return batch


def report_off_policy(batch: TensorDict, tis_coef: float | None) -> None:
    """Record `off_policy/*`: `off_policy_metrics`, and `weight_metrics` of the truncated importance weights.

    Args:
        batch: rollouts with `old_logprobs`, `logprobs` and `loss_mask`, each `[N, L]`.
        tis_coef: cap of the importance weights; None records no `weight_*`.
    """
    policies = batch["old_logprobs"], batch["logprobs"], batch["loss_mask"]
    metrics = off_policy_metrics(*policies)
    if tis_coef is not None:
        weights = weight_metrics(importance_weights(*policies, upper=tis_coef), batch["loss_mask"])
        metrics |= {f"weight_{key}": value for key, value in weights.items()}
    with stats_tracker.scope("off_policy"):
        stats_tracker.scalar(**{key: value.item() for key, value in metrics.items()})
