"""The inference executor "torch": its worker and its registration.

Comparison of the embedded executor with transformers for a checkpoint's model. It runs in the driver, on CPU.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.backends.embedded.options import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.backends.models.architecture import (
    REMEDY,
    TOLERANCE,
    alone,
    check_architecture,
    check_gpu_kernels,
    miniature,
    once_per_config,
    saved,
    sequences,
)
from rlite.backends.models.checkpoint_fit import check_fit
from rlite.backends.serving.pump import PumpedReplica
from rlite.errors import ConfigError, StorageError
from rlite.nn.pretrained import check_plain, load_config, meta_model, real_tensors, summary
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.session import has_gpus
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.parallel.tensor_inference import check_tensor_parallel
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend
from rlite.types import GenerationHyperparameters, SequenceRequest

NUM_NEW = 3
"""tokens that a small model generates after each sequence"""


def check_served(path: str, tensor_parallel_size: int) -> None:
    """Refuse a checkpoint whose model the executor would compute differently from transformers.

    Raises:
        ConfigError: the model cannot be served; the message gives the reason.
        CheckpointError: the config of the checkpoint is unusable.
    """
    config = load_config(path)
    model = meta_model(config)
    check_plain(config, path)
    check_architecture(type(model), model.config, [name for name, _ in model.named_parameters()])
    if (reason := refusal(type(model), model.config)) is not None:
        raise ConfigError(
            f"{path}: {type(model).__name__} ({config.model_type!r}) {reason}. {REMEDY}, or use another executor"
        )
    if has_gpus():
        check_gpu_kernels(type(model), model.config)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    check_fit(CheckpointReader(path), names, path, model)
    if tensor_parallel_size > 1:
        check_tensor_parallel(model, tensor_parallel_size)


@once_per_config
def refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return the reason why the executor would compute another model than transformers, None if it would not.

    Raises:
        StorageError: the small copy of the model could not be written. This says nothing about the class.
    """
    model = miniature(cls, config)
    try:
        with real_tensors(), torch.inference_mode(), saved(model) as folder:
            is_equal = largest_error(model, folder) <= TOLERANCE
    except StorageError:  # says nothing of the class
        raise
    except Exception as error:  # of any kind: the class's own code
        return f"cannot be served: a small copy of it fails with {summary(error)}"
    return None if is_equal else "computes something else when it is served"


def largest_error(model: PreTrainedModel, folder: str) -> float:
    """Return the largest difference between a generated token's log-probability and transformers' own forward.

    Differences are in units of the standard deviation of the logits.

    Args:
        model: a small model.
        folder: folder of its checkpoint.

    Raises:
        ConfigError: the worker answers a request with an error.
    """
    prompts = [ids.tolist() for ids in sequences()]
    length = max(map(len, prompts)) + NUM_NEW + 1
    # prompts are cut into several prefills, one of which begins amid a prompt
    options = EmbeddedOptions(max_model_len=length, max_num_seqs=len(prompts), max_prefill_tokens=length // 2)
    worker = EmbeddedWorker(folder, options, torch.device("cpu"))
    # a temperature at which every token is likely: in a peaked distribution, wrong logits give the same log-probability
    temperature = float(alone(model).std())
    gconfig = GenerationHyperparameters(max_new_tokens=NUM_NEW, temperature=temperature, ignore_eos=True)
    requests = [SequenceRequest(request_id=i, input_ids=ids, gconfig=gconfig, seed=i) for i, ids in enumerate(prompts)]
    errors = []
    for chunk in worker.advance(requests, [], NUM_NEW):
        if chunk.error is not None:
            raise ConfigError(chunk.error)
        prompt = prompts[chunk.request_id]
        logits = model(input_ids=torch.tensor([[*prompt, *chunk.token_ids]]), use_cache=False).logits[0] / temperature
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        made = expected.gather(1, torch.tensor(chunk.token_ids)[:, None])[:, 0]
        errors.append((made - torch.tensor(chunk.logprobs)).abs())
    return float(torch.cat(errors).max().nan_to_num(nan=float("inf")))


def make_worker(context: WorkerContext, path: str, options: EmbeddedOptions, executor_size: int) -> EmbeddedWorker:
    """Return one rank of one replica. The ranks of a replica share a process group.

    Args:
        context: the place of this worker.
        path: folder of the checkpoint.
        options: options of the executor.
        executor_size: number of workers in a replica.
    """
    group = subgroup(context.replica_ranks(executor_size)) if executor_size > 1 else None
    return EmbeddedWorker(path, options, torch.device(context.torch_device), group)


BACKEND = InferenceBackend(
    options=EmbeddedOptions,
    worker=make_worker,
    replica=PumpedReplica,
    check=check_served,
    capabilities=Capabilities(has_prompt_logprobs=True, has_readable_weights=True, extras=frozenset({"kept_ids"})),
)
