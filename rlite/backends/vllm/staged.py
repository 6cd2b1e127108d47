"""Staged weights on their way into vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rlite.backends.models.conversion import Conversion
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.parallel.shared_memory import SharedMemoryReader


@dataclass(frozen=True)
class Staged:
    """Weights in shared memory, under the names of the model's parameters."""

    handles: dict[str, Any]
    """handles of the shared memory, by parameter name"""
    conversion: Conversion
    """conversion into the names that the served checkpoint has"""
    path: str
    """the served checkpoint"""
    untrained: list[str]
    """its tensors that the model does not have; vLLM reads them again"""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored names and tensors of the whole checkpoint."""
        shared = SharedMemoryReader()
        yield from self.conversion.stored((name, shared.view(handle)) for name, handle in self.handles.items())
        if self.untrained:
            reader = CheckpointReader(Path(self.path))
            for name in self.untrained:
                yield name, reader.read(name)
