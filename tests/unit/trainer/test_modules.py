import pytest

from rlite.trainer.modules import schedule
from rlite.trainer.options import OptimizerOptions


def options(**changes):
    return OptimizerOptions(
        **{"lr": 1.0, "weight_decay": 0.0, "scheduler": "cosine", "warmup_steps": 4, "total_steps": 12} | changes
    )


def test_the_schedule_rises_in_the_warm_up_and_ends_at_zero():
    factors = [schedule(step, options()) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[12] == pytest.approx(0.0)
    assert schedule(10**6, options(scheduler="linear")) == 0.0
    assert schedule(10**6, options(scheduler="constant")) == 1.0
    falling = options(scheduler="polynomial", lr=2.0, lr_end=0.5, power=2.0)
    assert schedule(8, falling) == pytest.approx(0.25 + 0.75 * 0.5**2)
    assert schedule(12, falling) == 0.25
