"""Observers of the steps of a run: report on the console, sinks of metrics, trace, memory and throughput, and alarms.

Model FLOPs are the operations that the model's mathematics needs. Recomputation by gradient checkpointing does not
count (that would be HFU). The output matrix counts for every token, even if a loss reads few log-probabilities.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rlite import config
from rlite.data.packs import sequence_lengths
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.errors import StorageError
from rlite.observability import trace
from rlite.rollout.collector.lost_groups import Selection, kind_of
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.services.console.sinks import Run, open_sinks
from rlite.services.console.terminal import ConsoleReporter, History
from rlite.trainer.callbacks import Metrics
from rlite.trainer.options import RunOptions
from rlite.trainer.run.best import is_lowest_best
from rlite.trainer.run.folder import RECORD, TRACE
from rlite.trainer.run.observer import Observer, ReportedMetrics
from rlite.trainer.run.training_run import TrainingRun
from rlite.wording import number

logger = logging.getLogger(__name__)


class SinkLog(Observer):
    """Logs metrics to the sinks of a run. They drop the lines that a resumed run writes again."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Open the sinks."""
        options = self._options
        of_run = Run(
            directory=run.folder,
            project=options.project,
            name=options.experiment_name,
            config=config.to_container(run.config),
            resume_after=run.step or -1,  # what stands at step 0 is of another run
        )
        self._sinks = open_sinks(options.all_sinks, of_run)

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Log a line."""
        self._sinks.log(run.step, metrics)

    on_log = on_added = on_step

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Write what is buffered."""
        self._sinks.close()


