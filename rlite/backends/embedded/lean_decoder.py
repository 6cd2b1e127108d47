"""A forward pass of Llama, Qwen2 and Qwen3 in float32 on CPU with little Python overhead.

The Python code of transformers' forward costs about 1 ms per step for four layers. With few sequences, the kernels take
no longer. `LeanDecoder` computes the same function with the same modules. It looks up parameters at each call and calls
the forwards of the linear layers. Weight syncs, moves and tensor parallelism therefore need no extra code. Activations
are `[tokens, ...]`, rotary angles come from a table, and activations that are not read again are overwritten.

The operations of a lean decoder between its matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.backends.embedded.attention import AttentionPlan
from rlite.backends.models.batch_invariant import FAMILY, is_plain
from rlite.backends.models.linear import MIN_ROWS
from rlite.backends.serving.native import call, compiled
from rlite.nn.pretrained import real_tensors


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
            output = torch.empty_like(x)
            added = None if added is None else added.contiguous()
            sizes = (*x.shape, norm.variance_epsilon, torch.get_num_threads())
            call("add_rms_norm", *sizes, x, added, norm.weight, output)
            return output
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
            sizes = (*x.shape, eps, torch.get_num_threads())
            call("rms_norm_rotate", *sizes, x, weight, positions.contiguous(), self._angles)
            return x
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
            call("silu_multiply", gate.numel(), torch.get_num_threads(), gate, up.contiguous())
            return gate
        return activation.forward(gate).mul_(up)


ROWS = 8
"""Decode batches are filled up to a multiple of this. oneDNN compiles its kernels for each number of rows, and would
compile them again in every batch of ragged answers, because its cache does not hold so many."""


class LeanDecoder:
    """The computation of one model. The model owns the parameters.

    Args:
        model: a model of a class in `FAMILY`.
        device: device of the table of rotary angles.
        max_len: longest sequence, in tokens.
        is_invariant: `rlite.backends.models.batch_invariant` computes the model.
    """

    def __init__(self, model: Any, device: torch.device, max_len: int, is_invariant: bool) -> None:
        base = model.model
        self._embedding: nn.Module = base.embed_tokens
        self._layers = list(base.layers)
        self._norm: nn.Module = base.norm
        self._head: nn.Module = model.lm_head
        with real_tensors(device), torch.inference_mode():
            cos, sin = base.rotary_emb(torch.empty(0), torch.arange(max_len)[None])
            half = sin.shape[-1] // 2
            # rotate_half negates the second half, here the sines of the first are negated
            angles = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)
        self._is_invariant = is_invariant
        self._pointwise = Pointwise(angles, is_native=not is_invariant and compiled() is not None)

    @classmethod
    def of(
        cls, model: PreTrainedModel, device: torch.device, max_len: int, is_invariant: bool = False
    ) -> LeanDecoder | None:
        """Return the decoder of a model, None if it does not apply.

        It applies to some classes, devices, dtypes, activations, rotary embeddings and kinds of attention only.

        Args:
            model: the model.
            device: device of the model.
            max_len: longest sequence, in tokens.
            is_invariant: `rlite.backends.models.batch_invariant` computes the model.
        """
        is_own = type(model) in FAMILY and is_plain(model)
        applies = is_own and device.type == "cpu" and model.dtype == torch.float32
        return cls(model, device, max_len, is_invariant) if applies else None

    def fill(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> None:
        """Write keys and values of tokens to the cache. The last layer computes nothing else.

        Args:
            tokens: `[tokens]`.
            positions: `[tokens]`.
            plan: the attention of this forward pass.
        """
        x, h = self._embedding.forward(tokens), None
        *layers, last = self._layers
        for layer in layers:
            h = self._layer(layer, x, h, positions, plan)
        attention, h = last.self_attn, self._pointwise.add_norm(last.input_layernorm, x, h)
        plan.write(
            attention.layer_idx, self._rotated(attention, "k", h, positions), _heads(attention.v_proj, attention, h)
        )

    def logits(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of tokens.

        Args:
            tokens: `[tokens]`.
            positions: `[tokens]`.
            plan: the attention of this forward pass.
        """
        rows = len(tokens)
        missing = 0 if self._is_invariant or rows < MIN_ROWS else -rows % ROWS
        tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
        x, h = self._embedding.forward(tokens), None
        for layer in self._layers:
            h = self._layer(layer, x, h, positions, plan, missing)
        return self._head.forward(self._pointwise.add_norm(self._norm, x, h))[:rows]

    def _layer(
        self, module: Any, x: Tensor, added: Tensor | None, positions: Tensor, plan: AttentionPlan, missing: int = 0
    ) -> Tensor:
        """Return the output of the layer's MLP; x, the residual stream, takes in `added` and the attention's output.

        The last `missing` rows belong to no sequence.
        """
        attention, mlp = module.self_attn, module.mlp
        h = self._pointwise.add_norm(module.input_layernorm, x, added)
        query, key = (self._rotated(attention, which, h, positions) for which in ("q", "k"))
        value = _heads(attention.v_proj, attention, h)
        query, key, value = (heads[: len(heads) - missing] for heads in (query, key, value))
        h = plan.attend(attention.layer_idx, query, key, value, attention.scaling).flatten(1)
        h = F.pad(h, (0, 0, 0, missing)) if missing else h
        h = self._pointwise.add_norm(module.post_attention_layernorm, x, attention.o_proj.forward(h))
        h = self._pointwise.gate(mlp.act_fn, mlp.gate_proj.forward(h), mlp.up_proj.forward(h))
        return mlp.down_proj.forward(h)

    def _rotated(self, attention: Any, which: str, h: Tensor, positions: Tensor) -> Tensor:
        heads = _heads(getattr(attention, f"{which}_proj"), attention, h)
        return self._pointwise.norm_rotate(getattr(attention, f"{which}_norm", None), heads, positions)


def _heads(projection: Any, attention: Any, h: Tensor) -> Tensor:
    return projection.forward(h).view(h.shape[0], -1, attention.head_dim)
