"""The worker of the vLLM executor. The first rank of a replica starts vLLM, which runs on the devices of all its ranks.

The other ranks hold the replica's devices and do nothing. Weight sync writes into staging memory of the first rank,
which vLLM's workers read in place.

`VllmReplica` is its driver's side: a thread fetches tokens from an engine that generates by itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any, Concatenate

import psutil
import torch
import torch.distributed as dist

from rlite.backends.models.lora import stored_layers
from rlite.backends.serving.pump import PumpedReplica
from rlite.backends.serving.staging import CheckpointStaging
from rlite.backends.vllm import release
from rlite.backends.vllm.process import EngineProcess, P, T
from rlite.backends.vllm.release import VllmOptions
from rlite.backends.vllm.server import Server
from rlite.errors import ConfigError, WeightSyncError, WorkerDied, WorkerError
from rlite.nn.pretrained import end_ids, load_config, meta_model, stored_dtype
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import ParameterShard
from rlite.runtime.parallel.tensor import attention_shape
from rlite.runtime.replicas.adapters import AdapterWeights, check_fit, probe_ids
from rlite.runtime.replicas.digests import Served
from rlite.runtime.replicas.replica import Capabilities, InferenceBackend, check_lengths
from rlite.runtime.replicas.transport import Piece
from rlite.runtime.replicas.workers import Part, RankChoice
from rlite.types import PromptLogprobs, SequenceRequest, TokenChunk

START_S = 1800.0
"""time limit in seconds for the start of vLLM, which loads the weights and may compile the model"""
WAIT_S = 0.02
"""seconds that a call waits for the first tokens: new requests and other calls wait as long"""
CPU_BLOCK = 128
"""tokens of one block of vLLM's KV cache on CPU"""
PARTS = ("weights", "kv_cache")
"""parts of vLLM's memory, by vLLM's tags"""
DTYPES = ("float32", "float16", "bfloat16")


