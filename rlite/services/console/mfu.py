"""MFU (model FLOPs utilisation) and peak memory of the trained engine, in the metrics of each step.

Model FLOPs are the operations that the model's mathematics needs. Recomputation by gradient checkpointing does not
count (that would be HFU). The output matrix counts for every token, even if a loss reads few log-probabilities. Of
tokens that sequences share and that are computed once (`shared_tokens`), one is counted, by its share of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rlite.data.packs import sequence_lengths
from rlite.engine.train import RliteTrainEngine
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun

Repeated = Callable[[Callable[[], Any]], Any]
"""returns the result of an action on an engine, repeated if its workers are lost meanwhile"""


class UsageReport(Observer):
    """Enters the memory and the throughput of the trained engine into the metrics of each step.

    `freeze_steps`: first steps, in which the engine is not trained.
    """

    def __init__(self, engine: RliteTrainEngine, repeated: Repeated, freeze_steps: int = 0) -> None:
        self._engine, self._repeated, self._freeze_steps = engine, repeated, freeze_steps

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        """Enter peak memory and, if the devices are known, MFU."""
        usage = self._repeated(self._engine.device_usage)
        is_trained = run.batch is not None and run.step > self._freeze_steps
        lengths = sequence_lengths(run.batch) if is_trained else []
        metrics |= usage_metrics(usage, self._engine.module, lengths, metrics.get("seconds_update", 0.0))
        if "mfu" in metrics:
            metrics["mfu"] *= 1 - metrics.get("shared_tokens", 0.0)


PEAK_TFLOPS = {
    2500: ("GB200",),
    2250: ("B200",),
    835: ("H200 NVL", "H100 NVL"),
    756: ("H100 PCIe", "H800 PCIe"),
    989: ("GH200", "H200", "H100", "H800"),
    148: ("H20",),
    312: ("A100", "A800"),
    149.7: ("A40",),
    165: ("A30",),
    125: ("A10",),
    362: ("L40S",),
    121: ("L4",),
}
"""GPUs by their dense bfloat16 TFLOP/s, from NVIDIA's data sheets (half of what they say with sparsity); of the names
whose words are all in the device's, the first applies"""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a transformer that determine its FLOPs."""

    num_multiplied: int
    """parameters that multiply every token: all but an input embedding that is not the output matrix too"""
    num_trained: int
    """parameters of `num_multiplied` that are trained"""
    attention_width: int
    """layers x query heads x size of a head"""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelSize | None:
        """Return the size of a causal or score model, on meta or not; None for a mixture of experts."""
        config = model.config.get_text_config()
        if getattr(config, "num_experts_per_tok", None):
            return None
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        is_shared = head is not None and head.weight is embedding.weight
        multiplied = [p for p in model.parameters() if is_shared or p is not embedding.weight]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            num_multiplied=sum(p.numel() for p in multiplied),
            num_trained=sum(p.numel() for p in multiplied if p.requires_grad),
            attention_width=config.num_hidden_layers * config.num_attention_heads * head_dim,
        )


def training_flops(size: ModelSize, lengths: Iterable[int]) -> float:
    """Return the model FLOPs of one forward and backward pass over causal sequences of these lengths.

    A multiplication by a parameter and the addition after it: 2 in the forward pass, 2 for the gradient of the input, 2
    for the gradient of a trained parameter; 6 N per token if all are trained (Kaplan et al. 2020). A query and a key: 2
    d for the score and 2 d for the weighted value, three times with the backward pass, where d is `attention_width`
    (Chowdhery et al. 2022, appendix B, whose 12 d l per token has no causal mask). A causal sequence of l tokens has l
    (l + 1) / 2 such pairs.
    """
    per_token = 4 * size.num_multiplied + 2 * size.num_trained
    return float(sum(per_token * l + 12 * size.attention_width * (l * (l + 1) // 2) for l in lengths))


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device by torch's name; None if unknown (a slice of a GPU, a CPU)."""
    words = set(device_name.replace("-", " ").split())
    names = ((name, peak) for peak, names in PEAK_TFLOPS.items() for name in names if "MIG" not in words)
    return next((1e12 * peak for name, peak in names if words.issuperset(name.split())), None)


def mfu(size: ModelSize, lengths: Iterable[int], seconds: float, device_names: Sequence[str]) -> float | None:
    """Return the share of these devices' peak that training on the sequences reaches; None if a device is unknown."""
    peaks = [peak for peak in map(peak_flops, device_names) if peak is not None]
    if len(peaks) < len(device_names) or seconds <= 0:
        return None
    return training_flops(size, lengths) / (seconds * sum(peaks))


def usage_metrics(
    usage: Sequence[DeviceUsage], module: Any, lengths: Sequence[int], seconds: float
) -> dict[str, float]:
    """Return metrics of memory and throughput for one training phase.

    Returns `memory_gib`, the peak of the worker with the most memory since the last call; and `mfu`, if the devices are
    known.
    """
    size = ModelSize.of(module)
    share = None if size is None else mfu(size, lengths, seconds, [each.name for each in usage])
    metrics = {"memory_gib": max(each.peak_bytes for each in usage) / 2**30, "mfu": share}
    return {name: value for name, value in metrics.items() if value is not None}
