"""The worker of the embedded inference executor: continuous batching around a Hugging Face model.

The driver pumps the worker: `advance` accepts requests, runs some decode steps, and returns the generated tokens. There
is no thread and no event loop. Under tensor parallelism every rank gets the same calls in the same order. Rank 0
broadcasts the sampled tokens, so all ranks make the same decisions.

Log-probabilities of prompts: forward passes beside the KV cache, over packs of prompts.

A pack is cut into pieces of a bounded number of tokens, because the logits of a whole pack may not fit. A prompt that
is cut continues from the keys and values of its earlier pieces.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.backends.embedded.attention import ScoringPlan
from rlite.backends.embedded.cache import CONTEXT_LIMIT, CacheSizes, EmbeddedOptions, PagedCache
from rlite.backends.embedded.kernel import decode_kernel
from rlite.backends.embedded.model import ShardedModel
from rlite.backends.embedded.passes import DecodeGraphs, ForwardPasses, GraphRecorder, check_rows
from rlite.backends.embedded.scheduler import Chunk, RunningSequence, Scheduler, ServedAdapter
from rlite.backends.embedded.speculation import Speculator
from rlite.backends.models import architecture
from rlite.backends.models.attention import use_flash_attention_3
from rlite.backends.models.mixers import check_not_split
from rlite.backends.models.stored import StoredCheckpoint
from rlite.backends.serving.pump import PumpedReplica
from rlite.backends.serving.sampler import RequestRules, length_objection
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError, DataError, NonFiniteError, ResidencyError, StorageError, did_you_mean
from rlite.nn.pretrained import check_plain, end_ids, load_config, meta_model, real_tensors, summary
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.session import has_gpus
from rlite.runtime.parallel.host_memory import give_back_cached_memory
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.tensor import check_tensor_parallel
from rlite.runtime.replicas.adapters import AdapterWeights, probe_ids
from rlite.runtime.replicas.digests import Served, own_digests
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend
from rlite.runtime.replicas.transport import Piece
from rlite.runtime.replicas.workers import Part
from rlite.types import GenerationHyperparameters, PromptLogprobs, SequenceRequest, TokenChunk

logger = logging.getLogger(__name__)
LOGITS_BYTES = 256 << 20
"""most memory of the float32 logits of one forward pass"""


def prompt_logprobs(
    weights: ShardedModel,
    prompts: Sequence[list[int]],
    num_top: int,
    max_tokens: int,
    is_alone: bool,
    adapter: ServedAdapter | None = None,
) -> list[PromptLogprobs]:
    """Return the log-probabilities of each prompt's tokens but the first.

    `max_tokens`: most tokens of one forward pass.
    """
    vocab_size = weights.config.get_text_config().vocab_size
    weights.use_adapters([adapter])
    max_tokens = max(1, min(max_tokens, LOGITS_BYTES // (4 * vocab_size)))
    results = [PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[]) for _ in prompts]
    plan: ScoringPlan | None = None
    for piece in pieces(prompts, max_tokens, is_alone):
        plan = ScoringPlan(piece, plan, weights.device)
        labels = torch.tensor([token for c in piece for token in prompts[c.row][c.start + 1 : c.stop + 1]])
        columns = _columns(weights.prompt_logits(plan), labels.to(weights.device), num_top)
        owners = [results[c.row] for c in piece for _ in c.tokens]
        for owner, logprob, top_ids, top_logprobs in zip(owners, *columns, strict=True):
            owner.logprobs.append(logprob)
            owner.top_ids.append(top_ids)
            owner.top_logprobs.append(top_logprobs)
    for index, result in enumerate(results):
        if not all(map(math.isfinite, result.logprobs)):
            raise NonFiniteError(f"prompt {index}: its logits are not finite in {weights.dtype}")
    return results


def pieces(prompts: Sequence[list[int]], max_tokens: int, is_alone: bool) -> Iterator[list[Chunk]]:
    """Yield the chunks of each forward pass: all tokens but the last of each prompt, in order.

    `prompts`: token ids. `Chunk.row` is the index of a prompt. `max_tokens`: most tokens of a piece. Yields chunks. A
    chunk that starts within a prompt is the first of its piece.
    """
    piece: list[Chunk] = []
    room = max_tokens
    for index, prompt in enumerate(prompts):
        start, end = 0, len(prompt) - 1
        while start < end:
            stop = min(end, start + room)
            piece.append(Chunk(index, start, stop, prompt[start:stop]))
            room -= stop - start
            start = stop
            if not room or (is_alone and start == end):
                yield piece
                piece, room = [], max_tokens
    if piece:
        yield piece


def _columns(logits: Tensor, labels: Tensor, num_top: int) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Return the columns of `PromptLogprobs` for labels `[rows]` and logits `[rows, vocabulary]`."""
    logprobs = logits.float().log_softmax(-1)
    top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    found = logprobs.gather(1, labels[:, None])[:, 0]
    return found.tolist(), top.indices.tolist(), top.values.tolist()


