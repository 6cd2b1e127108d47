"""Forward passes of one worker: prefill, and bursts of decode steps.

With `deterministic=true`, a request's bits do not depend on the rest of the batch. Llama, Qwen2, Qwen3 and Qwen3-MoE in
float32 on CPU are computed by `models.batch_invariant`, in any shape and with the bits of training. Other models are
computed in fixed shapes: a kernel chooses its blocks, and so the order of its sums, by the shapes of its arguments. A
decode step computes DECODE_ROWS rows at a time; free rows compute a token that is not read. A prompt is prefilled
BLOCK tokens of one sequence at a time, from multiples of BLOCK. Attention reads as many blocks as a sequence needs, and
sampling processes one row at a time. A kernel may still treat the rows of one shape differently; `check_rows` tests
this machine's kernels.

Decode steps captured as CUDA graphs, so that a small model's step costs no kernel launches.

A graph replays the same kernels on the same addresses. A step is captured for a number of rows, rounded up to a bucket,
and without the paged kernel for a number of pages, too. Rows without a sequence read and write page TRASH. The inputs
of a step are copied into buffers at fixed addresses. Captures are discarded when weights or cache move. Weights that
are written in place need no new capture. Sampling is not captured.

A step is captured when its buckets first occur. The capture takes as long as a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlite.backends.embedded.attention import (
    CheckPlan,
    DecodePlan,
    KernelDecodePlan,
    NativeDecodePlan,
    PagedKernel,
    PrefillPlan,
    StepsPlan,
)
from rlite.backends.embedded.cache import DECODE_ROWS, EmbeddedOptions, PagedCache, block_table
from rlite.backends.embedded.model import ShardedModel
from rlite.backends.embedded.pages import TRASH, num_pages
from rlite.backends.embedded.scheduler import Chunk, RunningSequence, Scheduler
from rlite.backends.embedded.speculation import Speculator, kept_spans
from rlite.backends.models.batch_invariant import BLOCK, label_logprobs
from rlite.backends.serving import native, sampler
from rlite.backends.serving.sampler import RequestRules, Sampled, Sampling, SamplingBatch
from rlite.data.routing import ROUTED
from rlite.errors import ConfigError, DivergedError
from rlite.observability import stats_tracker
from rlite.runtime.parallel.shards import nonfinite_names
from rlite.runtime.parallel.upload import upload
from rlite.types import GenerationHyperparameters

NARROWEST = 256
"""positions of a sequence that the narrowest capture without the paged kernel reads"""
WARM_UPS = 2
"""eager steps before a capture, in which libraries allocate their workspaces"""

Addresses = tuple[int, ...]


def bucket(num: int, limit: int, smallest: int = 1) -> int:
    """Return the smallest power-of-two multiple of `smallest` that is at least `num`, but at most `limit`.

    `num`: size to round up; at most `limit`. `smallest`: smallest bucket; a power of two.
    """
    size = smallest
    while size < num:
        size *= 2
    return min(size, limit)


class Shape(NamedTuple):
    """Shape of a captured step."""

    rows: int
    """number of rows; the results of rows beyond the batch are discarded"""
    width: int
    """leading positions of a sequence that are read"""

    @classmethod
    def of(cls, num_rows: int, longest: int, max_rows: int, max_len: int) -> Shape:
        """Return the shape for a batch."""
        return cls(bucket(num_rows, max_rows), bucket(longest, max_len, NARROWEST))


def logits_of_fixed_step(
    model: ShardedModel,
    cache: PagedCache,
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    kernel: PagedKernel | None = None,
) -> Tensor:
    """Return logits `[rows, vocabulary]` of the step that is captured: one token of each row.

    Every row is computed by kernels that do not depend on the values of the positions.

    `tokens`: `[rows]`. `positions`: `[rows]`. `table`: pages of the rows, `[rows, pages]`. Without a kernel, all of
    them are read.
    """
    plan: DecodePlan | KernelDecodePlan
    if kernel is not None:
        plan = KernelDecodePlan(cache, table, positions[None], kernel)
    else:
        plan = DecodePlan(cache, table, positions[None], [table.shape[1] * BLOCK] * len(tokens))
    return model.logits(tokens, positions, plan)


Replay = Callable[[], object]


class GraphRecorder:
    """Recorder of CUDA graphs on one device.

    All recordings use one stream and one memory pool, because they never run at the same time. Each stream costs a
    workspace of cuBLAS, which is never freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # memory for intermediate results

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        """Record a step.

        `step`: runs on the current stream. Its inputs are real: a warm-up writes the keys and values that the replay
        after it writes again. Returns a function that replays the step, and the tensor that holds the result.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    step()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may allocate meanwhile
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = step()
        return graph.replay, result

    def clear(self) -> None:
        """Free the memory of intermediate results and workspaces. The recordings must not run again."""
        self._pool = self._stream = None
        torch._C._cuda_clearCublasWorkspaces()


class DecodeGraphs:
    """The captured steps of one model and their input buffers, on one device without tensor parallelism."""

    def __init__(
        self,
        model: ShardedModel,
        num_rows: int,
        max_len: int,
        recorder: GraphRecorder,
        kernel: PagedKernel | None = None,
    ) -> None:
        self._model, self._num_rows, self._recorder, self._kernel = model, num_rows, recorder, kernel
        self._tokens, self._positions = torch.zeros(2, num_rows, dtype=torch.int64, device=model.device)
        self._table = torch.full((num_rows, num_pages(max_len)), TRASH, device=model.device)
        self._addresses: Addresses = ()
        self.captures: dict[Shape, tuple[Replay, Tensor]] = {}
        """captures, valid as long as the memory that they use stays at its addresses"""

    def addresses(self, cache: PagedCache) -> Addresses:
        """Return the addresses of all memory that a capture reads and writes, except its own buffers."""
        routing = () if cache.routing is None else (cache.routing.data_ptr(),)
        return (*self._model.addresses(), *cache.addresses(), *routing)

    def begin(self, table: Tensor) -> None:
        """Begin a burst of the sequences with these pages, `[rows, pages]`."""
        self._table.fill_(TRASH)
        self._table[: len(table), : table.shape[1]] = table

    def logits(
        self, cache: PagedCache, addresses: Addresses, tokens: Tensor, positions: Tensor, longest: int
    ) -> Tensor:
        """Return logits `[rows, vocabulary]` of the sequences as `ShardedModel.logits` does.

        They are valid until the next call.

        `tokens`: `[rows]`. `positions`: `[rows]`.
        """
        num_rows, max_len = len(tokens), self._table.shape[1] * BLOCK
        shape = Shape.of(num_rows, longest if self._kernel is None else max_len, self._num_rows, max_len)
        self._tokens[:num_rows].copy_(tokens)
        self._positions[:num_rows].copy_(positions)
        self._positions[num_rows : shape.rows].zero_()
        if addresses != self._addresses:
            self.captures.clear()
            self._addresses = addresses
        if shape not in self.captures:
            table = self._table[: shape.rows, : shape.width // BLOCK]
            inputs = self._tokens[: shape.rows], self._positions[: shape.rows], table
            step = partial(logits_of_fixed_step, self._model, cache, *inputs, self._kernel)
            self.captures[shape] = self._recorder(step)
        replay, logits = self.captures[shape]
        replay()
        return logits[:num_rows]

    def clear(self) -> None:
        """Free the memory of all captures. Steps are captured again when needed."""
        self.captures.clear()
        self._recorder.clear()


STOP_STRING_STEPS = 4
"""decode steps between two checks for stop strings; tokens after the stop are discarded"""
CUDA_STEPS = 8
"""decode steps between two checks for stop tokens on CUDA, where a check waits for the device"""


class _Batch(NamedTuple):
    """Sampling parameters of the rows of one forward pass."""

    rows: list[Sampling]
    whole: SamplingBatch
    alone: list[SamplingBatch]
    """parameters of each row, if rows are sampled one by one"""


Steps = Callable[[int, Tensor], Tensor]
"""the steps of a burst, called in order: (step, tokens `[rows]`) -> logits `[rows, vocabulary]`"""


@dataclass
class ForwardPasses:
    """The computation of the scheduler's decisions."""

    weights: ShardedModel
    scheduler: Scheduler
    rules: RequestRules
    options: EmbeddedOptions
    group: dist.ProcessGroup | None
    """the ranks of the replica; None is one rank"""
    graphs: DecodeGraphs | None
    """captured decode steps, if there are any"""
    kernel: PagedKernel | None = None
    """attention of decode steps on a GPU"""
    speculator: Speculator | None = None
    """proposes tokens; None: each step makes one token of each row"""

    def __post_init__(self) -> None:
        self._last = _Batch([], SamplingBatch.of([], self.rules.vocab_size, self.weights.device), [])

    def prefill(self, cache: PagedCache) -> None:
        """Admit sequences, and fill the cache for all running ones, except for the last token of each."""
        while True:
            copies, chunks = self.scheduler.next_prefill()
            cache.apply(copies)
            if not chunks:
                return
            weights, running = self.weights, self.scheduler.running
            weights.use_adapters([running[c.row].adapter for c in chunks for _ in c.tokens])
            if self.options.deterministic and not weights.is_invariant:
                for chunk in chunks:
                    for tile in tiles_of(chunk, self.scheduler.running[chunk.row].tokens):
                        weights.prefill(PrefillPlan(cache, [tile], is_flash=False, is_invariant=False, is_fixed=True))
            else:
                is_flash = weights.device.type == "cuda" and weights.dtype in (torch.float16, torch.bfloat16)
                weights.prefill(PrefillPlan(cache, chunks, is_flash, weights.is_invariant))

    def decode(self, cache: PagedCache, max_steps: int, version: int) -> tuple[int, dict[int, str]]:
        """Run one burst: decode steps between which neither the batch nor its sampling parameters change.

        Returns the number of steps, and the reason for each request that cannot continue, by request number.
        """
        device = self.weights.device
        if any(s.request.gconfig.stop for s in self.scheduler.running):
            # a recurrent state cannot go back behind a stop
            max_steps = min(max_steps, 1 if self.weights.has_state else STOP_STRING_STEPS)
        steps = self.scheduler.burst(max_steps)
        cache.apply(self.scheduler.take_copies())
        if self.speculator is not None:
            if proposals := self._propose(self.speculator, steps):
                return 1, self._check(cache, proposals, version)
            steps = min(steps, self.speculator.burst)
        sequences = list(self.scheduler.running)
        batch = self._batch([s.sampling for s in sequences])
        has_adapters = self.weights.use_adapters([s.adapter for s in sequences])
        stop_ids = batch.whole.stop_ids
        watched = stop_ids if device.type == "cpu" or self.weights.has_state else None
        if stop_ids is not None and watched is None:
            steps = min(steps, CUDA_STEPS)
        lengths = [len(s.tokens) for s in sequences]
        # of the tokens that go in, [steps, rows]; the one that comes out is one further
        positions = upload(lengths, device) + torch.arange(-1, steps - 1, device=device)[:, None]
        random = sampler.uniforms(batch.whole.seeds, positions + 1)
        logits_at = self._steps_of(cache, lengths, positions, has_adapters)
        tokens = upload([s.tokens[-1] for s in sequences], device)
        made: list[Sampled] = []
        for step in range(steps):
            made.append(self._sample(logits_at(step, tokens), batch, random[step]))
            tokens = made[-1].tokens
            if watched is not None and torch.eq(tokens[:, None], watched).any():
                break
        # [row][step] each: tokens and the two kinds of log-probabilities
        columns = zip(*(step[:3] for step in made), strict=True)
        rows = [torch.stack(column, dim=1).tolist() for column in columns]
        kept_ids = zip(*(sampler.kept_ids_of(step.kept, len(sequences)) for step in made), strict=True)
        return len(made), self._record(cache, version, rows, list(kept_ids))

    def _propose(self, speculator: Speculator, steps: int) -> list[list[int]]:
        """Return the proposed tokens of each running sequence, which has pages for `steps` steps; [] without any."""
        proposals = speculator.propose(self.scheduler.running)
        if proposals and not self.scheduler.reserve(max(map(len, proposals)) + 1):
            proposals = [tokens[: steps - 1] for tokens in proposals]
        return proposals if any(proposals) else []

    def _check(self, cache: PagedCache, proposals: list[list[int]], version: int) -> dict[int, str]:
        """Run one decode step in which rows may accept proposed tokens.

        Returns the reason for each request that cannot continue, by request number.
        """
        assert self.speculator is not None
        pairs, weights = list(zip(self.scheduler.running, proposals, strict=True)), self.weights
        chunks = [
            Chunk(s.row, (n := len(s.tokens)) - 1, n + len(p), [s.tokens[-1], *p], pages=s.pages) for s, p in pairs
        ]
        batch = self._batch([s.sampling for s, p in pairs for _ in range(len(p) + 1)])
        is_native = cache.is_blocked and not weights.is_invariant and native.compiled() is not None
        plan = CheckPlan(cache, chunks) if is_native else PrefillPlan(cache, chunks, False, weights.is_invariant)
        weights.use_adapters([s.adapter for s, p in pairs for _ in range(len(p) + 1)])
        logits = weights.logits(plan.tokens, plan.positions, plan)
        sampled = self._sample(logits, batch, sampler.uniforms(batch.whole.seeds, plan.positions + 1))
        columns = [column.tolist() for column in sampled[:3]]
        spans = kept_spans(columns[0], proposals)
        num_proposed, num_accepted = sum(map(len, proposals)), sum(s.stop - s.start - 1 for s in spans)
        self.speculator.observe(num_proposed, num_accepted)
        stats_tracker.count(**{"speculation/proposed": num_proposed, "speculation/accepted": num_accepted})
        kept_ids = sampler.kept_ids_of(sampled.kept, len(columns[0]))
        rows = [[column[span] for span in spans] for column in columns]
        return self._record(cache, version, rows, [kept_ids[span] for span in spans])

    def _batch(self, rows: list[Sampling]) -> _Batch:
        """Return the sampling parameters of rows, which are mostly those of the call before."""
        if rows != self._last.rows:
            batch_of = partial(SamplingBatch.of, vocab_size=self.rules.vocab_size, device=self.weights.device)
            alone = [batch_of([row]) for row in rows] if self.options.deterministic else []
            self._last = _Batch(rows, batch_of(rows), alone)
        return self._last

    def _sample(self, logits: Tensor, batch: _Batch, random: Tensor) -> Sampled:
        """Return a token of each row of logits `[rows, vocabulary]`, the same on all ranks."""
        sample_each, sample_all = sampler.sample_each, sampler.sample
        sampled = sample_each(logits, batch.alone, random) if batch.alone else sample_all(logits, batch.whole, random)
        if self.weights.is_invariant:
            gconfigs = [row.gconfig for row in batch.rows]
            sampled = with_trained_logprobs(sampled, logits, gconfigs, self.weights.num_vocabulary_shards)
        if self.group is not None:
            dist.broadcast(sampled.tokens, group_src=0, group=self.group)
        return sampled

    def _record(
        self, cache: PagedCache, version: int, rows: Sequence[list[list[Any]]], kept_ids: list[Any]
    ) -> dict[int, str]:
        """Give the sequences their tokens.

        `rows`: `[row][step]` each: tokens, log-probabilities and sampling log-probabilities. `kept_ids`: `[row][step]`.
        Returns the reason for each request that cannot continue, by request number.
        """
        ids, logprobs, sampling_logprobs = rows
        sequences = self.scheduler.running
        extras = {"kept_ids": kept_ids, **self._routing_of(cache, [len(made) for made in ids])}
        # NaN among the logits is NaN here, and so is a choice of nothing
        are_finite = self.rules.agreed([math.isfinite(sum(values)) for values in sampling_logprobs])
        overflown = [s for s, is_finite in zip(sequences, are_finite, strict=True) if not is_finite]
        failed = self._give_up(cache, version, overflown) if overflown else {}
        self.scheduler.record(ids, logprobs, sampling_logprobs, self._find_stop, extras)
        if failed:
            self.scheduler.abort(failed)
        return failed

    def _routing_of(self, cache: PagedCache, counts: list[int]) -> dict[str, list[Any]]:
        """Return the column of chosen experts `[row][step]` for rows of so many steps, if a sequence asks for it."""
        sequences = self.scheduler.running
        if not any(sequence.has_routing for sequence in sequences):
            return {}
        given = zip(sequences, [len(s.tokens) for s in sequences], counts, strict=True)
        column = [
            cache.routing_of(s.pages, 0 if length == s.prompt_len else length - 1, length, count)
            if s.has_routing
            else []
            for s, length, count in given
        ]
        return {ROUTED: column}

    def _find_stop(self, sequence: RunningSequence, start: int) -> int | None:
        return self.rules.length_at_stop(sequence.request, sequence.tokens, start, sequence.prompt_len)

    def _give_up(self, cache: PagedCache, version: int, sequences: Sequence[RunningSequence]) -> dict[int, str]:
        """Return the reason for each of these requests, whose logits are not finite."""
        names = nonfinite_names(self.weights.parameter_shards())
        if not all(self.rules.agreed([not names])):
            found = ", ".join(names[:3]) or "in the shard of another rank"
            raise DivergedError(
                f"the served weights of policy version {version} hold NaN or infinity ({found}), and give logits "
                "that are not finite; release() and build() the engine to go on with other weights"
            )
        reasons = {}
        others = {page for s in self.scheduler.running if s not in sequences for page in s.pages}
        for sequence in sequences:
            cache.clear([TRASH, *(page for page in sequence.pages if page not in others)])
            cache.states.drop(sequence.row)
            sequence.has_failed = True
            reasons[sequence.request.request_id] = (
                f"after {len(sequence.tokens)} tokens its logits are not finite, though the weights are (policy "
                f"version {version}): what the model computes of these tokens is too large for {self.weights.dtype}"
            )
        return reasons

    def _steps_of(self, cache: PagedCache, lengths: list[int], positions: Tensor, has_adapters: bool) -> Steps:
        """Return the steps of a burst. No step with adapters is captured."""
        weights = self.weights
        table = block_table([sequence.pages for sequence in self.scheduler.running], weights.device)
        for row, length in enumerate(lengths):
            if length == 1:  # nothing was prefilled
                cache.states.drop(row)
        if self.graphs is not None and not has_adapters:
            graphs, longest, addresses = self.graphs, max(lengths), self.graphs.addresses(cache)
            graphs.begin(table)
            return lambda step, tokens: graphs.logits(cache, addresses, tokens, positions[step], longest + step)
        if self.options.deterministic and not weights.is_invariant:
            return tiled_steps(weights, cache, table, lengths, positions)
        if self.kernel is not None:
            return _steps(weights, KernelDecodePlan(cache, table, positions, self.kernel), positions)
        if cache.is_blocked and not weights.is_invariant and native.compiled() is not None:
            return _steps(weights, NativeDecodePlan(cache, table, positions), positions)
        plan = DecodePlan(cache, table, positions, lengths, is_invariant=weights.is_invariant)
        return _steps(weights, plan, positions)


