"""The inference executor "torch": its worker and its registration."""

from __future__ import annotations

import torch

from rlite.cluster.host import WorkerContext
from rlite.engine.embedded.architecture_check import check_served
from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.replica import PumpedReplica
from rlite.engine.embedded.worker import EmbeddedWorker
from rlite.engine.inference_executor import Capabilities, InferenceBackend
from rlite.parallel.processes import subgroup


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
