"""A checkpoint folder under the names of a model's parameters, and what its export needs of it.

The folder may hold more than the model: vision parts around a text model, heads that predict further tokens. Its tensors
may be quantised. `StoredCheckpoint` is read like a `CheckpointReader`; `StoredForm` turns parameters back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.backends.models.conversion import Conversion, Rules, default_conversion, make_conversion, unchanged
from rlite.backends.models.dequantised import DequantisedReader
from rlite.backends.models.expressions import Expression, Shape, whole
from rlite.errors import CheckpointError, ConfigError
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import is_container, load_config, meta_parameters, quantisation, real_tensors
from rlite.runtime.parallel.shards import Box, CheckpointReader
from rlite.wording import counted

REBUILT = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""buffers of old checkpoints that every class computes itself"""
CONTAINERS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")
"""transformers' lists of classes, in the order in which the class of a container is looked up"""


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that checkpoints of a transformers model hold, by name."""
    if transformers_class(model) is None:
        return {}
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def transformers_class(model: nn.Module) -> type[PreTrainedModel] | None:
    """Return the class of transformers that a model is of or extends; None if it is another model."""
    known = (cls for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models."))
    return next(known, None)


def own_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of a model's parameters and stored buffers, by their names without adapters."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **stored_buffers(model)}
    if isinstance(model, BaseTrainModule):
        tensors = {model.checkpoint_name(name): tensor for name, tensor in tensors.items()}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


class StoredCheckpoint:
    """A Hugging Face folder, read under the names of a model's parameters.

    Tensors that belong to no parameter keep their stored names.

    Args:
        model: the model, on any device.
        path: the folder.

    Raises:
        CheckpointError: the folder is unusable, or its tensors do not fit the conversion of their class.
        ConfigError: transformers converts the folder in a way that is not known.
    """

    def __init__(self, model: nn.Module, path: str | Path) -> None:
        self.path = Path(path)
        self.raw: Any = CheckpointReader(path)
        self.config = load_config(path) if (self.path / "config.json").exists() else None
        if self.config is not None and (found := quantisation(self.config)):
            self.raw = DequantisedReader(self.raw, found)
        own, self._rules = own_shapes(model), None
        container = None
        if self.config is not None and is_container(self.config, model):
            container = _container(self.config)
            self._rules = Rules(container, own_shapes(container), _places(container, model, own))
        elif (cls := transformers_class(model)) is not None:
            self._rules = Rules(_as_class(model, cls), own)
        try:
            if self._rules is None:
                self.conversion = unchanged(self.raw.names(), self.raw.shape)
            else:
                self.conversion = make_conversion(self._rules, self.raw.names(), self.raw.shape)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        self.is_container = container is not None
        found = _untrained(self.conversion.rest, [model] if container is None else [model, container])
        self.untrained = [*self.conversion.untrained, *found]
        """stored names of parts that the model does not have, by the checkpoint's config or by its class"""
        self._made = {name: each for group in self.conversion.groups for name, each in group.held.items()}
        self._rest = dict.fromkeys(name for name in self.conversion.rest if name not in set(found))

    def names(self) -> list[str]:
        """Return the names of the parameters that the folder has, and of tensors that belong to none."""
        return [*self._made, *self._rest]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._made[name].shape if name in self._made else self.raw.shape(self._known(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            CheckpointError: it is made of tensors of different types.
        """
        if name not in self._made:
            return self.raw.dtype(self._known(name))
        dtypes = {self.raw.dtype(leaf): leaf for leaf in self._made[name].leaves()}
        if len(dtypes) > 1:
            told = ", ".join(f"{leaf} ({dtype})" for dtype, leaf in dtypes.items())
            raise CheckpointError(f"{self.path}: {name} is made of tensors of different types: {told}")
        return next(iter(dtypes))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor; without a box the whole tensor. Other boxes' stored tensors are not read."""
        if name not in self._made:
            return self.raw.read(self._known(name), box)
        made: Expression = self._made[name]
        return made.read(self.raw, whole(made.shape) if box is None else box)

    def _known(self, name: str) -> str:
        if name in self._rest:
            return name
        rule = self._rules.looked_for(name) if self._rules is not None else ""
        looked = f"; transformers makes it by {rule}, and no tensor matches" if rule else ""
        raise CheckpointError(f"{self.path}: no tensor named {name!r} among its {len(self.raw.names())} tensors{looked}")

    def rule(self, name: str) -> str:
        """Return the conversion that made a tensor, for messages; empty if it is stored as it is."""
        return next((group.rule for group in self.conversion.groups if name in group.held), "")


def _as_class(model: nn.Module, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a view of a model as `cls`, which it extends: transformers knows its classes by their names."""
    view = object.__new__(cls)
    vars(view).update(vars(model))
    return view


def _container(config: Any) -> PreTrainedModel:
    """Return the model around a text model, on meta.

    Raises:
        ConfigError: transformers cannot make it.
    """
    for kind in CONTAINERS:
        classes = vars(transformers).get(f"MODEL_FOR_{kind}_MAPPING") or {}
        if type(config) in classes:
            try:
                with real_tensors(), meta_parameters():
                    return classes[type(config)]._from_config(config)
            except Exception as error:  # of any kind: the class's own code
                told = f"the model around the text model ({config.model_type!r}) cannot be made: {error}"
                raise ConfigError(told) from error
    raise ConfigError(f"transformers has no model of type {config.model_type!r}, which the checkpoint's config names")


def _places(container: PreTrainedModel, model: Any, own: dict[str, Shape]) -> dict[str, str]:
    """Return the names of a text model's parameters by their names in its container.

    Raises:
        ConfigError: the container does not have one such model.
    """
    base = transformers_class(model.base_model)
    bases = [name for name, module in container.named_modules() if type(module) is base]
    if len(bases) != 1:
        told = f"{type(container).__name__} has {counted(len(bases), 'part')} of class {base and base.__name__}"
        raise ConfigError(f"{told}, not one")
    prefixes = {bases[0]: model.base_model_prefix}
    heads = container.get_output_embeddings(), model.get_output_embeddings()
    if None not in heads:
        there, here = (
            next(name for name, module in each.named_modules() if module is head)
            for each, head in zip((container, model), heads, strict=True)
        )
        prefixes[there] = here
    return {
        f"{there}{name.removeprefix(here)}": name
        for name in own
        for there, here in prefixes.items()
        if name.startswith(f"{here}.")
    }


def _untrained(names: Iterable[str], models: list[nn.Module]) -> list[str]:
    """Return the names that a class ignores and that belong to no module of it, such as heads for further tokens."""
    patterns = [p for model in models for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    modules = {name for name, _ in models[-1].named_modules()}
    return [
        name
        for name in names
        if any(re.search(pattern, name) for pattern in patterns)
        and not REBUILT.search(name)
        and name.rpartition(".")[0] not in modules
    ]
