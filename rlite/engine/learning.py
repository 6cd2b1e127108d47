"""The part of a train engine beside whole steps: the halves of a step, and adapters that learn by themselves."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlite.algorithms.reduce import Loss, Weight
from rlite.engine.module_methods import ModuleEngine
from rlite.engine.registry import AdapterTrainWorker, TrainWorker
from rlite.engine.weights import SyncReport
from rlite.errors import CheckpointError, ConfigError, did_you_mean
from rlite.nn.options import LoraOptions
from rlite.nn.pretrained import local_checkpoint
from rlite.observability import trace
from rlite.runtime.parallel.shards import CheckpointReader
from rlite.runtime.replicas.adapter_serving import AdapterServing
from rlite.runtime.replicas.engine import Engine
from rlite.runtime.storage.atomic import MANIFEST, verify
from rlite.wording import warn_once

logger = logging.getLogger(__name__)


class LearningEngine(ModuleEngine):
    """A train engine that accumulates gradients and makes steps, of its module and of adapters by name.

    Adapters live in the workers. They are gone after `release()`, `meta()` and a restart of workers. `save_state` and
    `take_snapshot` keep them; `save` does not.

    Args:
        module: a `BaseTrainModule` on the meta device.
        executor: name of the parallel backend.
    """

    def __init__(self, module: nn.Module, executor: str = "fsdp2") -> None:
        super().__init__(module, executor)
        self._adapters: dict[str, LoraOptions] = {}
        self._read_from: str | Path | None = None
        """folder of the weights that were read last; None is the module's own source"""

    def _fingerprint(self) -> str:
        source = self.module.materialization_source() if self._read_from is None else self._read_from
        if isinstance(source, Mapping):
            return super()._fingerprint()
        return CheckpointReader(local_checkpoint(source)).fingerprint()

    # -- learning ------------------------------------------------------------------------------------------------

    def forward_backward(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: Loss,
        loss_weight_fn: Weight | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Accumulate the gradients of a batch, for `optimizer_step`.

        After any number of calls the gradients are those of the weighted mean over all microbatches since the last
        step, or of the sum. Several calls give the same gradients as one call with all rows. The gradients of the
        module and of each adapter accumulate apart, so calls for several adapters may alternate. The first call after
        a step drops gradients that methods of the module left. If `loss_fn` raises, the accumulated gradients are
        dropped. If the module defines a method of this name, the module's method is called instead.

        Args:
            batch: as for `train_batch`.
            loss_fn: as for `train_batch`.
            loss_weight_fn: as for `train_batch`. Weights of several calls must count the same quantity.
            adapter: as for `train_batch`.

        Returns:
            This batch's `loss`, the means that loss_fn reports, `weight`, `num_tokens`, `num_microbatches` per rank.

        Raises:
            DataError: the batch has another form, or a sequence is longer than a microbatch.
        """
        self._begin_training("forward_backward", adapter)
        return self._atomic(TrainWorker.forward_backward, batch, loss_fn, loss_weight_fn, adapter)

    def optimizer_step(self, adapter: str | None = None, **settings: Any) -> dict[str, float]:
        """Clip the accumulated gradients, make one optimizer step, and drop the gradients.

        The gradients may also come from methods of the module. If the module defines a method of this name, the
        module's method is called instead.

        Args:
            adapter: the adapter whose gradients and optimizer are meant; None is the module.
            **settings: new values of the optimizer's options, which stay: `lr`, `betas`, `eps`, `weight_decay`. An
                adapter begins with lr 1e-4, betas (0.9, 0.999), eps 1e-8 and no weight decay. `max_grad_norm` is for
                this step; default: the option of `build`. Infinity does not clip.

        Returns:
            `grad_norm`, `lr`, `weight` of all calls of `forward_backward` since the last step, and `is_skipped`.
                `is_skipped` is 1 if no step was made, because there is no gradient, or a loss or a gradient is not
                finite.

        Raises:
            ConfigError: the module has no optimizer, or the optimizer has no such option.
        """
        self._need_weights("optimizer_step")
        self._begin_training("optimizer_step", adapter)
        if settings and self._backend.check_adapter is None:
            raise ConfigError(f"optimizer_step: the executor {self.executor_name!r} takes no {sorted(settings)[0]}")
        given = (adapter, settings) if adapter is not None or settings else ()
        return self._ask_each(TrainWorker.optimizer_step, [given] * self.num_data_ranks)[0]

    def eval_batch(
        self,
        batch: Mapping[str, Tensor],
        loss_fn: Loss,
        loss_weight_fn: Weight | None = None,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Return the statistics of a batch as `train_batch` does, without a step, with the module in evaluation mode.

        Args:
            batch: as for `train_batch`.
            loss_fn: as for `train_batch`.
            loss_weight_fn: as for `train_batch`.
            adapter: as for `train_batch`.
        """
        return self._atomic(TrainWorker.eval_batch, batch, loss_fn, loss_weight_fn, adapter)

    # -- condition -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        size = f"{type(self.module).__name__}, {self.num_parameters / 1e6:.2f} M parameters"
        if not self.is_built:
            return f"{type(self).__name__}({size}, not built)"
        return f"{type(self).__name__}({size}, {self.dims}, {self._where()})"

    @property
    def num_parameters(self) -> int:
        """Number of the module's parameters; tied parameters count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def device(self) -> torch.device:
        """Device on which the driver should keep batches for this engine."""
        return torch.device("cpu")

    def choices(self) -> dict[str, str]:
        """Return what the workers chose when they were built, and why, by topic; {} if the executor chooses nothing."""
        return self._workers.call(self._backend.choices)[0] if self._backend.choices else {}

    def nonfinite_parameters(self) -> list[str]:
        """Return the names of parameters that hold NaN or infinity, on any worker."""
        return sorted({name for names in self._workers.call(TrainWorker.nonfinite_parameters) for name in names})

    # -- adapters ------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> dict[str, LoraOptions]:
        """The adapters by name, with the whole names of their layers."""
        return dict(self._adapters)

    def add_adapter(self, name: str, options: LoraOptions | Mapping[str, Any] | None = None, seed: int = 0) -> None:
        """Add an adapter beside linear layers of the module. It computes nothing before its first step.

        Adapters may have different ranks and layers. While there are adapters, the weights of the module do not change.

        Args:
            name: a new name.
            options: rank, scale and layers; without dropout.
            seed: seed of the initial values.

        Raises:
            ConfigError: the name is taken, or the module or the executor cannot have the adapter.
        """
        self._need_weights("add_adapter")
        chosen = options if isinstance(options, LoraOptions) else LoraOptions(**(options or {}))
        self._add("add_adapter", name, chosen, seed)

    def _add(self, what: str, name: str, options: LoraOptions, seed: int = 0) -> None:
        if not isinstance(name, str) or not name or name in self._adapters:
            problem = "is there already" if name in self._adapters else "is no name"
            raise ConfigError(f"{what}: {name!r} {problem}; give the adapter another name")
        whole = self._checked(what, options)
        self._workers.call(AdapterTrainWorker.add_adapter, name, whole, seed)
        self._adapters[name] = whole

    def _checked(self, what: str, options: LoraOptions) -> LoraOptions:
        if self._backend.check_adapter is None:
            raise ConfigError(f"{what}: the executor {self.executor_name!r} has no adapters by name")
        return self._backend.check_adapter(self.module, self.options, options)

    def remove_adapter(self, name: str) -> None:
        """Drop an adapter with its gradients and its optimizer.

        Raises:
            ConfigError: there is no such adapter.
        """
        self._check_adapter("remove_adapter", name)
        self._workers.call(AdapterTrainWorker.remove_adapter, name)
        del self._adapters[name]

    def forget_gradients(self, adapter: str) -> None:
        """Drop the accumulated gradients of an adapter. Its values and its optimizer stay.

        Raises:
            ConfigError: there is no such adapter.
        """
        self._check_adapter("forget_gradients", adapter)
        self._workers.call(AdapterTrainWorker.forget_gradients, adapter)

    def save_adapter(self, name: str, path: str | Path, with_optimizer: bool = True) -> None:
        """Write an adapter, whole or not at all: PEFT's files, and the state of its optimizer.

        `peft.PeftModel.from_pretrained(base, path)` opens the folder. Accumulated gradients are left out.

        Args:
            name: the adapter.
            path: a folder on a file system that all workers and this process share. It is replaced.
            with_optimizer: write the state of the optimizer, which is twice as large as the adapter.

        Raises:
            ConfigError: there is no such adapter.
            CheckpointError: the files could not be written. `path` is unchanged.
        """
        self._check_adapter("save_adapter", name)
        facts = {"adapter": name, "base": self.base_id, "has_state": with_optimizer}
        where = str(Path(path).absolute())
        self._workers.call(AdapterTrainWorker.save_adapter, name, where, facts, with_optimizer)

    def load_adapter(self, name: str, path: str | Path, with_optimizer: bool = True) -> None:
        """Read an adapter of `save_adapter`, or one in PEFT's format. Accumulated gradients are dropped.

        Args:
            name: a new name, or an adapter of the same rank, scale and layers, which is overwritten.
            path: the folder.
            with_optimizer: read the state of the optimizer. Otherwise the optimizer begins anew.

        Raises:
            ConfigError: the adapter belongs to another base model, or the adapter of this name has another form.
                Nothing was changed.
            CheckpointError: a file is missing or damaged. Nothing was changed.
        """
        self._need_weights("load_adapter")
        folder, what = Path(path).absolute(), "load_adapter"
        if self._backend.read_adapter is None:
            raise ConfigError(f"{what}: the executor {self.executor_name!r} has no adapters by name")
        has_state = False
        if (folder / MANIFEST).exists():
            facts = verify(folder)
            has_state = facts.get("has_state", True)
            if (base := facts.get("base")) != self.base_id:
                told = f"the adapter {folder} belongs to another base model, to weights {str(base)[:12]}"
                raise ConfigError(f"{what}: {told}, and this engine has {self.base_id[:12]}")
        if with_optimizer and not has_state:
            told = "holds no state of an optimizer that save_adapter has written"
            raise CheckpointError(f"{folder}: {told}; load it with with_optimizer=False")
        found = self._backend.read_adapter(self.module, folder)
        is_new = name not in self._adapters
        if is_new:
            self._add(what, name, found)
        elif (own := self._adapters[name]) != found:
            forms = [f"rank {o.rank}, alpha {o.alpha:g}, {len(o.target_modules)} layers" for o in (own, found)]
            told = f"{name!r} has {forms[0]}, and {folder} has {forms[1]}, or other layers"
            raise ConfigError(f"{what}: {told}; remove_adapter({name!r}) first, or load under another name")
        try:
            self._workers.call(AdapterTrainWorker.load_adapter, name, str(folder), with_optimizer)
        except CheckpointError:
            if is_new:
                self.remove_adapter(name)
            raise

    def p2p_adapter_sync(
        self,
        target: Engine,
        adapter: str | None = None,
        name: str | None = None,
        on_inflight: Literal["continue", "keep"] = "continue",
        may_be_zero: bool = False,
    ) -> SyncReport:
        """Let an inference engine serve an adapter beside its base, which has to be the base of this engine.

        Only the adapter travels. The version before it is served until all replicas have the new one.

        Args:
            target: an inference engine.
            adapter: an adapter of this engine; None is the module's own (`add_lora`).
            name: name that requests give; default: that of `adapter`. Without either it is the policy's adapter, for
                requests that name none, and the engine's policy version rises by one.
            on_inflight: "continue" resumes generation in flight from its tokens, with a recomputed cache; "keep" lets
                it end with the version with which it began, so that several versions are served.
            may_be_zero: accept an adapter whose products are all 0, such as one before its first step.

        Returns:
            The report of the sync, with the version of the adapter under its name.

        Raises:
            ConfigError: there is no such adapter, the target serves no adapters, or another engine writes this one.
            WeightSyncError: the target serves another base, the adapter does not fit, or it changes no logit. The
                version before it is still served.
        """
        self._need_weights("p2p_adapter_sync")
        if adapter is not None:
            self._check_adapter("p2p_adapter_sync", adapter)
        if not isinstance(target, AdapterServing):
            raise ConfigError(f"p2p_adapter_sync: {target.name} is no inference engine; use p2p_weight_sync")
        started = time.perf_counter()
        with trace.span("weight sync", source=self.name, target=target.name):
            found = self._workers.call(AdapterTrainWorker.adapter_weights, adapter)
            weights = replace(next(each for each in found if each is not None), base=self.base_id)
            version = target.take_adapter(name or adapter, weights, self.name, on_inflight, may_be_zero)
        num_workers = sum(len(copy.ranks) for copy in target.members)
        return SyncReport(
            version=version,
            num_bytes=weights.num_bytes * num_workers,
            seconds=time.perf_counter() - started,
            transport="adapter",
            num_tensors=2 * len(weights.factors),
        )

    # -- what the module's weights may do meanwhile --------------------------------------------------------------

    def load(self, path: str | Path | None = None) -> None:
        """Read weights from a Hugging Face checkpoint; see `ResumableEngine.load`.

        Raises:
            ConfigError: there are adapters, which belong to the weights before.
        """
        self._check_learner("load", None)
        super().load(path)
        self._base, self._read_from = None, path

    def _facts(self) -> dict[str, Any]:
        adapters = {name: options.model_dump() for name, options in self._adapters.items()}
        return {"adapters": adapters, "base": self.base_id} if adapters else {}

    def _check_facts(self, facts: Mapping[str, Any]) -> None:
        for name, options in facts.get("adapters", {}).items():
            self._checked(f"resume with the adapter {name!r}", LoraOptions(**options))

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        found = {name: LoraOptions(**options) for name, options in facts.get("adapters", {}).items()}
        if lost := sorted(self._adapters.keys() - found.keys()):
            logger.warning("%s: the state holds no adapter %s, which is gone", self.name, ", ".join(lost))
        self._adapters = found
        if self.module.lora is None:
            self.base_id = facts.get("base", "")

    def meta(self) -> None:
        """Free all memory, on the device and on the host. The weights and the adapters are gone."""
        super().meta()
        self._adapters = {}

    def _built(self) -> None:
        super()._built()
        self._adapters, self._read_from = {}, None

    def _restart(self) -> None:
        super()._restart()
        self._adapters = {}

    def _check_learner(self, what: str, adapter: str | None) -> None:
        """Refuse to change weights beside which adapters were made, and to use an adapter that is not there."""
        if adapter is not None:
            self._check_adapter(what, adapter)
        elif self._adapters:
            told = f"{what} would change the weights to which the adapters {', '.join(sorted(self._adapters))} belong"
            raise ConfigError(f"{told}; name an adapter (adapter=), or remove_adapter() them first")

    def _base_of_merged(self, target: Engine) -> str:
        """Return `base_id` of an engine into whose weights the module's own adapter was merged."""
        if vars(self.options).get("deterministic"):
            told = "the merged adapter gives other bits than deterministic=true computes; p2p_adapter_sync keeps them"
            warn_once(logger, f"p2p_weight_sync into {target.name}: {told}")
        return ""

    def _check_adapter(self, what: str, name: str) -> str:
        """Return the name of an adapter if it is there."""
        self._need_weights(what)
        if name not in self._adapters:
            raise ConfigError(f"{what}: there is no adapter {name!r}; {did_you_mean(str(name), self._adapters)}")
        return name

    @abstractmethod
    def _begin_training(self, what: str, adapter: str | None) -> None:
        """Check what learns, and note that the weights of the base will be others."""

    @abstractmethod
    def _atomic(self, method: Any, batch: Mapping[str, Tensor], *functions: Any) -> dict[str, Any]:
        """Return the statistics of a worker's method on a batch; the last of `functions` is the adapter."""
