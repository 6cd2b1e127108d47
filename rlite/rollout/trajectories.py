"""Trajectories, and the batches that they are padded into.

A trajectory is a TensorDict of k rows (mostly one): `input_ids` and `attention_mask` [k, L], further keys per token
[k, L, ...] or per row [k, ...]. `rlite.batch` has the table of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.batch import INTEGER, KEYS, NAMED_REWARD, PER_TOKEN, with_keys
from rlite.errors import DataError
from rlite.rollout.rewards.score import Reward


def sequence_row(
    tokens: Sequence[int],
    loss_mask: Sequence[bool],
    logprobs: Sequence[float],
    versions: Sequence[int],
    *,
    is_truncated: bool,
) -> TensorDict:
    """Return one sequence as a trajectory of batch size [1].

    Args:
        tokens: L token ids.
        loss_mask: whether each token is trained on.
        logprobs: log-probability of each token at sampling, 0 for tokens that the model has not generated.
        versions: policy version of each token, -1 for tokens that the model has not generated.
        is_truncated: whether a length limit ended the sequence.

    Returns:
        `input_ids`, `attention_mask`, `loss_mask`, `logprobs` and `versions` [1, L], `truncated` [1].
    """
    columns = {
        "input_ids": torch.tensor([tokens], dtype=torch.int64),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": torch.tensor([loss_mask], dtype=torch.bool),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int64),
        "truncated": torch.tensor([is_truncated]),
    }
    return TensorDict(columns, batch_size=[1])


def of_trajectory(count: int, **values: float) -> dict[str, Tensor]:
    """Return columns [count] for values of a whole trajectory, and for the parts of a reward that has parts."""
    parts = [value.parts for value in values.values() if isinstance(value, Reward)]
    named = {f"{NAMED_REWARD}{name}": part for own in parts for name, part in own.items()}
    return {key: torch.full((count,), value, dtype=torch.float32) for key, value in (values | named).items()}


def check_trajectory(trajectory: Any, what: str = "the trajectory") -> None:
    """Check that this is a TensorDict that can be trained on.

    The table of `rlite.batch` says which keys are per token, and which of them hold integers. Floating-point values
    must be finite. `attention_mask` must be ones and then zeros in every row, and `loss_mask` ones and zeros within it.
    `sequence_index` must count the rows.

    Raises:
        DataError: Something does not fit; the message names the key.
    """
    if not isinstance(trajectory, TensorDict):
        raise DataError(f"{what} is {type(trajectory).__name__}: expected a TensorDict of batch size [1], or None")
    missing = [key for key in ("input_ids", "attention_mask") if key not in trajectory]
    if missing:
        raise DataError(f"{what} has no {' and no '.join(missing)}; expected input_ids and attention_mask [1, L]")
    shape = trajectory["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        raise DataError(f"{what}: input_ids has shape {list(shape)}; expected [1, L] with L > 0")
    for key, value in trajectory.items():
        if not isinstance(value, Tensor) or value.shape[:1] != shape[:1]:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise DataError(
                f"{what}: {key} is {found}; expected a tensor, {list(shape)} per token or [{shape[0]}] per row"
            )
        if key in PER_TOKEN and value.shape != shape:
            raise DataError(f"{what}: {key} has shape {list(value.shape)}, input_ids {list(shape)}; expected the same")
        if key == "rewards" and value.shape not in (shape[:1], shape):
            raise DataError(
                f"{what}: rewards has shape {list(value.shape)}; expected [{shape[0]}], one for each row, or "
                f"{list(shape)}, one for each token"
            )
        is_part = str(key).startswith(NAMED_REWARD)
        if value.is_floating_point() and not is_part and not value.isfinite().all():
            raise DataError(f"{what}: {key} holds a value that is not finite: {value.flatten()[:8].tolist()}")
    for key in sorted(INTEGER & set(trajectory.keys())):
        if trajectory[key].is_floating_point() or trajectory[key].dtype == torch.bool:
            raise DataError(f"{what}: {key} is {_describe(trajectory[key])}; expected whole numbers")
    mask = trajectory["attention_mask"].bool()
    if not mask.all() and ((mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all()):
        raise DataError(f"{what}: attention_mask must be ones and then zeros (right padding), at least one one")
    if "loss_mask" in trajectory:
        chosen = trajectory["loss_mask"].bool()
        if (chosen & ~mask).any():
            raise DataError(f"{what}: loss_mask selects positions that attention_mask leaves out")
        if (trajectory["loss_mask"] != chosen).any():
            raise DataError(f"{what}: loss_mask holds other values than ones and zeros")
    if "sequence_index" in trajectory:
        index = trajectory["sequence_index"]
        if index.dim() != 1 or index[0] != 0 or ((index[1:] != index[:-1] + 1) & (index[1:] != 0)).any():
            raise DataError(f"{what}: sequence_index is {index.tolist()}; expected the rows counted from 0")


def pad_trajectories(trajectories: Sequence[TensorDict], group_ids: Sequence[int] | None = None) -> TensorDict:
    """Pad trajectories of any lengths on the right, into one batch with the rows in order.

    Keys that are [k, L, ...] in every trajectory become [N, max L, ...], padded with 0 (`versions` with -1). Keys of
    equal shape beyond the rows are concatenated to [N, ...].

    Args:
        trajectories: at least one, all with the same keys.
        group_ids: one per trajectory, for all of its rows; default: its index.

    Returns:
        A TensorDict of batch size [N], with `group_ids` [N] int64.

    Raises:
        DataError: Keys are missing or too many, or shapes or types do not fit together. The message names the key and
            the trajectory.
    """
    if not trajectories:
        raise DataError("pad_trajectories: the list is empty; expected at least one trajectory")
    for index, trajectory in enumerate(trajectories):
        check_trajectory(trajectory, f"trajectory {index}")
    check_alike(trajectories)
    lengths = [trajectory["input_ids"].shape[1] for trajectory in trajectories]
    batch = {key: _join(key, values, lengths) for key, values in _columns(trajectories).items()}
    ids = torch.tensor(range(len(trajectories)) if group_ids is None else group_ids, dtype=torch.int64)
    if len(ids) != len(trajectories):
        raise DataError(f"{len(ids)} group_ids for {len(trajectories)} trajectories; expected one each")
    batch["group_ids"] = ids.repeat_interleave(torch.tensor([len(row["input_ids"]) for row in trajectories]))
    return TensorDict(batch, batch_size=[len(batch["group_ids"])])


def check_alike(trajectories: Sequence[TensorDict]) -> None:
    """Check that these fit into one batch.

    Raises:
        DataError: They do not; the message names the key and the trajectory.
    """
    keys = [set(trajectory.keys()) - {"group_ids"} for trajectory in trajectories]
    for index, own in enumerate(keys):
        odd = sorted(own ^ keys[0])
        if odd:
            has, lacks = (index, 0) if odd[0] in own else (0, index)
            raise DataError(f"trajectory {has} has {odd[0]!r} and trajectory {lacks} has not; expected the same keys")
    lengths = [trajectory["input_ids"].shape[1] for trajectory in trajectories]
    for key, values in _columns(trajectories).items():
        _is_per_token(key, values, lengths)


def layout(trajectory: TensorDict) -> frozenset[tuple[Any, ...]]:
    """Return what must agree within a batch, by key: the type, the number of dimensions, the sizes after the second."""
    return frozenset(
        (key, value.dtype, value.dim(), value.shape[2:]) for key, value in trajectory.items() if key != "group_ids"
    )


def join_batches(batches: Sequence[TensorDict]) -> TensorDict:
    """Return the rows of all batches as one batch, padded to one width. Rows keep their `group_ids`."""
    return with_keys(pad_trajectories(batches), group_ids=torch.cat([batch["group_ids"] for batch in batches]))


def trajectory_index(batch: TensorDict) -> Tensor:
    """Return the number [N] of each row's trajectory, from 0.

    The rows of a trajectory are adjacent, and `sequence_index` [N] counts them from 0. Without that key every row is a
    trajectory.
    """
    if "sequence_index" not in batch:
        return torch.arange(len(batch))
    return (batch["sequence_index"] == 0).cumsum(0) - 1


def last_rows(batch: TensorDict) -> Tensor:
    """Return the row [M] with each trajectory's outcome: the last row with an action, or the last row if none has."""
    index, rows = trajectory_index(batch), torch.arange(len(batch))
    has_action = batch["loss_mask"].any(1)
    # any row with an action comes after all rows without
    order = torch.where(has_action, rows + len(batch), rows)
    return torch.zeros(int(index[-1]) + 1, dtype=torch.int64).scatter_reduce(0, index, order, "amax") % len(batch)


