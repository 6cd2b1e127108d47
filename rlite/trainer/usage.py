"""What a step makes of its devices, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rlite.engine.train import RliteTrainEngine
from rlite.trainer.flops import ModelSize, mfu


def usage_metrics(engine: RliteTrainEngine, lengths: Sequence[int], seconds: float) -> dict[str, float]:
    """Of an engine that has been trained for so long on sequences of these lengths, each once.

    Returns: `memory_gib`, of the worker that held most since the last call; and where the devices' peak is known `mfu`,
        the model FLOPs of these sequences over what all devices could have made in that time.
    """
    usage, size = engine.device_usage(), ModelSize.of(engine.module)
    metrics = {"memory_gib": max(each.peak_bytes for each in usage) / 2**30}
    share = None if size is None else mfu(size, lengths, seconds, [each.name for each in usage])
    return metrics if share is None else {**metrics, "mfu": share}
