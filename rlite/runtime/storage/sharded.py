"""Sharded training state in torch.distributed.checkpoint's format, which another number of ranks can load.

Saving takes two steps. `snapshot` reads the module. Writing does not, so it may run beside the next training steps,
over a process group of its own. Beside the shared part each rank writes `rank-N.pt`: its own state, and values that
are not tensors.

Reading executes no code from a file. torch.distributed.checkpoint stores its table of contents and every value that is
not a tensor as pickles. Here the table is JSON (`metadata.json`), and `torch.load` runs with `weights_only`, which
builds tensors and plain values only.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.futures
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import set_element
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils._pytree import tree_leaves, tree_map_only

from rlite.errors import CheckpointError, DamagedCheckpointError, why_not_written
from rlite.files import expect
from rlite.runtime.parallel.fsdp import local_tensor
from rlite.runtime.parallel.host_memory import HostMemory, host_like, with_block
from rlite.runtime.storage.atomic import hash_files, publish, seal

METADATA = "metadata.json"
"""file that names each part of each tensor and its place"""
FORMAT = 1
OLD_METADATA = ".metadata"
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError)
"""errors of torch.load and of JSON readers on a file of another form"""
WRONG_FILE = (errno.ENOENT, errno.EISDIR, errno.EINVAL)
"""errors of the system by the file's fault; the last: torch seeks before the beginning of one that was cut off"""


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Convert read errors inside the block to DamagedCheckpointError with the file's name."""
    try:
        yield
    except CheckpointError:
        raise
    except (*UNREADABLE, RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in WRONG_FILE:
            raise
        reason = str(error).strip().split("\n")[0][:200]
        why = f"the file {file.name} cannot be read, or holds what no checkpoint of rlite holds: {reason}"
        raise DamagedCheckpointError(f"{file.parent}: {why}") from None


def load_values(file: Path) -> dict[str, Any]:
    """Return tensors and plain values that `torch.save` wrote."""
    with naming(file):
        values = torch.load(file, weights_only=True)
        expect(isinstance(values, dict), f"expected a dict, found {type(values).__name__}")
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

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's part.

        Returns the future of torch's own writer.
        """
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise OSError(why_not_written(error)) from None

    def finish(self, metadata: contents.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the table of contents."""
        entries = {name: _described(entry) for name, entry in metadata.state_dict_metadata.items()}
        places = []
        for written in chain(*results):
            index, place = written.index, written.storage_data
            where = (index.fqn, index.offset and list(index.offset), index.index)
            places.append((*where, place.relative_path, place.offset, place.length))
        table = {"format": FORMAT, "entries": entries, "places": places}
        (Path(self.path) / METADATA).write_text(json.dumps(table))


class JsonReader(FileSystemReader):
    """Reader of checkpoints that `JsonWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> contents.Metadata:
        """Read the table of contents."""
        file = Path(self.path) / METADATA
        if not file.exists() and file.with_name(OLD_METADATA).exists():
            raise CheckpointError(
                f"{self.path}: written by an earlier version of rlite, whose {OLD_METADATA} is a pickle, which could "
                "run code and is no longer read. Begin from the weights in latest/ of that run"
            )
        with naming(file):
            table = json.loads(file.read_text())
            expect(table["format"] == FORMAT, f"format {table['format']}, expected {FORMAT}")
            return contents.Metadata(
                state_dict_metadata={str(name): _entry(entry) for name, entry in table["entries"].items()},
                storage_data=dict(_placed(*place) for place in table["places"]),
                storage_meta=contents.StorageMeta(load_id=self.load_id),
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read one file at a time, so that an error names its file.

        Returns a future that is done.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with naming(Path(self.path) / name):
                super().read_data(LoadPlan(items), planner)
        done = torch.futures.Future[None]()
        done.set_result(None)
        return done


class PlainLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, reading values that are not tensors with `weights_only`."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Put a value in its place in the state dict."""
        place = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, place, torch.load(value, weights_only=True))


