"""A train executor of another package: pipeline stages over gloo, each with a part of a Llama model's layers.

The first stage of a pipeline receives rows and arguments and passes them on. The last one has the loss and answers.
Hidden states go forward and their gradients back by torch.distributed's send and recv, one microbatch at a time.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlite.algorithms.logprobs import OnLogprobs
from rlite.algorithms.reduce import Loss, LossSums, Weight, call_loss
from rlite.backends.models.huggingface import exported_class
from rlite.data.packs import BatchShare, lazy_pack, pair_rows
from rlite.engine.registry import TrainBackend, register_executor
from rlite.engine.user_module import take_class
from rlite.errors import ConfigError
from rlite.nn.pretrained import real_tensors
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.parallel.host_memory import DeviceUsage, device_usage
from rlite.runtime.parallel.processes import subgroup
from rlite.runtime.parallel.shards import CheckpointReader, ParameterShard, nonfinite_names
from rlite.runtime.replicas.workers import Part, RankChoice
from rlite.runtime.storage.atomic import publish, seal
from rlite.runtime.storage.huggingface import Writer
from rlite.runtime.storage.sharded import load_values, random_state, set_random_state
from rlite.types import PackingMethod

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    max_tokens_per_microbatch: int = 16384
    balance_by: str = "tokens"
    packing_method: PackingMethod = "first_fit_decreasing"
    param_dtype: str = "float32"
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class PipelineLayout:
    num_data_ranks: int
    num_peers: int
    seq: int = 1
    pack_factor: int = 1


class PassThrough(nn.Module):
    """A layer of another stage."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return hidden_states


class Received(nn.Module):
    """Instead of the token embedding: what the stage before has sent."""

    hidden: Tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hidden[None]


