"""An engine that serves adapters beside its weights: several by name, and one of the policy.

    adapter ──> stage on every replica ──> does it change a logit? ──> rest ──> use it ──> go on
                       └── no, or an error: the earlier version is served as before

Requests name an adapter. Requests that name none are the policy's: the base alone, or with the adapter called None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError, WeightSyncError, WorkerError, did_you_mean
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.replica import Replica
from rlite.runtime.replicas.serving import ServingEngine

REMEDY = "use executor='torch' or executor='vllm', or p2p_weight_sync, which merges the adapter"


@dataclass(frozen=True)
class HeldAdapter:
    """An adapter that is served, for replicas that join."""

    weights: AdapterWeights
    version: int
    writer: str
    """name of the train engine, or folder, that it comes from"""


class AdapterServing(ServingEngine):
    """An engine with adapters beside its weights. The weights do not change while there are adapters.

    Args:
        *args: arguments of `ServingEngine`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: dict[str | None, HeldAdapter] = {}

    @property
    def adapters(self) -> dict[str | None, int]:
        """Versions of the adapters that are served, by name. None is the adapter of requests that name none."""
        return {name: self._version_of(name) for name in self._held}

    def _version_of(self, name: str | None) -> int:
        """Return the version of an adapter: of the policy's, that of the policy; 0 of one that is not there."""
        if name is None:
            return self._version
        return self._held[name].version if name in self._held else 0

    def load_adapter(self, name: str, path: str | Path, on_inflight: str = "continue") -> int:
        """Serve an adapter from a folder in PEFT's format, under a name that requests give.

        Args:
            name: a new name, or the name of an adapter whose next version this is.
            path: the folder.
            on_inflight: "continue" or "keep"; see `RliteTrainEngine.p2p_adapter_sync`.

        Returns:
            The version of the adapter under this name, from 1 on.

        Raises:
            ConfigError: the executor serves no adapters, or another writer wrote this adapter.
            CheckpointError: the folder holds no usable adapter.
            WeightSyncError: the adapter belongs to another base model, or changes no logit. The earlier version, if
                there is one, is still served.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"load_adapter: {name!r} is no name; give the adapter a name")
        self._check_can_take(f"the adapter {name!r}", name, "load_adapter", on_inflight)
        return self.take_adapter(name, AdapterWeights.read(Path(path)), "load_adapter", on_inflight)

    def remove_adapter(self, name: str | None) -> None:
        """Forget an adapter. No request for it may be in flight.

        Raises:
            ConfigError: there is no such adapter.
        """
        if name not in self._held:
            raise ConfigError(f"remove_adapter: {self._missing(name)}")
        with self._replicas.membership:
            self._replicas.pause()
            try:
                self._each(lambda replica: replica.drop_adapter(name))
                del self._held[name]
            finally:
                self._let_run()

    def take_adapter(
        self,
        name: str | None,
        weights: AdapterWeights,
        writer: str,
        on_inflight: str = "continue",
        may_be_zero: bool = False,
    ) -> int:
        """Serve a version of an adapter on all replicas, or leave everything as it is.

        Args:
            name: its name; None is the policy's adapter, whose version is the engine's policy version.
            weights: its values.
            writer: name of the engine or call that writes it.
            on_inflight: "continue" or "keep".
            may_be_zero: accept an adapter whose products are all 0.

        Returns:
            The version.

        Raises:
            ConfigError: the executor serves no adapters, or another writer wrote this adapter.
            WeightSyncError: a replica did not take the adapter. The earlier version is still served.
            WorkerError: a worker was lost that is not replaced.
        """
        what = f"the adapter {name!r}" if name else "the policy's adapter"
        self._check_can_take(what, name, writer, on_inflight)
        with self._replicas.membership:
            last = self._version_of(name)
            try:
                self._check_base(what, weights)
                changes = self._each(lambda replica: replica.stage_adapter(name, weights, last + 1))
                if False in changes and not (may_be_zero and weights.is_zero):
                    raise WeightSyncError("it changes no logit of the base model, as if it were not there")
            except WorkerError:
                raise
            except Exception as error:  # of any executor: the caller learns what is served
                served = f"version {last}" if name in self._held or name is None else "nothing under this name"
                why = f"{what} from {writer} was not taken over, and {self.name} still serves {served}"
                raise WeightSyncError(f"{why}: {error}") from error
            self._replicas.pause()
            try:
                self._each(lambda replica: replica.use_adapter(name, on_inflight == "keep"))
                self._held[name] = HeldAdapter(weights, last + 1, writer)
                if name is None:
                    self.set_version(last + 1)
            finally:
                self._let_run()
        return last + 1

    def _check_can_take(self, what: str, name: str | None, writer: str, on_inflight: str) -> None:
        obstacle = self.capabilities.adapter_obstacle
        if obstacle is None:
            self._need(False, "adapters", REMEDY)
        elif why := obstacle(vars(self.options) if self.is_built else {}):
            self._need(False, "adapters", why)
        if on_inflight not in ("continue", "keep"):
            raise ConfigError(f"on_inflight={on_inflight!r}: expected 'continue' or 'keep'")
        self._need_weights("adapters")
        if (held := self._held.get(name)) is not None and held.writer != writer:
            told = f"{what} of {self.name} is written by {held.writer}, so {writer} cannot write it, too"
            raise ConfigError(f"{told}; take another name, or remove_adapter({name!r}) first")

    def _check_base(self, what: str, weights: AdapterWeights) -> None:
        if weights.base and weights.base != self.base_id:
            told = f"{what} belongs to another base model: to weights {weights.base[:12]}"
            raise WeightSyncError(f"{told}, and this engine serves {self.base_id[:12]} ({self.path})")

    def _check_adapter(self, what: str, name: str | None) -> None:
        if name is not None and name not in self._held:
            raise ConfigError(f"{what}: {self._missing(name)}")

    def _missing(self, name: str | None) -> str:
        return f"{self.name} has no adapter {name!r}; {did_you_mean(str(name), [own for own in self._held if own])}"

    # -- what the weights may do meanwhile -----------------------------------------------------------------------

    @contextmanager
    def receiving_weights(self, on_inflight: str) -> Iterator[None]:
        """Hold generation while weights arrive; see `ServingEngine.receiving_weights`.

        Args:
            on_inflight: "continue" or "abort".

        Yields:
            None.

        Raises:
            ConfigError: there are adapters, which belong to the weights before.
        """
        self._need_no_adapters("p2p_weight_sync")
        with super().receiving_weights(on_inflight):
            yield

    def meta(self) -> None:
        """Free all memory, on the device and on the host. The weights and the adapters are gone."""
        super().meta()
        self._held = {}

    def _load(self, folder: str | None) -> None:
        self._need_no_adapters("load")
        super()._load(folder)

    def _built(self) -> None:
        self._held = {}
        super()._built()

    def _start_again(self, index: int) -> Replica:
        replica: Any = super()._start_again(index)
        for name, held in self._held.items():
            replica.stage_adapter(name, held.weights, self._version_of(name))
            replica.use_adapter(name, is_kept=True)
        return replica

    def _need_no_adapters(self, what: str) -> None:
        if self._held:
            names = ", ".join(sorted(name or "the policy's" for name in self._held))
            told = f"{what} would change the weights of {self.name}, to which its adapters belong ({names})"
            raise ConfigError(f"{told}: one model has two writers; remove_adapter() them first")
