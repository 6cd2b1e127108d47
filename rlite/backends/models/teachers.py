"""Output embeddings of teachers in a train module, a moving average of the weights of its own, and divergences.

A frozen teacher gives its output embedding to the student once. A student that teaches itself keeps a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlite.algorithms.divergence import Divergence, OnDivergence
from rlite.algorithms.logprobs import OnLogprobs, next_token
from rlite.backends.models.head_divergence import Head, TeacherTokens, linear_divergence
from rlite.backends.models.head_logprobs import local_part
from rlite.data.packs import check_has
from rlite.errors import ConfigError
from rlite.nn.base import BaseTrainModule
from rlite.runtime.parallel import fsdp
from rlite.runtime.parallel.host_memory import host_like

Source = tuple[Tensor, Head | TeacherTokens]
"""rows that have a teacher, and what it says there"""


class TeacherHeads(nn.Module):
    """Output embeddings of teachers by their number: buffers, which move with the student and are never saved."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        """teachers whose heads are here"""

    def put(self, number: int, weight: Tensor, bias: Tensor | None) -> None:
        """Keep the head of a teacher.

        Args:
            number: number of the teacher.
            weight: [vocabulary, width].
            bias: [vocabulary].
        """
        self.register_buffer(f"weight_{number}", weight, persistent=False)
        self.register_buffer(f"bias_{number}", bias, persistent=False)
        self.numbers = sorted({*self.numbers, number})

    def sources(self, hidden: Tensor, teachers: Tensor) -> Iterator[Source]:
        """Yield what each teacher says.

        Args:
            hidden: hidden states of the teachers, [rows, width] of the widest; others fill the first columns.
            teachers: number of the teacher of each row, [rows].

        Raises:
            ConfigError: a row has a teacher whose head is not here.
        """
        if missing := sorted({*teachers.unique().tolist()} - {-1, *self.numbers}):
            raise ConfigError(f"teachers {missing} have given no output embedding: call put_teacher_head for each")
        for number in self.numbers:
            weight, bias = (self._buffers[f"{name}_{number}"] for name in ("weight", "bias"))
            assert weight is not None
            if (weight.dtype, weight.device) != (hidden.dtype, hidden.device):  # once
                weight, bias = weight.to(hidden), None if bias is None else bias.to(hidden)
                self.put(number, weight, bias)
            own = (teachers == number).nonzero()[:, 0]
            yield own, Head(hidden[own, : weight.shape[1]], weight, bias)


class TaughtModule(BaseTrainModule):
    """A causal model that teachers may teach, and that may be a teacher."""

    @property
    def teacher_averages(self) -> dict[str, Tensor]:
        """Moving averages of the trained parameters by name, on the host; none before the first."""
        return vars(self).setdefault("kept_teacher_averages", {})

    @property
    def teacher_heads(self) -> TeacherHeads:
        """Heads of the teachers."""
        heads = self._modules.get("kept_teacher_heads")
        if not isinstance(heads, TeacherHeads):
            heads = TeacherHeads()
            self.add_module("kept_teacher_heads", heads)
        return heads

    def output_head(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the weight [V, H] and the bias [V] of the output embedding on the CPU, on the first rank alone.

        Raises:
            ConfigError: the model has no linear output embedding.
        """
        weight, bias, is_first = self._whole_head()
        return (weight.cpu(), None if bias is None else bias.cpu()) if is_first else None

    def put_teacher_head(self, number: int, weight: Tensor, bias: Tensor | None) -> None:
        """Keep the output embedding of a teacher.

        Args:
            number: number of the teacher.
            weight: [vocabulary, width].
            bias: [vocabulary].
        """
        self.teacher_heads.put(number, weight, bias)

    def keep_own_head(self, number: int) -> None:
        """Keep a copy of the module's present output embedding as that of a teacher."""
        weight, bias, _ = self._whole_head()
        self.teacher_heads.put(number, weight.clone(), None if bias is None else bias.clone())

    def heads_of_teachers(self) -> list[int]:
        """Return the numbers of the teachers whose heads are here: none after a worker was started again."""
        return self.teacher_heads.numbers

    def _whole_head(self) -> tuple[Tensor, Tensor | None, bool]:
        head: Any = self.get_output_embeddings()  # type: ignore[operator]
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"{type(self).__name__} has no linear output embedding, which a teacher of hidden states needs"
            )
        place = head.weight.device_mesh.get_coordinate() if isinstance(head.weight, DTensor) else None
        whole = [None if x is None else fsdp.full_tensor(x) for x in (head.weight, head.bias)]
        assert whole[0] is not None
        return whole[0], whole[1], not any(place or ())

    def has_average(self) -> bool:
        """Return whether moving averages are here. Checkpoints hold them."""
        return bool(self.teacher_averages)

    @torch.no_grad()
    def average_weights(self, decay: float) -> None:
        """Move the averages towards the weights: average = decay x average + (1 - decay) x weight.

        Args:
            decay: share of the average that stays. The first call takes the weights as they are.
        """
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if not self.teacher_averages:
            self.teacher_averages.update((name, host_like(p)) for name, p in trained.items())
        for name, parameter in trained.items():
            average = fsdp.local_tensor(self.teacher_averages[name])
            average.lerp_(fsdp.local_tensor(parameter.detach()).to(average.device), 1 - decay)

    @torch.no_grad()
    def exchange_average(self) -> None:
        """Exchange the weights for their averages, or back."""
        for name, whole in self.teacher_averages.items():
            average, weight = fsdp.local_tensor(whole), fsdp.local_tensor(self.get_parameter(name).detach())
            kept = weight.to(average.device, copy=True)
            weight.copy_(average)
            average.copy_(kept)


