"""Forward passes of one worker: prefill, and bursts of decode steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlite.engine.embedded.attention import DecodePlan, PrefillPlan, TilePlan
from rlite.engine.embedded.cache import SlotCache
from rlite.engine.embedded.graphs import DecodeGraphs
from rlite.engine.embedded.model import ShardedModel
from rlite.engine.embedded.options import EmbeddedOptions
from rlite.engine.embedded.requests import RequestRules
from rlite.engine.embedded.sampling import SamplingBatch, sample, uniforms
from rlite.engine.embedded.scheduler import RunningSequence, Scheduler
from rlite.engine.embedded.tiles import TiledDecoder, sample_each, tiles_of
from rlite.errors import DivergedError
from rlite.parallel.shards import nonfinite_names

STOP_STRING_STEPS = 4
"""decode steps between two checks for stop strings; tokens after the stop are discarded"""
CUDA_STEPS = 8
"""decode steps between two checks for stop tokens on CUDA, where a check waits for the device"""


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

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.weights.device

    def prefill(self, cache: SlotCache) -> None:
        """Fill the cache for all running sequences, except for the last token of each."""
        while True:
            moves, chunks = self.scheduler.next_prefill()
            cache.apply(moves)
            if not chunks:
                return
            if self.options.deterministic:
                for chunk in chunks:
                    for start, tokens in tiles_of(chunk, self.scheduler.running[chunk.slot].tokens):
                        self.weights.prefill(TilePlan(cache, chunk.slot, start, tokens, self.device))
            else:
                self.weights.prefill(PrefillPlan(cache, chunks, self.device))

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
        sequences = self.scheduler.running
        gconfigs = [s.request.gconfig for s in sequences]
        steps = self.scheduler.burst(max_steps)
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
        logits_at = self._steps_of(cache, lengths, positions)
        tokens = torch.tensor([s.tokens[-1] for s in sequences], device=self.device)
        made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            logits = logits_at(step, tokens)
            if each:
                tokens, taken, taken_of_cut = sample_each(logits, each, random[step])
            else:
                tokens, taken, taken_of_cut = sample(logits, batch, random[step])
            if self.group is not None:
                dist.broadcast(tokens, group_src=0, group=self.group)
            made.append((tokens, taken, taken_of_cut))
            if watched is not None and torch.eq(tokens[:, None], watched).any():
                break
        # [row][step] each: tokens and the two kinds of log-probabilities
        ids, logprobs, sampling_logprobs = (torch.stack(c, dim=1).tolist() for c in zip(*made, strict=True))
        # NaN among the logits is NaN here, and so is a choice of nothing
        are_finite = agreed(self.group, self.device, [math.isfinite(sum(values)) for values in sampling_logprobs])
        failed: dict[int, str] = {}
        if not all(are_finite):
            failed = self._give_up(
                cache, version, [s for s, fine in zip(sequences, are_finite, strict=True) if not fine]
            )
        cache.apply(self.scheduler.record(ids, logprobs, sampling_logprobs, self.rules.find_stop))
        if failed:
            cache.apply(self.scheduler.abort(failed))
        return len(made), failed

    def _give_up(self, cache: SlotCache, version: int, sequences: Sequence[RunningSequence]) -> dict[int, str]:
        """Return the reason for each of these requests, whose logits are not finite.

        Raises:
            DivergedError: the weights are not finite.
        """
        names = nonfinite_names(self.weights.parameter_shards())
        if not all(agreed(self.group, self.device, [not names])):
            found = ", ".join(names[:3]) or "in the shard of another rank"
            raise DivergedError(
                f"the served weights of policy version {version} hold NaN or infinity ({found}), and give logits "
                "that are not finite; release() and build() the engine to go on with others"
            )
        for sequence in sequences:
            cache.clear(sequence.slot)
        return {
            sequence.request.request_id: f"after {len(sequence.tokens)} tokens its logits are not finite, though the "
            f"weights are (policy version {version}): what the model computes of these tokens is too large for "
            f"{self.weights.dtype}"
            for sequence in sequences
        }

    def _sampling(self, sequences: Sequence[RunningSequence]) -> SamplingBatch:
        return SamplingBatch.of(
            [s.request.gconfig for s in sequences],
            [s.request.seed for s in sequences],
            [s.stop_ids for s in sequences],
            [len(s.tokens) < s.min_tokens for s in sequences],
            self.rules.vocab_size,
            self.device,
        )

    def _steps_of(
        self, cache: SlotCache, lengths: list[int], positions: torch.Tensor
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Return the steps of a burst, called in order: (step, tokens `[rows]`) -> logits `[rows, vocabulary]`."""
        if self.graphs is not None:
            graphs, longest, addresses = self.graphs, max(lengths), self.graphs.addresses(cache)
            return lambda step, tokens: graphs.logits(cache, addresses, tokens, positions[step], longest + step)
        if self.options.deterministic:
            return TiledDecoder(self.weights, cache, lengths, positions)
        plan = DecodePlan(cache, lengths, positions)

        def logits(step: int, tokens: torch.Tensor) -> torch.Tensor:
            if step:
                plan.go_to(step)
            return self.weights.logits(tokens, positions[step], plan)

        return logits