class VllmWorker:
    """One rank of one replica. The constructor returns when vLLM is ready."""

    def __init__(self, context: WorkerContext, path: str, options: VllmOptions, executor_size: int) -> None:
        self._context, self._path, self._options, self._size = context, path, options, executor_size
        self._name = f"rank {context.rank} on {context.device}"
        self._is_first = context.rank % executor_size == 0
        self._is_cpu = context.device.kind == "cpu"
        self._environment = self._variables()
        self._version = self._num_adapters = 0
        self._is_resting = False
        self._process: EngineProcess | None = None
        self._on_device: set[str] = set()
        """parts of vLLM's memory that are on the device"""
        if not self._is_first:
            return
        self._config = load_config(path)
        self._dtype = options.dtype or str(stored_dtype(path, self._config)).removeprefix("torch.")
        if self._dtype not in DTYPES:
            told = f"vLLM does not compute in the checkpoint's {self._dtype}; give dtype= one of {DTYPES}"
            raise ConfigError(f"{path}: {told}")
        dtype, device = getattr(torch, self._dtype), torch.device(context.torch_device)
        self._staged = CheckpointStaging(path, dtype, device, reader_index=0)
        self._start("auto")

    # -- requests ------------------------------------------------------------------------------------------------

    def advance(self, new: list[SequenceRequest], aborted: list[int], max_steps: int) -> list[TokenChunk]:
        """Start `new`, end `aborted`, and return the tokens that have been generated.

        `max_steps`: 0 does not wait for tokens. Returns one chunk for each request that made progress or ended.
        """
        if self._process is None:
            return []
        if new:
            self._process.cast(Server.submit, new)
        if aborted:
            self._process.cast(Server.cancel, aborted)
        return self._process.take_chunks(WAIT_S if max_steps else 0.0)

    def pause(self) -> list[TokenChunk]:
        """Rest at a token boundary.

        Returns the tokens before it that no call has returned.
        """
        self._call(Server.pause)
        self._is_resting = True
        return self.advance([], [], 0)

    def resume(self) -> list[TokenChunk]:
        """Return the tokens that no call has returned, and continue after `pause`."""
        self._call(Server.resume)
        self._is_resting = False
        return self.advance([], [], 0)

    def prompt_logprobs(self, prompts: list[list[int]], num_top: int) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens."""
        return self._score(prompts, num_top, None)

    def adapter_logprobs(self, prompts: list[list[int]], num_top: int, adapter: str) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens with an adapter; see `prompt_logprobs`."""
        return self._score(prompts, num_top, adapter)

    def _score(self, prompts: list[list[int]], num_top: int, adapter: str | None) -> list[PromptLogprobs]:
        if self._process is None:
            return []
        check_lengths(prompts, self._process.max_model_len - 1)
        return self._process.call(Server.prompt_logprobs, prompts, num_top, adapter)

    def set_version(self, version: int) -> None:
        """Stamp tokens with this policy version from now on."""
        self._version = version
        self._call(Server.set_version, version)

    def _call(self, method: Callable[Concatenate[Server, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return the server's result; None on ranks without a server."""
        return None if self._process is None else self._process.call(method, *args, **kwargs)

    # -- adapters ------------------------------------------------------------------------------------------------

    def stage_adapter(self, name: str | None, given: AdapterWeights, version: int) -> bool | None:
        """Let vLLM load a version of an adapter from files of its own; see `AdapterWorker.stage_adapter`."""
        if self._process is None:
            return None
        layers = stored_layers(meta_model(self._config)).items()
        check_fit(given, f"the adapter {name!r}", {stored: layer.weight.shape for stored, (_, layer) in layers})
        self._num_adapters += 1
        folder = self._process.folder / f"adapter-{self._num_adapters}"
        folder.mkdir()
        given.write(folder)
        can_compute = not self._is_resting and self._on_device.issuperset(PARTS)
        vocab_size = self._config.get_text_config().vocab_size
        probe = probe_ids(vocab_size, self._process.max_model_len) if can_compute else None
        try:
            return self._call(Server.stage_adapter, name, version, self._num_adapters, str(folder), probe)
        except WorkerDied:
            raise
        except RuntimeError as error:
            raise ConfigError(f"{self._name}: vLLM does not take the adapter: {error}") from error

    def use_adapter(self, name: str | None, is_kept: bool) -> None:
        """Serve the version that was staged; see `AdapterWorker.use_adapter`."""
        self._call(Server.use_adapter, name, is_kept)

    def drop_adapter(self, name: str | None) -> None:
        """Forget an adapter; see `AdapterWorker.drop_adapter`."""
        self._call(Server.drop_adapter, name)

    # -- weights -------------------------------------------------------------------------------------------------

    def load_weights(self, path: str | None = None) -> None:
        """Read weights from a checkpoint of the same model; None is the engine's own."""
        if not self._is_first:
            return
        self._staged.forget()
        self.to_device("weights")
        self._load(path or self._path, None)

    def stage(self, is_near: bool) -> None:
        """Begin a sync with unwritten memory; see `StagingWorker.stage`.

        Only a vLLM of one process reads from a GPU: a handle of GPU memory opens once.
        """
        if self._is_first:
            self._staged.begin(is_near and self._size == 1)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return staging tensors of all parameters and stored buffers during a sync, on the first rank alone."""
        return self._staged.shards if self._is_first else {}

    def weights_changed(self, version: int) -> None:
        """Let vLLM read the staging tensors."""
        self._version = version
        if not self.parameter_shards():  # the weights came from a checkpoint
            self._call(Server.set_version, version)
            return
        stored = self._staged.stored
        self._load((self._staged.handles(), stored.conversion, self._path, stored.untrained), version)
        self._staged.end()

    def digest(self, pieces: Sequence[Piece]) -> Served:
        """Return digests of the blocks that vLLM's workers compute with; see `DigestingWorker.digest`."""
        if self._process is None:
            return Served([])
        groups = [group for group in self._staged.stored.conversion.groups if len(group.held) == len(group.stored) == 1]
        stored = {name: next(iter(group.stored)) for group in groups for name in group.held}
        asked = [(stored.get(p.name, p.name), p.target_box, self._staged.held[p.name][1]) for p in pieces]
        version, by_rank = self._process.call(Server.digest, pickle.dumps(asked))
        digests = [[*chain(*of_ranks)] for of_ranks in zip(*map(pickle.loads, by_rank), strict=True)]
        limit = "" if all(digests) else "vLLM keeps some tensors in another form; compared is what it has read"
        return Served(digests, version, limit)

    def _load(self, source: Any, version: int | None) -> None:
        """Let vLLM load weights."""
        try:
            self._call(Server.load, source, version)
        except WorkerDied:
            raise
        except RuntimeError as error:
            raise WeightSyncError(f"{self._name}: vLLM could not load the weights: {error}") from error

    # -- residency -----------------------------------------------------------------------------------------------

    def to_device(self, what: Part = "all") -> None:
        """Move weights, KV cache or both to the device. After `to_meta` the weights are random."""
        if not self._is_first:
            return
        if self._process is None:
            self._start("dummy")
            self._sleep(1)
        wanted = PARTS if what == "all" else (what,)
        if missing := [part for part in wanted if part not in self._on_device]:
            self._call(Server.wake_up, missing)
            self._on_device.update(missing)

    def to_cpu(self) -> None:
        """Keep the weights in host memory alone, where they are if vLLM computes on CPU. Drop the KV cache."""
        self._sleep(1)

    def to_meta(self) -> None:
        """Free all memory. vLLM has no sleep mode on CPU, so there its processes end."""
        if self._is_first:
            self._staged.free()
        if self._is_cpu:
            self.shut_down()
        self._sleep(2)

    def _sleep(self, level: int) -> None:
        self._call(Server.sleep, level)
        self._on_device.clear()

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that this replica holds on its devices, on the first rank."""
        held = {"weights": 0, "kv_cache": 0}
        if self._process is not None:
            held["weights"] = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self._staged.held.values())
            held["kv_cache"] = self._process.cache_bytes
        return {part: nbytes if part in self._on_device else 0 for part, nbytes in held.items()}

    def shut_down(self) -> None:
        """End vLLM and all its processes."""
        if self._process is not None:
            self._process.close()
            self._process = None

    # -- start ---------------------------------------------------------------------------------------------------

    def _start(self, load_format: str) -> None:
        arguments, ends = self._engine_arguments(load_format), end_ids(self._path, self._config)
        settings = (arguments, self._path, ends, self._version)
        self._process = EngineProcess(self._name, settings, self._environment, START_S)
        self._on_device = set(PARTS)

    def _engine_arguments(self, load_format: str) -> dict[str, Any]:
        options = self._options
        arguments: dict[str, Any] = {
            "model": self._path,
            "tensor_parallel_size": self._size,
            "distributed_executor_backend": "mp" if self._size > 1 else "uni",
            "dtype": self._dtype,
            **{name: getattr(options, name) for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization")},
            "seed": 0,  # every request has its own
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "load_format": load_format,
            "disable_log_stats": True,
            **({release.ROUTING: True} if options.enable_return_routed_experts else {}),
        }
        if self._is_cpu:
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": self._cpu_cache_bytes()}
        else:
            arguments |= {"enable_sleep_mode": True}
        return arguments | options.passed_on

    def _cpu_cache_bytes(self) -> int:
        """Return the bytes of KV cache of one vLLM worker: for all sequences, or as many as fit."""
        layers, _, key_heads, head_dim = attention_shape(self._config)
        limit = self._config.get_text_config().max_position_embeddings
        length = self._options.max_model_len or limit
        per_token = 2 * layers * max(key_heads // self._size, 1) * head_dim * getattr(torch, self._dtype).itemsize
        per_sequence = -(-length // CPU_BLOCK) * CPU_BLOCK * per_token
        # at worst, all workers of the engine share this machine
        share = self._options.gpu_memory_utilization / self._context.world_size
        free = int(psutil.virtual_memory().available * share)
        given = self._options.passed_on.get("kv_cache_memory_bytes", free)
        # vLLM keeps one block for itself
        needed = (self._options.max_num_seqs + 1) * per_sequence
        if given < per_sequence + CPU_BLOCK * per_token:
            sizes = f"{per_sequence / 2**20:.3g} MiB of KV cache, {given / 2**20:.3g} MiB are available"
            remedy = "lower max_model_len, or raise gpu_memory_utilization or kv_cache_memory_bytes"
            raise ConfigError(f"one sequence of max_model_len={length} needs {sizes}; {remedy}")
        return min(needed, given)

    def _variables(self) -> dict[str, str]:
        """Return environment variables of vLLM. Variables that the user has set win, except for devices and threads."""
        threads = max(self._context.num_threads or torch.get_num_threads(), 1)
        own = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the sampler of `extension.py` needs the first one
            # several replicas share the cores, and vLLM's own binding gives each of them the same ones
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        own = {name: os.environ.get(name, value) for name, value in own.items()}
        if self._is_cpu:
            if self._options.passed_on.get("enforce_eager", True):
                own["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles small functions even then, with a C++ compiler
            return own | {"OMP_NUM_THREADS": str(threads)}
        return own | {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus())}

    def _gpus(self) -> list[str]:
        """Return the GPUs of this replica, as CUDA_VISIBLE_DEVICES names them; a collective of its ranks."""
        index = torch.device(self._context.torch_device).index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        own = visible.split(",")[index] if visible else str(index)
        if self._size == 1:
            return [own]
        gathered: list[Any] = [None] * self._size
        dist.all_gather_object(gathered, own, group=subgroup(self._context.replica_ranks(self._size)))
        return gathered


class FetchingReplica(PumpedReplica):
    """A replica whose thread fetches tokens while there are requests. The engine generates between the calls too.

    To pause, the thread makes no further call, the engine rests, and the tokens before that are delivered.
    """

    def pause(self) -> None:
        """Let the engine rest at a token boundary, and deliver every token before it."""
        super().pause()
        with self._calling:
            if self.failure is None:
                self._deliver(lambda: self.workers.ask(VllmWorker.pause))

    def resume(self) -> None:
        """Let the engine continue, and fetch its tokens."""
        if self.failure is None:
            self._deliver(lambda: self.workers.ask(VllmWorker.resume))
        super().resume()

    def close(self) -> None:
        """Stop the thread, end requests in flight with an error, and end vLLM's processes."""
        super().close()
        with contextlib.suppress(WorkerError):  # vLLM ends with a worker that is gone
            self.workers.call(VllmWorker.shut_down)

    def _fail(self, error: Exception) -> None:
        """Accept no further requests. If vLLM is gone, its worker serves no calls either."""
        if isinstance(error, WorkerDied) and not error.workers:  # vLLM died; its worker does not know the engine's name
            group, first = self.workers.group, self.workers.ranks[0]
            error = WorkerDied(f"{group.name} {error.args[0]}", (group.describe(first),))
        if isinstance(error, WorkerError):
            self.workers.group.mark_lost(self.workers.ranks, error)
        super()._fail(error)


def check_served(path: str, tensor_parallel_size: int) -> None:
    """Refuse a checkpoint that the installed vLLM cannot serve."""
    version, _ = release.installed()
    config = load_config(path)
    classes = config.architectures or []
    if not release.architectures().intersection(classes):
        told = f"its config names the model class {', '.join(classes) or '(none)'}, which vLLM {version} does not know"
        remedy = "Export the model under the name of its Hugging Face class, or use executor='torch'"
        raise ConfigError(f"{path}: {told}. {remedy}")
    sizes, head_dim = release.CPU_HEAD_SIZES, attention_shape(config)[3]
    if release.is_cpu_build() and head_dim not in sizes:
        problem = f"vLLM {version} on CPU does not support attention heads of size {head_dim}"
        raise ConfigError(f"{path}: {problem}; it supports {', '.join(map(str, sizes))}. Use executor='torch'")


BACKEND = InferenceBackend(
    options=VllmOptions,
    worker=VllmWorker,
    replica=FetchingReplica,
    check=check_served,
    ranks=RankChoice(receives=(0,), returns=0),  # the other ranks hold the devices of vLLM's workers
    capabilities=Capabilities(
        has_prompt_logprobs=True,
        sync_obstacle=release.sync_obstacle,
        adapter_obstacle=release.adapter_obstacle,
        extras=frozenset({"kept_ids"}),
        optional_extras=release.OPTIONAL,
    ),
)
