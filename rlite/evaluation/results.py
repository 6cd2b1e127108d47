"""Results of an evaluation of one model or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlite.evaluation.compare import Comparison
from rlite.evaluation.samples import Sample


@dataclass(frozen=True)
class EvaluatedModel:
    """The samples of one model, and their metrics."""

    name: str
    """name in tables and in the record"""
    model: str
    """folder or hub name"""
    metrics: Mapping[str, float]
    """metrics from `rlite.evaluation.metrics.summary`; those of tasks are named TASK/METRIC"""
    samples: Sequence[Sample] = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """settings that decided the samples"""
    higher_is_better: Mapping[str, bool] = field(default_factory=dict, repr=False)
    """direction of metrics: true if a higher value is better; of the metrics of tasks that say it"""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation."""

    models: Sequence[EvaluatedModel]
    """one, or two that answered the same items"""
    comparison: Comparison | None = None
    """the second model less the first; None for one model, or if there is no common measure"""
    no_comparison: str = ""
    """why two models are not compared"""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the first model."""
        return self.models[0].metrics

    @property
    def samples(self) -> Sequence[Sample]:
        """Samples of the first model."""
        return self.models[0].samples

    def to_json(self) -> dict[str, Any]:
        """Return metrics and comparison as values of JSON."""
        models = {each.name: _to_json(each) for each in self.models}
        comparison = None
        if self.comparison is not None:
            first, second = (each.name for each in self.models)
            comparison = {"first": first, "second": second, **asdict(self.comparison)}
        reason = {"no_comparison": self.no_comparison} if self.no_comparison else {}
        return {"models": models, "comparison": comparison, **reason}


def _to_json(model: EvaluatedModel) -> dict[str, Any]:
    directions = {"higher_is_better": dict(model.higher_is_better)} if model.higher_is_better else {}
    return {"model": model.model, "metrics": dict(model.metrics), **directions}
