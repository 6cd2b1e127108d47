"""A train engine on which the methods of the user's module are called, on all workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rlite.data.dispatch import cuts_sequences, gather, gather_of, plan_shares, scatter
from rlite.engine.registry import TrainBackend, TrainWorker, find_backend
from rlite.engine.train_state import ResumableEngine
from rlite.engine.user_module import check_train_module, redefined, user_methods, with_class

YIELDING = ("forward_backward", "optimizer_step")
"""methods of the engine that the module's methods of the same names replace"""


class ModuleEngine(ResumableEngine):
    """A train engine with the methods of its module. `RliteTrainEngine` adds the atomic operations.

    Args:
        module: a `BaseTrainModule` on the meta device.
        executor: name of the parallel backend.
    """

    def __init__(self, module: nn.Module, executor: str = "fsdp2") -> None:
        checked = check_train_module(module, self._own_names())
        super().__init__(find_backend("train", executor, TrainBackend), executor, checked)
        self._yield_to_module()

    @classmethod
    def _own_names(cls) -> set[str]:
        return set(dir(cls)).difference(YIELDING)

    def _yield_to_module(self) -> None:
        """Let the module's methods replace the engine's methods of the same names."""
        for name in YIELDING:
            vars(self).pop(name, None)
        for name in user_methods(type(self.module)).keys() & set(YIELDING):
            vars(self)[name] = self._module_method(name)

    def reload_methods(self) -> list[str]:
        """Call the methods of the module's class as it is defined now, after a notebook cell defined it again.

        Weights, optimizer and attributes stay. Classes that `importlib.reload` defined again count, too.

        Returns:
            The names of the methods that are new, changed or gone; [] if the class was not defined again.

        Raises:
            ConfigError: the new definition changes the base classes, `__init__` or `on_weights_materialized`, or an
                engine cannot serve it. Nothing was changed.
        """
        new = redefined(type(self.module))
        if new is type(self.module):
            return []
        with with_class(self.module, new, self._own_names()) as changed:
            source = self._source()
            if self.is_built:
                self._workers.call(TrainWorker.reload_methods, source)
                self._set_factory(source)
        self._yield_to_module()
        return changed

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a public method of the module, which is called on every data-parallel rank."""
        module = self.__dict__.get("module")
        if module is None or name.startswith("_") or not callable(getattr(type(module), name, None)):
            problem = f"{type(self).__name__} has no method {name!r}"
            raise AttributeError(f"{problem}, and neither has its module {type(module).__name__}")
        return self._module_method(name)

    def _module_method(self, name: str) -> Callable[..., Any]:
        method = getattr(type(self.module), name)

        def call(*args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
            self._need_weights(name)
            shares = plan_shares(args, kwargs, self.num_data_ranks)
            calls = scatter(args, kwargs, self.num_data_ranks, self.dims.seq, shares=shares)
            named, is_cut = [(*call, name) for call in calls], cuts_sequences(args, kwargs)
            results = self._ask_each(TrainWorker.invoke, named, what=name, timeout=timeout, has_own_statistics=is_cut)
            return gather(results, gather_of(method), shares)

        call.__name__ = name
        call.__doc__ = method.__doc__
        return call

    @property
    @abstractmethod
    def dims(self) -> Any:
        """Division of work over the workers."""

    @property
    @abstractmethod
    def num_data_ranks(self) -> int:
        """Number of ranks over which batches are split."""

    @abstractmethod
    def _ask_each(self, method: Callable[..., Any], calls: Sequence[tuple], **options: Any) -> list[Any]:
        """Return the result of every data rank."""