def _steps(model: ShardedModel, plan: StepsPlan, positions: Tensor) -> Steps:
    """Return the steps of the rows of one plan, whose positions are `[steps, rows]`."""

    def logits(step: int, tokens: Tensor) -> Tensor:
        if step:
            plan.go_to(step)
        return model.logits(tokens, positions[step], plan)

    return logits


# -- fixed shapes ----------------------------------------------------------------------------------------------------


def tiles_of(chunk: Chunk, tokens: Sequence[int]) -> Iterator[Chunk]:
    """Yield the tiles of BLOCK positions that cover a chunk."""
    for start in range(chunk.start - chunk.start % BLOCK, chunk.stop, BLOCK):
        part = tokens[start : min(start + BLOCK, chunk.stop)]
        yield Chunk(chunk.row, start, start + BLOCK, part, num_padding=BLOCK - len(part), pages=chunk.pages)


def tiled_steps(
    model: ShardedModel, cache: PagedCache, table: Tensor, lengths: Sequence[int], positions: Tensor
) -> Steps:
    """Return the steps of a burst in which DECODE_ROWS rows are computed at a time.

    `table`: pages of each sequence, `[rows, pages]`. `lengths`: length of each sequence, in tokens. `positions`:
    positions of the input tokens, `[steps, rows]`.
    """
    num_rows, padding = len(lengths), -len(lengths) % DECODE_ROWS
    lengths, table = [*lengths, *[1] * padding], F.pad(table, (0, 0, 0, padding), value=TRASH)
    steps = torch.arange(len(positions), device=positions.device)
    # padding walks along as if it were a sequence that has just begun
    positions = torch.cat([positions, steps[:, None].expand(-1, padding)], dim=1)
    tiles = []
    for start in range(0, len(lengths), DECODE_ROWS):
        rows = slice(start, start + DECODE_ROWS)
        plan = DecodePlan(cache, table[rows], positions[:, rows], lengths[rows], first_row=start, is_padded=False)
        tiles.append(_steps(model, plan, positions[:, rows]))

    def logits(step: int, tokens: Tensor) -> Tensor:
        parts = F.pad(tokens, (0, padding)).split(DECODE_ROWS)
        return torch.cat([tile(step, part) for tile, part in zip(tiles, parts, strict=True)])[:num_rows]

    return logits


