"""docs/reading-a-run.md names every metric that a trainer can log, and none that is gone."""

from __future__ import annotations

import ast
import inspect
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import torch

from rlite.algorithms import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    LossInputs,
    off_policy_metrics,
    policy_loss,
    preference_loss,
    weight_metrics,
)
from rlite.algorithms.reduce import Configured
from rlite.backends.models.routing import Routing
from rlite.evaluation.metrics import Sample, summary
from rlite.trainer.losses import DpoLoss, KtoLoss

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reading-a-run.md"
PLACES = re.compile(r"[A-Z]+")
"""parts of names on the page that stand for any text, as NAME in `reward/NAME`"""
OF_ENGINE = {"loss", "grad_norm", "lr", "loss_weight", "num_tokens", "num_microbatches", "is_skipped", "shared_tokens"}
"""statistics of `train_batch`, as they are logged"""
RECORDERS = ("scalar", "count", "stat")


def told() -> list[re.Pattern[str]]:
    """The names in the first columns of the page's tables, as patterns."""
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([\w/@]+)`", cell)]
    assert len(names) > 100
    return [re.compile(PLACES.sub(r"[\\w@.-]+", name)) for name in names]


def is_told(name: str, patterns: list[re.Pattern[str]]) -> bool:
    """Whether the page has a metric: by its name, or as the metric of held-out rows or of the critic."""
    kinds = (name, name.removeprefix("test_"), name.removeprefix("critic/"))
    return any(pattern.fullmatch(kind) for kind in kinds for pattern in patterns)


class Recorded(ast.NodeVisitor):
    """Gathers the names of metrics that a module records by `stats_tracker`, with the scopes around them."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._scopes: list[str] = []

    def visit_With(self, node: ast.With) -> None:
        """Enter the scopes of a block."""
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        scopes = [text for call in calls if name_of(call) == "scope" for text in texts(call.args)]
        for call in calls:
            self.visit(call)
        self._scopes += scopes
        for each in node.body:
            self.visit(each)
        del self._scopes[len(self._scopes) - len(scopes) :]

    def visit_Call(self, node: ast.Call) -> None:
        """Take the names of a call that records."""
        if name_of(node) == "record_timing":
            self.names |= {"seconds" if text == "step" else f"seconds_{text}" for text in texts(node.args)}
        elif name_of(node) in RECORDERS and "stats_tracker" in ast.unparse(node.func):
            own = [word.arg for word in node.keywords if word.arg is not None]
            for word in node.keywords:
                if isinstance(word.value, ast.Dict):
                    own += texts([key for key in word.value.keys if key is not None])
                elif isinstance(word.value, ast.DictComp):
                    own += texts([word.value.key])
            self.names |= {"/".join([*self._scopes, name]) for name in own}
        self.generic_visit(node)


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def texts(nodes: list[ast.expr]) -> list[str]:
    """The constants among nodes; a value in an f-string becomes X."""
    parts = [node.values if isinstance(node, ast.JoinedStr) else [node] for node in nodes]
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in own)
        for own in parts
        if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in own)
    ]


def in_code() -> set[str]:
    """Metrics that the library records by name."""
    recorded = Recorded()
    for path in (ROOT / "rlite").rglob("*.py"):
        if path.parent.name != "observability":
            recorded.visit(ast.parse(path.read_text(encoding="utf-8")))
    assert {"sync_bytes", "rollout/num_lost", "rollout/lost/X", "seconds_update", "seconds"} <= recorded.names
    return recorded.names


def in_runs() -> set[str]:
    """Metrics of the runs of earlier versions in tests/data."""
    names: set[str] = set()
    for archive in (ROOT / "tests" / "data").glob("*.tar.xz"):
        with tarfile.open(archive) as files:
            for member in files:
                if member.name.endswith("/metrics.jsonl") and (file := files.extractfile(member)):
                    names |= {name for line in file.read().splitlines() for name in json.loads(line)}
    assert {"critic/value", "reward_trained", "test_truncated"} <= names
    return names - {"step"}


def of_losses() -> Iterator[str]:
    """Metrics of every policy loss, of the preference losses and of distances of policies."""
    tokens, mask = torch.linspace(-2, -1, 6), torch.ones(6, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 6], dtype=torch.int32)
    inputs = LossInputs(tokens, tokens - 0.1, torch.ones(6), mask, tokens, None, cu_seqlens)
    for name in POLICY_LOSSES:
        yield from policy_loss(Configured.of(POLICY_LOSSES, name, {}), inputs)[1]
    pair = torch.zeros(2)
    yield from preference_loss(pair, pair, pair, pair, loss=Configured.of(PREFERENCE_LOSSES, "sigmoid", {})).metrics
    yield from (*DpoLoss.reported, *KtoLoss.reported, "nll")
    yield from (f"off_policy/{name}" for name in off_policy_metrics(tokens, tokens, mask, cu_seqlens=cu_seqlens))
    yield from (f"off_policy/weight_{name}" for name in weight_metrics(tokens.exp(), mask))


def of_evaluations() -> set[str]:
    """Metrics of an evaluation in which something failed."""
    samples = [
        Sample("a", 0, 1.0, answer="1", length=3),
        Sample("a", 1, 0.0, answer="2", length=3, failed_attempts=("RewardRaised",), redrawn="CallTimeout"),
        Sample("b", 0, None, reason="RewardTimeout: late", length=5),
        Sample("b", 1, 1.0, answer="1", length=4),
    ]
    return {*summary(samples, ks=2)}


def of_experts() -> set[str]:
    """Metrics of the experts of a mixture."""
    names = set(re.findall(r'^ +"(\w+)": |metrics\["(\w+)"\]', inspect.getsource(Routing.report), re.MULTILINE))
    assert ("load_max", "") in names
    return {f"moe/{''.join(own)}" for own in names} | {"moe/load/000"}


def test_every_metric_that_a_trainer_can_log_is_on_the_page() -> None:
    patterns = told()
    logged = {*in_code(), *in_runs(), *of_losses(), *of_evaluations(), *of_experts(), *OF_ENGINE}
    assert sorted(name for name in logged if not is_told(name, patterns)) == []


def test_every_metric_on_the_page_is_still_in_the_code() -> None:
    code = {word for path in (ROOT / "rlite").rglob("*.py") for word in re.findall(r"\w+", path.read_text("utf-8"))}
    lasts = {pattern.pattern.rpartition("/")[2] for pattern in told() if "[" not in pattern.pattern}
    parts = r"^(seconds|weight)_|_(min|max|mean|abs|std|p50|p95)$"
    words = {re.sub(parts, "", last) for last in lasts}
    assert sorted(words - code) == []
