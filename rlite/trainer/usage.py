"""What a step makes of its devices, as metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rlite.engine.train import RliteTrainEngine
from rlite.trainer.flops import ModelSize, peak_flops, training_flops


def usage_metrics(engine: RliteTrainEngine, lengths: Sequence[int], seconds: float) -> dict[str, float]:
    """Of an engine that has been trained for so long on sequences of these lengths, each once.

    Returns: `memory_gib`, of the worker that held most since the last call; and where the devices' peak is known `mfu`,
        the model FLOPs of these sequences over what all devices could have made in that time.
    """
    usage = engine.device_usage()
    metrics = {"memory_gib": max(each.peak_bytes for each in usage) / 2**30}
    peaks, size = [peak_flops(each.name) for each in usage], ModelSize.of(engine.module)
    if size is not None and seconds > 0 and None not in peaks:
        metrics["mfu"] = training_flops(size, lengths) / (seconds * sum(peak for peak in peaks if peak))
    return metrics