def of_taught(module: BaseTrainModule, function: OnLogprobs, data: Mapping[str, Any], positions: Tensor | None) -> Any:
    """Return the first argument of a function of divergences or hidden states.

    Args:
        module: a causal language model.
        function: an `OnDivergence` or an `OnHidden`.
        data: the pack.
        positions: bool [T], positions that the function reads; None is all.

    Raises:
        ConfigError: it is another module, or its logits are not those of a linear output embedding alone.
    """
    if not isinstance(module, TaughtModule):
        raise ConfigError(f"{type(module).__name__} is no causal language model of rlite.nn, as distillation needs")
    model: Any = module
    if isinstance(function, OnDivergence):
        return model.compute_logprobs(data, function.temperature, positions, function.divergence)
    return model.compute_hidden(data)


def compare(
    heads: TeacherHeads,
    divergence: Divergence,
    temperature: float,
    data: Mapping[str, Any],
    take: Callable[[Tensor], Tensor],
    head: nn.Linear,
    rows: Tensor,
    index: Tensor | None,
) -> Tensor:
    """Return the divergence of each row from its teacher, and 0 for a row without one, [rows].

    Args:
        heads: heads of the teachers.
        divergence: direction and support.
        temperature: divides the logits.
        data: the pack, with the columns of a teacher.
        take: selects this rank's computed tokens of values [T, ...].
        head: the student's output embedding.
        rows: hidden states of the student, [rows, width].
        index: place of each row among the computed tokens; None is all in their order.

    Raises:
        ConfigError: a row has a teacher whose head is not here.
        DataError: the pack has no columns of a teacher.
    """
    check_has(data, "teacher", "teacher_hidden" if heads.numbers else "teacher_logprobs")

    def chosen(values: Tensor) -> Tensor:
        return take(values) if index is None else take(values).index_select(0, index)

    teachers, part = chosen(data["teacher"]), local_part(head)
    if "teacher_hidden" in data:
        sources = heads.sources(chosen(data["teacher_hidden"]), teachers)
    else:
        ids = data["teacher_ids" if "teacher_ids" in data else "input_ids"]
        said = [chosen(next_token(x, data["cu_seqlens"])) for x in (ids, data["teacher_logprobs"])]
        said = [x[:, None] if x.dim() == 1 else x for x in said]
        own = (teachers >= 0).nonzero()[:, 0]
        sources = iter([(own, TeacherTokens(said[0][own].long(), said[1][own]))])
    found = rows.new_zeros(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    for own, teacher in sources:
        values = linear_divergence(rows[own], teacher=teacher, divergence=divergence, temperature=temperature, **part)
        found = found.index_copy(0, own, values.to(found.dtype))
    return found
