"""The operations of a lean decoder between its matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlite.engine.embedded import native


class Pointwise:
    """Norms, rotary embeddings and gates, by `decode.c` or by PyTorch. They overwrite activations.

    In C, each is one pass over the memory. PyTorch needs five operations for a root mean square alone, and with several
    threads, the gaps between so many short operations are so long that threads fall asleep.

    Args:
        angles: `[max_len, 2, head_dim]`, cosines and sines, of which those of the first half are negated.
        is_native: compute by `decode.c`. Otherwise each operation rounds as in transformers.
    """

    def __init__(self, angles: Tensor, is_native: bool) -> None:
        self._angles = angles.contiguous()
        self._is_native = is_native

    def add_norm(self, norm: Any, x: Tensor, added: Tensor | None) -> Tensor:
        """Add to x in place, and normalise the sum.

        Args:
            norm: the module with `weight` and `variance_epsilon`.
            x: the residual stream, `[tokens, width]`.
            added: `[tokens, width]`; None adds nothing.

        Returns:
            The RMS norm of x, `[tokens, width]`.
        """
        if self._is_native:
            return native.add_rms_norm(x, added, norm.weight, norm.variance_epsilon)
        if added is not None:
            x += added
        return torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)

    def norm_rotate(self, norm: Any | None, x: Tensor, positions: Tensor) -> Tensor:
        """Normalise and rotate queries or keys.

        Args:
            norm: the module with `weight` and `variance_epsilon`, of each head; None does not normalise.
            x: `[tokens, heads, head_dim]`.
            positions: positions of the tokens, `[tokens]`.

        Returns:
            The rotated heads, `[tokens, heads, head_dim]`.
        """
        if self._is_native:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
            return native.rms_norm_rotate_(x, weight, eps, positions, self._angles)
        if norm is not None:
            x = torch.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
        cos, sin = self._angles[positions][:, :, None].unbind(1)
        return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)

    def gate(self, activation: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return `silu(gate) * up`.

        Args:
            activation: the module that computes silu.
            gate: `[tokens, width]`.
            up: `[tokens, width]`.
        """
        if self._is_native:
            return native.silu_multiply_(gate, up)
        return activation.forward(gate).mul_(up)
