"""Registration of the inference executor "vllm", and the checks before it starts."""

from __future__ import annotations

from rlite.engine.inference_executor import Capabilities, InferenceBackend
from rlite.engine.vllm import releases
from rlite.engine.vllm.options import VllmOptions
from rlite.engine.vllm.replica import FetchingReplica
from rlite.engine.vllm.worker import VllmWorker
from rlite.engine.workers import RankChoice
from rlite.errors import ConfigError
from rlite.nn.pretrained import load_config
from rlite.parallel.tensor_plan import attention_shape


def check_served(path: str, tensor_parallel_size: int) -> None:
    """Refuse a checkpoint that the installed vLLM cannot serve.

    Args:
        path: folder of the checkpoint.
        tensor_parallel_size: number of workers in a replica.

    Raises:
        ConfigError: vLLM does not know the model, or its CPU backend does not support the size of a head.
        CheckpointError: the config of the checkpoint is unusable.
    """
    version, _ = releases.installed()
    config = load_config(path)
    classes = config.architectures or []
    if not releases.architectures().intersection(classes):
        raise ConfigError(
            f"{path}: its config names the model class {', '.join(classes) or '(none)'}, which vLLM {version} does not "
            "know. Export the model under the name of its Hugging Face class, or use executor='torch'"
        )
    sizes, head_dim = releases.cpu_head_sizes(), attention_shape(config)[3]
    if releases.is_cpu_build() and sizes and head_dim not in sizes:
        raise ConfigError(
            f"{path}: vLLM {version} on CPU does not support attention heads of size {head_dim}; it supports "
            f"{', '.join(map(str, sorted(sizes)))}. Use executor='torch'"
        )


BACKEND = InferenceBackend(
    options=VllmOptions,
    worker=VllmWorker,
    replica=FetchingReplica,
    check=check_served,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of vLLM's workers
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"})),
)
