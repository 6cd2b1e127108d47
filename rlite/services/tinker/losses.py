"""The losses of the Tinker API, as losses of a train engine. Each is a sum over tokens, never a mean.

With lp the log-probability of a target, q that of the sampler, A its advantage and r = exp(lp - q):

    cross_entropy         -w lp                          targets [N] or, for soft targets, [N, K]
    importance_sampling   -r A                           (off-policy policy gradient)
    ppo                   -min(r A, clip(r) A)           (arXiv:1707.06347)
    cispo                 -sg(clip(r)) A lp              (arXiv:2506.13585; sg stops the gradient)
    dro                   -(A lp - beta / 2 (lp - q)^2)  (arXiv:2405.19107)

The target at a position is usually the next token of the sequence, so one token is added at the end and the engine
computes log-probabilities without keeping logits. For other targets it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.algorithms import OnLogprobs, PerToken, TokenLogprobs
from rlite.errors import DataError, did_you_mean

_Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One datum: the tokens that the model reads, and the loss's inputs at their positions."""

    tokens: list[int]
    inputs: Mapping[str, Tensor]
    """by name, [tokens] or [tokens, targets]"""


@dataclass(frozen=True)
class ForwardRequest:
    """A request to compute a loss, and gradients unless `is_forward_only`."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float]
    is_forward_only: bool
    rows: Sequence[Row]


def _ratio(lp: Tensor, data: _Inputs) -> Tensor:
    return torch.exp(lp - data["logprobs"])


def _clipped(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _cross_entropy(lp: Tensor, data: _Inputs, config: Mapping[str, float]) -> Tensor:
    return -data["weights"] * lp


def _importance_sampling(lp: Tensor, data: _Inputs, config: Mapping[str, float]) -> Tensor:
    return -_ratio(lp, data) * data["advantages"]


def _ppo(lp: Tensor, data: _Inputs, config: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(lp, data), data["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)


def _cispo(lp: Tensor, data: _Inputs, config: Mapping[str, float]) -> Tensor:
    return -_clipped(_ratio(lp, data), config).detach() * data["advantages"] * lp


def _dro(lp: Tensor, data: _Inputs, config: Mapping[str, float]) -> Tensor:
    return -(lp * data["advantages"] - 0.5 * config["beta"] * (lp - data["logprobs"]).square())


@dataclass(frozen=True)
class LossKind:
    """One loss of the API."""

    of_tokens: Callable[[Tensor, _Inputs, Mapping[str, float]], Tensor]
    """(log-probabilities, inputs, config) -> loss of each token"""
    needs: tuple[str, ...]
    """inputs beside target_tokens"""
    config: Mapping[str, float]
    """values of `loss_fn_config` by default"""


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": LossKind(_cross_entropy, ("weights",), {}),
    "importance_sampling": LossKind(_importance_sampling, _SAMPLED, {}),
    "ppo": LossKind(_ppo, _SAMPLED, _CLIP),
    "cispo": LossKind(_cispo, _SAMPLED, _CLIP),
    "dro": LossKind(_dro, _SAMPLED, {"beta": 0.05}),
}
TARGETS, PLACES = "target_tokens", "has_target"


@dataclass(frozen=True)
class TokenSum(OnLogprobs):
    """A loss on next tokens. `data` holds the loss's inputs [T] at the positions that predict, and `has_target` [T]."""

    name: str
    config: Mapping[str, float]

    def positions(self, data: Mapping[str, Any]) -> Tensor:
        """Return the positions with a target, [T]."""
        return data[PLACES]

    def __call__(self, tokens: TokenLogprobs, data: dict[str, Any]) -> tuple[Tensor, dict[str, PerToken]]:
        """Return the sum of a pack's losses, and the log-probabilities of the targets.

        Args:
            tokens: log-probabilities, [T].
            data: the pack's keys.
        """
        lp = torch.where(data[PLACES], tokens.logprobs, 0.0)
        losses = LOSSES[self.name].of_tokens(lp, data, self.config)
        return torch.where(data[PLACES], losses, 0.0).sum(), {"logprobs": PerToken(lp.detach())}


