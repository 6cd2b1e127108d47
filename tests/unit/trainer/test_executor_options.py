"""Further options of an executor: what has a place of its own is refused there, in the words of the command."""

from __future__ import annotations

from typing import Any

import pytest

from rlite import config
from rlite.assembly.commands.options import GenerateConfig, ServeConfig
from rlite.assembly.evaluate.options import EvalConfig
from rlite.errors import ConfigError
from rlite.trainer.rl.options import RolloutOptions

CONFIGS = {GenerateConfig: ["model=m", "prompt=hello"], ServeConfig: ["model=m"], EvalConfig: ["model=m"]}
DOUBLED = {
    "tensor_parallel_size": "set tp_size",
    "data_parallel_size": "it follows from the devices and tp_size",
    "colocate_with": "rlite places the engine",
    "dtype": "set dtype",
}


@pytest.mark.parametrize("name", DOUBLED)
@pytest.mark.parametrize("cls", CONFIGS)
def test_an_executor_option_with_a_place_of_its_own_is_refused_with_that_place(cls: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"executor_options\.{name}: .*{DOUBLED[name]}"):
        config.load(cls, [*CONFIGS[cls], f"executor_options.{name}=1"])


@pytest.mark.parametrize("name", ["max_model_len", "seed", "max_num_seqs", "gpu_memory_utilization", *DOUBLED])
def test_rollouts_refuse_each_option_that_is_set_twice(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"executor_options\.{name}: "):
        RolloutOptions(executor_options={name: 1})
    assert RolloutOptions(executor_options={"addresses": ["http://a"], "model": "m"}).executor_options


def test_the_server_hands_further_options_to_its_executor() -> None:
    arguments = ["model=m", "executor=vllm", "executor_options={enable_prefix_caching: false, seed: 3}", "tp_size=2"]
    options = config.load(ServeConfig, arguments)
    assert options.build_options() == {
        "tensor_parallel_size": 2,
        "data_parallel_size": 1,
        "enable_prefix_caching": False,
        "seed": 3,
    }
    with pytest.raises(ConfigError, match=r"executor_options\.max_model_len: .*set max_model_len"):
        config.load(ServeConfig, ["model=m", "executor_options={max_model_len: 9}"])
