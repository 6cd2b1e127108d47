"""Registration of the inference executor "vllm", and the checks before it starts.

The replica of the vLLM executor: a thread that fetches tokens from an engine that generates by itself.
"""

from __future__ import annotations

import contextlib
from typing import Protocol

from rlite.backends.serving.pump import PumpedReplica, PumpedWorker
from rlite.backends.vllm import options
from rlite.backends.vllm.options import VllmOptions
from rlite.backends.vllm.worker import VllmWorker
from rlite.errors import ConfigError, WorkerDied, WorkerError
from rlite.nn.pretrained import load_config
from rlite.runtime.parallel.tensor_plan import attention_shape
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend
from rlite.runtime.replicas.workers import RankChoice
from rlite.types import TokenChunk


class FetchedWorker(PumpedWorker, Protocol):
    """A worker whose engine generates between the calls, too. `advance` waits a moment and returns the tokens."""

    def pause(self) -> list[TokenChunk]:
        """Rest at a token boundary, and return the tokens before it that no call has returned."""

    def resume(self) -> list[TokenChunk]:
        """Return the tokens that no call has returned, and continue after `pause`."""

    def shut_down(self) -> None:
        """End the engine and all its processes."""


class FetchingReplica(PumpedReplica):
    """A replica whose thread fetches tokens while there are requests. The engine generates between the calls too.

    To pause, the thread makes no further call, the engine rests, and the tokens before that are delivered.
    """

    def pause(self) -> None:
        """Let the engine rest at a token boundary, and deliver every token before it."""
        super().pause()
        with self._calling:
            if self.failure is None:
                self._deliver(lambda: self.workers.ask(FetchedWorker.pause))

    def resume(self) -> None:
        """Let the engine continue, and fetch its tokens."""
        if self.failure is None:
            self._deliver(lambda: self.workers.ask(FetchedWorker.resume))
        super().resume()

    def close(self) -> None:
        """Stop the thread, end requests in flight with an error, and end vLLM's processes."""
        super().close()
        with contextlib.suppress(WorkerError):  # vLLM ends with a worker that is gone
            self.workers.call(FetchedWorker.shut_down)

    def _fail(self, error: Exception) -> None:
        """Accept no further requests. If vLLM is gone, its worker serves no calls either."""
        if isinstance(error, WorkerDied) and not error.workers:  # vLLM died; its worker does not know the engine's name
            group, first = self.workers.group, self.workers.ranks[0]
            error = WorkerDied(f"{group.name} {error.args[0]}", (group.describe(first),))
        if isinstance(error, WorkerError):
            self.workers.group.mark_lost(self.workers.ranks, error)
        super()._fail(error)


def check_served(path: str, tensor_parallel_size: int) -> None:
    """Refuse a checkpoint that the installed vLLM cannot serve.

    Args:
        path: folder of the checkpoint.
        tensor_parallel_size: number of workers in a replica.

    Raises:
        ConfigError: vLLM does not know the model, or its CPU backend does not support the size of a head.
        CheckpointError: the config of the checkpoint is unusable.
    """
    version, _ = options.installed()
    config = load_config(path)
    classes = config.architectures or []
    if not options.architectures().intersection(classes):
        raise ConfigError(
            f"{path}: its config names the model class {', '.join(classes) or '(none)'}, which vLLM {version} does not "
            "know. Export the model under the name of its Hugging Face class, or use executor='torch'"
        )
    sizes, head_dim = options.CPU_HEAD_SIZES, attention_shape(config)[3]
    if options.is_cpu_build() and head_dim not in sizes:
        raise ConfigError(
            f"{path}: vLLM {version} on CPU does not support attention heads of size {head_dim}; it supports "
            f"{', '.join(map(str, sizes))}. Use executor='torch'"
        )


BACKEND = InferenceBackend(
    options=VllmOptions,
    worker=VllmWorker,
    replica=FetchingReplica,
    check=check_served,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of vLLM's workers
    capabilities=Capabilities(has_prompt_logprobs=True, extras=frozenset({"kept_ids"})),
)
