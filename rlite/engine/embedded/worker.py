"""The worker of the embedded inference executor: continuous batching around an unmodified Hugging Face model.

The driver pumps it: `advance` takes in requests, makes up to so many decode steps, and returns what was made. There is
no thread and no event loop here. Under tensor parallelism every rank gets the same calls in the same order, and takes
the same decisions, because the only thing they depend on besides the calls, the sampled tokens, comes from rank 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from rlite.engine.embedded.attention import DecodePlan, PrefillPlan, TilePlan
from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.graphs import DecodeGraphs, is_capturable
from rlite.engine.embedded.model import ShardedModel
from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.sampling import SamplingBatch, sample, uniforms
from rlite.engine.embedded.scheduler import RunningSequence, Scheduler
from rlite.engine.embedded.tiles import (
    DECODE_ROWS,
    TiledDecoder,
    check_rows,
    sample_each,
    tiles_of,
)
from rlite.errors import ConfigError, DivergedError, ResidencyError
from rlite.nn.architecture import rope_limit
from rlite.parallel.shards import ParameterShard, nonfinite_names
from rlite.parallel.tensor import attention_shape
from rlite.parallel.usage import give_back_cached_memory
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk

STOP_STRING_STEPS = 4
"""decode steps between two looks at the text of requests with stop strings; what lies behind the stop is thrown away"""
CUDA_STEPS = 8
"""the same for stop tokens on CUDA, where looking means waiting for the device"""
CONTEXT_LIMIT = 4096
"""default bound of max_model_len: every slot has room for the longest sequence"""


class EmbeddedWorker:
    """One rank's model, KV cache and scheduler. Weights are loaded and the cache allocated when it is built.

    Raises: ConfigError for a model or options that cannot be served; CheckpointError for an unusable `path`.
    """

    def __init__(
        self,
        path: str,
        options: EmbeddedOptions,
        device: torch.device,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.path = path
        self.options = options
        self.device = torch.device(device)
        self.version = 0
        self._group = tp_group if tp_group is not None and tp_group.size() > 1 else None
        self._weights = ShardedModel(path, options.dtype, self.device, self._group)
        config = self._weights.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_model_len = self._max_model_len(config)
        self._weights.specialise(self.max_model_len)
        self._end_ids = self._weights.end_ids()
        self._are_weights_here = False
        self._cache: SlotCache | None = None
        self.load_weights()
        self._num_slots = self._affordable_slots()
        # fixed shapes cut prompts at fixed places, not where a forward happens to be full
        most = self.max_model_len * self._num_slots if options.deterministic else options.max_prefill_tokens
        self._scheduler = Scheduler(self._num_slots, most)
        self._failed: dict[int, TokenChunk] = {}
        self.to_device("kv_cache")
        self._graphs: DecodeGraphs | None = None
        is_recorded = options.cuda_graphs and not options.deterministic and self.device.type == "cuda"
        if is_recorded and self._group is None and is_capturable(config):
            self._graphs = DecodeGraphs(self._weights, self._num_slots)
        if options.deterministic:
            self._check_determinism()

    def _max_model_len(self, config: PreTrainedConfig) -> int:
        limits = {"max_position_embeddings": config.max_position_embeddings}
        if (longest := rope_limit(config)) is not None:
            limits["length up to which rotary angles are the same for all sequences"] = longest
        name, limit = min(limits.items(), key=lambda item: item[1])
        length = self.options.max_model_len or min(limit, CONTEXT_LIMIT)
        if length > limit:
            raise ConfigError(f"max_model_len={length} is beyond the model's {name}={limit}")
        return length

    @torch.inference_mode()
    def _check_determinism(self) -> None:
        check_rows(self._weights, self._serving_cache())

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_unfinished(self) -> int:
        """Requests taken in and not ended."""
        return self._scheduler.num_unfinished

    def set_version(self, version: int) -> None:
        """The policy version that made the tokens from now on."""
        self.version = version

    @torch.inference_mode()
    def advance(self, new: list[SequenceRequest], aborted: list[int], max_steps: int) -> list[TokenChunk]:
        """Take in `new`, end `aborted`, and make up to `max_steps` decode steps; fewer if nothing is left to do.

        Returns one chunk for each request that made progress, ended, or was refused or failed (`error`, without
        tokens): what one request alone makes impossible does not end the others. After an exception the worker is of
        no more use, but for ResidencyError, raised before anything is done.
        Raises: ResidencyError if weights or KV cache are not on the device; DivergedError for weights that are not
            finite.
        """
        cache = self._serving_cache()
        for request in new:
            self._accept(request)
        if aborted:
            cache.apply(self._scheduler.abort(set(aborted)))
        steps = 0
        while steps < max_steps:
            self._scheduler.admit()
            self._prefill(cache)
            if not self._scheduler.running:
                break
            steps += self._decode(cache, max_steps - steps)
        return self._drain()

    def abort_all(self) -> list[TokenChunk]:
        """End every request with what it has made."""
        self._scheduler.abort()
        return self._drain()

    def weights_changed(self, version: int) -> None:
        """Running requests go on from the tokens they have, their cache is computed anew."""
        self.version = version
        self._scheduler.forget_cache()

    def _drain(self) -> list[TokenChunk]:
        failed, self._failed = self._failed, {}
        others = [chunk for chunk in self._scheduler.drain(self.version) if chunk.request_id not in failed]
        return [*failed.values(), *others]

    def _fail(self, request_id: int, error: str, is_nonfinite: bool = False) -> None:
        """Answer a request with why it cannot be served; if it runs, its owner ends it."""
        self._failed[request_id] = TokenChunk(
            request_id=request_id,
            token_ids=[],
            logprobs=[],
            sampling_logprobs=[],
            version=self.version,
            error=error,
            is_nonfinite=is_nonfinite,
        )

    def _accept(self, request: SequenceRequest) -> None:
        gconfig = request.gconfig
        prompt, tokens = request.input_ids, [*request.input_ids, *request.output_ids]
        if (error := self._objection(request)) is not None:
            self._fail(request.request_id, error)
            return
        self._scheduler.add(
            RunningSequence(
                request=request,
                tokens=tokens,
                num_reported=len(tokens),
                max_tokens=min(len(prompt) + gconfig.max_new_tokens, self.max_model_len),
                min_tokens=len(prompt) + gconfig.min_new_tokens,
                stop_ids=self._stop_ids(gconfig),
            )
        )

    def _stop_ids(self, gconfig: GenerationHyperparameters) -> frozenset[int]:
        return frozenset(gconfig.stop_token_ids) | (frozenset() if gconfig.ignore_eos else self._end_ids)

    def _objection(self, request: SequenceRequest) -> str | None:
        ids = [*request.input_ids, *request.output_ids]
        if not request.input_ids:
            return "the prompt is empty; give at least one token"
        if len(ids) > self.max_model_len - 1:
            room = self.max_model_len - 1
            default = (
                "" if self.options.max_model_len else f" (the default: the model's limit, at most {CONTEXT_LIMIT})"
            )
            return (
                f"the prompt has {len(ids)} tokens, max_model_len={self.max_model_len}{default} leaves room for {room}"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            return f"token id {wrong} is not in the vocabulary of {self.vocab_size}"
        if request.gconfig.min_new_tokens and self._stop_ids(request.gconfig).issuperset(range(self.vocab_size)):
            return f"min_new_tokens={request.gconfig.min_new_tokens}, and every token is a stop token: none may be made"
        if request.gconfig.stop and isinstance(self._tokenizer, str):
            return f"stop strings need a tokenizer; {self.path} has none ({self._tokenizer}). Use stop_token_ids"
        return None

    # --- computation ------------------------------------------------------------------------------------------------

    def _prefill(self, cache: SlotCache) -> None:
        while True:
            moves, chunks = self._scheduler.next_prefill()
            cache.apply(moves)
            if not chunks:
                return
            if self.options.deterministic:
                for chunk in chunks:
                    for start, tokens in tiles_of(chunk, self._scheduler.running[chunk.slot].tokens):
                        self._weights.prefill(TilePlan(cache, chunk.slot, start, tokens, self.device))
            else:
                self._weights.prefill(PrefillPlan(cache, chunks, self.device))

    def _decode(self, cache: SlotCache, max_steps: int) -> int:
        """One burst: steps between which neither the batch nor its sampling parameters change. Returns their number."""
        sequences = self._scheduler.running
        gconfigs = [s.request.gconfig for s in sequences]
        steps = self._scheduler.burst(max_steps)
        if any(g.stop for g in gconfigs):
            steps = min(steps, STOP_STRING_STEPS)
        batch = self._sampling(sequences)
        each = [self._sampling([s]) for s in sequences] if self.options.deterministic else []
        watched = batch.stop_ids if self.device.type == "cpu" else None
        if batch.stop_ids is not None and watched is None:
            steps = min(steps, CUDA_STEPS)
        lengths = [len(s.tokens) for s in sequences]
        # of the tokens that go in, [steps, rows]; the one that comes out is one further
        positions = torch.tensor(lengths, device=self.device) + torch.arange(-1, steps - 1, device=self.device)[:, None]
        random = uniforms(batch.seeds, positions + 1)
        logits_at = self._decoder(cache, lengths, positions)
        tokens = torch.tensor([s.tokens[-1] for s in sequences], device=self.device)
        made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            logits = logits_at(step, tokens)
            if each:
                tokens, taken, taken_of_cut = sample_each(logits, each, random[step])
            else:
                tokens, taken, taken_of_cut = sample(logits, batch, random[step])
            if self._group is not None:
                dist.broadcast(tokens, group_src=0, group=self._group)
            made.append((tokens, taken, taken_of_cut))
            if watched is not None and torch.eq(tokens[:, None], watched).any():
                break
        # [row][step] each: tokens and the two kinds of log-probabilities
        ids, logprobs, sampling_logprobs = (torch.stack(c, dim=1).tolist() for c in zip(*made, strict=True))
        # NaN among the logits is NaN here, and so is a choice of nothing
        are_finite = self._agreed([math.isfinite(sum(values)) for values in sampling_logprobs])
        if not all(are_finite):
            self._give_up(cache, [s for s, is_finite in zip(sequences, are_finite, strict=True) if not is_finite])
        cache.apply(self._scheduler.record(ids, logprobs, sampling_logprobs, self._find_stop))
        if self._failed:
            cache.apply(self._scheduler.abort(self._failed))
        return len(made)

    def _agreed(self, flags: list[bool]) -> list[bool]:
        """What all ranks agree to."""
        if self._group is None:
            return flags
        votes = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._group)
        return votes.bool().tolist()

    def _give_up(self, cache: SlotCache, sequences: Sequence[RunningSequence]) -> None:
        """Fail requests whose logits are not finite. Raises: DivergedError if the weights are not finite."""
        names = nonfinite_names(self.parameter_shards())
        if not all(self._agreed([not names])):
            found = ", ".join(names[:3]) or "in the shard of another rank"
            raise DivergedError(
                f"the served weights of policy version {self.version} hold NaN or infinity ({found}), and give logits "
                "that are not finite; release() and build() the engine to go on with others"
            )
        for sequence in sequences:
            cache.clear(sequence.slot)
            self._fail(
                sequence.request.request_id,
                f"after {len(sequence.tokens)} tokens its logits are not finite, though the weights are "
                f"(policy version {self.version}): what the model computes of these tokens is too large for "
                f"{self._weights.dtype}",
                is_nonfinite=True,
            )

    def _sampling(self, sequences: Sequence[RunningSequence]) -> SamplingBatch:
        return SamplingBatch.of(
            [s.request.gconfig for s in sequences],
            [s.request.seed for s in sequences],
            [s.stop_ids for s in sequences],
            [len(s.tokens) < s.min_tokens for s in sequences],
            self.vocab_size,
            self.device,
        )

    def _decoder(
        self, cache: SlotCache, lengths: list[int], positions: torch.Tensor
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """The steps of one burst, to be taken in turn: step and tokens `[rows]` to logits `[rows, vocabulary]`."""
        if self._graphs is not None:
            graphs, longest, addresses = self._graphs, max(lengths), self._graphs.addresses(cache)
            return lambda step, tokens: graphs.logits(cache, addresses, tokens, positions[step], longest + step)
        if self.options.deterministic:
            return TiledDecoder(self._weights, cache, lengths, positions)
        plan = DecodePlan(cache, lengths, positions)

        def logits(step: int, tokens: torch.Tensor) -> torch.Tensor:
            if step:
                plan.go_to(step)
            return self._weights.logits(tokens, positions[step], plan)

        return logits

    def _find_stop(self, sequence: RunningSequence, start: int) -> int | None:
        stops = sequence.request.gconfig.stop
        tokenizer = self._tokenizer
        assert not isinstance(tokenizer, str)  # else it was refused
        # a token holds at least a byte: a stop string cannot begin further back, but for tokens without text
        reach = max(len(s.encode()) for s in stops) + 8
        for length in range(start + 1, len(sequence.tokens) + 1):
            tail = sequence.tokens[max(sequence.prompt_len, length - reach) : length]
            text = tokenizer.decode(tail, skip_special_tokens=True)
            if any(s in text for s in stops):
                return length
        return None

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | str:
        """Or why there is none. All ranks look at the same time, and have one if all could read it."""
        tokenizer: PreTrainedTokenizerBase | str
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:  # of any kind, by the files' own parsers: only stop strings cannot do without
            tokenizer = f"{type(error).__name__}: {error}"
        (is_everywhere,) = self._agreed([not isinstance(tokenizer, str)])
        return tokenizer if is_everywhere or isinstance(tokenizer, str) else "another rank could not read it"

    # --- residency --------------------------------------------------------------------------------------------------

    def load_weights(self, path: str | None = None) -> None:
        """Fill the weights from a checkpoint of the same model (default: the engine's own), on the device."""
        self._weights.load(path)
        self._are_weights_here = True

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """This rank's blocks of the parameters, each once (tied: the embedding's name), to be written in place."""
        return self._weights.parameter_shards()

    def to_device(self, what: Literal["all", "weights", "kv_cache"] = "all") -> None:
        """Bring weights, KV cache or both to the device. Weights that were on meta have no defined content."""
        if what in ("all", "weights"):
            self._weights.allocate()
            self._are_weights_here = True
        if what in ("all", "kv_cache") and self._cache is None:
            self._cache = SlotCache(*self._cache_shape(), dtype=self._weights.dtype, device=self.device)

    def to_cpu(self) -> None:
        """Weights go to the host's memory; the KV cache is given back, and computed anew for what is running."""
        self._weights.to(torch.device("cpu"))
        self._drop_cache()

    def to_meta(self) -> None:
        """Give the memory of weights and KV cache back."""
        self._weights.to(torch.device("meta"))
        self._drop_cache()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held by this rank."""
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

    def _cache_shape(self) -> tuple[int, int, int, int, int, int]:
        layers, heads, kv_heads, head_dim = attention_shape(self._weights.config)
        num_slots = self._num_slots
        if self.options.deterministic:  # the last tile is as large as the others
            num_slots += -num_slots % DECODE_ROWS
        share = self._weights.tp_size
        return layers, num_slots, heads // share, kv_heads // share, self.max_model_len, head_dim

    def _affordable_slots(self) -> int:
        if self.device.type != "cuda":
            return self.options.max_num_seqs
        self._num_slots = 1
        layers, spare, _, heads, length, dim = self._cache_shape()
        per_slot = 2 * layers * heads * length * dim * self._weights.dtype.itemsize
        give_back_cached_memory()  # the driver counts it as taken
        free, total = torch.cuda.mem_get_info(self.device)
        budget = total * self.options.gpu_memory_utilization - (total - free) - (spare - 1) * per_slot
        slots = torch.tensor(min(self.options.max_num_seqs, int(budget // per_slot)), device=self.device)
        if self._group is not None:
            dist.all_reduce(slots, op=dist.ReduceOp.MIN, group=self._group)
        if slots < 1:
            raise ConfigError(
                f"one sequence of max_model_len={length} needs {per_slot / 2**20:.0f} MiB of KV cache, "
                f"{max(budget, 0) / 2**20:.0f} MiB are left at "
                f"gpu_memory_utilization={self.options.gpu_memory_utilization}; "
                "lower max_model_len or raise gpu_memory_utilization"
            )
        return int(slots)
