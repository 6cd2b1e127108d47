"""Pictures of a run. Needs matplotlib: `pip install 'rlite[plot]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rlite.errors import DataError
from rlite.imports import optional
from rlite.services.console.sinks import read_metrics

with optional("plots need", "plot"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626")


def plot_learning_curve(
    metrics_jsonl: str | Path,
    out_png: str | Path,
    metrics: Sequence[str] = ("reward",),
    *,
    title: str | None = None,
    window: int = 10,
) -> Path:
    """Draw metrics of a `metrics.jsonl` over its steps, one panel each.

    Every step is faint; the mean of the last `window` steps is bold.

    Args:
        metrics_jsonl: path of the file.
        out_png: where the picture goes.
        metrics: the metrics to draw.
        title: title of the picture.
        window: steps of the running mean.

    Returns:
        Path of the picture.

    Raises:
        DataError: the file has none of the metrics.
    """
    rows = read_metrics(Path(metrics_jsonl))
    known = sorted({key for row in rows for key in row} - {"step"})
    figure = Figure(figsize=(6.4, 0.8 + 2.8 * len(metrics)), dpi=160, layout="constrained")
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for panel, metric, color in zip(panels, metrics, _COLORS * len(metrics), strict=False):
        points = [(int(row["step"]), row[metric]) for row in rows if metric in row]
        if not points:
            raise DataError(f"{metrics_jsonl} has no metric {metric!r}; it has: {', '.join(known) or 'nothing'}")
        _draw(panel, points, metric, color, window, is_sparse=len(points) <= len(rows) / 2)
    panels[-1].set_xlabel("training step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", x=0.02, ha="left")
    out_png = Path(out_png)
    out_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)
    return out_png


def _draw(
    panel: Axes, points: list[tuple[int, float]], metric: str, color: str, window: int, *, is_sparse: bool
) -> None:
    steps, values = [step for step, _ in points], [value for _, value in points]
    if is_sparse or len(points) < 3:
        panel.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4.5)
    else:
        recent = [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
        panel.plot(steps, values, color=color, linewidth=0.9, alpha=0.35, label="each step")
        panel.plot(steps, recent, color=color, linewidth=2.0, label=f"mean of {window} steps")
        panel.legend(frameon=False, fontsize=8, loc="best")
    panel.set_ylabel(metric)
    panel.grid(color="#e5e7eb", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color("#9ca3af")
    panel.tick_params(colors="#4b5563", labelsize=9)
