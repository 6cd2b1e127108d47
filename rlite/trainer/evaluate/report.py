"""The table of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from rlite.evaluation.results import EvaluationResult
from rlite.rollout.collector.lost import in_a_line
from rlite.trainer.evaluate.options import EvalConfig
from rlite.wording import counted


def print_result(result: EvaluationResult, options: EvalConfig) -> None:
    """Print metrics and comparison.

    Args:
        result: of the evaluation.
        options: of the command.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("metric")
    for model in result.models:
        table.add_column(model.name, justify="right")
    for name in shown_metrics([model.metrics for model in result.models]):
        table.add_row(name, *(shown(name, model.metrics) for model in result.models))
    console.print(title(result, options), soft_wrap=True)
    console.print(table)
    for model in result.models:
        if reasons := Counter(in_a_line(sample.reason) for sample in model.samples if sample.score is None):
            failed, most = f"{reasons.total()} of {len(model.samples)} samples failed", reasons.most_common(1)[0][0]
            console.print(f"{model.name}: {failed}; most often: {most}", soft_wrap=True)
    if (sentence := difference(result)) is not None:
        console.print(sentence, soft_wrap=True)


def title(result: EvaluationResult, options: EvalConfig) -> str:
    """Return what was measured, in words and numbers.

    Args:
        result: of the evaluation.
        options: of the command.
    """
    num_items = len({sample.item for sample in result.samples})
    if options.tasks:
        return f"{num_items} questions of {', '.join(options.tasks)}"
    num_samples = len(result.samples) // num_items
    return f"{counted(num_items, 'prompt')} x {counted(num_samples, 'sample')}{sampling(options)}"


def sampling(options: EvalConfig) -> str:
    """Return how the answers are sampled, in words; "" if nothing was generated."""
    if not options.sources_of_scores:
        return ""
    chosen = options.sampling
    default = f" (the default of samples={options.samples})" if options.temperature is None else ""
    return f", temperature {chosen.temperature:g}{default}, at most {chosen.max_new_tokens} new tokens"


def shown_metrics(models: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the metrics for the table, in order: of pass@k, k = 1, 2, 4, ... and the largest."""
    names = list(dict.fromkeys(name for metrics in models for name in metrics))
    ks = [int(name.removeprefix("pass@")) for name in names if name.startswith("pass@")]
    hidden = {f"pass@{k}" for k in ks if k & (k - 1) and k != max(ks)} | {"standard_error"}
    return [name for name in names if name not in hidden and not name.endswith("_stderr")]


def shown(name: str, metrics: Mapping[str, float]) -> str:
    """Return a metric for the table, the accuracy with its standard error; "" if the model has none."""
    if name not in metrics:
        return ""
    value = metrics[name]
    if name == "num_errors" or name.startswith("errors/"):
        return f"{value:.0f}"
    error = metrics.get("standard_error") if name == "accuracy" else metrics.get(f"{name}_stderr")
    return f"{value:.4f}" if error is None else f"{value:.4f} ± {error:.4f}"


def difference(result: EvaluationResult) -> str | None:
    """Return the comparison in a sentence; None without one."""
    if (found := result.comparison) is None:
        return None
    first, second = (model.name for model in result.models)
    interval = "" if found.low is None else f" [{found.low:+.4f}, {found.high:+.4f}]"
    return (
        f"accuracy of {second} - {first}: {found.difference:+.4f}{interval} ({found.confidence:.0%} interval, paired "
        f"bootstrap over {found.num_items} items), p = {found.p_value:.2g} (two-sided sign-flip test); better at "
        f"{found.better} items, worse at {found.worse}"
    )
