"""Weights on their way to a server: staged in host memory by weight sync, then sent bucket by bucket.

SGLang takes a bucket as one flat tensor with the names, types and shapes of its parts ("flattened_bucket"). The
flat tensor travels in the request, by CUDA IPC on a GPU, or by a broadcast in a process group.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.multiprocessing import reductions

from rlite.backends.sglang.server import CallRefused, Endpoint
from rlite.errors import WeightSyncError, WorkerError
from rlite.nn.pretrained import load_config, meta_model
from rlite.runtime.parallel.processes import close_store, connect_store, open_store
from rlite.runtime.parallel.shards import ParameterShard

BUCKET_BYTES = 256 * 2**20
FORMAT = "flattened_bucket"


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together: views of one flat tensor of bytes in host memory, without gaps."""

    flat: Tensor
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def ends(self) -> list[int]:
        """Index in `flat` after each parameter's last byte."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        return torch.tensor(sizes).cumsum(0).tolist()

    def shards(self) -> dict[str, ParameterShard]:
        """Return the parameters, for weight sync to write."""
        starts = [0, *self.ends]
        parts = zip(self.names, self.dtypes, self.shapes, starts, self.ends, strict=False)
        return {
            name: ParameterShard(self.flat[start:end].view(dtype).view(shape), (0,) * len(shape), tuple(shape))
            for name, dtype, shape, start, end in parts
        }


def served_parameters(path: str, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of the model's parameters by Hugging Face name. Tied parameters appear once.

    Args:
        path: folder of the checkpoint.
        dtype: type of the served weights.
    """
    named = meta_model(load_config(path), dtype).named_parameters()
    return {name: (parameter.dtype, parameter.shape) for name, parameter in named}


def make_buckets(
    parameters: Mapping[str, tuple[torch.dtype, torch.Size]], most_bytes: int = BUCKET_BYTES
) -> list[Bucket]:
    """Return buckets of at most `most_bytes` bytes; a larger parameter travels alone.

    SGLang expects no gaps, so wide types come first and every parameter is aligned.
    """
    ordered = sorted(parameters, key=lambda name: -parameters[name][0].itemsize)
    groups: list[list[str]] = []
    filled = most_bytes
    for name in ordered:
        dtype, shape = parameters[name]
        nbytes = math.prod(shape) * dtype.itemsize
        if filled + nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    buckets = []
    for names in groups:
        dtypes, shapes = zip(*(parameters[name] for name in names), strict=True)
        nbytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))
        buckets.append(Bucket(torch.empty(nbytes, dtype=torch.uint8), tuple(names), dtypes, shapes))
    return buckets


