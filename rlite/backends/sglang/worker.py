"""The worker of the SGLang executor: it starts or finds the server of its replica, moves its memory, and feeds weights.

The first rank of a replica does this. The other ranks hold the devices of SGLang's own processes.

Weights on their way to a server: staged in memory of this worker by weight sync, then sent bucket by bucket.

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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.multiprocessing import reductions

from rlite.backends.models.conversion import Conversion
from rlite.backends.models.expressions import Leaf
from rlite.backends.models.replay import routing_table
from rlite.backends.models.stored import StoredCheckpoint, held_tensors
from rlite.backends.serving.http import CallRefused, Endpoint
from rlite.backends.serving.staging import Staging
from rlite.backends.sglang.server import ROUTING, ServerProcess, SglangOptions
from rlite.errors import CheckpointError, ConfigError, WeightSyncError, WorkerError
from rlite.nn.pretrained import load_config, meta_model, stored_dtype
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.processes import close_store, connect_store, open_store, subgroup
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.shared_memory import renumbered
from rlite.runtime.replicas.digests import Served
from rlite.runtime.replicas.transport import Piece
from rlite.runtime.replicas.workers import Part

BUCKET_BYTES = 256 * 2**20
FORMAT = "flattened_bucket"


class Bucket(NamedTuple):
    """Parameters that travel together: views of one flat tensor of bytes, without gaps."""

    flat: Tensor
    parts: list[SimpleNamespace]
    """names, types, shapes and places of the parameters, as SGLang calls them"""

    def shards(self) -> dict[str, ParameterShard]:
        """Return the parameters, for weight sync to write."""
        boxes = {p.name: self.flat[p.start_idx : p.end_idx].view(p.dtype).view(p.shape) for p in self.parts}
        return {name: ParameterShard(box, (0,) * box.dim(), tuple(box.shape)) for name, box in boxes.items()}


def make_buckets(
    parameters: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    most_bytes: int = BUCKET_BYTES,
    empty: Callable[..., Tensor] = torch.empty,
) -> list[Bucket]:
    """Return buckets of at most `most_bytes` bytes; a larger parameter travels alone.

    SGLang expects no gaps, so wide types come first and every parameter is aligned.

    `parameters`: types and shapes by name. `empty`: returns unwritten memory for each bucket, from a shape and a dtype.
    """
    groups: list[list[SimpleNamespace]] = []
    for name, (dtype, shape) in sorted(parameters.items(), key=lambda item: -item[1][0].itemsize):
        nbytes = math.prod(shape) * dtype.itemsize
        if not groups or groups[-1][-1].end_idx + nbytes > most_bytes:
            groups.append([])
        start = groups[-1][-1].end_idx if groups[-1] else 0
        place = {"start_idx": start, "end_idx": start + nbytes, "numel": nbytes}  # counted in bytes
        groups[-1].append(SimpleNamespace(name=name, shape=shape, dtype=dtype, **place))
    return [Bucket(empty((parts[-1].end_idx,), dtype=torch.uint8), parts) for parts in groups]


def stored_buckets(buckets: list[Bucket], conversion: Conversion) -> Iterator[Bucket]:
    """Yield buckets of the tensors that the server's checkpoint has, made of those that weight sync has written."""
    forms = ((name, form) for group in conversion.groups for name, form in group.stored.items())
    if all(isinstance(form, Leaf) and form.name == name for name, form in forms):
        yield from buckets
        return
    waiting: dict[str, Tensor] = {}
    shards = ((name, shard.tensor) for bucket in buckets for name, shard in bucket.shards().items())
    for name, tensor in conversion.stored(shards):
        waiting[name] = tensor
        if sum(each.nbytes for each in waiting.values()) >= BUCKET_BYTES:
            yield from _filled(waiting)
            waiting = {}
    yield from _filled(waiting)


def _filled(tensors: Mapping[str, Tensor]) -> Iterator[Bucket]:
    parameters = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    empty = partial(torch.empty, device=next((each.device for each in tensors.values()), None))
    for bucket in make_buckets(parameters, empty=empty):
        for name, shard in bucket.shards().items():
            shard.tensor.copy_(tensors[name])
        yield bucket


