"""Registration of the train executor "fsdp2", and the checks that run before any process starts."""

from __future__ import annotations

from pathlib import Path

from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.backends.fsdp2.worker import Fsdp2Worker, check_module_fits, reader_of
from rlite.backends.models.huggingface import HuggingFaceFsdp2TrainModule
from rlite.backends.models.liger import check_liger
from rlite.engine.train_backend import TrainBackend
from rlite.nn.base import BaseTrainModule
from rlite.runtime.cluster.session import current_session, has_gpus
from rlite.runtime.parallel.dims import ParallelDims


def layout(num_workers: int, executor_size: int, options: Fsdp2Options) -> ParallelDims:
    """Return the division of the work over the workers.

    Args:
        num_workers: number of workers in all copies of the model.
        executor_size: number of workers that hold one copy.
        options: sizes within a copy.

    Raises:
        ConfigError: the sizes do not divide; the message shows the equation.
    """
    return ParallelDims.of(num_workers, executor_size, options.sp_size, options.tp_size)


def check_module(module: BaseTrainModule, options: Fsdp2Options) -> None:
    """Refuse a module that cannot be computed with these options.

    Raises:
        ConfigError: the message gives the reason.
        CheckpointError: the module's source holds tensors that the module would leave out.
    """
    module.check_architecture()
    if has_gpus() and options.compute_dtype != "float32":
        module.check_gpu_kernels()
    if type(module).materialization_source is HuggingFaceFsdp2TrainModule.materialization_source:
        source = str(module.materialization_source())
        if Path(source).expanduser().is_dir():  # workers download a name of the hub
            check_module_fits(module, reader_of(source), source)
    if options.tp_size > 1:
        module.check_parallel(options.tp_size)
    if options.deterministic:
        module.check_deterministic(current_session().device)
    if options.use_liger_kernel:
        check_liger(module, current_session().device)


BACKEND = TrainBackend(options=Fsdp2Options, worker=Fsdp2Worker, layout=layout, check_module=check_module)