class TensorSender:
    """Sends buckets in requests: the bytes themselves from a CPU, a CUDA IPC handle from a GPU.

    Args:
        endpoint: the server.
        num_ranks: tensor-parallel ranks of the server; each reads an entry of its own.
        device: device of the flat tensors that are sent.
        timeout: seconds for each bucket.
    """

    def __init__(self, endpoint: Endpoint, num_ranks: int, device: torch.device, timeout: float) -> None:
        self._endpoint, self._num_ranks, self._device, self._timeout = endpoint, num_ranks, device, timeout

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        flat = bucket.flat.to(self._device)
        body = {
            # a CUDA IPC handle that is opened twice is never freed
            "serialized_named_tensors": [serialized(flat, bucket) for _ in range(self._num_ranks)],
            "load_format": FORMAT,
            "flush_cache": False,
        }
        self._endpoint.call("/update_weights_from_tensor", body, self._timeout)
        del flat
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Do nothing: every bucket was freed when the server had loaded it."""


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """Return a bucket in the form of SGLang's serializer: a pickle in base64.

    Args:
        flat: the bucket's bytes, on the device from which they are sent.
        bucket: the bucket.
    """
    starts = [0, *bucket.ends]
    metadata = [
        SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        for name, shape, dtype, start, end in zip(
            bucket.names, bucket.shapes, bucket.dtypes, starts, bucket.ends, strict=False
        )
    ]
    content = {"flattened_tensor": flat, "metadata": metadata}
    buffer = io.BytesIO()
    _Pickler(buffer).dump(content)
    return base64.b64encode(buffer.getbuffer()).decode()


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors by value, and CUDA tensors by a handle that names their GPU by its UUID.

    The server may number its GPUs in another way. torch's own handles of CPU tensors are for children alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:6], uuid, *arguments[7:])  # the seventh is the index of the GPU


class GroupSender:
    """Broadcasts buckets in a process group of this process, as rank 0, and the server's ranks.

    Args:
        endpoint: the server.
        num_ranks: tensor-parallel ranks of the server.
        ip: address of this node.
        device: device of the flat tensors that are sent; decides between gloo and NCCL.
        timeout: seconds for each bucket.
    """

    def __init__(self, endpoint: Endpoint, num_ranks: int, ip: str, device: torch.device, timeout: float) -> None:
        self._endpoint, self._ip, self._device, self._timeout = endpoint, ip, device, timeout
        self._size = num_ranks + 1
        self._name = f"rlite-{secrets.token_hex(8)}"
        self._port: int | None = None
        self._group: Any = None

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        if self._group is None:
            self._meet()
        body = {
            "names": list(bucket.names),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": self._name,
            "load_format": FORMAT,
            "flush_cache": False,
        }
        flat = bucket.flat.to(self._device)
        self._both("/update_weights_from_distributed", body, lambda: self._group.broadcast(flat, 0).wait())

    def close(self) -> None:
        """Leave the process group."""
        if self._group is None:
            return
        with contextlib.suppress(WorkerError):
            self._endpoint.call("/destroy_weights_update_group", {"group_name": self._name})
        self._leave()

    def _meet(self) -> None:
        self._port = open_store(self._ip)
        backend = "gloo" if self._device.type == "cpu" else "nccl"
        body = {
            "master_address": self._ip,
            "master_port": self._port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._name,
            "backend": backend,
        }
        self._both("/init_weights_update_group", body, lambda: self._join(backend))

    def _join(self, backend: str) -> None:
        """Join as SGLang's ranks do, so that both sides look for each other under the same keys."""
        assert self._port is not None
        store = dist.PrefixStore(self._name, connect_store(self._ip, self._port, self._timeout))
        timeout = timedelta(seconds=self._timeout)
        self._group, _ = c10d._new_process_group_helper(
            self._size, 0, [], dist.Backend(backend), store, c10d.GroupName(self._name), timeout=timeout
        )

    def _both(self, path: str, body: Mapping[str, Any], act: Callable[[], object]) -> None:
        """Call the server, and act at the same time. A failure on either side leaves the group.

        Raises:
            WeightSyncError: this side failed.
            WorkerError: the server failed.
        """
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self._endpoint.call, path, body, self._timeout)
            try:
                act()
            except RuntimeError as error:
                self._leave()
                answer.result()  # the server's reason, if it has one
                raise WeightSyncError(f"broadcast of weights to {self._endpoint.url}: {error}") from error
            try:
                answer.result()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        if self._port is not None:
            close_store(self._port)


Sender = TensorSender | GroupSender


def update_weights(endpoint: Endpoint, sender: Sender, buckets: Sequence[Bucket], timeout: float) -> None:
    """Write all buckets into the server, and drop the KV cache of the old weights.

    Generation on the server is paused, and its requests are retracted.

    Args:
        endpoint: the server.
        sender: path of the buckets.
        buckets: buckets with every parameter once.
        timeout: seconds for each call.

    Raises:
        WeightSyncError: the server refused weights.
    """
    try:
        endpoint.call("/begin_weight_update", {}, timeout)
        try:
            for bucket in buckets:
                sender.send(bucket)
        finally:
            endpoint.call("/end_weight_update", {}, timeout)
        endpoint.call("/flush_cache", {}, timeout)
    except CallRefused as error:
        raise WeightSyncError(str(error)) from error