class StepTrace(Observer):
    """Starts and stops the trace of a run. A trace that cannot be written costs a warning.

    Args:
        options: `trace` and `trace_steps`.
        folder: the run's folder.
    """

    def __init__(self, options: RunOptions, folder: Path) -> None:
        self._is_wanted, self._path = options.trace, folder / TRACE
        self._first, self._last = options.trace_steps or (1, sys.maxsize)

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Follow a step."""
        self.follow(run.step, run.is_over)

    on_start = on_step

    def follow(self, step: int, is_over: bool) -> None:
        """Trace the next step if the options say so, and write the trace of the last step.

        Args:
            step: finished steps.
            is_over: no step is left. The trace of a run that was over before is kept.
        """
        if not self._is_wanted or (is_over and not trace.is_on()):
            return
        if step >= self._last:
            trace.stop()
        elif step + 1 >= self._first and not trace.is_on():
            try:
                trace.start(self._path)
            except StorageError as error:  # no trace is worth a run
                logger.warning("this run is not traced: %s", error)
                self._is_wanted = False
        trace.flush()

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """End the trace, if the options ask for one."""
        if self._is_wanted:
            trace.stop()


FILES = {"model": "latest", "best model": "best", "rollouts": RECORD}
MAX_EARLY = 2
"""headlines of evaluations that stand before most metrics of a step; more of them stand after these"""


class RunReport(Observer):
    """The console of a run, and the metrics that its last lines compare.

    Both always have the metrics of `best_metric` and `stop_at`.

    Args:
        options: the run's options.
        metrics: metrics to show.
        title: title of the plan.
        plan: returns how the work is divided, as text by topic. It is shown if there is work left.
        progress: returns the progress of the work under way, in words; see `ConsoleReporter.follow`.
    """

    def __init__(
        self,
        options: RunOptions,
        metrics: ReportedMetrics,
        title: str = "",
        plan: Callable[[], Mapping[str, str]] | None = None,
        progress: Callable[[], str] | None = None,
    ) -> None:
        self._options, self._metrics = options, metrics
        self._title, self._plan, self._progress = title, plan, progress
        self._deciding = [*([] if options.best_metric is None else [options.best_metric]), *options.stop_at]
        compared = list(dict.fromkeys((*self._deciding, *metrics.compared)))
        lowest = [name for name in compared if is_lowest_best(options, name)]
        self._history = History(compared, metrics.of_steps[:1], lowest, options.best_metric)

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Show from which step the run goes on, or how it goes on if it has ended already, and the plan."""
        if "jsonl" in self._options.sinks:  # of earlier attempts
            self._history.read(run.folder / "metrics.jsonl")
        run.console = self._console = ConsoleReporter(
            run.total_steps,
            metrics=self._columns(),
            choice=self._options.console,
            evaluated=self._metrics.evaluated,
            done_steps=run.step,
        )
        if (found := run.saved.checkpoints.found) is not None:
            self._show_resumed(run, found)
        if self._plan is not None and not run.is_over:
            self._console.report(self._title, self._plan())
        if self._progress is not None:
            self._console.follow(self._progress)

    def _show_resumed(self, run: TrainingRun, checkpoint: Path) -> None:
        if run.stop_reason:
            way = "choose other trainer.callbacks, trainer.stop_at or trainer.save_dir"
            rows = {"reason": run.stop_reason, "to go on": way}
            self._console.report(f"stopped already: after step {run.step} of {run.total_steps}", rows)
        elif run.step < run.total_steps:
            self._console.report(f"resumed from step {run.step}", {"checkpoint": checkpoint})
        else:
            ways = f"raise {self._options.limit_key}, or choose another {self._options.folder_key}"
            self._console.report(f"finished already: step {run.step} of {run.total_steps}", {"to go on": ways})

    def _columns(self) -> list[str]:
        """Return the console's metrics, the most important first."""
        of_steps, headlines = self._metrics.of_steps, self._metrics.headlines
        early = headlines if len(headlines) <= MAX_EARLY else ()
        return list(dict.fromkeys((*of_steps[:1], *self._deciding, *early, *of_steps[1:], *headlines)))

    def on_step(self, run: TrainingRun, metrics: Metrics) -> None:
        """Show the metrics of a step, and keep them for the comparison."""
        self._history.add(run.step, metrics)
        self._console.log(run.step, metrics)

    on_log = on_step  # metrics of evaluations

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Close the bar. At the end of a run, show how it ended, the improvements, and the places of the results."""
        self._console.close()
        if error is not None:
            return
        how = "interrupted" if run.is_interrupted else "stopped" if run.stop_reason else "finished"
        reason = f": {run.stop_reason}" if how == "stopped" else ""
        found = places(self._options)
        if run.best.value is not None and "best model" in found:
            metric = str(self._options.best_metric)
            found["best model"] += f", {metric} {number(metric, run.best.value)} at step {run.best.step}"
        title = f"{how} after step {run.step} of {run.total_steps}{reason}"
        self._console.report(title, {**self._history.rows(), **found}, style="green")


def places(options: RunOptions) -> dict[str, str]:
    """Return the places of the model, the rollouts and the curves of a run, as far as they exist."""
    folder, sinks = Path(options.save_dir), options.all_sinks
    found = {what: str(folder / name) for what, name in FILES.items() if (folder / name).exists()}
    curves = [str(folder / "metrics.jsonl")] if "jsonl" in sinks else []
    curves += [f"tensorboard --logdir {folder}"] if "tensorboard" in sinks else []
    curves += [name for name in sinks if name not in ("jsonl", "tensorboard")]
    return {**found, "curves": ", ".join(curves)} if curves else found


Repeated = Callable[[Callable[[], Any]], Any]
"""returns the result of an action on an engine, repeated if its workers are lost meanwhile"""


class UsageReport(Observer):
    """Enters the memory and the throughput of the trained engine into the metrics of each step.

    Args:
        engine: the engine.
        repeated: returns the result of a call of the engine, repeated if its workers are lost meanwhile.
        freeze_steps: first steps, in which the engine is not trained.
    """

    def __init__(self, engine: RliteTrainEngine, repeated: Repeated, freeze_steps: int = 0) -> None:
        self._engine, self._repeated, self._freeze_steps = engine, repeated, freeze_steps

    def on_train(self, run: TrainingRun, metrics: dict[str, float]) -> None:
        """Enter peak memory and, if the devices are known, MFU."""
        usage = self._repeated(self._engine.device_usage)
        is_trained = run.batch is not None and run.step > self._freeze_steps
        lengths = sequence_lengths(run.batch) if is_trained else []
        metrics |= usage_metrics(usage, self._engine.module, lengths, metrics.get("seconds_update", 0.0))


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
    share = None if size is None else mfu(size, lengths, seconds, [each.name for each in usage])
    metrics = {"memory_gib": max(each.peak_bytes for each in usage) / 2**30, "mfu": share}
    return {name: value for name, value in metrics.items() if value is not None}


LOST = "rollout/lost/"
DRIFT_LIMIT = 0.1
"""mean |log p(trainer) - log p(engine)| per token, in nats. Above it, the two are not the same policy; if rollouts run
ahead, the policy has moved too far"""
DIFFERING_LIMIT = 0.25
"""share of choices of experts that the policy would not repeat. Other kernels and dtypes explain some per cent"""
LOOK = {"look at": "the record (rlite view), the reward function, how hard the prompts are, and the temperature"}
REPEAT_AFTER = 50
"""steps after which an alarm whose cause lasts is given again"""


class Alarms(Observer):
    """Watch over the metrics of each step.

    Lost groups are reported once for each cause. Equal rewards, log-probabilities that differ between trainer and
    engine, and failures that choose among answers are reported when they begin, and again every `REPEAT_AFTER` steps
    while they last.

    Args:
        engine: its collector knows what was lost.
        is_ahead: rollouts run ahead of training.
        can_equal_rewards_teach: a group of equal rewards may teach something.
    """

    def __init__(self, engine: RliteInferenceEngine, is_ahead: bool, can_equal_rewards_teach: bool) -> None:
        self._engine = engine
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
        """Report what is new in the metrics of the finished step.

        Args:
            run: counts the steps, and has the console.
            metrics: metrics of the step.
            first_losses: an example of each cause of lost groups.
            selection: what failures have done to the answers of the step.
        """
        self._look_at_losses(run, metrics, first_losses)
        for cause, rows in (*self._of_metrics(metrics), *(selection or Selection()).alarms()):
            if run.step >= self._given_at.get(cause, -REPEAT_AFTER) + REPEAT_AFTER:
                self._given_at[cause] = run.step
                run.console.alarm(f"ALARM at step {run.step}: {cause}", rows)

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
        if (differs := metrics.get("moe/replay_differs", 0.0)) > DIFFERING_LIMIT:
            told = f"{differs:.1%} of the replayed choices (limit {DIFFERING_LIMIT:.0%})"
            yield (
                "the policy would choose other experts than those that it is trained with",
                {"moe/replay_differs": told},
            )

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