@dataclass
class Sender:
    """A way of buckets to a server."""

    endpoint: Endpoint
    num_ranks: int
    """tensor-parallel ranks of the server"""
    device: torch.device
    """device of the flat tensors that are sent"""
    timeout: float
    """seconds for each bucket"""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the server; by default nothing is left."""


class TensorSender(Sender):
    """Sends buckets in requests: the bytes themselves from a CPU, a CUDA IPC handle from a GPU."""

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        flat = bucket.flat.to(self.device)
        # an entry for each rank: a CUDA IPC handle that is opened twice is never freed
        entries = [serialized(flat, bucket) for _ in range(self.num_ranks)]
        body = {"serialized_named_tensors": entries, "load_format": FORMAT, "flush_cache": False}
        self.endpoint.call("/update_weights_from_tensor", body, self.timeout)
        del flat
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


def serialized(flat: Tensor, bucket: Bucket) -> str:
    """Return a bucket in the form of SGLang's serializer: a pickle in base64.

    `flat`: the bucket's bytes, on the device from which they are sent.
    """
    buffer = io.BytesIO()
    own = flat if flat.is_cuda else flat.clone()  # a view is pickled with all the memory that it is a part of
    _Pickler(buffer).dump({"flattened_tensor": own, "metadata": bucket.parts})
    return base64.b64encode(buffer.getbuffer()).decode()


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors by value, and CUDA tensors by a handle that names their GPU by its UUID.

    The server may number its GPUs in another way. torch's own handles of CPU tensors are for children alone.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return NotImplemented
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return renumbered(reductions.reduce_tensor(value), uuid)


@dataclass
class GroupSender(Sender):
    """Broadcasts buckets in a process group of this process, as rank 0, and the server's ranks."""

    def __post_init__(self) -> None:
        """Choose the group's name; the group is made for the first bucket."""
        self._ip = self.endpoint.own_ip()
        self._name = f"rlite-{secrets.token_hex(8)}"
        self._port: int | None = None
        self._group: Any = None

    def send(self, bucket: Bucket) -> None:
        """Send a bucket; return when the server has loaded it."""
        if self._group is None:
            self._meet()
        body: dict[str, Any] = {"group_name": self._name, "load_format": FORMAT, "flush_cache": False}
        body["names"] = [part.name for part in bucket.parts]
        body["dtypes"] = [str(part.dtype).removeprefix("torch.") for part in bucket.parts]
        body["shapes"] = [list(part.shape) for part in bucket.parts]
        flat = bucket.flat.to(self.device)
        self._both("/update_weights_from_distributed", body, lambda: self._group.broadcast(flat, 0).wait())

    def close(self) -> None:
        """Leave the process group."""
        if self._group is None:
            return
        with contextlib.suppress(WorkerError):
            self.endpoint.call("/destroy_weights_update_group", {"group_name": self._name})
        self._leave()

    def _meet(self) -> None:
        self._port = port = open_store(self._ip)
        backend, size = dist.Backend("gloo" if self.device.type == "cpu" else "nccl"), self.num_ranks + 1
        group = {"group_name": self._name, "backend": backend, "rank_offset": 1, "world_size": size}
        body = {"master_address": self._ip, "master_port": port, **group}

        def join() -> None:
            # as SGLang's ranks do, so that both sides look for each other under the same keys
            store = dist.PrefixStore(self._name, connect_store(self._ip, port, self.timeout))
            name, timeout = c10d.GroupName(self._name), timedelta(seconds=self.timeout)
            self._group, _ = c10d._new_process_group_helper(size, 0, [], backend, store, name, timeout=timeout)

        self._both("/init_weights_update_group", body, join)

    def _both(self, path: str, body: Mapping[str, Any], act: Callable[[], object]) -> None:
        """Call the server, and act at the same time. A failure on either side leaves the group."""
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(self.endpoint.call, path, body, self.timeout)
            try:
                act()
                answer.result()
            except BaseException as error:
                self._leave()
                answer.result()  # the server's reason, if it has one
                if isinstance(error, RuntimeError):
                    raise WeightSyncError(f"broadcast of weights to {self.endpoint.url}: {error}") from error
                raise

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)
        if self._port is not None:
            close_store(self._port)


PARTS = ("weights", "kv_cache")
"""parts of a server's memory, by SGLang's tags"""


