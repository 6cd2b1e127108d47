"""The divergence of a student from its teacher straight from the hidden states and output embeddings of both.

The logits of neither are ever held whole. Both directions walk over the vocabulary in blocks, as `head_logprobs` does:
first for the normalisers (and the most likely tokens), then for the terms of the divergence, and in the backward pass
for the gradient. A teacher whose head is elsewhere gives log-probabilities of some tokens instead of hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlite.algorithms import divergence as formulas
from rlite.algorithms.divergence import Divergence
from rlite.algorithms.logprobs import check_temperature, scaled
from rlite.backends.models.linear import linear
from rlite.errors import ConfigError

# logits of one model that are worked on at once; about ten tensors of this size exist meanwhile
_CPU_BLOCK, _GPU_BLOCK, _NARROWEST = 1 << 20, 1 << 24, 256


class Head(NamedTuple):
    """Hidden states, and the output embedding that reads them."""

    hidden: Float[Tensor, "rows width"]
    weight: Float[Tensor, "vocab width"]
    bias: Float[Tensor, " vocab"] | None = None

    def block(self, columns: slice, temperature: float) -> Float[Tensor, "rows columns"]:
        """Return logits / temperature of some columns, in float32 (float64 for float64)."""
        bias = None if self.bias is None else self.bias[columns]
        return scaled(linear(self.hidden, self.weight[columns], bias), temperature)

    def part(self, start: int, stop: int) -> Head:
        """Return the head of some columns."""
        return Head(self.hidden, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


class TeacherTokens(NamedTuple):
    """Log-probabilities of some tokens, from a teacher whose head is elsewhere."""

    ids: Int[Tensor, "rows k"]
    """token ids; -1 is none"""
    logprobs: Float[Tensor, "rows k"]


def linear_divergence(
    hidden: Float[Tensor, "rows width"],
    weight: Float[Tensor, "vocab width"],
    teacher: Head | TeacherTokens,
    divergence: Divergence,
    temperature: float = 1.0,
    *,
    bias: Float[Tensor, " vocab"] | None = None,
    group: dist.ProcessGroup | None = None,
    start: int = 0,
    block_size: int | None = None,
) -> Float[Tensor, " rows"]:
    """Compute the divergence of a student from a teacher at each row, in the memory of a few blocks of logits.

    The gradient is exact, and flows to the student's `hidden`, `weight` and `bias`. Vocabularies that differ in length
    (models of one family pad them differently) are compared over the ids that both have.

    `hidden`: the student's hidden states, [rows, width]. `weight`: the student's output embedding, [vocabulary, width].
    `teacher`: the teacher's hidden states with its whole head, of any width; or log-probabilities of some tokens.
    `divergence`: direction and support. The support of `TeacherTokens` is their ids. `bias`: the student's,
    [vocabulary]. `group`: ranks that hold a part of the student's vocabulary each; see `linear_logprobs`. Returns the
    divergence of each row, [rows].
    """
    num_rows = len(teacher.hidden) if isinstance(teacher, Head) else len(teacher.ids)
    if num_rows != len(hidden) or hidden.shape[-1] != weight.shape[-1]:
        found = f"{list(hidden.shape)} and {list(weight.shape)}, and {num_rows} rows of the teacher"
        raise ConfigError(f"expected hidden states [rows, width], a head [vocabulary, width] and as many rows: {found}")
    stop = len(weight)
    if isinstance(teacher, Head):
        stop = max(0, min(stop, len(teacher.weight) - start))
        teacher = teacher.part(start, start + stop)
    size = (_CPU_BLOCK if hidden.device.type == "cpu" else _GPU_BLOCK) // max(1, len(hidden))
    walk = _Walk(check_temperature(temperature), group, start, stop, block_size or max(_NARROWEST, size))
    return _HeadDivergence.apply(hidden, weight, bias, teacher, divergence, walk)


@dataclass(frozen=True)
class _Walk:
    """Walk over this rank's part of the vocabulary."""

    temperature: float
    group: dist.ProcessGroup | None
    start: int
    """token id of the first column"""
    stop: int
    """number of columns that both models have"""
    size: int

    def blocks(self) -> Iterator[slice]:
        """Yield the columns of each block."""
        for first in range(0, self.stop, self.size):
            yield slice(first, min(first + self.size, self.stop))

    def merged(self, log_sums: Tensor) -> Tensor:
        """Return the logarithms of the sums over all ranks' columns."""
        if self.group is None:
            return log_sums
        greatest = log_sums.clone()
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=self.group)
        total = (log_sums - greatest).exp()
        dist.all_reduce(total, group=self.group)
        return greatest + total.log()

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def placed(self, ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return the column within a block of each id, and whether the id is there."""
        own = ids - self.start - columns.start
        return own, (ids >= 0) & (own >= 0) & (own < columns.stop - columns.start)


class _Best:
    """The k tokens with the greatest logits of one model, with the logits of both."""

    def __init__(self, k: int, is_of_teacher: bool, like: Tensor) -> None:
        self.ids = like.new_full((len(like), k), -1, dtype=torch.int64)
        self.logits = [like.new_full((len(like), k), -torch.inf) for _ in range(2)]
        self._k, self._by = k, int(is_of_teacher)

    def read(self, blocks: tuple[Tensor, Tensor], first: int) -> None:
        """Take a block of logits of the student and of the teacher, whose first column is the token `first`."""
        _, columns = blocks[self._by].topk(min(self._k, blocks[0].shape[-1]), dim=-1)
        self._keep(columns + first, [block.gather(-1, columns) for block in blocks])

    def merge(self, group: dist.ProcessGroup) -> None:
        """Take the tokens of all ranks."""
        gathered: list[Tensor] = []
        for own in (self.ids, *self.logits):
            parts = [torch.empty_like(own) for _ in range(group.size())]
            dist.all_gather(parts, own.contiguous(), group=group)
            gathered.append(torch.cat(parts, dim=-1))
        self.ids, self.logits = self.ids[:, :0], [x[:, :0] for x in self.logits]
        self._keep(gathered[0], gathered[1:])

    def _keep(self, ids: Tensor, logits: list[Tensor]) -> None:
        ids = torch.cat([self.ids, ids], dim=-1)
        logits = [torch.cat(pair, dim=-1) for pair in zip(self.logits, logits, strict=True)]
        _, best = logits[self._by].topk(self._k, dim=-1)
        self.ids, self.logits = ids.gather(-1, best), [x.gather(-1, best) for x in logits]


_BEST_OF = {"student_topk": (False,), "teacher_topk": (True,), "union": (False, True)}
"""models whose most likely tokens are a support: true is the teacher"""


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        hidden, weight, bias, teacher, divergence, walk = inputs
        student = Head(hidden, weight, bias)
        ctx.teacher, ctx.beta, ctx.walk, ctx.is_full = teacher, divergence.beta, walk, False
        if isinstance(teacher, TeacherTokens):
            log_sum, logits = _logits_at(student, teacher.ids, walk)
            ids, log_t = teacher.ids, teacher.logprobs.to(logits)
        else:
            log_sum, teacher_sum, found = _log_sums(student, teacher, divergence, walk)
            if divergence.support == "full":
                values, total = _whole(student, teacher, (log_sum, teacher_sum), divergence.beta, walk)
                ctx.is_full = True
                ctx.save_for_backward(hidden, weight, bias, log_sum, teacher_sum, total)
                return values
            ids, (logits, teacher_logits) = _joined(found)
            log_t = teacher_logits - teacher_sum[:, None]
        log_s = (logits - log_sum[:, None]).masked_fill(ids < 0, -torch.inf)
        result = formulas.bucketed(log_s, log_t.masked_fill(ids < 0, -torch.inf), divergence.beta)
        ctx.save_for_backward(hidden, weight, bias, log_sum, ids, result.slopes, result.rest)
        return result.values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, *saved = ctx.saved_tensors
        student, walk = Head(hidden, weight, bias), ctx.walk
        slopes = _whole_slopes if ctx.is_full else _bucketed_slopes
        scale = (grad / walk.temperature)[:, None]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=grad.dtype) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        for columns in walk.blocks():
            block = (slopes(ctx, student, columns, *saved) * scale).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += linear(block, weight[columns].t())
            if grad_weight is not None:
                grad_weight[columns] = linear(block.t(), hidden.t())
            if grad_bias is not None:
                grad_bias[columns] = block.sum(0)
        if grad_hidden is not None:
            grad_hidden = walk.summed(grad_hidden).to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _log_sums(student: Head, teacher: Head, divergence: Divergence, walk: _Walk) -> tuple[Tensor, Tensor, list[_Best]]:
    """Return the normalisers of both models, and their most likely tokens as far as the support asks for them."""
    like = scaled(student.hidden[:, :0], 1.0)
    sums = [like.new_full((len(like),), -torch.inf) for _ in range(2)]
    found = [_Best(divergence.k, is_of_teacher, like) for is_of_teacher in _BEST_OF.get(divergence.support, ())]
    for columns in walk.blocks():
        x, y = (head.block(columns, walk.temperature).to(like.dtype) for head in (student, teacher))
        sums = [torch.logaddexp(known, block.logsumexp(-1)) for known, block in zip(sums, (x, y), strict=True)]
        for best in found:
            best.read((x, y), walk.start + columns.start)
    if walk.group is not None:
        for best in found:
            best.merge(walk.group)
    return walk.merged(sums[0]), walk.merged(sums[1]), found


def _joined(found: list[_Best]) -> tuple[Tensor, list[Tensor]]:
    """Return the ids of one or two models, each once, and the logits of both models there."""
    ids = torch.cat([best.ids for best in found], dim=-1)
    if len(found) == 2:
        is_again = (found[1].ids[:, :, None] == found[0].ids[:, None, :]).any(-1)
        ids = torch.cat([found[0].ids, found[1].ids.masked_fill(is_again, -1)], dim=-1)
    return ids, [torch.cat(parts, dim=-1) for parts in zip(*(best.logits for best in found), strict=True)]


def _logits_at(student: Head, ids: Tensor, walk: _Walk) -> tuple[Tensor, Tensor]:
    """Return the normaliser [rows], and the logits / temperature of some tokens [rows, k]."""
    like = scaled(student.hidden[:, :0], 1.0)
    log_sum, logits = like.new_full((len(ids),), -torch.inf), like.new_full(ids.shape, -torch.inf)
    for columns in walk.blocks():
        x = student.block(columns, walk.temperature)
        log_sum = torch.logaddexp(log_sum, x.logsumexp(-1))
        place, is_here = walk.placed(ids, columns)
        logits = torch.where(is_here, x.gather(-1, place.clamp(0, x.shape[-1] - 1)), logits)
    if walk.group is not None:
        dist.all_reduce(logits, dist.ReduceOp.MAX, group=walk.group)
    return walk.merged(log_sum), logits


def _log_pair(student: Head, teacher: Head, sums: tuple[Tensor, Tensor], columns: slice, walk: _Walk) -> list[Tensor]:
    pairs = zip((student, teacher), sums, strict=True)
    return [head.block(columns, walk.temperature).to(sums[0].dtype) - log_sum[:, None] for head, log_sum in pairs]


def _whole(
    student: Head, teacher: Head, sums: tuple[Tensor, Tensor], beta: float, walk: _Walk
) -> tuple[Tensor, Tensor]:
    """Return the divergence over the whole vocabulary, and G."""
    both = torch.zeros(2, *sums[0].shape, dtype=sums[0].dtype, device=sums[0].device)
    for columns in walk.blocks():
        log_s, log_t = _log_pair(student, teacher, sums, columns, walk)
        found = formulas.terms(log_s, log_t, beta)
        both += torch.stack([part.sum(-1) for part in found])
    values, total = walk.summed(both)
    return values.clone(), formulas.total_weight(total[:, None], beta)


def _whole_slopes(ctx: Any, student: Head, columns: slice, log_sum: Tensor, teacher_sum: Tensor, total: Tensor) -> Any:
    log_s, log_t = _log_pair(student, ctx.teacher, (log_sum, teacher_sum), columns, ctx.walk)
    return formulas.terms(log_s, log_t, ctx.beta).weights - log_s.exp() * total[:, None]


def _bucketed_slopes(
    ctx: Any, student: Head, columns: slice, log_sum: Tensor, ids: Tensor, slopes: Tensor, rest: Tensor
) -> Tensor:
    others = (student.block(columns, ctx.walk.temperature) - log_sum[:, None]).exp() * rest[:, None]
    place, is_here = ctx.walk.placed(ids, columns)
    # tokens of other blocks are written into a column of their own, which is cut off
    padded = torch.cat([others, others[:, :1]], dim=-1)
    return padded.scatter_(-1, place.masked_fill(~is_here, others.shape[-1]), slopes)[:, :-1]
