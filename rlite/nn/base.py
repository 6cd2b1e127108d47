"""Train modules: ordinary `torch.nn.Module`s that carry an algorithm and stay on meta until an engine builds them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlite.algorithms.kept_ids import KeptIds, kept_logprobs
from rlite.algorithms.logits import gather_logprobs_entropy
from rlite.algorithms.logprobs import TokenLogprobs, next_token
from rlite.data.routing import RoutingShape
from rlite.errors import ConfigError
from rlite.runtime.parallel.fsdp import TrainMesh

CheckpointSource = str | Path | Mapping[str, Tensor]
"""a Hugging Face folder or hub name, or the tensors themselves by parameter name"""


class BaseTrainModule(nn.Module):
    """Base class of train modules.

    Subclass it (beside a model class, or alone), build it on meta, and call its methods on the engine.

    The module travels to the workers as code, config and meta tensors; each worker then makes its own shard of the
    weights. Real attributes that you set (a coefficient, a tokenizer) travel too.

    An instance may set `self.optimizer` and `self.lr_scheduler`; the engine's atomic operations use them.
    """

    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    lora: Any = None
    """`LoraOptions` of the module's own adapters, if it trains nothing else"""
    has_narrow_outputs: bool = False
    """true if `compute_logits` returns a few numbers for each token"""
    context_group: dist.ProcessGroup | None = None
    """set by the worker: the ranks that share the tokens of each pack (context parallel)"""
    routing: Any = None
    """set by the worker: the observer of a mixture of experts; see `rlite.backends.models.routing`"""
    replay: Any = None
    """set by the worker: what replays chosen experts; see `rlite.backends.models.replay`"""
    head_kernels: Any = None
    """set by the worker: `rlite.backends.models.triton_head`, if it computes log-probabilities"""

    def materialization_source(self) -> CheckpointSource:
        """Return the source of the weights. Called in every worker.

        Returns:
            Path of a Hugging Face checkpoint, or tensors by parameter name.

        Raises:
            ConfigError: the subclass does not define it.
        """
        problem = f"{type(self).__name__} does not say where its weights come from"
        remedy = "returning the path of a checkpoint or a dict of tensors by parameter name"
        raise ConfigError(f"{problem}: define materialization_source(), {remedy}")

    def on_weights_materialized(self) -> None:
        """Make the optimizer. Called in every worker when its shard of the weights is on the device."""

    def on_state_loaded(self) -> None:
        """React to a resume. Called in every worker after a checkpoint was loaded."""

    def fsdp_units(self) -> list[nn.Module]:
        """Return the submodules whose parameters are gathered together; default: each entry of each `nn.ModuleList`."""
        return [child for module in self.modules() if isinstance(module, nn.ModuleList) for child in module]

    def recompute_activations(self) -> None:
        """Recompute activations in the backward pass instead of keeping them (gradient checkpointing).

        Raises:
            ConfigError: the subclass does not define it.
        """
        problem = f"{type(self).__name__} has no recompute_activations()"
        raise ConfigError(f"{problem}: define it, or build with gradient_checkpointing=False")

    def check_architecture(self) -> None:
        """Raise ConfigError if the engine would compute the model wrongly.

        `build` calls it before any process starts.
        """

    def check_gpu_kernels(self) -> None:
        """Raise ConfigError if the model cannot be computed on GPUs in float16 and bfloat16.

        Called before any process starts.
        """

    def check_parallel(self, size: int) -> None:
        """Raise ConfigError if `parallelize` could not split the module over `size` ranks.

        Called before any process starts.
        """

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Split the module, still on meta, over the ranks of a one-dimensional mesh (tensor parallel).

        Raises:
            ConfigError: the subclass does not define it.
        """
        raise ConfigError(f"{type(self).__name__} has no parallelize(mesh): define it, or build with tp_size=1")

    def check_experts(self, options: Any, device_type: str) -> None:
        """Check that the options of experts fit the module. Called before any process starts.

        Args:
            options: the executor's options.
            device_type: type of the devices of the workers.

        Raises:
            ConfigError: they do not fit. The default implementation has no experts.
        """
        if options.ep_size > 1 or options.router_aux_loss_coef or options.router_bias_update_rate:
            problem = f"{type(self).__name__} has no prepare_experts(mesh, options)"
            raise ConfigError(f"ep_size and options of routers: {problem}; define it, or leave them out")

    def prepare_experts(self, mesh: TrainMesh, options: Any) -> list[nn.Module]:
        """Divide the experts of the module, still on meta, over the ranks of a mesh, and observe their routers.

        Args:
            mesh: place of this rank.
            options: the executor's options.

        Returns:
            The modules inside of `fsdp_units` that are sharded over the experts' own mesh.
        """
        return []

    def routing_shape(self) -> RoutingShape | None:
        """Return the form of the experts' choices that the module can replay; None if it has no experts."""
        return None

    def replay_obstacle(self) -> str | None:
        """Return why `compute_logits` cannot replay chosen experts; None if it can."""
        return "has no experts to choose"

    def prefix_obstacle(self) -> str | None:
        """Return why `compute_logits` cannot compute tokens with which sequences begin alike once; None if it can."""
        return f"{type(self).__name__} computes packs by itself"

    def check_deterministic(self, device_type: str) -> None:
        """Check that the log-probabilities of `make_deterministic` are the served ones.

        Called before any process starts.

        Args:
            device_type: type of the devices of the workers.

        Raises:
            ConfigError: they differ; the message gives the reason. The default implementation always raises.
        """
        problem = f"deterministic=true: {type(self).__name__} has no make_deterministic()"
        raise ConfigError(f"{problem}. Use a causal language model of rlite.nn, or leave deterministic out")

    def make_deterministic(self) -> None:
        """Make log-probabilities independent of the batch. Called in every worker, with weights on meta.

        A subclass that defines it also defines `check_deterministic`.
        """
        raise NotImplementedError

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a context in which the module computes without its adapters.

        Raises:
            ConfigError: the module has none.
        """
        raise ConfigError(f"{type(self).__name__} has no adapters to switch off: see rlite.nn.LoraTrainModule")

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of the parameter `name` of this module."""
        return name

    def preprocess_named_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Change a parameter on its way in.

        Args:
            name: the parameter.
            tensor: this worker's box of it; the shape must stay.

        Returns:
            The changed box.
        """
        return tensor

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return a whole parameter that the source does not have, the same on every rank; None refuses the source."""
        return None

    def leaves_out(self, name: str) -> bool:
        """Return True if the source may hold a tensor `name` that this module does not read.

        Any other tensor without a parameter refuses the source.
        """
        return False

    def served_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """Return the parameter with the value that leaves, sharded like `parameter`.

        A collective of all ranks, in order.
        """
        return parameter

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Change a parameter on its way out, to a checkpoint or another engine.

        Args:
            name: the parameter.
            tensor: this worker's box of it; the shape must stay.

        Returns:
            Name and box; None leaves the parameter out.
        """
        return name, tensor

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Compute logits [T, V] of a pack.

        Args:
            data: `input_ids` [T], `position_ids` [T], `cu_seqlens` [n + 1], `max_seqlen`.

        Returns:
            The logits.

        Raises:
            ConfigError: the subclass does not define it.
        """
        problem = f"{type(self).__name__} has no compute_logits(data)"
        raise ConfigError(f"{problem}: define it to use train_batch, eval_batch and forward")

    def compute_logprobs(
        self, data: Mapping[str, Any], temperature: float = 1.0, positions: Tensor | None = None
    ) -> TokenLogprobs:
        """Compute log-probabilities and entropies [T] of each position's next token, for losses `on_logprobs`.

        This implementation makes all logits; override it if that can be avoided.

        Args:
            data: the pack, as for `compute_logits`. If it has kept ids, log-probabilities are over them, and
                `full_logprobs` are over the vocabulary.
            temperature: divides the logits.
            positions: bool [T]; values where it is False are not needed and may be 0. None needs all.

        Returns:
            Log-probabilities and entropies.
        """
        labels = next_token(data["input_ids"], data["cu_seqlens"])
        values = logprobs_of_logits(self.compute_logits(data), labels, temperature, KeptIds.of_pack(data))
        return TokenLogprobs(*values)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device


def logprobs_of_logits(logits: Tensor, labels: Tensor, temperature: float, kept: KeptIds | None) -> tuple[Tensor, ...]:
    """Return log-probabilities and entropies [T], and with kept ids log-probabilities in the whole vocabulary [T].

    `logits`: [T, V]. `labels`: next tokens, [T]. `kept`: kept ids of the tokens, by row of the logits; None keeps the
    vocabulary.
    """
    logprobs, entropies = gather_logprobs_entropy(logits, labels, temperature)
    if kept is None:
        return logprobs, entropies
    return kept_logprobs(logits, labels, temperature, kept, logprobs), entropies, logprobs


def is_on_meta(module: nn.Module) -> bool:
    """Return True if no parameter of `module` holds memory."""
    return all(parameter.is_meta for parameter in module.parameters())