class SglangWorker:
    """The owner of one server, started or attached."""

    def __init__(self, context: WorkerContext, path: str, options: SglangOptions, executor_size: int) -> None:
        self._context, self._path, self._options, self._size = context, path, options, executor_size
        self._device = torch.device(context.torch_device)
        self._endpoint: Endpoint | None = None
        self._process: ServerProcess | None = None
        self._sender: Sender | None = None
        self._buckets: list[Bucket] = []
        self._on_device = set(PARTS)
        devices = self._devices()
        if context.rank % executor_size:
            return
        config = load_config(path)
        dtype = getattr(torch, options.dtype) if options.dtype else stored_dtype(path, config)
        self._parameters = held_tensors(meta_model(config, dtype))
        self._staging = Staging(self._device, self._parameters)
        text = config.get_text_config()
        longest = options.max_model_len or text.max_position_embeddings
        server = self._attach(config.model_type) if options.addresses else self._start(devices, dtype, longest)
        self._info = server.call("/server_info")
        length = self._info.get("context_length") or longest
        routing = routing_table(path) if options.enable_return_routed_experts else None
        if routing is not None and not self._info.get(ROUTING):
            raise ConfigError(f"{ROUTING}=true: the server at {server.url} was started without it")
        self._endpoint = replace(server, max_model_len=length, vocab_size=text.vocab_size, routing=routing)
        self.set_version(0)

    def endpoint(self) -> Endpoint | None:
        """Return the address of the replica's server; None on ranks without a server."""
        return self._endpoint

    def server_failure(self) -> str | None:
        """Return how the server of this worker ended; None if it runs, or if rlite did not start it."""
        return None if self._process is None else self._process.failure()

    def stop(self) -> None:
        """End the server if this worker started it."""
        if self._sender is not None:
            self._sender.close()
        if self._process is not None:
            self._process.stop()

    # -- starting ------------------------------------------------------------------------------------------------

    def _devices(self) -> list[int]:
        """Return the replica's GPUs as this process numbers them; none on CPU. A collective of the replica's ranks."""
        own = (self._context.device.node, self._device.index or 0)
        places = [own] * self._size
        if self._size > 1:
            if self._options.addresses:
                raise ConfigError("tensor_parallel_size: with addresses, a replica is a running server; leave it out")
            group = subgroup(self._context.replica_ranks(self._size), "sglang", "gloo")
            dist.all_gather_object(places, own, group=group)
        if len({node for node, _ in places}) > 1:
            raise ConfigError(f"tensor_parallel_size={self._size}: the devices of an SGLang server must be on one node")
        return [] if self._device.type == "cpu" else [index for _, index in places]

    def _start(self, devices: list[int], dtype: torch.dtype, longest: int) -> Endpoint:
        options = self._options
        arguments: dict[str, Any] = {
            "log_level_http": "warning",
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            **options.passed_on,
            "model_path": self._path,
            "tp_size": self._size,
            "dtype": str(dtype).removeprefix("torch."),
            "context_length": longest,
            "max_running_requests": options.max_num_seqs,
            "mem_fraction_static": options.gpu_memory_utilization,
            "random_seed": options.seed % 2**31,
            "incremental_streaming_output": True,
            **({ROUTING: True} if options.enable_return_routed_experts else {}),
        }
        self._process = process = ServerProcess(self._context.device.ip, arguments, options.api_key, devices)
        weakref.finalize(self, process.stop)
        process.wait_until_ready(options.start_timeout_s)
        return process.endpoint

    def _attach(self, model_type: str) -> Endpoint:
        endpoint = Endpoint(self._options.addresses[self._context.rank].rstrip("/"), self._options.api_key)
        try:
            served = endpoint.call("/model_info")
        except WorkerError as error:
            raise ConfigError(f"addresses: {error}") from error
        if (served.get("model_type") or model_type) != model_type:
            told = f"the server at {endpoint.url} serves {served.get('model_path')}, of type {served['model_type']!r}"
            raise ConfigError(f"{told}; {self._path} is of type {model_type!r}")
        return endpoint

    # -- weights -------------------------------------------------------------------------------------------------

    @cached_property
    def _stored(self) -> StoredCheckpoint:
        """The checkpoint, whose names the engine knows."""
        return StoredCheckpoint(meta_model(load_config(self._path)), self._path)

    def stage(self, is_near: bool) -> None:
        """Begin a sync with unwritten memory; see `StagingWorker.stage`."""
        if self._endpoint is not None:
            self._stored.check_syncable()
            self._buckets = []  # what a failed sync has left
            self._buckets = make_buckets(self._parameters, empty=self._staging.begin(is_near).empty)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return staging memory for all parameters during a sync. `weights_changed` sends it to the server."""
        return {name: shard for bucket in self._buckets for name, shard in bucket.shards().items()}

    def weights_changed(self, version: int) -> None:
        """Send staged weights to the server, and give the server's weights this policy version."""
        if self._endpoint is None:
            return
        if self._buckets:
            self._sender = sender = self._sender or self._make_sender()
            call = partial(self._endpoint.call, body={}, timeout=sender.timeout)
            try:
                call("/begin_weight_update")
                try:
                    for bucket in stored_buckets(self._buckets, self._stored.conversion):
                        sender.send(bucket)
                finally:
                    self._buckets = []
                    call("/end_weight_update")
                call("/flush_cache")  # of the old weights
            except CallRefused as error:
                raise WeightSyncError(str(error)) from error
            del bucket
            self._staging.end()
        self.set_version(version)

    def digest(self, pieces: Sequence[Piece]) -> Served:
        """Return the server's version and its own checksums of what it serves; see `DigestingWorker.digest`."""
        if self._endpoint is None:
            return Served([])
        checksums, limit = {}, "SGLang's own checksums are compared with those of other servers and of earlier syncs"
        try:
            found = self._endpoint.call("/weights_checker", {"action": "checksum"}, self._options.start_timeout_s)
            ranks = enumerate(found["ranks"])
            checksums = {f"{name}@{rank}": at for rank, each in ranks for name, at in each["checksums"].items()}
        except CallRefused as error:
            limit = f"compared is what the server has read, because it has no checksums: {error.message}"
        told = str(self._endpoint.call("/model_info").get("weight_version"))
        return Served([[] for _ in pieces], int(told) if told.isdecimal() else None, limit, checksums)

    def _make_sender(self) -> Sender:
        assert self._endpoint is not None
        automatic, chosen = "tensors" if self._process else "group", self._options.weight_transport
        cls = GroupSender if (automatic if chosen == "auto" else chosen) == "group" else TensorSender
        return cls(self._endpoint, int(self._info.get("tp_size") or 1), self._device, self._options.start_timeout_s)

    def load_weights(self, path: str | None) -> None:
        """Let the server read weights from a checkpoint; None is the engine's own."""
        if self._endpoint is not None:
            self.to_device("weights")
            self._buckets = []  # what a failed sync has left
            body = {"model_path": path or self._path}
            try:
                self._endpoint.call("/update_weights_from_disk", body, self._options.start_timeout_s)
            except CallRefused as error:
                raise CheckpointError(str(error)) from error

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        if self._endpoint is not None:
            self._endpoint.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        """Move a part of the server's memory back to the device."""
        wanted = PARTS if what == "all" else (what,)
        if missing := [part for part in wanted if part not in self._on_device]:
            self._move("/resume_memory_occupation", missing)
            self._on_device.update(missing)

    def to_cpu(self) -> None:
        """Keep the server's weights in host memory, and drop its KV cache."""
        self._need("enable_weights_cpu_backup", "and would lose its weights in cpu(). Use meta(), or")
        self._release()

    def to_meta(self) -> None:
        """Free the server's weights and KV cache on the device. SGLang keeps a copy of the weights on the host."""
        self._release()
        self._buckets = []
        if self._endpoint is not None:
            self._staging.free()

    def _release(self) -> None:
        if there := [part for part in PARTS if part in self._on_device]:
            self._move("/release_memory_occupation", there)
            self._on_device.difference_update(there)

    def _move(self, path: str, parts: list[str]) -> None:
        if self._endpoint is not None:
            self._need("enable_memory_saver", "so its memory cannot move:")
            self._endpoint.call(path, {"tags": parts}, self._options.start_timeout_s)

    def _need(self, option: str, otherwise: str) -> None:
        if self._endpoint is not None and not self._info.get(option):
            told, flag = f"the server at {self._endpoint.url} runs without {option}", option.replace("_", "-")
            raise ConfigError(f"{told}, {otherwise} start it with --{flag}")

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that the server holds on all its devices, by part: weights, kv_cache."""
        if self._endpoint is None:
            return {"weights": 0, "kv_cache": 0}
        weights = sum(math.prod(shape) * dtype.itemsize for dtype, shape in self._parameters.values())
        usage = [state.get("memory_usage", {}) for state in self._info.get("internal_states", [])]
        cache = int(sum(each.get("kvcache", 0.0) for each in usage) * 2**30) * int(self._info.get("tp_size") or 1)
        held = {"weights": weights, "kv_cache": cache}
        return {part: held[part] if part in self._on_device else 0 for part in PARTS}
