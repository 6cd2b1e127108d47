"""The attention layers of a model: their heads, the widths of keys and values, and which layers share both.

The classes of transformers state these facts each in its own fields, or in code. They are found by a forward pass of
one token through the model on tensors without storage, in which the attention notes the tensors that it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from rlite.backends.models.attention import Softmax, attention, no_mask
from rlite.backends.models.mixers import Mixer, Mixing, install_mixers, mixing
from rlite.nn.pretrained import real_tensors
from rlite.runtime.parallel.tensor import attention_shape

NOTING = "rlite_noting"
"""attention that notes what it is given, and returns each token's value"""


class AttentionLayer(NamedTuple):
    """Sizes of one attention layer."""

    num_heads: int
    """number of query heads"""
    num_key_heads: int
    """number of heads of keys and values"""
    key_width: int
    """width of a head of queries and keys"""
    value_width: int
    is_capped: bool = False
    """true if scores have a soft cap"""
    source: int | None = None
    """the earlier layer whose keys and values this layer reads; None is its own"""

    def split(self, parts: int) -> AttentionLayer:
        """Return the layer of one rank, if `parts` ranks share the heads."""
        return self._replace(num_heads=self.num_heads // parts, num_key_heads=self.num_key_heads // parts)


AttentionLayers = Mapping[int, AttentionLayer]
"""attention layers by their index; a layer without attention, such as a recurrent one, is missing"""


def equal_layers(config: PreTrainedConfig) -> AttentionLayers:
    """Return the layers of a model whose layers are equal and as its config states."""
    num_layers, heads, key_heads, width = attention_shape(config)
    return dict.fromkeys(range(num_layers), AttentionLayer(heads, key_heads, width, width))


_FOUND: dict[tuple[type, str], AttentionLayers] = {}
"""attention layers by class and by the content of the config"""


def attention_layers(cls: type[PreTrainedModel], config: PreTrainedConfig) -> AttentionLayers:
    """Return the attention layers of a model; if its code reads the values of tensors, as its config states them."""
    key = (cls, config.to_json_string(use_diff=False))
    if key not in _FOUND:
        _FOUND[key] = equal_layers(config) if (noted := _noted(cls, config)) is None else noted
    return _FOUND[key]


def _noted(cls: type[PreTrainedModel], config: PreTrainedConfig) -> AttentionLayers | None:
    notes = _Notes()
    try:
        _compute(cls, config, notes)
    except Exception:  # of any kind: the class's own code
        return None
    return notes.layers


def recurrent_bytes(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the size of the recurrent state of one sequence; 0 if no layer keeps any."""
    states = _States()
    _compute(cls, config, _Notes(), dtype, states)
    return states.nbytes


def _compute(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    notes: _Notes,
    dtype: torch.dtype | None = None,
    states: _States | None = None,
) -> None:
    """Run one token through a model without storage."""
    with real_tensors(), FakeTensorMode(), torch.no_grad():
        # other implementations read how many tokens each expert has
        model = cls._from_config(deepcopy(config), dtype=dtype, experts_implementation="batched_mm").eval()
        install_mixers(model)
        with attention(model.config, NOTING), mixing(states):
            model.base_model(input_ids=torch.ones(1, 1, dtype=torch.long), use_cache=False, notes=notes)


class _States(Mixing):
    """The size of the states after one token."""

    def __init__(self) -> None:
        self.nbytes = 0

    def mix(self, mixer: Mixer, hidden_states: Tensor) -> Any:
        output, state = mixer.run(hidden_states)
        self.nbytes += sum(tensor.nbytes for tensor in state.values())
        return output


class _Notes:
    """The layers that called the attention so far."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionLayer] = {}
        self._keys: list[tuple[int, Tensor]] = []

    def add(self, index: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> None:
        """Note what a layer hands to attention.

        `query`: [1, H, 1, key width]. `key`: [1, K, 1, key width]; the same object as another layer's, if that layer's
        keys are read. `value`: [1, K, 1, value width].
        """
        source = next((layer for layer, seen in self._keys if seen is key and layer != index), None)
        heads, widths = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
        self.layers[index] = AttentionLayer(*heads, *widths, softmax.softcap is not None, source)
        self._keys.append((index, key))


def _note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, notes: _Notes, **asked: Any
) -> tuple[Tensor, None]:
    """Return each token's value as its attention [1, T, H, D]."""
    notes.add(module.layer_idx, query, key, value, Softmax.asked(asked))
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


AttentionInterface.register(NOTING, _note)
AttentionMaskInterface.register(NOTING, no_mask)
