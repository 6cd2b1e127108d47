"""The worker of the embedded inference executor: continuous batching around a Hugging Face model.

The driver pumps the worker: `advance` accepts requests, runs some decode steps, and returns the generated tokens. There
is no thread and no event loop. Under tensor parallelism every rank gets the same calls in the same order. Rank 0
broadcasts the sampled tokens, so all ranks make the same decisions.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from rlite.backends.embedded.cache import CONTEXT_LIMIT, CacheSizes, SlotCache
from rlite.backends.embedded.cuda_graphs import DecodeGraphs, GraphRecorder
from rlite.backends.embedded.model import ShardedModel
from rlite.backends.embedded.options import EmbeddedOptions
from rlite.backends.embedded.passes import ForwardPasses, check_rows
from rlite.backends.embedded.prompt_logprobs import prompt_logprobs
from rlite.backends.embedded.scheduler import RunningSequence, Scheduler
from rlite.backends.models.architecture import rope_limit
from rlite.backends.serving.requests import RequestRules, length_objection
from rlite.errors import DataError, ResidencyError
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.replicas.workers import Part
from rlite.types import PromptLogprobs, SequenceRequest, TokenChunk


class EmbeddedWorker:
    """One rank's model, KV cache and scheduler. The constructor loads the weights and allocates the cache.

    Args:
        path: folder of the checkpoint.
        options: options of the executor.
        device: device of this rank.
        tp_group: the ranks of the replica.

    Raises:
        ConfigError: the model, or an option, cannot be served.
        CheckpointError: `path` holds no usable checkpoint.
    """

    def __init__(
        self, path: str, options: EmbeddedOptions, device: torch.device, tp_group: dist.ProcessGroup | None = None
    ) -> None:
        self.options = options
        self.device = torch.device(device)
        self.version = 0
        group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self._weights = weights = ShardedModel(path, options.dtype, self.device, group, options.deterministic)
        config = weights.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._plan = CacheSizes(options, weights.config, weights.dtype, weights.tp_size)
        self.max_model_len = self._plan.max_model_len
        weights.specialise(self.max_model_len)
        self._are_weights_here = False
        self._cache: SlotCache | None = None
        self.load_weights()
        self._num_slots = self._plan.affordable_slots(self.device, group)
        has_tiles = options.deterministic and not weights.is_invariant
        # fixed shapes cut prompts at fixed places, not where a forward happens to be full
        most = self.max_model_len * self._num_slots if has_tiles else options.max_prefill_tokens
        # in tiles, a cache that decode steps wrote differs from one that prefill writes, in its last bits
        self._scheduler = Scheduler(self._num_slots, most, keeps_caches=not has_tiles)
        self._failed: dict[int, TokenChunk] = {}
        self.to_device("kv_cache")
        self._graphs: DecodeGraphs | None = None
        is_recorded = options.cuda_graphs and not options.deterministic and self.device.type == "cuda"
        # some rotary embeddings depend on the longest position, so their steps run different kernels
        if is_recorded and group is None and rope_limit(config) is None:
            self._graphs = DecodeGraphs(weights, self._num_slots, GraphRecorder(self.device))
        default = "" if options.max_model_len else f" (the default: the model's limit, at most {CONTEXT_LIMIT})"
        agree = partial(agreed, group, self.device)
        self._rules = RequestRules(path, self.vocab_size, self.max_model_len, weights.end_ids(), default, agree)
        self._passes = ForwardPasses(weights, self._scheduler, self._rules, options, group, self._graphs)
        if options.deterministic:
            check_rows(weights, self._serving_cache())

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return self._scheduler.num_unfinished

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        self.version = version

    @torch.inference_mode()
    def advance(self, new: list[SequenceRequest], aborted: list[int], max_steps: int) -> list[TokenChunk]:
        """Accept `new`, end `aborted`, and run up to `max_steps` decode steps, fewer if no request is left.

        Args:
            new: requests, each of which continues after its `output_ids`.
            aborted: numbers of requests that end with their tokens so far.
            max_steps: upper bound of the number of decode steps; 0 only ends requests.

        Returns:
            One chunk for each request that made progress, ended, was refused or failed. A chunk of a refused or failed
                request has an `error` and no tokens. Such a request does not end the others.

        Raises:
            ResidencyError: weights or KV cache are not on the device. Nothing was changed.
            DivergedError: the weights are not finite. The worker can no longer be used.
        """
        cache = self._serving_cache()
        for request in new:
            if (error := self._rules.objection(request)) is not None:
                self._fail(request.request_id, error)
            else:
                self._scheduler.add(self._sequence(request))
        if aborted:
            cache.apply(self._scheduler.abort(set(aborted)))
        steps = 0
        while steps < max_steps:
            cache.apply(self._scheduler.admit())
            self._passes.prefill(cache)
            if not self._scheduler.running:
                break
            num, failed = self._passes.decode(cache, max_steps - steps, self.version)
            steps += num
            for number, error in failed.items():
                self._fail(number, error, is_nonfinite=True)
        return self._drain()

    @torch.inference_mode()
    def prompt_logprobs(self, prompts: list[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens. Running requests are not touched.

        Args:
            prompts: token ids of the vocabulary.
            num_top: number of most likely tokens at each place.

        Returns:
            One entry per prompt.

        Raises:
            DataError: a prompt is too long.
            ResidencyError: weights or KV cache are not on the device.
        """
        self._serving_cache()
        for prompt in prompts:
            if len(prompt) > self.max_model_len:  # the last token is not computed
                raise DataError(length_objection(len(prompt), self.max_model_len, self._rules.default))
        options = self.options
        return prompt_logprobs(self._weights, prompts, num_top, options.max_prefill_tokens, options.deterministic)

    def weights_changed(self, version: int) -> None:
        """Serve newly written weights. Running requests continue from their tokens, and their cache is recomputed."""
        self.version = version
        self._scheduler.forget_cache()

    def _sequence(self, request: SequenceRequest) -> RunningSequence:
        gconfig, num_prompt = request.gconfig, len(request.input_ids)
        tokens = [*request.input_ids, *request.output_ids]
        return RunningSequence(
            request=request,
            tokens=tokens,
            num_reported=len(tokens),
            max_tokens=min(num_prompt + gconfig.max_new_tokens, self.max_model_len),
            min_tokens=num_prompt + gconfig.min_new_tokens,
            stop_ids=self._rules.stop_ids(gconfig),
        )

    def _drain(self) -> list[TokenChunk]:
        failed, self._failed = self._failed, {}
        others = [chunk for chunk in self._scheduler.drain(self.version) if chunk.request_id not in failed]
        return [*failed.values(), *others]

    def _fail(self, request_id: int, error: str, is_nonfinite: bool = False) -> None:
        """Answer a request with the reason why it cannot be served."""
        self._failed[request_id] = TokenChunk(
            request_id=request_id, version=self.version, error=error, is_nonfinite=is_nonfinite
        )

    # --- residency --------------------------------------------------------------------------------------------------

    def load_weights(self, path: str | None = None) -> None:
        """Fill the weights on the device from a checkpoint of the same model; without a path, from the engine's own."""
        self._weights.load(path)
        self._are_weights_here = True

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's blocks of the parameters, for weight sync to write. Tied parameters appear once."""
        return self._weights.parameter_shards()

    def to_device(self, what: Part = "all") -> None:
        """Move weights, KV cache or both to the device. Weights that were on the meta device are uninitialised."""
        if what in ("all", "weights"):
            self._weights.allocate()
            self._are_weights_here = True
        if what in ("all", "kv_cache") and self._cache is None:
            self._cache = SlotCache(self._plan.cache_shape(self._num_slots), self._weights.dtype, self.device)

    def to_cpu(self) -> None:
        """Move weights to host memory and free the KV cache. Running requests recompute their cache later."""
        self._weights.to(torch.device("cpu"))
        self._drop_cache()

    def to_meta(self) -> None:
        """Free the memory of weights and KV cache."""
        self._weights.to(torch.device("meta"))
        self._drop_cache()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by part: weights, kv_cache."""
        cache = 0 if self._cache is None else self._cache.nbytes
        return {"weights": self._weights.memory_bytes(), "kv_cache": cache}

    def _serving_cache(self) -> SlotCache:
        if not self._are_weights_here or self._cache is None:
            missing = "weights" if not self._are_weights_here else "kv_cache"
            raise ResidencyError(
                f"generation needs the {missing} on {self.device}; call cuda({missing!r}) on the engine"
            )
        return self._cache

    def _drop_cache(self) -> None:
        self._are_weights_here = False
        self._cache = None
        if self._graphs is not None:
            self._graphs.clear()
        self._scheduler.forget_cache()
        give_back_cached_memory()


def agreed(group: dist.ProcessGroup | None, device: torch.device, flags: list[bool]) -> list[bool]:
    """Return for each flag whether it is set on all ranks.

    Args:
        group: the ranks of the replica; None is one rank.
        device: device of this rank.
        flags: flags of this rank; equally many on each rank.
    """
    if group is None:
        return flags
    votes = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return votes.bool().tolist()
