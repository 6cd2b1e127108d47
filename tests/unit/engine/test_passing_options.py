"""Options of an executor that passes arguments on to another program."""

from __future__ import annotations

import inspect

import pytest

from rlite.errors import ConfigError, UnknownOptionError
from rlite.runtime.replicas.replica import PassingOptions


class OtherOptions(PassingOptions):
    """Options of a program with four arguments: one has the name of an option, one is rlite's."""

    executor = "other"
    reserved = {"port": "the server takes a free port"}

    @classmethod
    def arguments(cls) -> frozenset[str]:
        return frozenset({"block_size", "seed", "dtype", "port"})


def test_arguments_of_the_program_are_passed_on_and_common_options_are_not() -> None:
    options = OtherOptions(seed=3, block_size=16)
    assert (options.seed, options.max_num_seqs, options.passed_on) == (3, 128, {"block_size": 16})


def test_the_signature_lists_common_options_first_and_each_name_once() -> None:
    names = list(inspect.signature(OtherOptions).parameters)
    common = ["max_model_len", "max_num_seqs", "gpu_memory_utilization", "dtype", "seed"]
    assert names == [*common, "block_size", "port"]


def test_reserved_unknown_and_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="executor 'other' does not take port: the server takes a free port"):
        OtherOptions(port=1)
    with pytest.raises(UnknownOptionError, match="did you mean 'seed'"):
        OtherOptions(sed=1)
    with pytest.raises(ConfigError, match="dtype=float64"):
        OtherOptions(dtype="float64")
