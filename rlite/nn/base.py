"""The module that carries an algorithm: an ordinary `torch.nn.Module`, on the meta device until an engine builds it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlite.algorithms.logprobs import gather_logprobs_entropy, next_token
from rlite.algorithms.token_logprobs import TokenLogprobs
from rlite.errors import ConfigError

CheckpointSource = str | Path | Mapping[str, Tensor]
"""a Hugging Face folder or hub name, or the tensors themselves by parameter name"""


class BaseTrainModule(nn.Module):
    """Subclass it (beside a model class, or alone), build it on meta, and call its methods on the engine.

    The module travels to the workers as code, config and meta tensors; each worker then makes its own shard of the
    weights. Real attributes that you set (a coefficient, a tokenizer) travel too.

    An instance may set `self.optimizer` and `self.lr_scheduler`; the engine's atomic operations use them.
    """

    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    context_group: dist.ProcessGroup | None = None
    """set by the worker: the ranks that share the tokens of each pack (context parallel)"""

    def materialization_source(self) -> CheckpointSource:
        """Where the weights come from. Called in every worker."""
        raise ConfigError(
            f"{type(self).__name__} does not say where its weights come from: define materialization_source(), "
            "returning the path of a checkpoint or a dict of tensors by parameter name"
        )

    def on_weights_materialized(self) -> None:
        """Called in every worker when its shard of the weights is on the device: make the optimizer here."""

    def on_state_loaded(self) -> None:
        """Called in every worker after a checkpoint to resume from was loaded."""

    def fsdp_units(self) -> list[nn.Module]:
        """The submodules whose parameters are gathered together; by default each entry of each `nn.ModuleList`."""
        return [child for module in self.modules() if isinstance(module, nn.ModuleList) for child in module]

    def recompute_activations(self) -> None:
        """Compute activations again in the backward pass instead of keeping them (gradient checkpointing)."""
        raise ConfigError(
            f"{type(self).__name__} has no recompute_activations(): define it, or build with "
            "gradient_checkpointing=False"
        )

    def check_architecture(self) -> None:
        """Raise ConfigError if the engine would compute the model wrongly. Called by `build`, before any process."""

    def check_parallel(self, size: int) -> None:
        """Raise ConfigError if `parallelize` could not split the module over so many ranks, before any is started."""

    def parallelize(self, mesh: DeviceMesh) -> None:
        """Split the module, still on meta, over the ranks of a one-dimensional mesh (tensor parallel)."""
        raise ConfigError(f"{type(self).__name__} has no parallelize(mesh): define it, or build with tp_size=1")

    def without_adapters(self) -> AbstractContextManager[None]:
        """Inside, the module computes as it would without its adapters; this one has none."""
        raise ConfigError(f"{type(self).__name__} has no adapters to switch off: see rlite.nn.LoraTrainModule")

    def checkpoint_name(self, name: str) -> str:
        """The name in the checkpoint of the parameter that is called `name` in this module."""
        return name

    def preprocess_named_parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Change a parameter on its way in. `tensor` is this worker's box of it; the shape must stay."""
        return tensor

    def missing_parameter(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The whole parameter that the source does not have, the same on every rank; None refuses the source."""
        return None

    def served_parameter(self, name: str, parameter: Tensor) -> Tensor:
        """The parameter with the value that leaves, sharded as `parameter` is. A collective of all ranks, in order."""
        return parameter

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Change a parameter on its way out, to a checkpoint or another engine; None leaves it out.

        `tensor` is this worker's box; the shape must stay.
        """
        return name, tensor

    def compute_logits(self, data: Mapping[str, Any]) -> Tensor:
        """Logits [T, V] of a pack: `input_ids` [T], `position_ids` [T], `cu_seqlens` [n + 1], `max_seqlen`."""
        raise ConfigError(
            f"{type(self).__name__} has no compute_logits(data): define it to use train_batch, eval_batch and forward"
        )

    def compute_logprobs(
        self, data: Mapping[str, Any], temperature: float = 1.0, positions: Tensor | None = None
    ) -> TokenLogprobs:
        """Log-probabilities and entropies [T] of each position's next token in a pack, for losses `on_logprobs`.

        Where `positions` [T] is given and False they are not needed and may be 0. This one makes all logits;
        override it where that can be avoided.
        """
        labels = next_token(data["input_ids"], data["cu_seqlens"])
        return TokenLogprobs(*gather_logprobs_entropy(self.compute_logits(data), labels, temperature))

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device


def is_on_meta(module: nn.Module) -> bool:
    """Whether no parameter of `module` holds memory."""
    return all(parameter.is_meta for parameter in module.parameters())
