"""Triton kernels of the output embedding: one pass over a block of logits, forward and backward.

The formulas are those of `rlite.algorithms.logprobs`, and so are the functions' signatures. The products stay those of
cuBLAS. The forward reads each logit once, 2 bytes in bfloat16. The backward reads and writes each logit once. Torch's
own operations move 54 bytes for each logit, because every step of a formula writes an intermediate in float32.

Kernels read `-inf` (a token that a bias forbids) and hand NaN on, as torch's operations do: `tl.maximum` alone would
drop a NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from rlite.algorithms.logprobs import Block, Rows, Statistics

STATISTICS_COLUMNS, GRADIENT_COLUMNS = 4096, 2048
"""columns that one program of a kernel reads at once"""
STATISTICS_WARPS, GRADIENT_WARPS = 8, 4


def block_statistics(logits: Block, labels: Int[Tensor, " rows"], temperature: float) -> Statistics:
    """Return the statistics of a block in float32; see `rlite.algorithms.logprobs.block_statistics`."""
    num_rows, num_columns = logits.shape
    out = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
    if num_rows:
        statistics_kernel[(num_rows,)](
            *(logits, labels, out, num_rows, num_columns, 1 / temperature),
            COLUMNS=STATISTICS_COLUMNS,
            num_warps=STATISTICS_WARPS,
        )
    return out


def block_gradient(
    logits: Block,
    labels: Int[Tensor, " rows"],
    temperature: float,
    log_sums: Rows,
    entropies: Rows,
    grad_logprobs: Rows,
    grad_entropies: Rows | None,
    out: Block | None = None,
) -> Block:
    """Return the gradient of a block in its own dtype; see `rlite.algorithms.logprobs.block_gradient`."""
    num_rows, num_columns = logits.shape
    out = torch.empty_like(logits) if out is None else out
    used = log_sums if grad_entropies is None else grad_entropies
    rows = [x.contiguous() for x in (log_sums, entropies, grad_logprobs, used)]
    if logits.numel():
        gradient_kernel[(num_rows, triton.cdiv(num_columns, GRADIENT_COLUMNS))](
            *(logits, out, labels, *rows, num_columns, 1 / temperature),
            COLUMNS=GRADIENT_COLUMNS,
            HAS_ENTROPY=grad_entropies is not None,
            num_warps=GRADIENT_WARPS,
        )
    return out


@triton.jit
def statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, labels_ptr, out_ptr, num_rows, num_columns, inverse_temperature, COLUMNS: tl.constexpr
):
    """Write m, s, t and x_l of one row: out [4, rows]."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * num_columns
    lanes = tl.arange(0, COLUMNS)
    greatest = tl.full((), -3.4028234663852886e38, tl.float32)
    total = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)
    for first in range(0, num_columns, COLUMNS):
        columns = first + lanes
        logits = tl.load(logits_ptr + start + columns, mask=columns < num_columns, other=float("-inf"))
        x = logits.to(tl.float32) * inverse_temperature
        new = tl.maximum(greatest, tl.max(x, 0))
        shift = tl.maximum(greatest - new, -1e4, propagate_nan=tl.PropagateNan.ALL)
        z = tl.maximum(x - new, -1e4, propagate_nan=tl.PropagateNan.ALL)
        exponentials = tl.exp(z)
        moment = (moment + total * shift) * tl.exp(shift) + tl.sum(exponentials * z, 0)
        total = total * tl.exp(shift) + tl.sum(exponentials, 0)
        greatest = new
    label = tl.load(labels_ptr + row)
    is_here = (label >= 0) & (label < num_columns)
    label_logit = tl.load(logits_ptr + start + label, mask=is_here, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + row, greatest)
    tl.store(out_ptr + num_rows + row, total)
    tl.store(out_ptr + 2 * num_rows + row, moment)
    tl.store(out_ptr + 3 * num_rows + row, label_logit * inverse_temperature)


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    out_ptr,
    labels_ptr,
    log_sums_ptr,
    entropies_ptr,
    grad_logprobs_ptr,
    grad_entropies_ptr,
    num_columns,
    inverse_temperature,
    COLUMNS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """Write the gradient of some columns of one row; `out_ptr` may be `logits_ptr`."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = row.to(tl.int64) * num_columns + columns
    is_column = columns < num_columns
    x = tl.load(logits_ptr + at, mask=is_column, other=0.0).to(tl.float32) * inverse_temperature
    grad = tl.load(grad_logprobs_ptr + row).to(tl.float32) * inverse_temperature
    log_p = tl.maximum(x - tl.load(log_sums_ptr + row), -1e4, propagate_nan=tl.PropagateNan.ALL)
    slope = -grad
    if HAS_ENTROPY:
        grad_entropy = tl.load(grad_entropies_ptr + row).to(tl.float32) * inverse_temperature
        slope -= grad_entropy * (log_p + tl.load(entropies_ptr + row))
    out = slope * tl.exp(log_p) + tl.where(columns == tl.load(labels_ptr + row), grad, 0.0)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_column)
