"""The part of rlite inside vLLM's own processes: schedulers, the sampler, weight sync, and memory of the KV cache.

vLLM mixes `WorkerExtension` into its worker class, by the engine argument `worker_extension_cls`. No other process
imports this module.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.sampler import Sampler

from rlite.backends.serving.sampler import Sampling, SamplingBatch, kept_ids_of, sample, uniforms
from rlite.backends.vllm.release import SAMPLING, Holding, is_cpu_build
from rlite.backends.vllm.reload import DirectCopies, processed_again
from rlite.backends.vllm.served import served_blocks
from rlite.errors import WeightSyncError
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.parallel.shared_memory import SharedMemoryReader
from rlite.runtime.replicas.digests import block_digests
from rlite.types import GenerationHyperparameters


class HoldingScheduler(Holding, Scheduler):
    """vLLM's scheduler, which sends the tokens of several steps at once."""


class AsyncHoldingScheduler(Holding, AsyncScheduler):
    """vLLM's scheduler for overlapping steps, which sends the tokens of several steps at once."""


class WorkerExtension:
    """Methods that rlite adds to vLLM's worker. The server calls them with `collective_rpc`."""

    model_runner: Any
    model_config: Any
    vllm_config: Any

    def rlite_install(self, server: int) -> int:
        """Install rlite's sampler, and end this process with the server.

        Returns bytes of the KV cache in this process.
        """
        self.model_runner.sampler = RequestSampler(self.model_runner)
        _mend_adapters(self.model_runner.get_model())
        threading.Thread(target=_end_with, args=(server,), name="rlite watch", daemon=True).start()
        return sum(storage.nbytes() for storage in self._rlite_storages())

    # -- weights -------------------------------------------------------------------------------------------------

    def rlite_load(self, source: bytes) -> None:
        """Load weights.

        `source`: pickled path of a checkpoint; or handles of shared parameters by name, their conversion, and the path
        of a checkpoint with the names of its tensors that are no parameters.
        """
        given = pickle.loads(source)
        model = self.model_runner.get_model()
        expected = {name for name, _ in model.named_parameters()}
        loaded: set[str] = set()
        load, held, written = model.load_weights, dict(model.named_parameters()), set[str]()

        def remember(weights: Any) -> set[str] | None:
            with DirectCopies(model, held) as copies:
                found = load(weights)
            written.update(copies.written)
            loaded.update(found or expected)
            return found

        tensors: Iterator[tuple[str, Tensor]] = iter(())
        if isinstance(given, str):
            reader = CheckpointReader(Path(given))
            names = reader.names()
        else:
            handles, conversion, path, names = given
            shared, reader = SharedMemoryReader(), CheckpointReader(path)
            tensors = conversion.stored((name, shared.view(handle)) for name, handle in handles.items())
        tensors = chain(tensors, ((name, reader.read(name)) for name in names))
        model.load_weights = remember
        try:
            with set_current_vllm_config(self.vllm_config), processed_again(model, written):
                self.model_runner.reload_weights(weights_iterator=tensors)
        finally:
            del model.load_weights
        # a quantised model has parameters that are computed from the checkpoint's
        if (missing := sorted(expected - loaded)) and self.model_config.quantization is None:
            raise WeightSyncError(f"vLLM did not load {missing[:5]} ({len(missing)} of {len(expected)} parameters)")
        _repack_tied_head(model)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the next sync writes into the same memory

    def rlite_digest(self, pieces: bytes) -> bytes:
        """Return pickled digests of the parts of each piece that this process computes with.

        `pieces`: pickled, of each the stored name, the box in the global tensor, and the shape of that tensor.
        """
        model, asked = self.model_runner.get_model(), pickle.loads(pieces)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        rename = mapper.get_rename_mapper().map_name if mapper else str
        held = served_blocks(model, {rename(name): shape for name, _, shape in asked})
        dtype = self.model_config.dtype
        return pickle.dumps([[*block_digests(held.get(rename(name), ()), box, dtype)] for name, box, _ in asked])

    # -- memory of the KV cache, where vLLM has no sleep mode ----------------------------------------------------

    def rlite_free_cache(self) -> None:
        """Free the memory of keys and values. All views of it stay valid, but empty."""
        self._rlite_sizes = [(storage, storage.nbytes()) for storage in self._rlite_storages()]
        for storage, _ in self._rlite_sizes:
            storage.resize_(0)

    def rlite_allocate_cache(self) -> None:
        """Allocate the memory of keys and values again."""
        for storage, nbytes in self._rlite_sizes:
            if storage.nbytes() == 0:
                storage.resize_(nbytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        self._rlite_sizes = []

    def _rlite_storages(self) -> list[Any]:
        tensors = [t for cache in self.model_runner.kv_caches for t in (cache if isinstance(cache, list) else [cache])]
        return list({t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values())


class RequestSampler(Sampler):
    """rlite's sampler in place of vLLM's: a token depends on its logits, its request's seed and its position alone.

    A request therefore continues with the same tokens on another replica. vLLM's log-probabilities carry both of the
    contract: of the whole distribution in the first column, of the truncated one in the second. The third column of the
    token ids, and those after it, hold the kept ids of requests that ask for them, padded with -1.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner.sampler.logprobs_mode)
        self._runner = runner
        self._known: dict[str, tuple[int, Sampling, Sampling]] = {}
        self._rows: list[Sampling] = []
        self._batch: SamplingBatch | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's SamplerOutput for `logits` [requests, vocabulary]."""
        rows = self._runner.input_batch
        if len(rows.req_ids) != logits.shape[0]:  # a dummy run
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        lengths = rows.num_tokens_no_spec[: len(rows.req_ids)].tolist()
        batch = self._sampling(rows.req_ids, lengths, logits)
        # from pageable memory the copy would wait for the forward pass
        positions = torch.tensor(lengths, pin_memory=logits.is_cuda).to(logits.device, non_blocking=True)
        tokens, whole, kept, kept_ids = sample(logits, batch, uniforms(batch.seeds, positions))
        columns = torch.stack([tokens, (tokens + 1) % logits.shape[1]], 1)
        if kept_ids is not None:
            rows_of_ids = [torch.tensor(ids, dtype=columns.dtype) for ids in kept_ids_of(kept_ids, len(tokens))]
            padded = torch.nn.utils.rnn.pad_sequence(rows_of_ids, batch_first=True, padding_value=-1)
            columns = torch.cat([columns, padded.to(columns.device)], 1)
        table = LogprobsTensors(columns.to(torch.int32), torch.stack([whole, kept], 1), torch.ones_like(tokens))
        return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=table)

    def _sampling(self, names: list[str], lengths: list[int], logits: Tensor) -> SamplingBatch:
        """Return the sampling parameters of the batch, which are kept while its composition stays the same."""
        known = [self._known.get(name) or self._read(name) for name in names]
        rows = [early if length < least else late for length, (least, early, late) in zip(lengths, known, strict=True)]
        if self._batch is None or rows != self._rows:
            self._rows = rows
            self._batch = SamplingBatch.of(rows, logits.shape[1], logits.device)
            self._known = dict(zip(names, known, strict=True))
        return self._batch

    def _read(self, name: str) -> tuple[int, Sampling, Sampling]:
        """Return the length from which a request may end, and its sampling parameters before and after that."""
        asked = (self._runner.requests[name].sampling_params.extra_args or {}).get(SAMPLING)
        if asked is None:  # nobody reads its completion
            return 0, UNREAD, UNREAD
        gconfig, stop_ids = GenerationHyperparameters(**asked["gconfig"]), frozenset(asked["stop_ids"])
        late = Sampling(gconfig, asked["seed"], stop_ids, has_kept_ids=asked["has_kept_ids"])
        return asked["min_length"], late._replace(is_early=True), late


UNREAD = Sampling(GenerationHyperparameters(greedy=True), seed=0)


def _repack_tied_head(model: Any) -> None:
    """Compute the packed copy of a tied head again, which vLLM's reload leaves with the old weights on CPU."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _mend_adapters(model: Any) -> None:
    """Let vLLM's layers with adapters compute what they should on CPU; without `enable_lora` there are none.

    For tokens without an adapter vLLM's CPU kernels read the adapter at index -1, which is the last one. Here the last
    one is empty. Its product for adapters of the head fails, and ends the engine, when a prompt's log-probabilities
    share a batch with other requests. rlite refuses adapters of the head, and here the head has none. It refuses those
    of experts and embeddings, too, whose layers hold no tuples.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, LogitsProcessorWithLoRA):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, module.base_layer)
        elif is_cpu_build() and isinstance(module, BaseLayerWithLoRA) and isinstance(module.lora_b_stacked, tuple):
            module.lora_b_stacked = tuple(map(_with_empty, module.lora_b_stacked))


def _with_empty(stacked: Tensor) -> Tensor:
    return torch.cat([stacked, torch.zeros_like(stacked[:1])])


def _end_with(process: int) -> None:
    """End this process when another one has ended."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    os._exit(1)