class EmbeddedWorker:
    """One rank's model, KV cache and scheduler. The constructor loads the weights and allocates the cache."""

    def __init__(
        self, path: str, options: EmbeddedOptions, device: torch.device, tp_group: dist.ProcessGroup | None = None
    ) -> None:
        self.options, self.device, self.version = options, device, 0
        group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self._weights = weights = ShardedModel(path, options, device, group)
        config = weights.config.get_text_config()
        self._plan = CacheSizes(options, weights.config, weights.cache_dtype, weights.layers)
        self.vocab_size, self.max_model_len = config.vocab_size, self._plan.max_model_len
        weights.specialise(self.max_model_len)
        if device.type == "cpu" and weights.dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
            logger.warning("this processor has no bfloat16 products (avx512_bf16): batches are faster in dtype=float32")
        self._are_weights_here = self._is_routing = False
        self._cache: PagedCache | None = None
        self.load_weights()
        self._plan = replace(self._plan, state=weights.state_of_one())
        self._shape = self._plan.cache_shape(device, group)
        has_tiles = options.deterministic and not weights.is_invariant
        # fixed shapes cut prompts at fixed places, not where a forward happens to be full
        most = self.max_model_len * options.max_num_seqs if has_tiles else options.max_prefill_tokens
        # in tiles, a cache that decode steps wrote differs from one that prefill writes, in its last bits
        rows, num_pages = options.max_num_seqs, self._shape.num_pages
        self._scheduler = Scheduler(rows, most, num_pages, keeps_caches=not has_tiles, has_state=weights.has_state)
        self._num_preempted = 0
        self._adapters: dict[str | None, ServedAdapter] = {}
        """by name; None is the adapter of requests that name none"""
        self._staged: dict[str | None, ServedAdapter] = {}
        self._failed: dict[int, TokenChunk] = {}
        self.to_device("kv_cache")
        # some rotary embeddings depend on the longest position, so their steps run different kernels
        is_fixed = group is None and not options.deterministic and architecture.rope_limit(config) is None
        is_fixed = is_fixed and not weights.has_state
        is_recorded = options.cuda_graphs and device.type == "cuda" and is_fixed
        if options.flash_attention_3:
            use_flash_attention_3(device)
        is_wanted = options.paged_kernel and device.type == "cuda" and not has_tiles
        kernel = decode_kernel(weights.layers, weights.dtype, device) if is_wanted else None
        recorder = GraphRecorder(device)
        self._graphs = DecodeGraphs(weights, rows, self.max_model_len, recorder, kernel) if is_recorded else None
        default = "" if options.max_model_len else f" (the default: the model's limit, at most {CONTEXT_LIMIT})"
        ends = frozenset(end_ids(path, weights.config))
        agree = partial(agreed, group, device)
        self._rules = RequestRules(path, self.vocab_size, self.max_model_len, ends, default, agree)
        self.speculator = self._make_speculator()
        """counts proposed and accepted tokens; None: there are no proposals"""
        self._passes = ForwardPasses(
            weights, self._scheduler, self._rules, options, group, self._graphs, kernel, self.speculator
        )
        if options.deterministic:
            check_rows(weights, self._serving_cache())

    def _make_speculator(self) -> Speculator | None:
        obstacle = speculation_obstacle(self._weights, self.options)
        if obstacle is not None and self.options.speculation is True:
            logger.warning("speculation=true has no effect: %s", obstacle)
        is_off = obstacle is not None or self.options.speculation is False
        return None if is_off else Speculator(is_always=self.options.speculation is True)

    @property
    def weights(self) -> ShardedModel:
        """The model, for readers of its weights and activations."""
        return self._weights

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """True if sequences have a recurrent state beside keys and values."""
        return self._weights.has_state

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        self.version = version
        if (policy := self._adapters.get(None)) is not None:
            policy.version = version

    @torch.inference_mode()
    def advance(self, new: list[SequenceRequest], aborted: list[int], max_steps: int) -> list[TokenChunk]:
        """Accept `new`, end `aborted`, and run up to `max_steps` decode steps, fewer if no request is left.

        `max_steps`: upper bound of the number of decode steps; 0 only ends requests. Returns one chunk for each request
        that made progress, ended, was refused or failed. A chunk of a refused or failed request has an `error` and no
        tokens. Such a request does not end the others.
        """
        cache = self._serving_cache()
        for request in new:
            objection = self._rules.objection(request) or self._routing_objection(request, cache)
            if (error := objection or self._adapter_objection(request.adapter)) is not None:
                self._fail(request.request_id, error)
            else:
                self._scheduler.add(sequence := self._sequence(request))
                if self.speculator is not None:
                    self.speculator.add(sequence)
        if aborted:
            self._scheduler.abort(set(aborted))
        steps = 0
        while steps < max_steps:
            self._passes.prefill(cache)
            if not self._scheduler.running:
                break
            num, failed = self._passes.decode(cache, max_steps - steps, self.version)
            steps += num
            for number, error in failed.items():
                self._fail(number, error, is_nonfinite=True)
        self._tell_preemptions()
        refused, self._failed = self._failed, {}
        others = [chunk for chunk in self._scheduler.drain(self.version) if chunk.request_id not in refused]
        return [*refused.values(), *others]

    def prompt_logprobs(self, prompts: list[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens. Running requests are not touched."""
        return self._score(prompts, num_top, None)

    def adapter_logprobs(self, prompts: list[list[int]], num_top: int, adapter: str) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens with an adapter; see `prompt_logprobs`."""
        if (error := self._adapter_objection(adapter)) is not None:
            raise DataError(error)
        return self._score(prompts, num_top, adapter)

    @torch.inference_mode()
    def _score(self, prompts: list[list[int]], num_top: int, adapter: str | None) -> list[PromptLogprobs]:
        self._serving_cache()
        longest, options = max(map(len, prompts), default=0), self.options
        if longest > self.max_model_len:  # the last token is not computed
            raise DataError(length_objection(longest, self.max_model_len, self._rules.default))
        sizes = num_top, options.max_prefill_tokens, options.deterministic
        return prompt_logprobs(self._weights, prompts, *sizes, self._adapters.get(adapter))

    def weights_changed(self, version: int) -> None:
        """Serve newly written weights. Running requests continue from their tokens, and their cache is recomputed."""
        self.version = version
        self._scheduler.forget_cache()
        if self.speculator is not None:
            self.speculator.restart([*self._scheduler.running, *self._scheduler.waiting])

    # --- adapters ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def stage_adapter(self, name: str | None, given: AdapterWeights, version: int) -> bool:
        """Make a version of an adapter ready; see `AdapterWorker.stage_adapter`."""
        adapter = self._weights.make_adapter(name, given, version)
        ids = probe_ids(self.vocab_size, self.max_model_len)

        def logits_with(chosen: ServedAdapter | None) -> Tensor:
            self._weights.use_adapters([chosen])
            return self._weights.prompt_logits(ScoringPlan([Chunk(0, 0, len(ids), ids)], None, self.device))

        is_changing = not torch.equal(logits_with(None), logits_with(adapter))
        self._staged[name] = adapter
        return is_changing

    def use_adapter(self, name: str | None, is_kept: bool) -> None:
        """Serve the version of an adapter that was staged; see `AdapterWorker.use_adapter`."""
        self._adapters[name] = self._staged.pop(name)
        if not is_kept:
            self._change_in_flight(name)

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter; see `AdapterWorker.drop_adapter`."""
        self._staged.pop(name, None)
        if self._adapters.pop(name, None) is not None and name is None:
            self._change_in_flight(None)

    def _change_in_flight(self, name: str | None) -> None:
        self._scheduler.change_adapter(name, self._adapters.get(name))
        if self.speculator is not None:
            self.speculator.restart([*self._scheduler.running, *self._scheduler.waiting])

    def _adapter_objection(self, name: str | None) -> str | None:
        if name is None or name in self._adapters:
            return None
        return f"there is no adapter {name!r}; {did_you_mean(name, [own for own in self._adapters if own])}"

    def _routing_objection(self, request: SequenceRequest, cache: PagedCache) -> str | None:
        """Record chosen experts from now on if a request asks for them.

        Returns why that is impossible.
        """
        if ROUTED in request.extras:
            if self._weights.routing is None:
                return f"the model has no experts whose choice could be recorded ({ROUTED})"
            self._is_routing = True
            cache.record_routing(self._weights.routing.shape)
        return None

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
            adapter=self._adapters.get(request.adapter),
        )

    def _tell_preemptions(self) -> None:
        if self._scheduler.num_preempted > self._num_preempted == 0:
            logger.warning(
                "the KV cache is full: the youngest requests wait, and are prefilled again later; for more speed raise "
                "kv_cache_memory_bytes or gpu_memory_utilization, or lower max_num_seqs"
            )
        self._num_preempted = self._scheduler.num_preempted

    def _fail(self, number: int, error: str, **kind: Any) -> None:
        """Answer a request with the reason why it cannot be served."""
        self._failed[number] = TokenChunk(request_id=number, version=self.version, error=error, **kind)

    # --- residency --------------------------------------------------------------------------------------------------

    def load_weights(self, path: str | None = None) -> None:
        """Fill the weights on the device from a checkpoint of the same model; without a path, from the engine's own."""
        self._weights.load(path)
        self._are_weights_here = True

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return this rank's blocks of the parameters, for weight sync to write. Tied parameters appear once."""
        return self._weights.parameter_shards()

    def digest(self, pieces: Sequence[Piece]) -> Served:
        """Return digests of the parameters, and the version that is stamped; see `DigestingWorker.digest`."""
        return Served(own_digests(self.parameter_shards(), pieces), self.version)

    def to_device(self, what: Part = "all") -> None:
        """Move weights, KV cache or both to the device. Weights that were on the meta device are uninitialised."""
        if what in ("all", "weights"):
            self._weights.allocate()
            self._are_weights_here = True
        if what in ("all", "kv_cache") and self._cache is None:
            self._cache = PagedCache(self._shape, self._weights.cache_dtype, self.device, self._plan.state)
            if self._is_routing and self._weights.routing is not None:
                self._cache.record_routing(self._weights.routing.shape)

    def to_cpu(self) -> None:
        """Move weights to host memory and free the KV cache. Running requests recompute their cache later."""
        self._weights.to(torch.device("cpu"))
        self._drop_cache()

    def to_meta(self) -> None:
        """Free the memory of weights, adapters and KV cache."""
        self._adapters, self._staged = {}, {}
        self._weights.to(torch.device("meta"))
        self._drop_cache()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank holds, by part: weights, kv_cache."""
        cache = 0 if self._cache is None else self._cache.nbytes
        return {"weights": self._weights.memory_bytes(), "kv_cache": cache}

    def _serving_cache(self) -> PagedCache:
        if not self._are_weights_here or self._cache is None:
            missing = "kv_cache" if self._are_weights_here else "weights"
            raise ResidencyError(f"generation needs the {missing} on {self.device}; call cuda({missing!r}) first")
        return self._cache

    def _drop_cache(self) -> None:
        self._are_weights_here = False
        self._cache = None
        if self._graphs is not None:
            self._graphs.clear()
        self._scheduler.forget_cache()
        give_back_cached_memory()


def speculation_obstacle(weights: ShardedModel, options: EmbeddedOptions) -> str | None:
    """Return why proposed tokens cannot be checked by one forward pass; None if they can."""
    if weights.device.type != "cpu":
        return f"on {weights.device.type} it has not been measured"
    if weights.has_state:
        return "a recurrent state cannot go back behind a token that is not accepted"
    if options.deterministic and not weights.is_invariant:
        return "deterministic=true computes this model in fixed shapes, one token of each sequence"
    return None


def adapter_obstacle(options: Mapping[str, Any], rank: int) -> str:
    """Return "": every engine may serve adapters of any rank."""
    return ""


def agreed(group: dist.ProcessGroup | None, device: torch.device, flags: list[bool]) -> list[bool]:
    """Return for each flag whether it is set on all ranks.

    `group`: the ranks of the replica; None is one rank. `flags`: flags of this rank; equally many on each rank.
    """
    if group is None:
        return flags
    votes = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return votes.bool().tolist()


NUM_NEW = 3
"""tokens that a small model generates after each sequence"""


def check_served(path: str, tensor_parallel_size: int) -> None:
    """Refuse a checkpoint whose model the executor would compute differently from transformers."""
    config = load_config(path)
    model = meta_model(config)
    check_plain(config, path)
    cls = type(model)
    architecture.check_architecture(cls, model.config)
    if (reason := refusal(cls, model.config)) is not None:
        told = f"{path}: {cls.__name__} ({config.model_type!r}) {reason}. {architecture.REMEDY}"
        raise ConfigError(f"{told}, or use another executor")
    if has_gpus():
        architecture.check_gpu_kernels(cls, model.config)
    if (reader := StoredCheckpoint(model, path)).is_container:
        architecture.check_container(config)
    architecture.check_fit(reader, path, model)
    if tensor_parallel_size > 1:
        check_not_split(model, f"tensor_parallel_size={tensor_parallel_size}", "tensor_parallel_size=1")
        check_tensor_parallel(model, tensor_parallel_size)


@architecture.once_per_config
def refusal(cls: type[PreTrainedModel], config: PreTrainedConfig) -> str | None:
    """Return the reason why the executor would compute another model than transformers, None if it would not."""
    model = architecture.miniature(cls, config)
    try:
        with real_tensors(), torch.inference_mode(), architecture.saved(model) as folder:
            is_equal = largest_error(model, folder) <= architecture.TOLERANCE
    except StorageError:  # says nothing of the class
        raise
    except Exception as error:  # of any kind: the class's own code
        return f"cannot be served: a small copy of it fails with {summary(error)}"
    return None if is_equal else "computes something else when it is served"


def largest_error(model: PreTrainedModel, folder: str) -> float:
    """Return the largest difference between a generated token's log-probability and transformers' own forward.

    Differences are in units of the standard deviation of the logits.
    """
    first, second, third = (ids.tolist() for ids in architecture.sequences())
    prompts, turn = [first, second, third], [*first, *second] * 2
    length = len(turn) + len(first) + 2 * NUM_NEW
    # prompts are cut into several prefills, one of which begins amid a prompt
    options = EmbeddedOptions(max_model_len=length, max_num_seqs=len(prompts), max_prefill_tokens=len(second) // 2)
    worker = EmbeddedWorker(folder, options, torch.device("cpu"))
    errors, made = _errors(worker, model, prompts)
    if worker.has_state:  # siblings copy a state, the next turns continue from it
        further, made = _errors(worker, model, [turn, turn])
        errors += further + _errors(worker, model, [[*turn, *tokens, *first] for tokens in made])[0]
    return max(errors)


def _errors(
    worker: EmbeddedWorker, model: PreTrainedModel, prompts: list[list[int]]
) -> tuple[list[float], list[list[int]]]:
    """Return the largest error of each answer to prompts, and the answers' tokens."""
    # a temperature at which every token is likely: in a peaked distribution, wrong logits give the same log-probability
    temperature = float(architecture.alone(model).std())
    gconfig = GenerationHyperparameters(max_new_tokens=NUM_NEW, temperature=temperature, ignore_eos=True)
    requests = [SequenceRequest(request_id=i, input_ids=ids, gconfig=gconfig, seed=i) for i, ids in enumerate(prompts)]
    errors: list[float] = [0.0] * len(prompts)
    made: list[list[int]] = [[]] * len(prompts)
    for chunk in worker.advance(requests, [], NUM_NEW):
        if chunk.error is not None:
            raise ConfigError(chunk.error)
        prompt = prompts[chunk.request_id]
        logits = model(input_ids=torch.tensor([[*prompt, *chunk.token_ids]]), use_cache=False).logits[0] / temperature
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(chunk.token_ids)[:, None])[:, 0]
        error = (chosen - torch.tensor(chunk.logprobs)).abs().max().nan_to_num(nan=float("inf"))
        errors[chunk.request_id], made[chunk.request_id] = float(error), chunk.token_ids
    return errors, made


def make_worker(context: WorkerContext, path: str, options: EmbeddedOptions, executor_size: int) -> EmbeddedWorker:
    """Return one rank of one replica. The ranks of a replica share a process group."""
    group = subgroup(context.replica_ranks(executor_size)) if executor_size > 1 else None
    return EmbeddedWorker(path, options, torch.device(context.torch_device), group)


BACKEND = InferenceBackend(
    options=EmbeddedOptions,
    worker=make_worker,
    replica=PumpedReplica,
    check=check_served,
    capabilities=Capabilities(
        has_prompt_logprobs=True,
        has_readable_weights=True,
        extras=frozenset({"kept_ids", ROUTED}),
        adapter_obstacle=adapter_obstacle,
    ),
)
