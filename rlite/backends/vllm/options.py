"""Options of `executor="vllm"`: the options of every inference executor, and every engine argument of vLLM.

Neither vLLM nor torch is imported here: options are checked in the driver. The names come from vLLM's sources.
"""

from __future__ import annotations

from rlite.backends.vllm import releases
from rlite.engine.options import PassingOptions

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
        return releases.engine_arguments() - OWN.keys()