def cut(module: Any, stage: int, num_stages: int) -> None:
    """Leave the module one stage's part, under the names that it has in the whole."""
    layers = module.model.layers
    own = range(stage * len(layers) // num_stages, (stage + 1) * len(layers) // num_stages)
    for index in set(range(len(layers))).difference(own):
        layers[index] = PassThrough()
    if stage > 0:
        module.model.embed_tokens = Received()
    if stage < num_stages - 1:
        module.model.norm, module.lm_head = nn.Identity(), nn.Identity()


class PipelineWorker:
    def __init__(self, context: WorkerContext, source: bytes, options: PipelineOptions, executor_size: int) -> None:
        self._options, self._source, self._rank = options, source, context.rank
        self._stage, self._num_stages = context.rank % executor_size, executor_size
        self._is_last = self._stage == executor_size - 1
        ranks = context.world_ranks
        first = context.rank - self._stage
        self._pipeline = subgroup(ranks[first : first + executor_size])
        self._copies = subgroup(ranks[self._stage :: executor_size])
        self._everyone = subgroup(ranks)
        self.arena = self.staged = None
        self._weight, self._is_finite = 0.0, True
        self.module: Any = None
        self.load(None)

    def _materialize(self) -> None:
        dtype = getattr(torch, self._options.param_dtype)
        with real_tensors(CPU):
            self.module = cloudpickle.loads(self._source)
            cut(self.module, self._stage, self._num_stages)
            for submodule in self.module.modules():
                for name, parameter in submodule._parameters.items():
                    if parameter is not None:
                        submodule._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))

    # -- between the stages ------------------------------------------------------------------------------------------

    def _from_first(self, *arguments: Any) -> Any:
        """Return the input of the first stage."""
        blob = [cloudpickle.dumps(arguments) if self._stage == 0 else None]
        dist.broadcast_object_list(blob, group_src=0, group=self._pipeline)
        return cloudpickle.loads(blob[0])

    def _sum(self, values: list[float], group: Any = None) -> list[float]:
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed, group=group or self._copies)
        return summed.tolist()

    def _run(self, function: Any, data: dict[str, Any]) -> Any:
        """Run this stage's part of a forward pass, and return hidden states [T, H] or the function's input."""
        if self._stage > 0:
            shape = len(data["input_ids"]), self.module.config.hidden_size
            hidden = torch.empty(shape, dtype=getattr(torch, self._options.param_dtype))
            dist.recv(hidden, group=self._pipeline, group_src=self._stage - 1)
            self.module.model.embed_tokens.hidden = hidden.requires_grad_(torch.is_grad_enabled())
        if self._is_last and isinstance(function, OnLogprobs):
            return self.module.compute_logprobs(data, function.temperature, function.positions(data))
        outputs = self.module.compute_logits(data)
        if not self._is_last:
            dist.send(outputs.detach().contiguous(), group=self._pipeline, group_dst=self._stage + 1)
        return outputs

    def _backward(self, outputs: Tensor) -> None:
        """`outputs` is the loss on the last stage, hidden states on the others."""
        gradient = None
        if not self._is_last:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, group=self._pipeline, group_src=self._stage + 1)
        outputs.backward(gradient)
        if self._stage > 0:
            received = self.module.model.embed_tokens.hidden.grad
            dist.send(received, group=self._pipeline, group_dst=self._stage - 1)

    # -- atomic operations -------------------------------------------------------------------------------------------

    def forward_backward(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight, adapter: None = None
    ) -> dict[str, float]:
        share, loss_fn, loss_weight_fn = self._from_first(share, loss_fn, loss_weight_fn)
        if not self._weight:
            self._forget()
        packs, weights, added = self._packs(share, loss_weight_fn)
        if added == 0:
            return {"loss": 0.0, "weight": 0.0}
        total = self._weight + added
        before = {p: p.grad * (self._weight / total) for p in self.module.parameters() if p.grad is not None}
        self.module.zero_grad(set_to_none=True)
        sums = LossSums()
        for data, weight in zip(packs, weights, strict=True):
            outputs = self._run(loss_fn, data)
            if self._is_last:
                loss, report = call_loss(loss_fn, outputs, data)
                sums.add({"loss": loss, **report}, weight)
                outputs = loss * (weight / total) if weight else _any(outputs).sum() * 0.0
            self._backward(outputs)
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self._copies)
            if parameter in before:
                parameter.grad += before[parameter]
        means = sums.means(self._sum, dist.get_world_size(self._copies)) if self._is_last else {"loss": 0.0}
        is_finite = self._sum([float(not math.isfinite(means["loss"]))], self._pipeline) == [0.0]
        self._weight, self._is_finite = total, self._is_finite and is_finite
        return {**means, "weight": added}

    def optimizer_step(self, adapter: None = None, settings: None = None) -> dict[str, float]:
        optimizer = self._optimizer()
        lr, weight, is_finite = float(optimizer.param_groups[0]["lr"]), self._weight, self._is_finite
        held = [p.grad for p in self.module.parameters() if p.grad is not None]
        if not held:
            return {"grad_norm": 0.0, "lr": lr, "weight": 0.0, "is_skipped": 1.0}
        norm = math.sqrt(self._sum([float(sum(g.double().square().sum() for g in held))], self._pipeline)[0])
        if norm > self._options.max_grad_norm:
            torch._foreach_mul_(held, self._options.max_grad_norm / (norm + 1e-6))
        is_skipped = not (is_finite and math.isfinite(norm))
        if not is_skipped:
            optimizer.step()
        self._forget()
        return {"grad_norm": norm, "lr": lr, "weight": weight, "is_skipped": float(is_skipped)}

    def train_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight, adapter: None = None
    ) -> dict[str, float]:
        self._optimizer()
        self._forget()
        means = self.forward_backward(share, loss_fn, loss_weight_fn)
        return {**means, **self.optimizer_step()}

    def _optimizer(self) -> torch.optim.Optimizer:
        if self.module.optimizer is None:
            raise ConfigError("training needs self.optimizer: set it in on_weights_materialized")
        return self.module.optimizer

    def _forget(self) -> None:
        self.module.zero_grad(set_to_none=True)
        self._weight, self._is_finite = 0.0, True

    def _packs(self, share: BatchShare, loss_weight_fn: Weight) -> tuple:
        packs = [dict(lazy_pack(share.batch, rows or pair_rows(share.batch), CPU)) for rows in share.microbatches]
        given = zip(share.microbatches, packs, strict=True)
        weights = [float(loss_weight_fn(data)) if rows else 0.0 for rows, data in given]
        return packs, weights, self._sum([sum(weights)])[0]

    @torch.no_grad()
    def eval_batch(
        self, share: BatchShare, loss_fn: Loss, loss_weight_fn: Weight, adapter: None = None
    ) -> dict[str, float]:
        share, loss_fn, loss_weight_fn = self._from_first(share, loss_fn, loss_weight_fn)
        packs, weights, total = self._packs(share, loss_weight_fn)
        sums = LossSums()
        with evaluating(self.module):
            for data, weight in zip(packs, weights, strict=True):
                outputs = self._run(loss_fn, data)
                if self._is_last:
                    loss, report = call_loss(loss_fn, outputs, data)
                    sums.add({"loss": loss, **report}, weight)
        means = sums.means(self._sum, dist.get_world_size(self._copies)) if self._is_last else {}
        return {**means, "weight": total}

    @torch.no_grad()
    def forward(
        self, share: BatchShare, post_hook: Callable[..., Tensor], without_adapters: bool, adapter: None = None
    ) -> Any:
        share, post_hook, _ = self._from_first(share, post_hook, without_adapters)
        found = []
        with evaluating(self.module):
            for rows in share.microbatches:
                data = dict(lazy_pack(share.batch, rows or pair_rows(share.batch), CPU))
                outputs = self._run(post_hook, data)
                if self._is_last:
                    values = post_hook(outputs, data)
                    found.append(values if rows else values[:0])
        return torch.cat(found) if self._is_last else None

    def invoke(self, args: tuple, kwargs: dict, method: str) -> Any:
        """Every stage runs the method on its part of the module."""
        args, kwargs, method = self._from_first(args, kwargs, method)
        return getattr(self.module, method)(*args, **kwargs)

    def reload_methods(self, source: bytes) -> None:
        self._source = source
        take_class(self.module, type(cloudpickle.loads(source)))

    def set_mode(self, is_training: bool) -> None:
        self.module.train(is_training)

    def step_lr_scheduler(self) -> float:
        self.module.lr_scheduler.step()
        return float(self.module.lr_scheduler.get_last_lr()[0])

    # -- weights and state -------------------------------------------------------------------------------------------

    def parameter_shards(self) -> dict[str, ParameterShard]:
        return {
            name: ParameterShard(parameter.data, (0,) * parameter.dim(), tuple(parameter.shape))
            for name, parameter in self.module.named_parameters()
        }

    def served_shards(self, has_values: bool = True) -> dict[str, ParameterShard]:
        return self.parameter_shards()

    def aliases(self) -> dict[str, str]:
        return {}

    def full_tensor(self, name: str) -> Tensor:
        held: list[Any] = [None] * self._num_stages
        dist.all_gather_object(held, dict(self.module.named_parameters()).get(name), group=self._pipeline)
        return next(tensor for tensor in held if tensor is not None)

    def export_values(self) -> dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]:
        shards = self.parameter_shards().items()
        return {name: (shard.box, shard.global_shape, shard.tensor.clone()) for name, shard in shards}

    def weights_changed(self, version: int) -> None:
        pass

    @torch.no_grad()
    def load(self, path: str | None) -> None:
        is_new = self.module is None
        if is_new:
            self._materialize()
        reader = CheckpointReader(path or self.module.materialization_source())
        for name, parameter in self.module.named_parameters():
            parameter.copy_(reader.read(name))
        if is_new:
            self.module.on_weights_materialized()

    def save(self, path: str) -> None:
        stages: list[Any] = [None] * self._num_stages
        dist.all_gather_object(stages, dict(self.module.named_parameters()), group=self._pipeline)
        if self._rank == 0:
            config = self.module.config
            writer = Writer(Path(path), config.dtype)
            for name, tensor in (item for stage in stages for item in stage.items()):
                writer.add(name, tensor.detach())
            writer.add_config(config, exported_class(self.module), Path(config._name_or_path))
            writer.finish()
        dist.barrier(group=self._everyone)

    def save_state(self, folder: str, path: str, facts: Mapping[str, Any], is_asynchronous: bool) -> None:
        """Every rank writes a file, at once."""
        torch.save(self._state(), Path(folder) / f"rank-{self._rank}.pt")
        dist.barrier(group=self._everyone)
        if self._rank == 0:
            seal(Path(folder), facts)
            publish(Path(folder), Path(path))
        dist.barrier(group=self._everyone)

    def has_saved(self) -> bool:
        return True

    def finish_saving(self) -> None:
        pass

    def load_state(self, path: str) -> None:
        self._take(load_values(Path(path) / f"rank-{self._rank}.pt"))

    def pack_state(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self._state(), buffer)
        return buffer.getvalue()

    def unpack_state(self, packed: bytes) -> None:
        self._take(torch.load(io.BytesIO(packed), weights_only=True))

    def _state(self) -> dict[str, Any]:
        module = self.module
        return {
            "model": module.state_dict(),
            "optimizer": module.optimizer.state_dict(),
            "scheduler": module.lr_scheduler.state_dict() if module.lr_scheduler else None,
            "gradients": {name: p.grad for name, p in module.named_parameters()},
            "accumulated": [self._weight, self._is_finite],
            "random": random_state(),
        }

    def _take(self, state: dict[str, Any]) -> None:
        module = self.module
        module.load_state_dict(state["model"])
        module.optimizer.load_state_dict(state["optimizer"])
        if module.lr_scheduler:
            module.lr_scheduler.load_state_dict(state["scheduler"])
        for name, parameter in module.named_parameters():
            parameter.grad = state["gradients"][name]
        self._weight, self._is_finite = state["accumulated"]
        set_random_state(state["random"])
        module.on_state_loaded()

    # -- residency and health ----------------------------------------------------------------------------------------

    def to_device(self, what: Part) -> None:
        if self.module is None:
            self._materialize()
            self.module.on_weights_materialized()

    def to_cpu(self) -> None:
        """They are there."""

    def to_meta(self) -> None:
        self.module = None

    def memory_bytes(self) -> dict[str, int]:
        parameters = [] if self.module is None else self.module.parameters()
        return {"weights": sum(p.nbytes for p in parameters), "optimizer": 0}

    def nonfinite_parameters(self) -> list[str]:
        return nonfinite_names(self.parameter_shards())

    def device_usage(self) -> DeviceUsage:
        return device_usage(CPU)


def _any(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logprobs


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    is_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(is_training)


def layout(num_workers: int, executor_size: int, options: PipelineOptions) -> PipelineLayout:
    return PipelineLayout(num_workers // executor_size, executor_size)


def check_module(module: Any, options: PipelineOptions) -> None:
    if module.config.tie_word_embeddings:
        raise ConfigError("a pipeline holds the embedding and the head on different stages: they cannot be tied")
    module.check_architecture()


BACKEND = TrainBackend(
    options=PipelineOptions,
    worker=PipelineWorker,
    layout=layout,
    check_module=check_module,
    ranks=RankChoice(receives=(0,), returns=-1),
)


def register() -> None:
    register_executor("train", "pipeline", f"{__name__}:BACKEND")
