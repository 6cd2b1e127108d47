"""A checkpoint folder under the names of a model's parameters, and what its export needs of it.

The folder may hold more than the model: vision parts around a text model, heads that predict further tokens. It may be
quantised. `StoredCheckpoint` is read like a `CheckpointReader`; `StoredForm` turns parameters back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from logging import getLogger
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlite.backends.models.conversion import Conversion, Rules, default_conversion, make_conversion, unchanged
from rlite.backends.models.experts import corrects
from rlite.backends.models.expressions import Expression, Shape, whole
from rlite.errors import CheckpointError, ConfigError, WeightSyncError
from rlite.nn.base import BaseTrainModule
from rlite.nn.pretrained import (
    is_container,
    load_config,
    meta_parameters,
    quantisation,
    quantised,
    real_tensors,
    summary,
)
from rlite.runtime.parallel.shards import Box, CheckpointReader, ParameterShard
from rlite.wording import counted, warn_once

logger = getLogger(__name__)

REBUILT = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""buffers of old checkpoints that every class computes itself"""
CONTAINERS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM")
"""transformers' lists of classes, in the order in which the class of a container is looked up"""
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""values of E2M1 by their bits"""
MX_VALUES = 32
"""values that share a scale in MXFP4"""


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


def held_tensors(model: nn.Module) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return the dtypes and shapes of a model's parameters and stored buffers, each tied parameter once."""
    tensors = {**dict(model.named_parameters()), **stored_buffers(model)}
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


_buffer_names: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
"""names of each model's stored buffers: most models have none, and a search visits all modules at every weight sync"""


def buffer_shards(model: nn.Module) -> dict[str, ParameterShard]:
    """Return the stored buffers, which every rank holds whole. The first call for a model looks for their names."""
    if (names := _buffer_names.get(model)) is None:
        names = _buffer_names[model] = list(stored_buffers(model))
    buffers = ((name, model.get_buffer(name)) for name in names)
    return {name: ParameterShard(held, (0,) * held.dim(), tuple(held.shape)) for name, held in buffers}


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


def _opened(path: Path) -> tuple[CheckpointReader | DequantisedReader, Any]:
    """Return a reader of the stored tensors of a folder, and its config if it has one."""
    reader, config = CheckpointReader(path), load_config(path) if (path / "config.json").exists() else None
    found = None if config is None else quantisation(config, path)
    return (reader, config) if found is None else (DequantisedReader(reader, found), config)


