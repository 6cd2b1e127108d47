"""Options of `rlite simulate`, and the amounts that they name. No torch here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, ClassVar

from annotated_types import Le

from rlite.config import Count, Natural, Options, Rate, Seed
from rlite.errors import ConfigError
from rlite.rollout.collector.options import CollectorLimits
from rlite.trainer.options import AnnouncedOptions

MAX_EXPONENT = 50.0
"""exponent that no draw exceeds, so that it stays finite"""
Draw = Callable[[random.Random, float], float]
"""draw(random numbers, value of the run) -> value in the simulation"""
KINDS: Mapping[str, Callable[..., float]] = {
    "factor": lambda rng, own, factor: own * factor,
    "constant": lambda rng, own, value: value,
    "uniform": lambda rng, own, low, high: rng.uniform(low, high),
    "exponential": lambda rng, own, mean: rng.expovariate(1.0) * mean,
    "lognormal": lambda rng, own, median, sigma: median * math.exp(min(rng.gauss(0.0, sigma), MAX_EXPONENT)),
}
MAX_SIZE, MAX_SAMPLES = 100_000, 4096
"""groups of a batch, or devices; and episodes of a group"""
EXPECTED = (
    "expected a factor such as 2x, a number, a share such as 30%, or lognormal:MEDIAN,SIGMA, uniform:LOW,HIGH or "
    "exponential:MEAN"
)


def amount(text: str, name: str) -> Draw:
    """Return the function that an amount means.

    Args:
        text: such as 12, 2x, 30% or lognormal:256,1.
        name: name of the option.

    Raises:
        ConfigError: the text means no amount.
    """
    unit = 0.01 if text.endswith("%") else 1.0
    kind, _, numbers = text.rpartition(":")
    kind = kind or ("factor" if text.endswith("x") else "constant")
    try:
        values = [float(number) * unit for number in numbers.rstrip("x%").split(",")]
        KINDS[kind](random.Random(0), 1.0, *values)
    except (LookupError, ValueError, TypeError, OverflowError):
        raise ConfigError(f"{name}={text}: {EXPECTED}") from None
    if not all(0 <= value < math.inf for value in values):
        raise ConfigError(f"{name}={text}: {EXPECTED}")
    draw = KINDS[kind]
    return lambda rng, own: draw(rng, own, *values)


class SimulatedRollouts(CollectorLimits):
    """Options of `rollout` that a simulation knows. Those that are not given are the run's."""

    max_head_offpolicyness: Natural = 1
    """weight updates that may happen between the start of a group and its consumption"""
    tp_size: Count = 1
    """devices of a replica"""
    max_num_seqs: Count = 256
    """sequences that a replica decodes at once"""
    max_refills: Natural = 4
    """groups of equal rewards that are replaced for each batch, in batches"""


class SimulatedData(Options):
    """Sizes of a batch. Those that are not given are the run's."""

    prompts_per_rollout: Annotated[Count, Le(MAX_SIZE)] | None = None
    """groups in a batch"""
    responses_per_prompt: Annotated[Count, Le(MAX_SAMPLES)] | None = None
    """episodes of a group"""


class SimulateConfig(AnnouncedOptions):
    """Options of `rlite simulate [RUN]`."""

    without_key: ClassVar[tuple[str, ...]] = ("run",)
    help_arguments: ClassVar[str] = "[RUN]"
    help_example: ClassVar[str] = "runs/grpo rollout.max_head_offpolicyness=4 rollout_devices=2x loss_of_replicas=30%"
    amounts: ClassVar[tuple[str, ...]] = (
        *("rollout_devices", "loss_of_replicas", "lengths", "seconds_per_token", "seconds_update", "seconds_sync"),
        "failures",
    )

    run: str | None = None
    """folder of a run whose rollouts ran ahead of training; the first argument without a key. Without a run, give
    lengths, seconds_per_token, seconds_update and both sizes in train_data"""
    steps: Count = 1000
    """steps to simulate"""
    out: str | None = None
    """file for the answer as JSON"""
    rollout: SimulatedRollouts | None = None
    """limits of the rollouts"""
    train_data: SimulatedData | None = None
    """size of a batch"""
    rollout_devices: str = "1x"
    """devices that generate: a factor of the run's (without a run: of one replica's), or a number"""
    loss_of_replicas: str = "0%"
    """share of the replicas that are lost for good after half of the steps; the others take over their requests"""
    lengths: str = "1x"
    """tokens of a response: a factor of the run's such as 2x, or a distribution such as lognormal:256,1"""
    seconds_per_token: str = "1x"
    """seconds of a token of a response that is alone on its replica"""
    slowdown: Rate | None = None
    """relative growth of these seconds with each further sequence on the replica; default: as measured in the run"""
    seconds_update: str = "1x"
    """seconds of a step's training, without the weight sync"""
    seconds_sync: str = "1x"
    """seconds of a weight sync, in which generation rests"""
    failures: str = "1x"
    """share of the groups that are lost because they fail"""
    seed: Seed = 0
    """seed of all draws"""

    def draw(self, name: str) -> Draw:
        """Return the function that the amount of an option means."""
        return amount(getattr(self, name), name)

    def problems(self) -> Iterator[str]:
        """Yield a message for what is missing without a run; raise ConfigError for texts that mean no amount."""
        yield from super().problems()
        for name in self.amounts:
            value = self.draw(name)(random.Random(0), 0.0)
            if name in ("loss_of_replicas", "failures") and value > 1:
                yield f"{name}={getattr(self, name)}: expected a share of at most 100%"
        if self.run is None:
            for name in ("lengths", "seconds_per_token", "seconds_update"):
                if getattr(self, name).endswith("x"):
                    yield f"{name}: needed without a run, such as {name}=lognormal:256,1; or name a run's folder"
            if self.train_data is None or None in dict(self.train_data).values():
                yield "train_data: without a run, prompts_per_rollout and responses_per_prompt are needed"
