"""Compare the tensors of a checkpoint with those of the model, so that none is left out unnoticed."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rlite.errors import CheckpointError
from rlite.nn.pretrained import quantised
from rlite.wording import counted

PLAIN = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_QUANTISED = re.compile(r"scale|zero|absmax|quant|packed|g_idx|_blocks$|SCB$")
_REBUILT = re.compile(r"rotary_emb\.inv_freq|(^|\.)position_ids$")
"""buffers of old checkpoints that every class computes itself"""


def check_fit(
    reader: Any,
    expected: Collection[str],
    path: str | Path,
    model: nn.Module,
    leaves_out: Callable[[str], bool] = lambda name: False,
) -> None:
    """Refuse a checkpoint with tensors that the model would leave out or read as other numbers.

    The code that reads the tensors refuses missing ones and other shapes.

    Args:
        reader: a `CheckpointReader`, or another reader of its interface.
        expected: the checkpoint's names of the model's parameters.
        path: the checkpoint, for messages.
        model: the model; of a transformers class, tied names and names to ignore are known.
        leaves_out: whether the model leaves out a tensor of this name on purpose.

    Raises:
        CheckpointError: the message names a tensor and the remedy.
    """
    names = set(reader.names())
    problem = _other_type(reader, sorted(names.intersection(expected))) or _untied(reader, names, model)
    problem = problem or _left_over(reader, sorted(names.difference(expected)), model, leaves_out)
    if problem:
        raise CheckpointError(f"{path}: {problem}")


def _other_type(reader: Any, names: Iterable[str]) -> str | None:
    wrong = next((name for name in names if reader.dtype(name) not in PLAIN), None)
    return wrong and quantised(f"{wrong} is of type {reader.dtype(wrong)}")


def _untied(reader: Any, names: Collection[str], model: nn.Module) -> str | None:
    for name, source in _tied(model).items():
        if {name, source} <= set(names) and not torch.equal(reader.read(name), reader.read(source)):
            return (
                f"the config ties {name} to {source}, and the file holds two different tensors. Set "
                '"tie_word_embeddings": false in config.json, or write the folder again with save_pretrained()'
            )
    return None


def _left_over(reader: Any, names: Iterable[str], model: nn.Module, leaves_out: Callable[[str], bool]) -> str | None:
    """Return a text about the tensors that the model neither has nor makes itself, None if there are none."""
    tied, buffers = _tied(model), dict(model.named_buffers())
    ignored = [_REBUILT, *(vars(model).get("_keys_to_ignore_on_load_unexpected") or ())]

    def is_known(name: str) -> bool:
        if name in tied or leaves_out(name) or any(re.search(pattern, name) for pattern in ignored):
            return True
        return name in buffers and torch.equal(reader.read(name).to(buffers[name]), buffers[name])

    left = [name for name in names if not is_known(name)]
    if scale := next(filter(_QUANTISED.search, left), None):
        return quantised(f"it holds {scale}")
    if not left:
        return None
    own = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))  # the class that FSDP extends
    return (
        f"it holds {counted(len(left), 'tensor')} that {own.__name__} does not have, such as {left[0]}; they "
        "would be left out. Use a model whose class has them, or a checkpoint without them"
    )


def _tied(model: nn.Module) -> Mapping[str, str]:
    """Return tied parameters of a transformers model, each with the name of the parameter that it is tied to."""
    return model.get_expanded_tied_weights_keys(all_submodels=True) if isinstance(model, PreTrainedModel) else {}
