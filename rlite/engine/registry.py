"""The table of executors, and the seam of training backends.

A backend is a `TrainBackend` that is registered under a name. Each of its workers is a `TrainWorker`: one rank that
holds a part of the user's module. All ranks get the same calls in the same order. `TrainBackend.layout` divides a batch
over the ranks. `Backend.ranks` names, among the ranks that share the same rows, the ranks that receive arguments and
the rank that returns the result. A rank that receives nothing is called too, with None for each argument.

`rlite.init()` and `rlite.session()` start a program's session, with defaults for its engines.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlite.algorithms.reduce import Loss, Weight
from rlite.config import Options
from rlite.data.packs import BatchShare
from rlite.errors import ConfigError, RliteError, UnknownOptionError, did_you_mean
from rlite.nn.base import BaseTrainModule
from rlite.nn.options import LoraOptions
from rlite.runtime.cluster.launcher import SessionOptions
from rlite.runtime.cluster.placement import DeviceKind
from rlite.runtime.cluster.session import EngineOptions, LauncherName, Session, open_session, shutdown
from rlite.runtime.parallel.host_memory import DeviceUsage
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.engine import Engine
from rlite.runtime.replicas.workers import Backend, Kind, SourceWorker

B = TypeVar("B", bound=Backend)
_backends: dict[tuple[Kind, str], Backend | str] = {
    ("train", "fsdp2"): "rlite.backends.fsdp2.worker:BACKEND",
    ("inference", "torch"): "rlite.backends.embedded.worker:BACKEND",
    ("inference", "remote"): "rlite.backends.remote.replica:BACKEND",
    ("inference", "sglang"): "rlite.backends.sglang.replica:BACKEND",
    ("inference", "vllm"): "rlite.backends.vllm.worker:BACKEND",
}


def register_executor(kind: Kind, name: str, backend: Backend | str) -> None:
    """Register an executor, so that `executor=name` finds it.

    Args:
        kind: kind of engine that may use the executor.
        name: name of the executor.
        backend: an `InferenceBackend` or `TrainBackend`, or "module:attribute", imported on first use.
    """
    _backends[kind, name] = backend


def registered_executors(kind: Kind) -> list[str]:
    """Return the names of the executors of a kind, in the order of their registration."""
    return [name for of, name in _backends if of == kind]


def find_backend(kind: Kind, name: str, expected: type[B]) -> B:
    """Return the backend that was registered under a name.

    Args:
        kind: "train" or "inference".
        name: the executor's name.
        expected: class of this kind's backends.

    Raises:
        ConfigError: the name is not registered, or its backend has another class.
    """
    if (kind, name) not in _backends:
        raise ConfigError(f"unknown {kind} executor {name!r}; {did_you_mean(name, registered_executors(kind))}")
    backend = _backends[kind, name]
    if isinstance(backend, str):
        module, attribute = backend.split(":")
        backend = _backends[kind, name] = getattr(importlib.import_module(module), attribute)
    if not isinstance(backend, expected):
        told = f"{kind} executor {name!r} is registered with {backend!r:.100}"
        raise ConfigError(f"{told}; expected a {expected.__name__}")
    return backend


class WorkLayout(Protocol):
    """Division of a batch over an engine's ranks: `num_peers` neighbouring ranks make one data rank."""

    @property
    def num_data_ranks(self) -> int:
        """Parts into which the rows of a batch are split."""

    @property
    def num_peers(self) -> int:
        """Neighbouring ranks that work on one part together."""

    @property
    def seq(self) -> int:
        """Pieces into which the peers cut the sequences of an argument in `NeedParallel(type="seq")`."""

    @property
    def pack_factor(self) -> int:
        """Multiple of `max_tokens_per_microbatch` that a microbatch may hold because peers share its activations."""


def _shares_nothing(module: BaseTrainModule, options: Any) -> str:
    return "the executor computes every sequence whole"


