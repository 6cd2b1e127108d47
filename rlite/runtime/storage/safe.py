"""Checkpoints that can be read without executing code from a file.

torch.distributed.checkpoint stores its table of contents and every value that is not a tensor as pickles. Here the
table is JSON (`metadata.json`), and `torch.load` runs with `weights_only`, which builds tensors and plain values only.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rlite.errors import CheckpointError, DamagedCheckpointError, why_not_written

METADATA = "metadata.json"
"""file that names each part of each tensor and its place"""
FORMAT = 1
OLD_METADATA = ".metadata"
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)
"""errors of torch.load and of JSON readers on a file of another form"""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Convert read errors inside the block to DamagedCheckpointError with the file's name.

    Yields:
        None.

    Raises:
        CheckpointError: as raised inside the block.
        DamagedCheckpointError: the file cannot be read, or holds a value that no checkpoint of rlite holds.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (*UNREADABLE, RecursionError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise DamagedCheckpointError(
            f"{file.parent}: the file {file.name} cannot be read, or holds what no checkpoint of rlite holds: {reason}"
        ) from None


def load_values(file: Path) -> dict[str, Any]:
    """Return tensors and plain values that `torch.save` wrote.

    Raises:
        DamagedCheckpointError: the file cannot be read safely.
    """
    with naming(file):
        values = torch.load(file, weights_only=True)
        _expect(isinstance(values, dict), f"expected a dict, found {type(values).__name__}")
        return values


@dataclass(frozen=True)
class _Place:
    """Place of a written item, with the attribute names that torch's reader expects."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class JsonWriter(FileSystemWriter):
    """torch's checkpoint writer with its table of contents in `metadata.json`."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part.

        Returns:
            The future of torch's own writer.

        Raises:
            OSError: the write failed; the message gives the reason, where torch gives only a position in the file.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise OSError(why_not_written(error)) from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents."""
        entries: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                chunks = [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks]
                dtype = str(entry.properties.dtype).removeprefix("torch.")
                entries[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
            else:
                entries[name] = None
        places = [
            [
                *(written.index.fqn, written.index.offset and list(written.index.offset), written.index.index),
                *(written.storage_data.relative_path, written.storage_data.offset, written.storage_data.length),
            ]
            for result in results
            for written in result
        ]
        table = {"format": FORMAT, "entries": entries, "places": places}
        (Path(self.path) / METADATA).write_text(json.dumps(table))


class JsonReader(FileSystemReader):
    """Reader of checkpoints that `JsonWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents.

        Returns:
            torch's Metadata.

        Raises:
            DamagedCheckpointError: the table cannot be read.
            CheckpointError: the checkpoint is of an old version whose table is a pickle.
        """
        file = Path(self.path) / METADATA
        if not file.exists() and file.with_name(OLD_METADATA).exists():
            raise CheckpointError(
                f"{self.path}: written by an earlier version of rlite, whose {OLD_METADATA} is a pickle, which could "
                "run code and is no longer read. Begin from the weights in latest/ of that run"
            )
        with naming(file):
            table = json.loads(file.read_text())
            _expect(table["format"] == FORMAT, f"format {table['format']}, expected {FORMAT}")
            return Metadata(
                state_dict_metadata={str(name): _entry(entry) for name, entry in table["entries"].items()},
                storage_data=dict(_placed(*place) for place in table["places"]),
                storage_meta=StorageMeta(load_id=self.load_id),
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read one file at a time, so that an error names its file.

        Returns:
            A future that is done.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with naming(Path(self.path) / name):
                super().read_data(LoadPlan(items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class PlainLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, reading values that are not tensors with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Put a value in its place in the state dict."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    dtype = getattr(torch, entry["dtype"])
    _expect(isinstance(dtype, torch.dtype), f"{entry['dtype']} is not a dtype")
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks)


def _placed(
    name: str, offsets: list[int] | None, index: int | None, file: str, offset: int, length: int
) -> tuple[MetadataIndex, _Place]:
    _expect(Path(file).name == file, f"{file!r} is not a file of the checkpoint")
    return MetadataIndex(name, offsets, index), _Place(file, int(offset), int(length))