@dataclass(frozen=True)
class TargetSum:
    """A loss on any targets. `data` holds `target_tokens` and the loss's inputs, [T, K]."""

    name: str
    config: Mapping[str, float]

    def __call__(self, logits: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, PerToken]]:
        """Return the sum of a pack's losses, and the log-probabilities of the targets.

        Args:
            logits: logits, [T, V].
            data: the pack's keys.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        lp = wide.log_softmax(-1).gather(-1, data[TARGETS])
        losses = LOSSES[self.name].of_tokens(lp, data, self.config)
        return losses.sum(), {"logprobs": PerToken(lp.detach())}


@dataclass(frozen=True)
class Work:
    """A request as a train engine takes it."""

    batch: TensorDict
    loss: TokenSum | TargetSum
    lengths: Sequence[tuple[int, ...]]
    """shape of the targets of each row"""

    def logprobs_of(self, values: Tensor) -> list[Tensor]:
        """Return the log-probabilities of each row's targets, in their shape.

        Args:
            values: [N, L] or [N, L, K].
        """
        found = []
        for row, shape in zip(values, self.lengths, strict=True):
            own = row[: shape[0]]
            found.append(own if own.dim() == 1 else own[:, : shape[1]] if len(shape) == 2 else own[:, 0])
        return found


def check(request: ForwardRequest, vocab_size: int, max_length: int) -> None:
    """Refuse a request whose loss cannot be computed.

    Args:
        request: the request.
        vocab_size: tokens of the model.
        max_length: most tokens of a datum.

    Raises:
        DataError: the message names the datum and the input.
    """
    if request.loss not in LOSSES:
        raise DataError(f"loss_fn={request.loss!r} is no loss of this server; {did_you_mean(request.loss, LOSSES)}")
    kind = LOSSES[request.loss]
    if unknown := request.config.keys() - kind.config.keys():
        has = f"it has {', '.join(kind.config) or 'none'}"
        raise DataError(f"loss_fn_config: {request.loss} has no option {min(unknown)!r}; {has}")
    for number, row in enumerate(request.rows):
        _check_row(request.loss, kind, row, f"data[{number}]", vocab_size, max_length)


def _check_row(name: str, kind: LossKind, row: Row, where: str, vocab_size: int, max_length: int) -> None:
    length, targets = len(row.tokens), row.inputs.get(TARGETS)
    optional = {"weights"} if name == "cross_entropy" else set()
    missing = [key for key in (TARGETS, *kind.needs) if key not in row.inputs and key not in optional]
    if missing or targets is None:
        raise DataError(
            f"{where}.loss_fn_inputs: {name} needs {missing[0]}, and found {sorted(row.inputs) or 'nothing'}"
        )
    if unknown := sorted(row.inputs.keys() - {TARGETS, *kind.needs}):
        takes = f"it takes {TARGETS}, {', '.join(kind.needs)}"
        raise DataError(f"{where}.loss_fn_inputs: {name} takes no {unknown[0]!r}; {takes}")
    is_soft = targets.dim() == 2 and name == "cross_entropy"
    if targets.is_floating_point() or len(targets) != length or not (targets.dim() == 1 or is_soft):
        told = f"expected a whole number for each of {length} tokens"
        raise DataError(f"{where}.{TARGETS}: {told}, found shape {list(targets.shape)} of {targets.dtype}")
    for key in kind.needs:
        if (found := row.inputs.get(key)) is not None and found.shape != targets.shape:
            raise DataError(f"{where}.{key}: has shape {list(found.shape)}, and {TARGETS} has {list(targets.shape)}")
        if found is not None and not torch.isfinite(found).all():
            raise DataError(f"{where}.{key}: holds NaN or infinity")
    ids = torch.cat([torch.tensor(row.tokens), targets.flatten()])
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise DataError(
            f"{where}: expected tokens from 0 to {vocab_size - 1}, found {int(ids.min())} to {int(ids.max())}"
        )
    if length >= max_length:
        raise DataError(f"{where}: has {length} tokens; this server takes at most {max_length - 1}")


def work_of(request: ForwardRequest) -> Work:
    """Return a checked request as a train engine takes it.

    Args:
        request: the request, which `check` has accepted.
    """
    targets = [row.inputs[TARGETS].long() for row in request.rows]
    config = {**LOSSES[request.loss].config, **request.config}
    needs = LOSSES[request.loss].needs
    is_next = all(_are_next(row.tokens, own) for row, own in zip(request.rows, targets, strict=True))
    lengths = [tuple(each.shape) for each in targets]
    columns: dict[str, list[Tensor]] = {PLACES: [torch.ones(len(each), dtype=torch.bool) for each in targets]}
    if is_next:
        ids = [torch.tensor([*row.tokens, int(own[-1])]) for row, own in zip(request.rows, targets, strict=True)]
    else:
        ids = [torch.tensor(row.tokens) for row in request.rows]
        width = max(shape[1] if len(shape) == 2 else 1 for shape in lengths)
        columns[TARGETS] = [_widened(own, width) for own in targets]
    for key in needs:
        values = [row.inputs.get(key, torch.ones(own.shape)) for row, own in zip(request.rows, targets, strict=True)]
        columns[key] = [each.float() if is_next else _widened(each.float(), width) for each in values]
    columns |= {"input_ids": ids, "attention_mask": [torch.ones(len(each), dtype=torch.long) for each in ids]}
    longest = max(map(len, ids))
    batch = TensorDict({k: _padded(rows, longest) for k, rows in columns.items()}, batch_size=[len(ids)])
    return Work(batch, (TokenSum if is_next else TargetSum)(request.loss, config), lengths)


def _are_next(tokens: Sequence[int], targets: Tensor) -> bool:
    """Return whether the targets are the tokens that follow in the sequence."""
    return targets.dim() == 1 and targets[:-1].tolist() == list(tokens[1:])


def _widened(values: Tensor, width: int) -> Tensor:
    """Return values [N] or [N, K] as [N, width]; further cells are 0, so they have no weight."""
    columns = values[:, None] if values.dim() == 1 else values
    return torch.nn.functional.pad(columns, (0, width - columns.shape[1]))


def _padded(rows: Sequence[Tensor], length: int) -> Tensor:
    padded = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
