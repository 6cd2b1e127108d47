"""Forward passes of one worker: prefill, and bursts of decode steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlite.engine.embedded.attention import DecodePlan, InvariantPrefillPlan, NativeDecodePlan, PrefillPlan, TilePlan
from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.cuda_graphs import DecodeGraphs
from rlite.engine.embedded.deterministic import TiledDecoder, sample_each, tiles_of, with_trained_logprobs
from rlite.engine.embedded.model import ShardedModel
from rlite.engine.embedded.native import compiled
from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.request_rules import RequestRules
from rlite.engine.embedded.sampling import Sampled, SamplingBatch, kept_ids_of, sample, uniforms
from rlite.engine.embedded.scheduler import RunningSequence, Scheduler
from rlite.errors import DivergedError
from rlite.parallel.shards import nonfinite_names

STOP_STRING_STEPS = 4
"""decode steps between two checks for stop strings; tokens after the stop are discarded"""
CUDA_STEPS = 8
"""decode steps between two checks for stop tokens on CUDA, where a check waits for the device"""


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

    def prefill(self, cache: SlotCache) -> None:
        """Fill the cache for all running sequences, except for the last token of each."""
        while True:
            moves, chunks = self.scheduler.next_prefill()
            cache.apply(moves)
            if not chunks:
                return
            if self.weights.is_invariant:
                self.weights.prefill(InvariantPrefillPlan(cache, chunks, self.weights.device))
            elif self.options.deterministic:
                for chunk in chunks:
                    for start, tokens in tiles_of(chunk, self.scheduler.running[chunk.slot].tokens):
                        self.weights.prefill(TilePlan(cache, chunk.slot, start, tokens, self.weights.device))
            else:
                self.weights.prefill(PrefillPlan(cache, chunks, self.weights.device))

    def decode(self, cache: SlotCache, max_steps: int, version: int) -> tuple[int, dict[int, str]]:
        """Run one burst: decode steps between which neither the batch nor its sampling parameters change.

        Args:
            cache: the KV cache.
            max_steps: upper bound of the number of steps.
            version: policy version, for messages.

        Returns:
            The number of steps, and the reason for each request that cannot continue, by request number.

        Raises:
            DivergedError: the weights are not finite.
        """
        sequences, device = self.scheduler.running, self.weights.device
        gconfigs = [s.request.gconfig for s in sequences]
        steps = self.scheduler.burst(max_steps)
        if any(g.stop for g in gconfigs):
            steps = min(steps, STOP_STRING_STEPS)
        batch = self._sampling(sequences)
        alone = [self._sampling([s]) for s in sequences] if self.options.deterministic else []
        watched = batch.stop_ids if device.type == "cpu" else None
        if batch.stop_ids is not None and watched is None:
            steps = min(steps, CUDA_STEPS)
        lengths = [len(s.tokens) for s in sequences]
        # of the tokens that go in, [steps, rows]; the one that comes out is one further
        positions = torch.tensor(lengths, device=device) + torch.arange(-1, steps - 1, device=device)[:, None]
        random = uniforms(batch.seeds, positions + 1)
        logits_at = self._steps_of(cache, lengths, positions)
        tokens = torch.tensor([s.tokens[-1] for s in sequences], device=device)
        made: list[Sampled] = []
        for step in range(steps):
            logits = logits_at(step, tokens)
            made.append(sample_each(logits, alone, random[step]) if alone else sample(logits, batch, random[step]))
            if self.weights.is_invariant:
                made[-1] = with_trained_logprobs(made[-1], logits, gconfigs, self.weights.num_vocabulary_shards)
            tokens = made[-1].tokens
            if self.group is not None:
                dist.broadcast(tokens, group_src=0, group=self.group)
            if watched is not None and torch.eq(tokens[:, None], watched).any():
                break
        # [row][step] each: tokens and the two kinds of log-probabilities
        columns = zip(*(step[:3] for step in made), strict=True)
        ids, logprobs, sampling_logprobs = (torch.stack(column, dim=1).tolist() for column in columns)
        kept_ids = [kept_ids_of(step.kept, len(sequences)) for step in made]
        # NaN among the logits is NaN here, and so is a choice of nothing
        are_finite = self.rules.agreed([math.isfinite(sum(values)) for values in sampling_logprobs])
        overflown = [s for s, is_finite in zip(sequences, are_finite, strict=True) if not is_finite]
        failed = self._give_up(cache, version, overflown) if overflown else {}
        cache.apply(self.scheduler.record(ids, logprobs, sampling_logprobs, self.rules.find_stop, kept_ids))
        if failed:
            cache.apply(self.scheduler.abort(failed))
        return len(made), failed

    def _give_up(self, cache: SlotCache, version: int, sequences: Sequence[RunningSequence]) -> dict[int, str]:
        """Return the reason for each of these requests, whose logits are not finite.

        Raises:
            DivergedError: the weights are not finite.
        """
        names = nonfinite_names(self.weights.parameter_shards())
        if not all(self.rules.agreed([not names])):
            found = ", ".join(names[:3]) or "in the shard of another rank"
            raise DivergedError(
                f"the served weights of policy version {version} hold NaN or infinity ({found}), and give logits "
                "that are not finite; release() and build() the engine to go on with other weights"
            )
        for sequence in sequences:
            cache.clear(sequence.slot)
            sequence.has_failed = True
        return {
            sequence.request.request_id: f"after {len(sequence.tokens)} tokens its logits are not finite, though the "
            f"weights are (policy version {version}): what the model computes of these tokens is too large for "
            f"{self.weights.dtype}"
            for sequence in sequences
        }

    def _sampling(self, sequences: Sequence[RunningSequence]) -> SamplingBatch:
        return SamplingBatch.of(sequences, self.rules.vocab_size, self.weights.device)

    def _steps_of(self, cache: SlotCache, lengths: list[int], positions: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Return the steps of a burst, called in order: (step, tokens `[rows]`) -> logits `[rows, vocabulary]`."""
        if self.graphs is not None:
            graphs, longest, addresses = self.graphs, max(lengths), self.graphs.addresses(cache)
            return lambda step, tokens: graphs.logits(cache, addresses, tokens, positions[step], longest + step)
        if self.options.deterministic and not self.weights.is_invariant:
            return TiledDecoder(self.weights, cache, lengths, positions)
        plan: NativeDecodePlan | DecodePlan
        if cache.is_blocked and not self.weights.is_invariant and compiled() is not None:
            plan = NativeDecodePlan(cache, positions)
        else:
            plan = DecodePlan(cache, lengths, positions, is_invariant=self.weights.is_invariant)

        def logits(step: int, tokens: Tensor) -> Tensor:
            if step:
                plan.go_to(step)
            return self.weights.logits(tokens, positions[step], plan)

        return logits
