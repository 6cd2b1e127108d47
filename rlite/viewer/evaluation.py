"""The results of an evaluation of finished models, with the prompts on which two of them differ."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rlite.viewer.prompts import prompts
from rlite.viewer.run import ViewedRun
from rlite.viewer.tables import known_scores

MAX_DIFFERENT = 20
"""prompts that differ most"""


def results(run: ViewedRun) -> dict[str, Any] | None:
    """Return metrics by model, the comparison of two models, and the prompts on which they differ; None for training.

    Args:
        run: the run.
    """
    if not run.results.models:
        return None
    names = [name for name in run.results.models if f"eval.{name}" in run.record.sources]
    different = differences(run, names[0], names[1]) if len(names) == 2 else []
    return {
        "models": run.results.models,
        "comparison": run.results.comparison,
        "no_comparison": run.results.no_comparison,
        "different": different,
    }


def differences(run: ViewedRun, first: str, second: str) -> list[dict[str, Any]]:
    """Return the prompts whose mean scores differ most between two models.

    Args:
        run: the run.
        first: name of a model.
        second: name of a model that answered the same questions.
    """
    sources = [f"eval.{name}" for name in (first, second)]
    if len({run.set_of(source) for source in sources}) > 1:
        return []
    scores = [known_scores(run.record.table(source)) for source in sources]
    is_lowest_best = bool((run.results.comparison or {}).get("lower_is_better"))
    worst, worst_of = (max, pc.max) if is_lowest_best else (min, pc.min)
    extremes = [worst_of(own.filter(pc.is_finite(own))).as_py() or 0.0 for own in scores]
    one, other = (_means(run, source, worst(0.0, *extremes)) for source in sources)
    both = [(item, one[item], other[item]) for item in one.keys() & other.keys() if one[item] != other[item]]
    both.sort(key=lambda each: (-abs(each[2] - each[1]), each[0]))
    known = prompts(run) if both else {}
    place = run.set_of(sources[0])
    return [
        {"set": place, "item": item, "prompt": known.get((place, item)), "first": before, "second": after}
        for item, before, after in both[:MAX_DIFFERENT]
    ]


def _means(run: ViewedRun, source: str, wrong: float) -> dict[str, float]:
    """Return the mean score of each item; a failed sample counts `wrong`, as in `rlite.evaluation.compare`."""
    table = run.record.table(source)
    scores = pa.table({"item": table["item"], "score": pc.fill_null(known_scores(table), wrong)})
    means = scores.filter(pc.is_finite(scores["score"])).group_by("item").aggregate([("score", "mean")])
    return dict(zip(means["item"].to_pylist(), means["score_mean"].to_pylist(), strict=True))
