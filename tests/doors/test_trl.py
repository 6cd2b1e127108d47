"""TRL's contract needs no package: this is the learning test alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.learning import check_learning, tiny_model
from tests.unit.rollout.contracts import counters
from tests.unit.rollout.contracts.tool_template import TEMPLATE

FILE = Path(counters.__file__)


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_held_out_rewards_rise(tmp_path: Path) -> None:
    rows, held_out = (
        [{"prompt": [{"role": "user", "content": f"Say many e, {number}."}]} for number in numbers]
        for numbers in (range(64), range(100, 116))
    )
    config = {"reward_funcs": [f"{FILE}:share_of_e"]}
    model = tiny_model(tmp_path, TEMPLATE)
    check_learning(tmp_path, model, rows, held_out, env_path=f"trl:{FILE}:Silent", env_config=config)
