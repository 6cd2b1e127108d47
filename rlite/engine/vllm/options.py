"""Options of `executor="vllm"`: the options of every inference executor, and every engine argument of vLLM.

Neither vLLM nor torch is imported here: options are checked in the driver. The names come from vLLM's sources.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from rlite.config import Count, Options
from rlite.engine.vllm import releases
from rlite.errors import ConfigError

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


class CommonOptions(Options):
    """Options that every inference executor has."""

    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest sequence, prompt and completion together; default: the model's own limit"""
    max_num_seqs: Count = 128
    """sequences decoded together"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """fraction of a GPU's memory for weights and KV cache. On CPU, upper bound for the KV cache as a fraction of the
    free memory"""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """type of weights and KV cache; default: the checkpoint's"""
    seed: int = 0
    """seed of requests without a seed of their own"""


class _Signature(type):
    """Gives `VllmOptions` the signature that lists every engine argument of the installed vLLM."""

    @property
    def __signature__(cls) -> Signature:
        common = CommonOptions.model_fields
        names = [*common, *sorted(releases.engine_arguments() - common.keys() - OWN.keys())]
        return Signature([Parameter(name, Parameter.KEYWORD_ONLY) for name in names])


class VllmOptions(metaclass=_Signature):
    """Options of `executor="vllm"`.

    Args:
        **values: fields of `CommonOptions`, and engine arguments of vLLM, which are passed on as they are.

    Raises:
        ConfigError: a value of the common options cannot work, or vLLM is missing.
        UnknownOptionError: an option is unknown.
    """

    max_model_len: int | None
    max_num_seqs: int
    gpu_memory_utilization: float
    dtype: str | None
    seed: int

    def __init__(self, **values: Any) -> None:
        for name in OWN.keys() & values.keys():
            raise ConfigError(f"executor 'vllm' does not take {name}: {OWN[name]}")
        passed_on = {name: value for name, value in values.items() if name in releases.engine_arguments()}
        common = CommonOptions(
            **{k: v for k, v in values.items() if k in CommonOptions.model_fields or k not in passed_on}
        )
        vars(self).update(common.model_dump())
        self.engine_arguments = {k: v for k, v in passed_on.items() if k not in CommonOptions.model_fields}
        """engine arguments of vLLM beside the common options"""
