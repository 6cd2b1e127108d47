from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from rlite.errors import DataError

pytest.importorskip("matplotlib")

from rlite.services.console.plots import plot_learning_curve


def test_the_picture_holds_a_panel_per_metric(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "reward": step / 40, "kl": "nan" if step == 3 else 0.1} for step in range(1, 41)]
    for row in rows[::10]:
        row["test/accuracy"] = 0.5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = []
    for names in (["reward"], ["reward", "kl", "test/accuracy"]):
        picture = plot_learning_curve(metrics, tmp_path / "plots" / "curve.png", names, title="tiny")
        header = picture.read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        sizes.append(struct.unpack(">II", header[16:24]))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] > 2 * sizes[0][1]


def test_a_metric_that_was_never_logged_is_named_with_those_that_were(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 0.5}\n')
    with pytest.raises(DataError, match=r"no metric 'reward'; it has: loss"):
        plot_learning_curve(metrics, tmp_path / "curve.png")
