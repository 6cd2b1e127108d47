"""The report of a run: the console, the plan of the model, the improvements, and the places of the results.

Model FLOPs are the operations that the model's mathematics needs. Recomputation by gradient checkpointing does not
count (that would be HFU). The output matrix counts for every token, even if a loss reads few log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlite.assembly.command import at_end
from rlite.engine.train import RliteTrainEngine
from rlite.errors import shortened
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.services.console.terminal import ConsoleReporter, History
from rlite.services.record.files import FOLDER as RECORD
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions
from rlite.trainer.options import RunOptions, TableOptions
from rlite.trainer.run.best import is_lowest_best

FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}
MAX_EARLY = 2
"""headlines of evaluations that stand before most metrics of a step; more of them stand after these"""


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """The names of the metrics that a run shows."""

    of_steps: Sequence[str] = ()
    """metrics of every step for the console, the most important first"""
    headlines: Sequence[str] = ()
    """metrics of evaluations for the console"""
    compared: Sequence[str] = ()
    """metrics of evaluations for the comparison at the end"""
    evaluated: Sequence[str] = ()
    """metrics of evaluations from which `best_metric` and `stop_at` choose"""


class RunReport:
    """The console of a run, and the metrics that its last lines compare.

    Both always have the metrics of `best_metric` and `stop_at`.

    Args:
        options: the run's options.
        metrics: metrics to show.
    """

    def __init__(self, options: RunOptions, metrics: ReportedMetrics) -> None:
        self._options, self._metrics = options, metrics
        self._deciding = [*([] if options.best_metric is None else [options.best_metric]), *options.stop_at]
        compared = list(dict.fromkeys((*self._deciding, *metrics.compared)))
        lowest = [name for name in compared if is_lowest_best(options, name)]
        self._history = History(compared, metrics.of_steps[:1], lowest, options.best_metric)

    def open(self, total_steps: int, done_steps: int) -> ConsoleReporter:
        """Return the console, after reading the metrics of earlier steps. It is closed before an error is printed.

        Args:
            total_steps: steps of the whole run.
            done_steps: steps of earlier attempts.
        """
        if "jsonl" in self._options.sinks:
            self._history.read(Path(self._options.save_dir) / "metrics.jsonl")
        self._console = ConsoleReporter(
            total_steps,
            metrics=self._columns(),
            choice=self._options.console,
            evaluated=self._metrics.evaluated,
            done_steps=done_steps,
        )
        at_end(self._console.close)
        return self._console

    def resumed(self, step: int, total_steps: int, checkpoint: Path, stop_reason: str) -> None:
        """Show from which step the run goes on, or how it goes on if it has ended already.

        Args:
            step: finished steps.
            total_steps: steps of the whole run.
            checkpoint: checkpoint of the finished steps.
            stop_reason: why an earlier attempt has ended the run; "" if it has not.
        """
        if stop_reason:
            way = "choose other trainer.callbacks, trainer.stop_at or trainer.save_dir"
            rows = {"reason": stop_reason, "to go on": way}
            self._console.report(f"stopped already: after step {step} of {total_steps}", rows)
        elif step < total_steps:
            self._console.report(f"resumed from step {step}", {"checkpoint": checkpoint})
        else:
            ways = f"raise {self._options.limit_key}, or choose another {self._options.folder_key}"
            self._console.report(f"finished already: step {step} of {total_steps}", {"to go on": ways})

    def _columns(self) -> list[str]:
        """Return the console's metrics, the most important first."""
        of_steps, headlines = self._metrics.of_steps, self._metrics.headlines
        early = headlines if len(headlines) <= MAX_EARLY else ()
        return list(dict.fromkeys((*of_steps[:1], *self._deciding, *early, *of_steps[1:], *headlines)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, and keep them for the comparison."""
        self._history.add(step, metrics)
        self._console.log(step, metrics)

    def end(self, title: str, best: str = "") -> None:
        """Show the improvements, and the places of the results.

        Args:
            title: how the run ended.
            best: the best evaluation in words.
        """
        found = places(self._options)
        if best and "best model" in found:
            found["best model"] += f", {best}"
        self._console.report(title, {**self._history.rows(), **found}, style="green")


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def model_plan(name: str, engine: RliteTrainEngine, max_grad_norm: float) -> dict[str, str]:
    """Return the size of a model, its optimizer, and the parameters that are trained otherwise, by topic.

    Args:
        name: folder or hub name of the checkpoint.
        engine: the engine of the model.
        max_grad_norm: norm to which gradients are clipped.
    """
    module: Any = engine.module
    options: OptimizerOptions = module.optimizer_options
    plan = {
        "model": f"{name}, {engine.num_parameters / 1e6:.2f} M parameters{_trained(engine)}",
        "optimizer": f"{OPTIMIZERS[options.name]}, {_rate(options)}, weight decay {options.weight_decay:g}, gradients "
        f"clipped to norm {max_grad_norm:g}",
    }
    if module.lora is not None:
        plan["adapters"] = (
            f"rank {module.lora.rank}, alpha {module.lora.alpha:g}, {', '.join(module.lora.target_modules)}"
        )
    if groups := options.parameter_groups:
        plan["parameter groups"] = "; ".join(_group(*each) for each in groups.items())
    return plan


def data_plan(data: TableOptions) -> dict[str, str]:
    """Return the system prompt and the options of the chat template, by topic, as far as they are set."""
    said: Mapping[str, Any] = {"system prompt": data.system_prompt, "chat template": data.chat_template_options}
    return {topic: shortened(value) for topic, value in said.items() if value}


def _trained(engine: RliteTrainEngine) -> str:
    trained = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    if trained == engine.num_parameters:
        return ", all trained"
    return f", {trained / engine.num_parameters:.2%} trained"


def _rate(options: OptimizerOptions) -> str:
    warmup = f" after {options.warmup_steps} steps of warm-up" if options.warmup_steps else ""
    end = "" if options.scheduler == "constant" else f" to {options.lr_end:g}"
    return f"lr {options.lr:g} ({options.scheduler}{end}{warmup})"


def _group(name: str, group: ParameterGroupOptions) -> str:
    decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
    how = "frozen" if group.freeze else f"lr x {group.lr_factor:g}{decay}"
    return f"{name} ({group.pattern}): {how}"


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
    if "MIG" in words:
        return None
    names = ((name, peak) for peak, names in PEAK_TFLOPS.items() for name in names)
    return next((1e12 * peak for name, peak in names if words.issuperset(name.split())), None)


def mfu(size: ModelSize, lengths: Iterable[int], seconds: float, device_names: Sequence[str]) -> float | None:
    """Return the share of these devices' peak that training on the sequences reaches; None if a device is unknown.

    Args:
        size: the model's size.
        lengths: tokens of each sequence.
        seconds: time of the training step.
        device_names: names of all devices, as torch gives them.
    """
    peaks = [peak for peak in map(peak_flops, device_names) if peak is not None]
    if len(peaks) < len(device_names) or seconds <= 0:
        return None
    return training_flops(size, lengths) / (seconds * sum(peaks))


def usage_metrics(
    usage: Sequence[DeviceUsage], module: Any, lengths: Sequence[int], seconds: float
) -> dict[str, float]:
    """Return metrics of memory and throughput for one training phase.

    Args:
        usage: usage of the trained engine's devices.
        module: the engine's module.
        lengths: tokens of each sequence, each once.
        seconds: time of the phase.

    Returns:
        `memory_gib`, the peak of the worker with the most memory since the last call; and `mfu`, if the devices are
            known.
    """
    size = ModelSize.of(module)
    metrics = {"memory_gib": max(each.peak_bytes for each in usage) / 2**30}
    share = None if size is None else mfu(size, lengths, seconds, [each.name for each in usage])
    return metrics if share is None else {**metrics, "mfu": share}
