"""A forward pass of Llama, Qwen2 and Qwen3 in float32 on CPU with little Python overhead.

The Python code of transformers' forward costs about 1 ms per step for four layers. With few sequences, the kernels take
no longer. `LeanDecoder` computes the same function with the same modules. It looks up parameters at each call and calls
the forwards of the linear layers. Weight syncs, moves and tensor parallelism therefore need no extra code. Activations
are `[tokens, ...]`, rotary angles come from a table, and activations that are not read again are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.engine.embedded.attention import AttentionPlan
from rlite.nn.batch_invariant import FAMILY, is_plain
from rlite.nn.meta import real_tensors

Rotate = Callable[[Tensor], Tensor]


class LeanDecoder:
    """The computation of one model. The model owns the parameters.

    Args:
        model: a model of a class in `FAMILY`.
        device: device of the table of rotary angles.
        max_len: longest sequence, in tokens.
        is_invariant: `rlite.nn.batch_invariant` computes the model.
    """

    def __init__(self, model: Any, device: torch.device, max_len: int, is_invariant: bool) -> None:
        base = model.model
        self._embedding: nn.Module = base.embed_tokens
        self._layers = list(base.layers)
        self._norm: nn.Module = base.norm
        self._head: nn.Module = model.lm_head
        self._rotate = _rotate if is_invariant else _rotate_fused
        if not is_invariant:
            for layer in self._layers:
                layer.mlp.act_fn.forward = partial(F.silu, inplace=True)
        with real_tensors(device), torch.inference_mode():
            cos, sin = base.rotary_emb(torch.empty(0), torch.arange(max_len)[None])
            half = sin.shape[-1] // 2
            # rotate_half negates the second half, here the sines of the first are negated
            self._angles = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)
        """[max_len, 2, head_dim]"""

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
            is_invariant: `rlite.nn.batch_invariant` computes the model.
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
        x, rotate = self._below_last_layer(tokens, positions, plan)
        layer = self._layers[-1]
        attention, x = layer.self_attn, _rms_norm(layer.input_layernorm, x)
        plan.write(attention.layer_idx, _key(attention, x, rotate), _heads(attention.v_proj, attention, x))

    def logits(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of tokens.

        Args:
            tokens: `[tokens]`.
            positions: `[tokens]`.
            plan: the attention of this forward pass.
        """
        x, rotate = self._below_last_layer(tokens, positions, plan)
        x = _layer(self._layers[-1], x, rotate, plan)
        return self._head.forward(_rms_norm(self._norm, x))

    def _below_last_layer(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Rotate]:
        """Return the input of the last layer, and the rotation of queries and keys `[tokens, heads, head_dim]`."""
        cos, sin = self._angles[positions][:, :, None].unbind(1)
        rotate = partial(self._rotate, cos=cos, sin=sin)
        x = self._embedding.forward(tokens)
        for layer in self._layers[:-1]:
            x = _layer(layer, x, rotate, plan)
        return x, rotate


def _layer(module: Any, x: Tensor, rotate: Rotate, plan: AttentionPlan) -> Tensor:
    x += _attention(module.self_attn, _rms_norm(module.input_layernorm, x), rotate, plan)
    x += _mlp(module.mlp, _rms_norm(module.post_attention_layernorm, x))
    return x


def _attention(module: Any, x: Tensor, rotate: Rotate, plan: AttentionPlan) -> Tensor:
    query = _heads(module.q_proj, module, x)
    if hasattr(module, "q_norm"):
        query = _rms_norm(module.q_norm, query)
    query = rotate(query)
    key, value = _key(module, x, rotate), _heads(module.v_proj, module, x)
    return module.o_proj.forward(plan.attend(module.layer_idx, query, key, value, module.scaling).flatten(1))


def _key(module: Any, x: Tensor, rotate: Rotate) -> Tensor:
    key = _heads(module.k_proj, module, x)
    if hasattr(module, "k_norm"):
        key = _rms_norm(module.k_norm, key)
    return rotate(key)


def _heads(projection: Any, module: Any, x: Tensor) -> Tensor:
    return projection.forward(x).view(x.shape[0], -1, module.head_dim)


def _mlp(module: Any, x: Tensor) -> Tensor:
    gate = module.act_fn.forward(module.gate_proj.forward(x))
    gate *= module.up_proj.forward(x)
    return module.down_proj.forward(gate)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    weight = module.weight
    return torch.rms_norm(x, weight.shape, weight, module.variance_epsilon)


def _rotate_fused(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1) * sin)  # each operation rounds, as in transformers
