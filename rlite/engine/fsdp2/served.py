"""Parameters of a sharded module under the names and values that leave the engine, after the module's hooks."""

from __future__ import annotations

from torch import Tensor

from rlite.nn.base import BaseTrainModule
from rlite.parallel.fsdp import full_tensor, local_shard, local_tensor
from rlite.parallel.mesh import TrainMesh
from rlite.parallel.shards import ParameterShard


class ServedParameters:
    """One rank's boxes for weight sync, as `SourceWorker` declares them."""

    def __init__(self, module: BaseTrainModule, mesh: TrainMesh) -> None:
        self._module = module
        self._mesh = mesh
        self._own_names: dict[str, str] = {}
        """parameter name of each served name"""

    def shards(self, has_values: bool) -> dict[str, ParameterShard]:
        """Return this rank's served boxes by name; see `SourceWorker.served_shards`.

        Tensors that all tensor-parallel ranks hold are served by the first of them.
        """
        served, self._own_names = {}, {}
        for name, parameter in self._module.named_parameters():
            box = local_shard(self._module.served_parameter(name, parameter) if has_values else parameter)
            out = self._module.postprocess_named_parameter(name, box.tensor)
            if out is None:
                continue
            self._own_names[out[0]] = name
            if self._mesh.tensor_rank == 0 or not parameter.placements[-1].is_replicate():  # type: ignore[attr-defined]
                served[out[0]] = ParameterShard(out[1], box.offset, box.global_shape)
        return served

    def aliases(self) -> dict[str, str]:
        """Return the other served names of tied parameters, each with the name under which the parameter is served."""
        first = {id(p): name for name, p in self._module.named_parameters()}
        further: dict[str, str] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if name != first[id(p)]:
                names = (name, first[id(p)])
                out = [self._module.postprocess_named_parameter(n, local_tensor(p.detach())) for n in names]
                if out[0] is not None and out[1] is not None:
                    further[out[0][0]] = out[1][0]
        return further

    def full_tensor(self, name: str) -> Tensor:
        """Return a served tensor, gathered whole on this device. A collective of all ranks; call `shards` first."""
        own = self._own_names[name]
        parameter = self._module.served_parameter(own, self._module.get_parameter(own))
        out = self._module.postprocess_named_parameter(own, full_tensor(parameter))
        assert out is not None  # else it were not served
        return out[1]