@torch.inference_mode()
def check_rows(model: ShardedModel, cache: PagedCache) -> None:
    """Decode the same token in all rows of a tile, for a few steps."""
    steps, device = 3, cache.device
    positions = torch.arange(steps, device=device)[:, None].expand(-1, DECODE_ROWS)
    table = torch.full((DECODE_ROWS, 1), TRASH, device=device)
    logits_at = tiled_steps(model, cache, table, [1] * DECODE_ROWS, positions)
    for step in range(steps):
        logits = logits_at(step, torch.full((DECODE_ROWS,), step + 1, device=device))
        if not torch.equal(logits, logits[:1].expand_as(logits)):
            raise ConfigError(
                "deterministic=true: on this device equal rows of one matrix product differ in their last bits, so "
                "results would depend on a request's row; use one thread for each device, or another dtype"
            )


def with_trained_logprobs(
    sampled: Sampled, logits: Tensor, gconfigs: Sequence[GenerationHyperparameters], num_shards: int
) -> Sampled:
    """Return the results of `sample` with log-probabilities that have the bits of a deterministic train engine.

    `sampled`: tokens, log-probabilities and kept ids. Those over reported kept ids have these bits already. `logits`:
    `[rows, vocabulary]`.
    """
    tokens, before, sampling_logprobs, kept = sampled
    logprobs = torch.empty_like(before)
    temperatures = [1.0 if g.greedy else g.temperature for g in gconfigs]
    for temperature in set(temperatures):
        rows = upload([r for r, t in enumerate(temperatures) if t == temperature], logits.device)
        logprobs[rows] = label_logprobs(logits[rows], tokens[rows], temperature, num_shards)
    is_whole = sampling_logprobs == before
    if kept is not None:
        is_whole = is_whole.index_fill(0, kept[:, 0], False)
    return Sampled(tokens, logprobs, torch.where(is_whole, logprobs, sampling_logprobs), kept)