def first_rows(batch: TensorDict) -> Tensor:
    """Return the first row [M] of each trajectory: values of the whole trajectory are read there, once."""
    return (trajectory_index(batch).diff(prepend=torch.tensor([-1])) > 0).nonzero()[:, 0]


def _columns(trajectories: Sequence[TensorDict]) -> dict[str, list[Tensor]]:
    keys = [str(key) for key in trajectories[0].keys() if key != "group_ids"]  # noqa: SIM118
    return {key: [row[key] for row in trajectories] for key in keys}


def _is_per_token(key: str, values: list[Tensor], lengths: list[int]) -> bool:
    """Return whether these values are [k, L, ...].

    Raises:
        DataError: They do not fit together.
    """
    first = values[0]
    for index, value in enumerate(values):
        if value.dtype != first.dtype or value.dim() != first.dim() or value.shape[2:] != first.shape[2:]:
            raise DataError(
                f"{key} is {_describe(value)} in trajectory {index} and {_describe(first)} in trajectory 0; "
                "expected the same type, the same dimensions and the same sizes after the second"
            )
    if first.dim() == 1:
        return False
    widths = [value.shape[1] for value in values]
    if widths == lengths:
        return True
    if len(set(widths)) == 1:
        return False
    index = next(i for i, (width, length) in enumerate(zip(widths, lengths, strict=True)) if width != length)
    raise DataError(
        f"{key} is {_describe(values[index])} in trajectory {index}, which has {lengths[index]} tokens; "
        f"expected [1, {lengths[index]}] per token, or one shape in all trajectories"
    )


def _join(key: str, values: list[Tensor], lengths: list[int]) -> Tensor:
    if not _is_per_token(key, values, lengths):
        return torch.cat(values)
    padded = values[0].new_full(
        (sum(map(len, values)), max(lengths), *values[0].shape[2:]), KEYS[key].padding if key in KEYS else 0
    )
    row = 0
    for value in values:
        padded[row : row + len(value), : value.shape[1]] = value
        row += len(value)
    return padded


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
