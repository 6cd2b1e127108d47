"""An unmodified Hugging Face causal model whose parameters are this rank's shards, and their locations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlite.backends.embedded.attention import ATTENTION, AttentionPlan, PrefillPlan, ScoringPlan
from rlite.backends.embedded.lean_decoder import LeanDecoder
from rlite.backends.models.batch_invariant import make_invariant, obstacle
from rlite.backends.models.checkpoint_fit import check_fit
from rlite.backends.models.linear import speed_up_linear_layers
from rlite.errors import CheckpointError
from rlite.nn.pretrained import end_ids, load_config, meta_model, real_tensors, stored_dtype
from rlite.runtime.parallel.shards import Box, CheckpointReader, ParameterShard, nonfinite_names
from rlite.runtime.parallel.tensor_inference import TensorParallelPlan


@dataclass(frozen=True)
class _Place:
    """One parameter: its block, its global shape, and every module attribute that refers to it."""

    box: Box
    global_shape: tuple[int, ...]
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.box)

    def get(self) -> nn.Parameter:
        module, name = self.owners[0]
        return module.get_parameter(name)

    def set(self, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, name in self.owners:
            module._parameters[name] = parameter


class ShardedModel:
    """The model of one worker. It begins on the meta device; `load` or `allocate` gives it memory on `device`.

    Args:
        path: folder of a Hugging Face checkpoint.
        dtype: name of a torch dtype; None is the checkpoint's dtype.
        device: device of this rank.
        tp_group: the ranks that share the heads; None is one rank.
        is_deterministic: compute by `rlite.backends.models.batch_invariant` if it knows the model.

    Raises:
        ConfigError: the model cannot be served, because it has no attention backend or its heads do not divide.
        CheckpointError: `path` holds no usable checkpoint.
    """

    def __init__(
        self,
        path: str,
        dtype: str | None,
        device: torch.device,
        tp_group: dist.ProcessGroup | None,
        is_deterministic: bool = False,
    ) -> None:
        self.path = path
        self.device = device
        CheckpointReader(path)  # refuses a folder without weights
        self.config: PreTrainedConfig = load_config(path)
        self.dtype = getattr(torch, dtype) if dtype else stored_dtype(path, self.config)
        self.model = self._build()
        plan = TensorParallelPlan(self.model, tp_group)
        self.tp_size = plan.world_size
        self.num_vocabulary_shards = 1 if self.config.get_text_config().vocab_size % self.tp_size else self.tp_size
        """parts into which training divides the vocabulary"""
        self._places = self._find_places(plan)
        for place in self._places.values():
            place.set(torch.empty(place.local_shape, dtype=self.dtype, device="meta"))
        self.is_invariant = is_deterministic and obstacle(self.model, device.type, self.dtype) is None
        """true if the bits of a token depend on its sequence alone, not on the forward pass that computes them"""
        if self.is_invariant:
            make_invariant(self.model)
        elif device.type == "cpu":
            speed_up_linear_layers(self.model)
        plan.install()
        self._lean: LeanDecoder | None = None

    def _build(self) -> PreTrainedModel:
        # buffers are computed here for good: to_empty and friends would leave a rotary embedding of zeros
        model = meta_model(self.config, self.dtype, self.device)
        model.set_attn_implementation(ATTENTION)
        return model.eval().requires_grad_(False)

    def _find_places(self, plan: TensorParallelPlan) -> dict[str, _Place]:
        owners: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in self.model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, module, name))
        return {
            names[0][0]: _Place(plan.box(p), tuple(p.shape), tuple((module, name) for _, module, name in names))
            for p, names in owners.items()
        }

    def specialise(self, max_len: int) -> None:
        """Use the faster forward for sequences of at most `max_len` tokens, if this model has one."""
        self._lean = LeanDecoder.of(self.model, self.device, max_len, self.is_invariant)

    def prefill(self, plan: PrefillPlan) -> None:
        """Fill the cache with the keys and values of the plan's tokens."""
        if self._lean is not None:
            self._lean.fill(plan.tokens, plan.positions, plan)
        else:
            self.model.base_model(
                input_ids=plan.tokens[None], position_ids=plan.positions[None], use_cache=False, plan=plan
            )

    def logits(self, tokens: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the logits `[rows, vocabulary]` of one decode step.

        Args:
            tokens: one token of each sequence, `[rows]`.
            positions: positions of the tokens, `[rows]`.
            plan: the attention of this step.
        """
        if self._lean is not None:
            return self._lean.logits(tokens, positions, plan)
        output = self.model(input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, plan=plan)
        return output.logits[:, -1]

    def prompt_logits(self, plan: ScoringPlan) -> Tensor:
        """Return the logits `[tokens, vocabulary]` of the plan's tokens."""
        if self._lean is not None:
            return self._lean.logits(plan.tokens, plan.positions, plan)
        output = self.model(input_ids=plan.tokens[None], position_ids=plan.positions[None], use_cache=False, plan=plan)
        return output.logits[0]

    def load(self, path: str | None = None) -> None:
        """Fill the parameters from a checkpoint of this model. Each rank reads its own blocks.

        Parameters without memory are allocated.

        Args:
            path: folder of the checkpoint; None is the model's own.

        Raises:
            CheckpointError: the checkpoint does not fit, or its weights are not finite.
        """
        path = path or self.path
        reader = CheckpointReader(path)
        check_fit(reader, self.names(), path, self.model)
        self.allocate()
        with torch.no_grad(), real_tensors():
            for name, place in self._places.items():
                if (found := reader.shape(name)) != place.global_shape:
                    raise CheckpointError(f"{path}: {name!r} is {found}, the config says {place.global_shape}")
                place.get().copy_(reader.read(name, place.box))
        if names := nonfinite_names(self.parameter_shards()):
            raise CheckpointError(
                f"{path}: the weights are not finite in {self.dtype}: {names[0]} holds NaN or infinity"
            )

    def allocate(self) -> None:
        """Move the parameters to the device. Parameters on the meta device get uninitialised memory."""
        for place in self._places.values():
            tensor = place.get()
            if tensor.is_meta:
                with real_tensors(self.device):
                    place.set(torch.empty(place.local_shape, dtype=self.dtype))
            elif tensor.device != self.device:
                place.set(tensor.data.to(self.device))

    def to(self, device: torch.device) -> None:
        """Move the parameters. Moving to the meta device frees their memory. Buffers are small and stay."""
        for place in self._places.values():
            place.set(place.get().data.to(device))

    def names(self) -> set[str]:
        """Return the names of all parameters; a tied parameter has several."""
        return {name for name, _ in self.model.named_parameters(remove_duplicate=False)}

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """Return each parameter once, tied parameters under the embedding's name.

        The shards are valid until the model moves.
        """
        return {
            name: ParameterShard(place.get().data, tuple(s.start for s in place.box), place.global_shape)
            for name, place in self._places.items()
        }

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of the parameters. They change when parameters move, not when parameters are written."""
        return tuple(place.get().data_ptr() for place in self._places.values())

    def memory_bytes(self) -> int:
        """Return the bytes that the parameters hold, on the device or on the host."""
        tensors = [place.get() for place in self._places.values()]
        return sum(t.nbytes for t in tensors if not t.is_meta)

    def end_ids(self) -> frozenset[int]:
        """Return the model's own end tokens, from generation_config.json if it exists, else from the config."""
        return frozenset(end_ids(self.path, self.config))