@dataclass(frozen=True, kw_only=True)
class TrainBackend(Backend):
    """A training backend as `register_executor("train", name, backend)` takes it.

    `worker` makes a `TrainWorker` from the pickled module. The engine itself reads `max_tokens_per_microbatch`,
    `balance_by` and `packing_method` of `options`; `Fsdp2Options` explains them.
    """

    layout: Callable[[int, int, Any], WorkLayout]
    """layout(num_workers, workers per copy of the model, options); raises ConfigError for sizes that cannot be"""
    check_module: Callable[[BaseTrainModule, Any], None] | None = None
    """check_module(module, options) in the driver, before any process starts; raises ConfigError"""
    prefix_obstacle: Callable[[BaseTrainModule, Any], str | None] = _shares_nothing
    """prefix_obstacle(module, options) returns why workers compute every row of a pack whole; None if they compute the
    tokens that `BatchShare.sharing` names once"""
    check_adapter: Callable[[BaseTrainModule, Any, LoraOptions], LoraOptions] | None = None
    """check_adapter(module, options, adapter) in the driver returns the adapter with the whole names of its layers, or
    raises ConfigError; None: the executor has no adapters by name, and its methods take no argument `adapter`"""
    read_adapter: Callable[[BaseTrainModule, Path], LoraOptions] | None = None
    """read_adapter(module, folder) in the driver returns the form of an adapter in PEFT's format, or raises ConfigError
    if it belongs to another base model"""
    choices: Callable[[Any], dict[str, str]] | None = None
    """method of the worker that returns what it chose when it was built, and why, by topic of the start report"""