class StoredCheckpoint:
    """A Hugging Face folder, read under the names of a model's parameters.

    Tensors that belong to no parameter keep their stored names.

    `shapes`: shapes of its parameters and stored buffers, if the model holds parts of them.
    """

    def __init__(self, model: nn.Module, path: str | Path, shapes: Mapping[str, Shape] | None = None) -> None:
        self.path = Path(path)
        self.raw, self.config = _opened(self.path)
        own, self._rules = shapes or own_shapes(model), None
        container = None
        if self.config is not None and is_container(self.config, model):
            container = _container(self.config)
            self._rules = Rules(container, own_shapes(container), places(container, model, own))
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
        ignored = _untrained(self.conversion.rest, [model] if container is None else [model, container])
        self.untrained = [*self.conversion.untrained, *ignored]
        """stored names of parts that the model does not have, by the checkpoint's config or by its class"""
        self._made = {name: each for group in self.conversion.groups for name, each in group.held.items()}
        self._rest = dict.fromkeys(name for name in self.conversion.rest if name not in set(ignored))

    def names(self) -> list[str]:
        """Return the names of the parameters that the folder has, and of tensors that belong to none."""
        return [*self._made, *self._rest]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._made[name].shape if name in self._made else self.raw.shape(self._known(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
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

    def check_syncable(self) -> None:
        """Refuse a folder whose engine cannot take weights of a trainer."""
        if isinstance(self.raw, DequantisedReader):
            told = f"{self.path}: the engine serves its quantised weights, and a trainer's weights are not quantised"
            raise WeightSyncError(f"{told}. Export the trained model once, and serve the export")

    def _known(self, name: str) -> str:
        if name in self._rest:
            return name
        rule = self._rules.looked_for(name) if self._rules is not None else ""
        looked = f"; transformers makes it by {rule}, and no tensor matches" if rule else ""
        why = f"no tensor named {name!r} among its {len(self.raw.names())} tensors{looked}"
        raise CheckpointError(f"{self.path}: {why}")

    def rule(self, name: str) -> str:
        """Return the conversion that made a tensor, for messages; empty if it is stored as it is."""
        return next((group.rule for group in self.conversion.groups if name in group.held), "")


def _as_class(model: nn.Module, cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a view of a model as `cls`, which it extends: transformers knows its classes by their names."""
    view = object.__new__(cls)
    vars(view).update(vars(model))
    return view


def container_class(config: Any) -> type[PreTrainedModel]:
    """Return the class of the model around a text model."""
    lists = (getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", None) or {} for kind in CONTAINERS)
    found = next((classes[type(config)] for classes in lists if type(config) in classes), None)
    if found is None:
        raise ConfigError(
            f"transformers has no model of type {config.model_type!r}, which the checkpoint's config names"
        )
    return found


def _container(config: Any) -> PreTrainedModel:
    """Return the model around a text model, on meta."""
    cls = container_class(config)
    try:
        with real_tensors(), meta_parameters():
            return cls._from_config(config)
    except Exception as error:  # of any kind: the class's own code
        raise ConfigError(f"{cls.__name__} around the text model cannot be made: {summary(error)}") from error


def places(container: PreTrainedModel, model: Any, own: Mapping[str, Shape]) -> dict[str, str]:
    """Return the names of a text model's parameters by their names in its container."""
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


@dataclass(frozen=True)
class Untrained:
    """Tensors of a checkpoint that the model does not have, and that an export copies."""

    path: Path
    names: list[str]
    digest: str
    """SHA-256 of the tensors, which must be the same at the export"""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, as they are in the folder now."""
        found = sha256()
        try:
            raw, _ = _opened(self.path)
            for name in self.names:
                tensor = raw.read(name)
                _add(found, name, tensor)
                yield name, tensor
        except CheckpointError as error:
            raise CheckpointError(f"{self._told()} cannot be read again ({error}); {REMEDY}") from error
        if found.hexdigest() != self.digest:
            raise CheckpointError(f"{self._told()} has changed since it was read; {REMEDY}")

    def _told(self) -> str:
        held = f"{counted(len(self.names), 'tensor')} that the model does not train, such as {self.names[0]},"
        return f"{self.path}: it holds {held} which an export copies. The folder"


REMEDY = "put it back, or leave these tensors out with drop_untrained=true"


def _add(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


@dataclass(frozen=True)
class StoredForm:
    """The form in which a model is exported: names and dtypes of tensors, the config, and tensors that are copied.

    Only the rank that writes needs `wide` and `untrained`.
    """

    conversion: Conversion
    container: Any = None
    """config of the model around the text model; None if the export is of the model alone"""
    wide: frozenset[str] = frozenset()
    """stored names of tensors that are float32, whatever the config says"""
    untrained: Untrained | None = None

    def tensors(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, torch.dtype | None]]:
        """Yield all tensors of an export.

        Yields stored name, tensor, and the dtype in which it is stored; None is that of the config.
        """
        for name, tensor in self.conversion.stored(own):
            yield name, tensor, torch.float32 if name in self.wide else None
        if self.untrained is not None:
            for name, tensor in self.untrained.tensors():
                yield name, tensor, tensor.dtype

    def config(self, config: Any, architecture: str) -> tuple[Any, str]:
        """Return the config and the class of the export."""
        if self.container is None:
            return config, architecture
        outer = copy.deepcopy(self.container)
        outer.text_config, outer.tie_word_embeddings = config, config.tie_word_embeddings
        return outer, (outer.architectures or [container_class(outer).__name__])[0]


def stored_form(
    module: nn.Module, source: StoredCheckpoint | None, is_writer: bool, drops: bool, balances: bool = False
) -> StoredForm:
    """Return the form in which a module is exported: that of the checkpoint that it was read from.

    `source`: the checkpoint; None if the module was not read from a folder. `drops`: leave out the tensors that the
    module does not train; a text model then leaves its container.
    """
    cls = transformers_class(module)
    if source is not None and source.untrained and is_writer:
        told = f"{counted(len(source.untrained), 'tensor')} that are not trained, such as {source.untrained[0]}"
        done = "exports leave them out" if drops else "exports copy them from there"
        warn_once(logger, f"{source.path} holds {told}; {done}")
    if source is None or (source.is_container and drops):
        own = own_shapes(module)
        if cls is None:
            return StoredForm(unchanged(own, own.__getitem__))
        return StoredForm(default_conversion(_as_class(module, cls), own))
    container = source.config if source.is_container else None
    if not is_writer:
        return StoredForm(source.conversion, container)
    stored = [name for group in source.conversion.groups for name in group.stored]
    dtypes = {name: source.raw.dtype(name) for name in stored}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    wide = wide if len(wide) < len(dtypes) else set()
    wide |= {name for name in stored if balances and corrects(name)}
    untrained = None
    if source.untrained and not drops:
        digest = sha256()
        for name in source.untrained:
            _add(digest, name, source.raw.read(name))
        untrained = Untrained(source.path, source.untrained, digest.hexdigest())
    return StoredForm(source.conversion, container, frozenset(wide), untrained)


class DequantisedReader:
    """A `CheckpointReader` of a quantised checkpoint: its tensors as bfloat16. Only the wanted box is read.

    fp8      NAME [M, N], NAME_scale_inv [ceil(M / m), ceil(N / n)]     NAME = value * scale of its block of [m, n]
    mxfp4    NAME_blocks [E, N, K / 32, 16], NAME_scales [E, N, K / 32]  NAME [E, K, N] = value * 2 ** (scale - 127)
             two values of 4 bits in each byte, the lower ones first
    """

    def __init__(self, reader: CheckpointReader, quantisation: Mapping[str, Any]) -> None:
        self._reader = reader
        self._block: list[int] | None = quantisation.get("weight_block_size")
        stored = dict.fromkeys(reader.names())
        self._scaled = {name for name in stored if name + SCALE in stored}
        made = [name.removesuffix(BLOCKS) for name in stored if name.endswith(BLOCKS)]
        self._packed = {name for name in made if name + SCALES in stored}
        parts = {name + SCALE for name in self._scaled}
        parts |= {name + ending for name in self._packed for ending in (BLOCKS, SCALES)}
        if not parts:
            told = f"its config says {quantisation.get('quant_method')}, and it has no tensors of scales"
            raise CheckpointError(f"{reader.path}: {quantised(told)}")
        self._names = [*(name for name in stored if name not in parts), *self._packed]

    def names(self) -> list[str]:
        """Return the names of all tensors, without their scales."""
        return list(self._names)

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        if name not in self._packed:
            return self._reader.shape(name)
        experts, rows, blocks, size = self._reader.shape(name + BLOCKS)
        return experts, blocks * size * 2, rows

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return torch.bfloat16 if name in self._scaled | self._packed else self._reader.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor; without a box the whole tensor."""
        if name in self._packed:
            return self._unpacked(name, box or whole(self.shape(name)))
        if name in self._scaled:
            return self._unscaled(name, box or whole(self.shape(name)))
        return self._reader.read(name, box)

    def _unscaled(self, name: str, box: Box) -> Tensor:
        shape, found = self.shape(name), self._reader.shape(name + SCALE)
        values = self._reader.read(name, box).float()
        if all(size == 1 for size in found):
            return (values * self._reader.read(name + SCALE).float().reshape(())).bfloat16()
        block = (1,) * (len(shape) - 2) + tuple(self._block or shape[-2:])
        if found != tuple(-(-size // each) for size, each in zip(shape, block, strict=True)):
            told = f"{name + SCALE} has the shape {found}, and blocks of {self._block} do not divide {shape} so"
            raise CheckpointError(f"{self._reader.path}: {told}")
        wanted = tuple(slice(s.start // each, -(-s.stop // each)) for s, each in zip(box, block, strict=True))
        scale = self._reader.read(name + SCALE, wanted).float()
        for dim, (part, each) in enumerate(zip(box, block, strict=True)):
            scale = scale.index_select(dim, torch.arange(part.start, part.stop) // each - part.start // each)
        return (values * scale).bfloat16()

    def _unpacked(self, name: str, box: Box) -> Tensor:
        experts, columns, rows = box
        blocks = slice(columns.start // MX_VALUES, -(-columns.stop // MX_VALUES))
        packed = self._reader.read(name + BLOCKS, (experts, rows, blocks, slice(0, MX_VALUES // 2)))
        exponents = self._reader.read(name + SCALES, (experts, rows, blocks)).int() - 127
        table = torch.tensor(FP4, dtype=torch.bfloat16)
        values = table[torch.stack([packed & 15, packed >> 4], -1).int()].flatten(-2)
        values = torch.ldexp(values, exponents[..., None]).flatten(-2)
        start = columns.start - blocks.start * MX_VALUES
        return values[..., start : start + columns.stop - columns.start].transpose(1, 2)