def _described(entry: Any) -> dict[str, Any] | None:
    if not isinstance(entry, contents.TensorStorageMetadata):
        return None
    chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in entry.chunks]
    dtype = str(entry.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}


def _entry(entry: Any) -> contents.TensorStorageMetadata | contents.BytesStorageMetadata:
    if entry is None:
        return contents.BytesStorageMetadata()
    dtype = getattr(torch, entry["dtype"])
    expect(isinstance(dtype, torch.dtype), f"{entry['dtype']} is not a dtype")
    chunks = [contents.ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in entry["chunks"]]
    return contents.TensorStorageMetadata(contents.TensorProperties(dtype=dtype), torch.Size(entry["shape"]), chunks)


def _placed(
    name: str, offsets: list[int] | None, index: int | None, file: str, offset: int, length: int
) -> tuple[contents.MetadataIndex, _Place]:
    expect(Path(file).name == file, f"{file!r} is not a file of the checkpoint")
    return contents.MetadataIndex(name, offsets, index), _Place(file, int(offset), int(length))


def random_state() -> dict[str, Any]:
    """Return the state of torch (CPU and the current CUDA device), numpy and Python; `torch.load` reads it safely."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


Scheduler = torch.optim.lr_scheduler.LRScheduler

_writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One thread per process. Writes run in submission order, which is the same on all ranks, so the writes of two engines
cannot wait for each other."""


class Trained(NamedTuple):
    """A sharded module, with its optimizer, its learning-rate scheduler and averages if it has them."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Scheduler | None = None
    averages: dict[str, Tensor] | None = None
    """moving averages of parameters by name, sharded alike, on the host. Reading replaces the entries"""


@dataclass(frozen=True)
class Snapshot:
    """State of one rank at a step boundary."""

    shared: dict[str, Any]
    """tensors of all ranks: "model", "optimizer", "gradients", "averages" """
    own: dict[str, Any]


def snapshot(
    trained: Trained, is_copied: bool, memory: HostMemory | None = None, accumulated: Mapping[str, Any] | None = None
) -> Snapshot:
    """Collect the state of one rank.

    `memory`: host memory to copy to; an earlier snapshot there is overwritten. None allocates. `accumulated`: plain
    values and tensors that belong to the gradients; `load` returns them. Returns the state; without a copy it refers to
    the live tensors.
    """
    module, optimizer, scheduler, averages = trained
    stepped = _with_state(module, optimizer)
    gradients = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
    own: dict[str, Any] = {
        "random": random_state(),
        "scheduler": scheduler.state_dict() if scheduler else None,
        "settings": _settings(optimizer),
        "stepped": stepped,
        "gradients": gradients,
        "averages": [*(averages or ())],
        "accumulated": dict(accumulated or {}),
    }
    shared = _shared(module, optimizer if stepped else None, gradients)
    if averages:
        shared["averages"] = dict(averages)
    if is_copied:
        shared, own = _on_host(shared, memory or HostMemory()), deepcopy(own)
    return Snapshot(shared, own)


def start_writing(
    state: Snapshot, folder: Path, path: Path, facts: Mapping[str, Any], rank: int, group: dist.ProcessGroup
) -> Future[None]:
    """Start to write this rank's part into `folder`; rank 0 then seals the folder and renames it to `path`.

    Returns a future. It raises CheckpointError on every rank if one rank could not write; `path` is then unchanged.
    """

    def write() -> None:
        with where:
            try:
                dcp.save(state.shared, storage_writer=JsonWriter(folder), process_group=group)
                records = _gather(_write_own(state.own, folder, rank), group)
                if rank == 0:
                    seal(folder, facts, known=records)
                    publish(folder, path)
            except (CheckpointException, OSError) as error:  # the first is a BaseException, which would end the worker
                if rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)  # on a full disk it takes room
                raise CheckpointError(f"{path}: could not be written: {_reason(error)}") from None

    # A new thread starts on the first GPU. There torch would synchronize the wrong stream, and write tensors that are
    # not copied yet.
    where = torch.cuda.device(torch.cuda.current_device()) if torch.cuda.is_initialized() else nullcontext()
    return _writer.submit(write)


def _gather(outcome: dict[str, Any] | str, group: dist.ProcessGroup) -> dict[str, Any]:
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    if errors := [f"rank {index}: {each}" for index, each in enumerate(outcomes) if isinstance(each, str)]:
        raise OSError("; ".join(errors))
    return {name: record for each in outcomes for name, record in each.items()}


def _write_own(own: dict[str, Any], folder: Path, rank: int) -> dict[str, Any] | str:
    """Write the rank's own file.

    Returns hashes of all files that this rank wrote, or the reason of a failure as text: peers wait for an answer.
    """
    try:
        file = folder / f"rank-{rank}.pt"
        with file.open("wb") as stream:
            torch.save(own, stream)
            stream.flush()
            os.fsync(stream.fileno())
        return hash_files(folder, [file.name, *(part.name for part in folder.glob(f"__{rank}_*"))])
    except (OSError, RuntimeError) as error:  # torch.save makes either of a full disk
        return why_not_written(error)


def load(folder: Path, trained: Trained, rank: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """Read a checkpoint into this layout. Extra ranks keep their own random state.

    Returns `accumulated` of the snapshot; empty for a checkpoint of an earlier version.
    """
    file = folder / f"rank-{rank}.pt"
    own = load_values(file if file.exists() else folder / "rank-0.pt")
    module, optimizer = trained.module, trained.optimizer
    _check_model(folder, module)
    if own["stepped"] and optimizer is None:
        raise CheckpointError(f"{folder}: it holds an optimizer's state, and this module has none to take it")
    if optimizer is not None and len(own["settings"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder}: saved with another optimizer or other parameter groups: {len(own['settings'])} groups, not "
            f"{len(optimizer.param_groups)}. Resume with the options of that run, or start over from its weights"
        )

    def read(state: dict[str, Any]) -> None:
        try:
            dcp.load(state, storage_reader=JsonReader(folder), planner=PlainLoadPlanner(), process_group=group)
        except CheckpointException as error:  # a BaseException, which would end the worker
            raise CheckpointError(f"{folder}: could not be read: {_reason(error)}") from None

    _take(own, read, trained)
    if file.exists():
        set_random_state(own["random"])
    return own.get("accumulated", {})


def pack(state: Snapshot) -> bytes:
    """Return a rank's snapshot as bytes that `unpack` reads: blocks of tensors and plain values."""
    buffer = io.BytesIO()
    shared = tree_map_only(Tensor, lambda value: local_tensor(value.detach()), state.shared)
    torch.save({"shared": shared, "own": state.own}, buffer)
    return buffer.getvalue()


