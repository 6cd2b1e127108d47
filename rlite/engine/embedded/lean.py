"""The forward of Llama, Qwen2 and Qwen3 in float32 on CPU, without what a forward for every use costs.

transformers' forward takes about 1 ms a step more for the Python around four layers' kernels: as much as the kernels do
where few sequences are left. Here the same modules compute the same thing: their parameters are looked up at each
call and their linear layers' forwards called, so weight syncs, moves and tensor parallelism need no notice of it.
Activations are `[tokens, ...]`, rotary angles come from a table, and what nobody reads again is overwritten.
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
"""their layers differ in biases and in Qwen3's norms of queries and keys alone"""
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""rotary embeddings whose angles depend on the position alone, not on how long the longest sequence is"""


class LeanDecoder:
    """The computation of one model; the model owns the parameters."""

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
        """None where it does not apply: another class, device, dtype, activation, rotary embedding or attention."""
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
        """Keys and values of tokens at their positions, both `[tokens]`; of the last layer nothing else is made."""
        cos, sin = self._rotation(positions)
        x = self._layers_below_last(tokens, cos, sin, plan)
        layer = self._layers[-1]
        attention, x = layer.self_attn, _rms_norm(layer.input_layernorm, x)
        plan.write(attention.layer_idx, _key(attention, x, cos, sin), _heads(attention.v_proj, attention, x))

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Tokens at their positions, both `[tokens]`, to logits `[tokens, vocabulary]`."""
        cos, sin = self._rotation(positions)
        x = self._layers_below_last(tokens, cos, sin, plan)
        x = _layer(self._layers[-1], x, cos, sin, plan)
        return self._head.forward(_rms_norm(self._norm, x))

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines `[tokens, 1, head_dim]`."""
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
