"""Export of a sharded module as a Hugging Face checkpoint, with its adapters beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from rlite.checkpoint import huggingface
from rlite.errors import CheckpointError, why_not_written
from rlite.nn.base import BaseTrainModule
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule, exported_class
from rlite.nn.lora import LoraTrainModule
from rlite.nn.pretrained import add_end_ids, local_checkpoint
from rlite.nn.score import HuggingFaceFsdp2ScoreModule, pad_apart
from rlite.parallel.fsdp import full_tensor


def export(module: BaseTrainModule, path: Path, is_writer: bool, group: dist.ProcessGroup) -> None:
    """Write a Hugging Face checkpoint; a collective of all ranks.

    Args:
        module: the sharded module.
        path: the folder to make.
        is_writer: whether this rank writes.
        group: process group of all ranks.

    Raises:
        CheckpointError: on the writer, the checkpoint could not be written. `path` is unchanged.
    """
    trained: dict[str, Tensor] = {}
    if isinstance(module, LoraTrainModule) and module.lora is not None:
        trained = {name: full_tensor(p) for name, p in module.named_parameters() if p.requires_grad}
    tensors = ((name, full_tensor(module.served_parameter(name, p))) for name, p in module.named_parameters())
    served = (out for name, full in tensors if (out := module.postprocess_named_parameter(name, full)))
    try:
        if is_writer:
            _write(module, path, served, trained)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: could not be written: {why_not_written(error)}") from error
    finally:  # gathering is a collective: a full disk on rank 0 must not leave its peers in one
        for _ in served:
            pass
        dist.barrier(group=group)


def _write(module: Any, path: Path, tensors: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor]) -> None:
    is_transformer = isinstance(module, HuggingFaceFsdp2TrainModule)
    writer = huggingface.Writer(path, module.config.dtype if is_transformer else None)
    for name, tensor in tensors:
        writer.add(name, tensor)
    if is_transformer:
        source = module.config._name_or_path
        folder = local_checkpoint(source, weights=False) if source else None
        writer.add_config(module.exported_config(), exported_class(module), folder)
        add_end_ids(writer.folder, module.further_end_ids)
    if isinstance(module, HuggingFaceFsdp2ScoreModule):
        pad_apart(writer.folder, module.row_ends)
    if isinstance(module, LoraTrainModule) and adapter:
        module.save_adapter(writer.folder / "adapter", adapter)
    writer.finish()