def unpack(packed: bytes, trained: Trained) -> dict[str, Any]:
    """Continue from a snapshot of the same rank of the same layout.

    Returns `accumulated` of the snapshot.
    """
    saved = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)  # executes nothing
    own = saved["own"]
    _take(own, lambda state: _fill(state, saved["shared"]), trained)
    set_random_state(own["random"])
    return own["accumulated"]


def _fill(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy saved blocks into the tensors of a state, and replace its other values."""
    for key, value in state.items():
        if isinstance(value, dict):
            _fill(value, saved[key])
        elif isinstance(value, Tensor):
            local_tensor(value.detach()).copy_(saved[key])
        else:
            state[key] = saved[key]


def _take(own: Mapping[str, Any], read: Callable[[dict[str, Any]], None], trained: Trained) -> None:
    """Restore a module and its optimizer from a state."""
    module, optimizer, scheduler, averages = trained
    module.zero_grad(set_to_none=True)
    for name in own["gradients"]:
        parameter = module.get_parameter(name)
        parameter.grad = torch.zeros_like(parameter.detach())
    if optimizer is not None:
        optimizer.state.clear()  # torch fills an empty one, which is then whole
    state = _shared(module, optimizer if own["stepped"] else None, own["gradients"])
    filled = state["optimizer"]["state"] if own["stepped"] else {}
    if own["stepped"]:
        state["optimizer"]["state"] = {name: filled[name] for name in own["stepped"]}
    if averages is not None:
        averages.clear()
        averages |= {name: host_like(module.get_parameter(name)) for name in own.get("averages", ())}
        state |= {"averages": averages} if averages else {}
    read(state)
    states.set_model_state_dict(module, state["model"])
    if optimizer is not None:
        if own["stepped"]:
            state["optimizer"]["state"] = {**filled, **state["optimizer"]["state"]}  # torch wants all
            states.set_optimizer_state_dict(module, optimizer, state["optimizer"])
        stepped = {id(module.get_parameter(name)) for name in own["stepped"]}
        for forgotten in [parameter for parameter in optimizer.state if id(parameter) not in stepped]:
            del optimizer.state[forgotten]
        for group_now, settings in zip(optimizer.param_groups, own["settings"], strict=True):
            group_now.update(settings)
    if scheduler is not None and own["scheduler"] is not None:
        scheduler.load_state_dict(own["scheduler"])


def _reason(error: BaseException) -> str:
    """Return the causes of a failure by rank, without tracebacks."""
    if not isinstance(error, CheckpointException):
        return why_not_written(error)
    return "; ".join(f"rank {rank}: {why_not_written(failure[0])}" for rank, failure in sorted(error.failures.items()))


def _shared(module: nn.Module, optimizer: torch.optim.Optimizer | None, gradients: list[str]) -> dict[str, Any]:
    """Return the tensors that all ranks share.

    If an optimizer has made no step, torch fills its state by a step of zero, which counts as a step. Saving must not
    trigger that, so callers pass such an optimizer only for loading.
    """
    state: dict[str, Any] = {"model": states.get_model_state_dict(module)}
    if optimizer is not None:
        had = {name: parameter.grad for name, parameter in module.named_parameters()}
        for parameter in module.parameters():
            parameter.grad = None  # torch refuses to fill an optimizer whose parameters have gradients
        state["optimizer"] = states.get_optimizer_state_dict(module, optimizer)
        for name, gradient in had.items():
            module.get_parameter(name).grad = gradient
    if gradients:
        state["gradients"] = {name: module.get_parameter(name).grad for name in gradients}
    return state


def _with_state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    """Return the names of the parameters for which the optimizer has state."""
    if optimizer is None:
        return []
    remembered = {id(parameter) for parameter, state in optimizer.state.items() if state}
    return [name for name, parameter in module.named_parameters() if id(parameter) in remembered]


def _settings(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    """Return the settings (learning rate and so on) of each parameter group."""
    groups = optimizer.param_groups if optimizer else []
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _check_model(folder: Path, module: nn.Module) -> None:
    """Compare names and shapes of the checkpoint's tensors with the module's."""
    entries = JsonReader(folder).read_metadata().state_dict_metadata
    saved = {key.removeprefix("model."): entry for key, entry in entries.items() if key.startswith("model.")}
    for name, value in states.get_model_state_dict(module).items():
        if name not in saved:
            raise CheckpointError(f"{folder}: saved from another model: it has no {name}")
        size = getattr(saved.pop(name), "size", None)
        if isinstance(value, Tensor) and size != value.shape:
            found = None if size is None else tuple(size)
            raise CheckpointError(f"{folder}: saved from another model: {name} is {found}, not {tuple(value.shape)}")
    if saved:
        raise CheckpointError(f"{folder}: saved from another model: this one has no {next(iter(saved))}")


def _on_host(state: dict[str, Any], memory: HostMemory) -> dict[str, Any]:
    """Return a copy in host memory. A tensor that occurs twice (tied parameters) is copied once."""
    tensors = {id(value): value for value in tree_leaves(state) if isinstance(value, Tensor)}
    blocks = memory.copies([local_tensor(value.detach()) for value in tensors.values()])
    copies = {key: with_block(value, block) for (key, value), block in zip(tensors.items(), blocks, strict=True)}
    if any(value.is_cuda for value in tensors.values()):
        torch.cuda.synchronize()
    return tree_map_only(Tensor, lambda value: copies[id(value)], state)
