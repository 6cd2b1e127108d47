"""A Hugging Face checkpoint, written tensor by tensor beside its final place and renamed when it is whole."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlite.runtime.storage.atomic import publish, staging

MAX_FILE_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("*.jinja", "additional_chat_templates/*.jinja", "chat_template.json", "normalizer.json"),
)
COMPANIONS = ("generation_config.json", "*processor_config.json")
"""files of the original checkpoint, beside those of its tokenizer, that a user of the new one needs"""


def copy_companions(origin: Path, folder: Path, tokenizer: Path | None = None) -> None:
    """Copy the files beside the weights that a program needs to use a model."""
    for source, patterns in ((origin, COMPANIONS), (tokenizer or origin, TOKENIZER_FILES)):
        for file in (file for pattern in patterns for file in source.glob(pattern) if file.is_file()):
            place = folder / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copy2(file, place)


class Writer:
    """Writer of safetensors files of at most MAX_FILE_BYTES; `finish` publishes the folder in one step.

    Until then the files are in `folder`, where other files may be added.

    `dtype`: floating-point tensors are converted to it; None keeps the dtype of each tensor.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self._path, self._dtype = path, dtype
        self.folder = staging(path)
        self._files: list[list[str]] = []
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
        """Add a tensor; it is written when the current file is full.

        `dtype`: dtype of this tensor; None is that of the writer.
        """
        if (dtype := dtype or self._dtype) is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > MAX_FILE_BYTES:
            self._flush()
        self._pending[name] = tensor.cpu().contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def add_config(self, config: Any, architecture: str, origin: Path | None) -> None:
        """Write the model's config with the name of its transformers class, and copy companion files.

        `origin`: folder of the original checkpoint; its tokenizer and similar files are copied. None copies nothing.
        """
        config = copy.deepcopy(config)
        for part in (config, config.get_text_config()):  # what is written is plain
            vars(part).pop("quantization_config", None)
        config.architectures = [architecture]
        config.save_pretrained(self.folder)
        if origin is not None:
            copy_companions(origin, self.folder)

    def finish(self) -> None:
        """Write the remaining tensors and the index, and publish the folder."""
        self._flush()
        count, weight_map = len(self._files), {}
        for number, names in enumerate(self._files):
            final = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._file(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        publish(self.folder, self._path)

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        save_file(self._pending, self._file(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0
