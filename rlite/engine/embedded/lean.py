"""A forward pass of Llama, Qwen2 and Qwen3 in float32 on CPU with little Python overhead.

The Python code of transformers' forward costs about 1 ms per step for four layers. With few sequences, the kernels take
no longer. `LeanDecoder` computes the same function with the same modules. It looks up parameters at each call and calls
the forwards of the linear layers. Weight syncs, moves and tensor parallelism therefore need no extra code. Activations
are `[tokens, ...]`, rotary angles come from a table, and activations that are not read again are overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from rlite.engine.embedded.attention import AttentionPlan
from rlite.nn.meta import real_tensors

FAMILY = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""classes whose layers differ only in biases and in Qwen3's norms of queries and keys"""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""rotary embeddings whose angles depend on the position alone, not on the length of the longest sequence"""


class LeanDecoder:
    """The computation of one model. The model owns the parameters.

    Args:
        model: a model of a class in `FAMILY`.
        device: device of the table of rotary angles.
        max_len: longest sequence, in tokens.
    """

    def __init__(self, model: Any, device: torch.device, max_len: int) -> None:
        base = model.model
        self._embedding: nn.Module = base.embed_tokens
        self._layers = list(base.layers)
        self._norm: nn.Module = base.norm
        self._head: nn.Module = model.lm_head
        with real_tensors(device), torch.inference_mode():
            cos, sin = base.rotary_emb(torch.empty(0), torch.arange(max_len)[None])
            half = sin.shape[-1] // 2
            # rotate_half negates the second half, here the sines of the first are negated
            self._angles = torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)
        """[max_len, 2, head_dim]"""

    @classmethod
    def of(cls, model: PreTrainedModel, device: torch.device, max_len: int) -> LeanDecoder | None:
        """Return the decoder of a model, None if it does not apply.

        It applies to some classes, devices, dtypes, activations, rotary embeddings and kinds of attention only.

        Args:
            model: the model.
            device: device of the model.
            max_len: longest sequence, in tokens.
        """
        config = model.config
        applies = (
            type(model) in FAMILY
            and device.type == "cpu"
            and model.dtype == torch.float32
            and config.hidden_act == "silu"
            and config.rope_parameters["rope_type"] in FIXED_ROPE
            and "sliding_attention" not in (vars(config).get("layer_types") or ())
        )
        return cls(model, device, max_len) if applies else None

    def fill(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> None:
        """Write keys and values of tokens to the cache. The last layer computes nothing else.

        Args:
            tokens: `[tokens]`.
            positions: `[tokens]`.
            plan: the attention of this forward pass.
        """
        cos, sin = self._rotation(positions)
        x = self._layers_below_last(tokens, cos, sin, plan)
        layer = self._layers[-1]
        attention, x = layer.self_attn, _rms_norm(layer.input_layernorm, x)
        plan.write(attention.layer_idx, _key(attention, x, cos, sin), _heads(attention.v_proj, attention, x))

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Return the logits `[tokens, vocabulary]` of tokens.

        Args:
            tokens: `[tokens]`.
            positions: `[tokens]`.
            plan: the attention of this forward pass.
        """
        cos, sin = self._rotation(positions)
        x = self._layers_below_last(tokens, cos, sin, plan)
        x = _layer(self._layers[-1], x, cos, sin, plan)
        return self._head.forward(_rms_norm(self._norm, x))

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and signed sines, `[tokens, 1, head_dim]` each."""
        cos, sin = self._angles[positions][:, :, None].unbind(1)
        return cos, sin

    def _layers_below_last(
        self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        x = self._embedding.forward(tokens)
        for layer in self._layers[:-1]:
            x = _layer(layer, x, cos, sin, plan)
        return x


def _layer(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    x += _attention(module.self_attn, _rms_norm(module.input_layernorm, x), cos, sin, plan)
    x += _mlp(module.mlp, _rms_norm(module.post_attention_layernorm, x))
    return x


def _attention(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    query = _heads(module.q_proj, module, x)
    if hasattr(module, "q_norm"):
        query = _rms_norm(module.q_norm, query)
    query = _rotate(query, cos, sin)
    key, value = _key(module, x, cos, sin), _heads(module.v_proj, module, x)
    return module.o_proj.forward(plan.attend(module.layer_idx, query, key, value, module.scaling).flatten(1))


def _key(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    key = _heads(module.k_proj, module, x)
    if hasattr(module, "k_norm"):
        key = _rms_norm(module.k_norm, key)
    return _rotate(key, cos, sin)


def _heads(projection: Any, module: Any, x: torch.Tensor) -> torch.Tensor:
    return projection.forward(x).view(x.shape[0], -1, module.head_dim)


def _mlp(module: Any, x: torch.Tensor) -> torch.Tensor:
    gate = F.silu(module.gate_proj.forward(x), inplace=True)
    gate *= module.up_proj.forward(x)
    return module.down_proj.forward(gate)


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    return torch.rms_norm(x, weight.shape, weight, module.variance_epsilon)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)
