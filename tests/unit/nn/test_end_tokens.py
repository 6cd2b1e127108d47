"""End tokens of a checkpoint are read as engines read them, and added without changing anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlite.nn.pretrained import GENERATION as FILE
from rlite.nn.pretrained import add_end_ids, end_ids, load_config
from tests.tiny import build_model_dir


@pytest.mark.parametrize(
    ("generation", "own", "added"),
    [
        (None, (7,), [7, 3]),
        ({"eos_token_id": 5, "top_k": 20}, (5,), [5, 3]),
        ({"eos_token_id": [5, 3]}, (5, 3), [5, 3]),
        ({"top_k": 20}, (), [3]),
    ],
)
def test_new_end_tokens_follow_the_models_own(
    generation: dict[str, Any] | None, own: tuple[int, ...], added: list[int], tmp_path: Path
) -> None:
    path = build_model_dir(tmp_path / "model", hidden=32, layers=1, eos_token_id=7)
    (path / FILE).unlink(missing_ok=True)
    if generation is not None:
        (path / FILE).write_text(json.dumps(generation))
    assert end_ids(path) == own
    add_end_ids(path, [])
    assert (path / FILE).exists() == (generation is not None)
    add_end_ids(path, [3])
    written = json.loads((path / FILE).read_text())
    if generation is None:  # as transformers generates with the config alone
        assert written["pad_token_id"] == load_config(path).pad_token_id
        assert "_from_model_config" not in written or not written["_from_model_config"]
    else:
        assert written == {**generation, "eos_token_id": added}
    assert end_ids(path) == tuple(added)