class TrainWorker(SourceWorker, Protocol):
    """One rank of a train engine."""

    # -- atomic operations ---------------------------------------------------------------------------------------

    def forward_backward(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Accumulate the gradients of a batch; see `RliteTrainEngine.forward_backward`.

        A batch without weight changes nothing.

        Args:
            share: this data rank's rows and microbatches. An empty microbatch is computed on padding rows with weight
                zero, because every rank takes part in every collective.
            loss_fn: the mean loss of a pack.
            loss_weight_fn: weight of a pack's mean; None: losses are sums over a pack, and gradients add up.
            adapter: the adapter whose gradients accumulate; None is the module.

        Returns:
            Over all ranks: the weighted means of the loss and of the means that loss_fn reports, and `weight`. For each
                `PerToken` that loss_fn reports an executor may also return the values [T] of the tokens of the share's
                own rows on CPU, without padding, in the order of the microbatches.
        """

    def optimizer_step(self, adapter: str | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, float]:
        """Make one optimizer step with the accumulated gradients; see `RliteTrainEngine.optimizer_step`.

        Args:
            adapter: the adapter that makes the step; None is the module.
            settings: new values of the optimizer's options, and `max_grad_norm` of this step.
        """

    def train_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Drop accumulated gradients, then call `forward_backward` and `optimizer_step`.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.
            adapter: as for `forward_backward`.

        Returns:
            The results of both calls.
        """

    def eval_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight | None, adapter: str | None = None
    ) -> dict[str, Any]:
        """Return what `forward_backward` returns, in evaluation mode and without gradients.

        Args:
            share: as for `forward_backward`.
            loss_fn: as for `forward_backward`.
            loss_weight_fn: as for `forward_backward`.
            adapter: as for `forward_backward`.
        """

    def forward(
        self,
        share: BatchShare,
        post_hook: Callable[..., Tensor],
        without_adapters: bool,
        adapter: str | None = None,
    ) -> Tensor:
        """Apply `post_hook(logits [T, V], data) -> [T, ...]` in evaluation mode, without gradients.

        Args:
            share: as for `forward_backward`.
            post_hook: function of each pack.
            without_adapters: switch the module's own adapters off meanwhile.
            adapter: the adapter with which the module computes; None is none.

        Returns:
            The values [T, ...] of the tokens of the share's own rows on CPU, without padding, in the order of the
                microbatches. A share without rows of its own has no values [0, ...].
        """

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Return the result of a method of the user's module.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            method: name of the method.
        """

    def set_mode(self, is_training: bool) -> None:
        """Put the module into training or evaluation mode."""

    def step_lr_scheduler(self) -> float:
        """Advance the module's `lr_scheduler` by one step.

        Returns:
            The new learning rate.

        Raises:
            ConfigError: the module has no lr_scheduler.
        """

    def reload_methods(self, source: bytes) -> None:
        """Give the module the class of another module, whose methods are called from now on.

        Weights, optimizer and attributes stay.

        Args:
            source: the pickled module, on the meta device, as the worker's constructor takes it.
        """

    # -- weights and state ---------------------------------------------------------------------------------------

    def load(self, path: str | None) -> None:
        """Read the weights from a Hugging Face folder; None is the module's own source."""

    def save(self, path: str) -> None:
        """Write a Hugging Face checkpoint, whole or not at all.

        Raises:
            CheckpointError: this rank could not write it.
        """

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        """Return copies of this rank's served boxes on CPU: name -> (box, global shape, values)."""

    def save_state(self, folder: str, path: str, facts: dict[str, Any], is_asynchronous: bool) -> None:
        """Write the state to resume from: weights, optimizer, scheduler, accumulated gradients, random numbers.

        Args:
            folder: folder in which every rank writes. The driver has made it and put its own file into it.
            path: final name of the folder, after it is whole and sealed (`rlite.runtime.storage.atomic`).
            facts: JSON-serialisable facts, sealed with the checkpoint.
            is_asynchronous: copy the state and return; write while training continues.

        Raises:
            CheckpointError: the state could not be written. An asynchronous save raises in `finish_saving`.
        """

    def has_saved(self) -> bool:
        """Return whether `finish_saving` would return at once."""

    def finish_saving(self) -> None:
        """Wait until the last `save_state` is written.

        Raises:
            CheckpointError: the state could not be written.
        """

    def load_state(self, path: str) -> None:
        """Resume from the state that `save_state` wrote, with any number of ranks that the backend allows.

        Raises:
            CheckpointError: the checkpoint does not fit. Nothing was changed.
        """

    def pack_state(self) -> bytes:
        """Return this rank's state to resume from, as `save_state` writes it."""

    def unpack_state(self, packed: bytes) -> None:
        """Resume exactly from the state that `pack_state` returned on the same rank of the same layout.

        Args:
            packed: the state.
        """

    # -- health --------------------------------------------------------------------------------------------------

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters of which this rank's part holds NaN or infinity."""

    def device_usage(self) -> DeviceUsage:
        """Return this rank's device and the peak memory of its process there since the last call."""


class AdapterTrainWorker(TrainWorker, Protocol):
    """One rank of a train engine that has adapters by name."""

    def add_adapter(self, name: str, options: LoraOptions, seed: int) -> None:
        """Make an adapter beside layers of the module, with an optimizer of its own.

        Args:
            name: a new name.
            options: rank, scale and layers.
            seed: seed of the initial values, which do not depend on the number of ranks.
        """

    def remove_adapter(self, name: str) -> None:
        """Drop an adapter with its gradients and its optimizer."""

    def forget_gradients(self, name: str) -> None:
        """Drop the accumulated gradients of an adapter."""

    def adapter_weights(self, name: str | None) -> AdapterWeights | None:
        """Return the values of an adapter whole, on the first rank of all; None on the others. A collective.

        Args:
            name: the adapter; None is the module's own (`add_lora`).
        """

    def save_adapter(self, name: str, path: str, facts: dict[str, Any], has_state: bool = True) -> None:
        """Write an adapter in PEFT's format, and the state of its optimizer, whole or not at all.

        Args:
            name: the adapter.
            path: the folder to make or replace.
            facts: JSON-serialisable facts, sealed with the files.
            has_state: write the state of its optimizer, too.

        Raises:
            CheckpointError: the files could not be written.
        """

    def load_adapter(self, name: str, path: str, has_state: bool) -> None:
        """Read an adapter of the same layers and rank. Accumulated gradients are dropped.

        Args:
            name: the adapter.
            path: a folder with PEFT's files.
            has_state: read the state of its optimizer, too; otherwise the optimizer begins anew.

        Raises:
            CheckpointError: a file cannot be read. Nothing was changed.
        """


