"""Trajectories: made of token histories, and padded into batches.

A trajectory is a TensorDict of k rows (mostly one): `input_ids` and `attention_mask` [k, L], further keys per token
[k, L, ...] or per row [k, ...]. `rlite.batch` has the table of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.batch import INTEGER, KEYS, NAMED_REWARD, PER_TOKEN, RAGGED
from rlite.data.packs import check_ragged, with_keys
from rlite.errors import DataError
from rlite.rollout.kept_ids import check_kept_ids
from rlite.rollout.rewards.score import Reward
from rlite.types import LLMResponse, StopReason


@dataclass(eq=False)
class TokenHistory:
    """Tokens of one sequence in the order in which the model reads and writes them. Each list has one entry per token.

    Tokens that the model has written are trained on, once, with their log-probabilities and versions. Tokens that it
    has only read are not.
    """

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    kept_ids: list[Sequence[int]] = field(default_factory=list)
    is_truncated: bool = False
    has_kept_ids: bool = False
    """some turn came with kept ids"""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of a prompt, an environment or a tool."""
        self._append(tokens, False, [0.0] * len(tokens), [-1] * len(tokens), [()] * len(tokens))

    def write(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop_reason: StopReason,
        kept_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append one turn of the model.

        Args:
            tokens: the output.
            logprobs: one per token.
            versions: the version of the weights, one per token.
            stop_reason: "length" marks the sequence as truncated.
            kept_ids: the ids among which each token was sampled, over which its log-probability is; [] is the
                vocabulary. None: the engine was not asked for them.
        """
        self._append(tokens, True, logprobs, versions, [()] * len(tokens) if kept_ids is None else kept_ids)
        self.has_kept_ids |= kept_ids is not None
        self.is_truncated |= stop_reason == "length"

    def add(self, response: LLMResponse) -> None:
        """Append one turn of the model, with its kept ids if the request asked for them."""
        made = response.output_tokens, response.output_logprobs, response.output_versions, response.stop_reason
        self.write(*made, response.extras.get("kept_ids"))

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last, on its last token."""
        assert self.loss_mask[-1]
        self.rewards[-1] += reward

    def drop_unanswered(self) -> None:
        """Remove the tokens after the last turn of the model."""
        while self.loss_mask and not self.loss_mask[-1]:
            for values in (self.tokens, self.loss_mask, self.logprobs, self.versions, self.rewards, self.kept_ids):
                values.pop()

    def row(self, *, has_rewards: bool = False) -> TensorDict:
        """Return the sequence as a trajectory of batch size [1].

        Args:
            has_rewards: add `token_rewards` [1, L] float32.

        Returns:
            `input_ids`, `attention_mask`, `loss_mask`, `logprobs` and `versions` [1, L], `truncated` [1]; with kept ids
            `kept_counts` [1, L] and `kept_ids` [1, M].
        """
        columns = {
            "input_ids": torch.tensor([self.tokens], dtype=torch.int64),
            "attention_mask": torch.ones(1, len(self.tokens), dtype=torch.bool),
            "loss_mask": torch.tensor([self.loss_mask], dtype=torch.bool),
            "logprobs": torch.tensor([self.logprobs], dtype=torch.float32),
            "versions": torch.tensor([self.versions], dtype=torch.int64),
            "truncated": torch.tensor([self.is_truncated]),
        }
        if self.has_kept_ids:
            columns["kept_counts"] = torch.tensor([[len(ids) for ids in self.kept_ids]], dtype=torch.int32)
            columns["kept_ids"] = torch.tensor([list(chain.from_iterable(self.kept_ids))], dtype=torch.int32)
        if has_rewards:
            columns["token_rewards"] = torch.tensor([self.rewards], dtype=torch.float32)
        return TensorDict(columns, batch_size=[1])

    def _append(self, tokens: Sequence[int], is_action: bool, *columns: Sequence[Any]) -> None:
        """Append tokens with their log-probabilities, versions and kept ids."""
        lists: list[list[Any]] = [self.logprobs, self.versions, self.kept_ids]
        for own, values in zip(lists, columns, strict=True):
            own.extend(values)
        self.loss_mask += [is_action] * len(tokens)
        self.rewards += [0.0] * len(tokens)
        self.tokens += tokens  # at last: the thread that writes the record counts by them


def of_trajectory(count: int, **values: float) -> dict[str, Tensor]:
    """Return columns [count] for values of a whole trajectory, and for the parts of a reward that has parts."""
    parts = [value.parts for value in values.values() if isinstance(value, Reward)]
    named = {f"{NAMED_REWARD}{name}": part for own in parts for name, part in own.items()}
    return {key: torch.full((count,), value, dtype=torch.float32) for key, value in (values | named).items()}


def check_trajectory(trajectory: Any, what: str = "the trajectory") -> None:
    """Check that this is a TensorDict that can be trained on.

    The table of `rlite.batch` says which keys are per token, and which of them hold integers. Floating-point values
    must be finite. `attention_mask` must be ones and then zeros in every row, and `loss_mask` ones and zeros within it.
    `sequence_index` must count the rows. `kept_ids` must hold each token that has kept ids.

    Raises:
        DataError: Something does not fit; the message names the key.
    """
    if not isinstance(trajectory, TensorDict):
        raise DataError(f"{what} is {type(trajectory).__name__}: expected a TensorDict of batch size [1], or None")
    if (fault := next(_faults(trajectory), None)) is not None:
        raise DataError(f"{what}{fault}")
    check_ragged(trajectory, what)
    if "kept_ids" in trajectory:
        check_kept_ids(trajectory, what)


def _faults(trajectory: TensorDict) -> Iterator[str]:
    """Yield what is wrong with the columns of a trajectory; the caller reads the first."""
    if missing := [key for key in ("input_ids", "attention_mask") if key not in trajectory]:
        yield f" has no {' and no '.join(missing)}; expected input_ids and attention_mask [1, L]"
    shape = trajectory["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        yield f": input_ids has shape {list(shape)}; expected [1, L] with L > 0"
    for key, value in trajectory.items():
        if not isinstance(value, Tensor) or value.shape[:1] != shape[:1]:
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            yield f": {key} is {found}; expected a tensor, {list(shape)} per token or [{shape[0]}] per row"
        if key in PER_TOKEN and value.shape != shape:
            yield f": {key} has shape {list(value.shape)}, input_ids {list(shape)}; expected the same"
        if key == "rewards" and value.shape not in (shape[:1], shape):
            expected = f"[{shape[0]}], one for each row, or {list(shape)}, one for each token"
            yield f": rewards has shape {list(value.shape)}; expected {expected}"
        is_part = str(key).startswith(NAMED_REWARD)
        if value.is_floating_point() and not is_part and not value.isfinite().all():
            yield f": {key} holds a value that is not finite: {value.flatten()[:8].tolist()}"
    for key in sorted(INTEGER & set(trajectory.keys())):
        if trajectory[key].is_floating_point() or trajectory[key].dtype == torch.bool:
            yield f": {key} is {_describe(trajectory[key])}; expected whole numbers"
    mask = trajectory["attention_mask"].bool()
    if not mask.all() and ((mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all()):
        yield ": attention_mask must be ones and then zeros (right padding), and not all zeros"
    if "loss_mask" in trajectory:
        chosen = trajectory["loss_mask"].bool()
        if (chosen & ~mask).any():
            yield ": loss_mask selects positions that attention_mask leaves out"
        if (trajectory["loss_mask"] != chosen).any():
            yield ": loss_mask holds other values than ones and zeros"
    if "sequence_index" in trajectory:
        index = trajectory["sequence_index"]
        if index.dim() != 1 or index[0] != 0 or ((index[1:] != index[:-1] + 1) & (index[1:] != 0)).any():
            yield f": sequence_index is {index.tolist()}; expected the rows counted from 0"


def pad_checked(trajectories: Sequence[TensorDict], group_ids: Sequence[int] | None = None) -> TensorDict:
    """Return what `pad_trajectories` returns, of trajectories that `check_trajectory` has passed.

    Raises:
        DataError: They do not fit together.
    """
    trajectories = _with_ragged(trajectories)
    batch = {
        key: _join(key, [row[key] for row in trajectories], is_per_token)
        for key, is_per_token in check_alike(trajectories).items()
    }
    ids = torch.tensor(range(len(trajectories)) if group_ids is None else group_ids, dtype=torch.int64)
    if len(ids) != len(trajectories):
        raise DataError(f"{len(ids)} group_ids for {len(trajectories)} trajectories; expected one each")
    batch["group_ids"] = ids.repeat_interleave(torch.tensor([len(row["input_ids"]) for row in trajectories]))
    return TensorDict(batch, batch_size=[len(batch["group_ids"])])


def check_alike(trajectories: Sequence[TensorDict]) -> dict[str, bool]:
    """Check that these fit into one batch.

    Returns:
        Whether each key is per token, [k, L, ...].

    Raises:
        DataError: They differ; the message names the key and the trajectory.
    """
    trajectories = _with_ragged(trajectories)
    keys = [set(trajectory.keys()) - {"group_ids"} for trajectory in trajectories]
    for index, own in enumerate(keys):
        odd = sorted(own ^ keys[0])
        if odd:
            has, lacks = (index, 0) if odd[0] in own else (0, index)
            raise DataError(f"trajectory {has} has {odd[0]!r} and trajectory {lacks} has not; expected the same keys")
    lengths = [trajectory["input_ids"].shape[1] for trajectory in trajectories]
    columns = [str(key) for key in trajectories[0].keys() if key != "group_ids"]  # noqa: SIM118
    return {key: _is_per_token(key, [row[key] for row in trajectories], lengths) for key in columns}


def _with_ragged(trajectories: Sequence[TensorDict]) -> Sequence[TensorDict]:
    """Return trajectories that have the same ragged keys: without values, if a trajectory had none."""
    for key, counts in RAGGED.items():
        if (like := next((each for each in trajectories if key in each), None)) is None:
            continue
        trajectories = [
            each if key in each else with_keys(each, **_no_values(like, each, key, counts)) for each in trajectories
        ]
    return trajectories


def _no_values(like: TensorDict, trajectory: TensorDict, key: str, counts: str) -> dict[str, Tensor]:
    rows = trajectory["input_ids"]
    return {key: like[key].new_zeros(len(rows), 0), counts: torch.zeros_like(rows, dtype=like[counts].dtype)}


def layout(trajectory: TensorDict) -> frozenset[tuple[Any, ...]]:
    """Return what must agree within a batch, by key: the type, the number of dimensions, the sizes after the second."""
    free = {"group_ids", *RAGGED, *RAGGED.values()}
    return frozenset(
        (key, value.dtype, value.dim(), value.shape[2:]) for key, value in trajectory.items() if key not in free
    )


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
    if key in RAGGED:
        return True  # padded like one
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


def _join(key: str, values: list[Tensor], is_per_token: bool) -> Tensor:
    if not is_per_token:
        return torch.cat(values)
    padding = KEYS[key].padding if key in KEYS else 0
    return pad_sequence([row for value in values for row in value], batch_first=True, padding_value=padding)


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
