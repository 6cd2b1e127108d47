from __future__ import annotations

import pytest
import torch
from transformers import get_polynomial_decay_schedule_with_warmup

from rlite.algorithms import lr_factor
from rlite.errors import ConfigError


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "polynomial"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_the_rate_rises_from_the_first_step_and_then_never_again(schedule: str, warmup_steps: int) -> None:
    rates = [lr_factor(step, schedule, total_steps=20, warmup_steps=warmup_steps, min_factor=0.1) for step in range(25)]
    assert rates[0] > 0
    assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
    assert rates[max(warmup_steps - 1, 0)] == 1
    assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)
    assert rates[20:] == pytest.approx([1.0 if schedule == "constant" else 0.1] * 5)


def test_with_decay_steps_the_rate_is_stable_in_between() -> None:
    rates = [lr_factor(step, "linear", total_steps=10, warmup_steps=2, decay_steps=4) for step in range(11)]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]


def test_a_warm_up_longer_than_training_and_no_step_at_all_are_no_error() -> None:
    assert lr_factor(3, "cosine", total_steps=2, warmup_steps=8) == 0.5
    assert lr_factor(0, "cosine", total_steps=0) == 0


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_polynomial_is_the_schedule_of_transformers(power: float, warmup_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    theirs = get_polynomial_decay_schedule_with_warmup(optimizer, warmup_steps, 20, lr_end=3e-6, power=power)
    for step in range(25):
        factor = lr_factor(
            step if step >= warmup_steps else step - 1,  # theirs makes the first step at a rate of 0
            "polynomial",
            total_steps=20,
            warmup_steps=warmup_steps,
            min_factor=3e-6 / 2e-5,
            power=power,
        )
        assert 2e-5 * factor == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        theirs.step()


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ConfigError, match="'exponential': expected one of constant, linear, cosine, polynomial"):
        lr_factor(0, "exponential", total_steps=1)