def init(
    device: DeviceKind | None = None,
    num_devices: int | None = None,
    launcher: LauncherName | None = None,
    address: str | None = None,
    num_threads: int | None = None,
    call_timeout: float = 3600.0,
    start_timeout: float = 300.0,
    engine_options: EngineOptions | None = None,
) -> Session:
    """Start the program's session, or attach to a running cluster.

    Under torchrun only rank 0 returns; the other ranks serve it and exit when it is done.

    Args:
        device: "cuda" or "cpu"; default: CUDA if there is one.
        num_devices: devices to use; default: all GPUs, or min(cores, 8) CPU slots.
        launcher: "torchrun" (default under torchrun), "inprocess" (default for one device) or "ray".
        address: address of a Ray cluster; default: RAY_ADDRESS, a cluster that `ray start` left here, or a new one.
        num_threads: torch threads per worker; default: the node's cores divided by its devices.
        call_timeout: seconds that a call may take before CallTimeout names the late workers.
        start_timeout: seconds that starting workers may take.
        engine_options: defaults of `build`, by the name of the executor, such as {"torch": {"max_num_seqs": 64}}.
            Arguments of `build` take precedence.

    Returns:
        The session.

    Raises:
        ConfigError: a session exists, the device is missing, the launcher is not available, or `engine_options` names
            an unknown executor or holds a value that cannot work.
        UnknownOptionError: an executor does not know an option.
        RliteError: this is a forked child of a process with a session.
    """
    check_engine_options(engine_options or {})
    chosen: DeviceKind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = SessionOptions(chosen, num_devices, address, num_threads, call_timeout, start_timeout)
    return open_session(options, launcher, engine_options)


@contextmanager
def session(**options: Any) -> Iterator[Session]:
    """Start the program's session, and end it after the block, also if the block raises.

        with rlite.session(num_devices=1):
            ...

    Args:
        **options: arguments of `init`.

    Yields:
        The session.

    Raises:
        ConfigError: a session is open already, which stays open; or as for `init`.
    """
    started = init(**options)
    try:
        yield started
    finally:
        shutdown()


def check_engine_options(engine_options: EngineOptions) -> None:
    """Check that all executors are registered, and know their options.

    Raises:
        ConfigError: an executor is unknown, or a value cannot work.
        UnknownOptionError: an executor does not know an option.
    """
    for name, options in engine_options.items():
        where = f"engine_options[{name!r}]"
        kinds: list[Kind] = [kind for kind, known_name in _backends if known_name == name]
        if not kinds:
            hint = did_you_mean(name, {known_name for _, known_name in _backends})
            raise ConfigError(f"engine_options: unknown executor {name!r}; {hint}")
        if not isinstance(options, Mapping):
            raise ConfigError(f"{where}={options!r}: expected a mapping of options of `build`")
        classes = [find_backend(kind, name, Backend).options for kind in kinds]
        known = {key for cls in classes for key in inspect.signature(cls).parameters}
        for key in options.keys() - known:
            is_place = key in inspect.signature(Engine.build).parameters
            hint = "it places one engine: give it to that engine's `build`" if is_place else did_you_mean(key, known)
            raise UnknownOptionError(f"{where} does not know the option {key!r}; {hint}")
        for cls in classes:
            if issubclass(cls, Options):  # `build` checks the values of other executors
                try:
                    cls(**{key: value for key, value in options.items() if key in cls.model_fields})
                except RliteError as error:
                    raise ConfigError(f"{where}: {error}") from None
