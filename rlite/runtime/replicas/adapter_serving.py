"""An engine that serves adapters beside its weights: several by name, and one of the policy.

    adapter ──> stage on every replica ──> does it change a logit? ──> rest ──> use it ──> go on
                       └── no, or an error: the earlier version is served as before ──┘ └── an error: go back

A replica on which going back fails, too, is taken out of service: no replica serves other weights under one version.

Requests name an adapter. Requests that name none are the policy's: the base alone, or with the adapter called None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlite.errors import ConfigError, WeightSyncError, WorkerError, did_you_mean
from rlite.runtime.replicas.adapters import AdapterWeights
from rlite.runtime.replicas.replica import Replica
from rlite.runtime.replicas.serving import ServingEngine
from rlite.runtime.replicas.workers import together

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

        Without the policy's adapter (None) the base answers, under the next policy version. A replica that does not
        forget the adapter is taken out of service.

        Raises:
            ConfigError: there is no such adapter.
            WorkerError: a worker was lost that is not replaced.
        """
        if name not in self._held:
            raise ConfigError(f"remove_adapter: {self._missing(name)}")
        with self._replicas.membership:
            try:
                self._replicas.pause()
                del self._held[name]
                self._go_back(name, is_kept=False)
                self._each(lambda replica: replica.check())
                if name is None:
                    self.set_version(self._version + 1)
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
        what = _described(name)
        self._check_can_take(what, name, writer, on_inflight, weights.rank)
        is_kept, is_begun = on_inflight == "keep", False
        with self._replicas.membership:
            last = self._version_of(name)
            try:
                self._check_base(what, weights)
                changes = self._each(lambda replica: replica.stage_adapter(name, weights, last + 1))
                if False in changes and not (may_be_zero and weights.is_zero):
                    raise WeightSyncError("it changes no logit of the base model, as if it were not there")
                self._replicas.pause()
                is_begun = True
                self._each(lambda replica: replica.use_adapter(name, is_kept))
                if name is None:
                    self.set_version(last + 1)
                self._held[name] = HeldAdapter(weights, last + 1, writer)
            except BaseException as error:
                if is_begun or name not in self._held:
                    self._replicas.pause()
                    self._go_back(name, is_kept)
                told = f"{what} from {writer} was not taken over, and {self._served(name)}"
                if isinstance(error, Exception) and not isinstance(error, WorkerError):
                    raise WeightSyncError(f"{told}: {error}") from error
                error.add_note(told)
                raise
            finally:
                self._let_run()
        return last + 1

    def _go_back(self, name: str | None, is_kept: bool) -> None:
        """Serve what is held under a name, or nothing, on every replica. The replicas rest.

        A replica on which this fails is taken out of service.
        """
        what, held, version = _described(name), self._held.get(name), self._version_of(name)

        def act(replica: Any) -> Exception | None:
            try:
                if held is None:
                    replica.drop_adapter(name)
                else:
                    replica.stage_adapter(name, held.weights, version)
                    replica.use_adapter(name, is_kept)
                if name is None:
                    replica.set_version(version)
            except Exception as error:  # of any executor: what the replica serves is not known
                return error
            return None

        replicas = self._replicas.serving
        for replica, error in zip(replicas, together(replicas, act), strict=True):
            if error is not None:
                told = f"{what} could not be changed back on replica {replica.workers.index} of {self.name}: {error}"
                self._replicas.expel(replica, error if isinstance(error, WorkerError) else WorkerError(told))

    def _served(self, name: str | None) -> str:
        if self.group.failure is not None:
            return f"{self.name} has to be built again, because a replica could not go back"
        has_version = name is None or name in self._held
        served = f"version {self._version_of(name)}" if has_version else "nothing under this name"
        return f"{self.name} still serves {served}"

    def check_adapters(self, rank: int = 1, options: Mapping[str, Any] | None = None) -> None:
        """Check that the engine can serve adapters.

        Args:
            rank: rank of the adapters.
            options: options of `build`; default: those with which the engine is built.

        Raises:
            ConfigError: it cannot. The message names the option.
        """
        obstacle = self.capabilities.adapter_obstacle
        if obstacle is None:
            self._need(False, "adapters", REMEDY)
        elif why := obstacle(options or (vars(self.options) if self.is_built else {}), rank):
            self._need(False, "adapters", why)

    def _check_can_take(self, what: str, name: str | None, writer: str, on_inflight: str, rank: int = 1) -> None:
        self.check_adapters(rank)
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

    def _adopt(self, replica: Any, giver: Replica) -> int | None:
        for name, held in self._held.items():
            replica.stage_adapter(name, held.weights, self._version_of(name))
            replica.use_adapter(name, is_kept=True)
        return super()._adopt(replica, giver)

    def _need_no_adapters(self, what: str) -> None:
        if self._held:
            names = ", ".join(sorted(name or "the policy's" for name in self._held))
            told = f"{what} would change the weights of {self.name}, to which its adapters belong ({names})"
            raise ConfigError(f"{told}: one model has two writers; remove_adapter() them first")


def _described(name: str | None) -> str:
    return f"the adapter {name!r}" if name else "the policy's adapter"
