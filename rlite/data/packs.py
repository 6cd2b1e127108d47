"""Trajectories, batches, packs and microbatches: the data of a step, from the tokens of a rollout to one forward pass.

A trajectory is a TensorDict of k rows (mostly one): `input_ids` and `attention_mask` [k, L], further keys per token
[k, L, ...] or per row [k, ...]. A batch [N, L] holds the rows of several trajectories, right-padded. A pack holds some
rows of a batch, concatenated to one dimension: those of a microbatch. Every data-parallel rank gets a share of a batch
in equally many microbatches of bounded size. `rlite.batch` has the table of keys.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlite.batch import INTEGER, KEYS, NAMED_REWARD, PACK_LAYOUT, PER_TOKEN, RAGGED
from rlite.data.kept_ids import check_kept_ids, is_ragged_value
from rlite.data.routing import ROUTED, note_rows, rows_tensor
from rlite.errors import ConfigError, DataError
from rlite.runtime.parallel.microbatch_plan import plan_sharing
from rlite.runtime.parallel.prefix_tree import Prefixes, PrefixTree, Sharing
from rlite.runtime.parallel.upload import upload
from rlite.types import LLMResponse, PackingMethod, StopReason

OPTIONAL = (ROUTED, "turn_limited")
"""keys for which padding stands in trajectories without them, of other workflows or saved by older versions"""

# -- trajectories ------------------------------------------------------------------------------------------------------


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
    routed_experts: list[bytes] = field(default_factory=list)
    """the experts that were chosen where the token was read, see `rlite.data.routing`; b"" if none are known"""
    is_truncated: bool = False
    has_kept_ids: bool = False
    """some turn came with kept ids"""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens of a prompt, an environment or a tool."""
        count = len(tokens)
        self._append(tokens, False, [0.0] * count, [-1] * count, [()] * count)

    def write(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        stop_reason: StopReason,
        kept_ids: Sequence[Sequence[int]] | None = None,
        routed_experts: Sequence[Sequence[bytes]] = (),
    ) -> None:
        """Append one turn of the model.

        `kept_ids`: the ids among which each token was sampled, over which its log-probability is; [] is the vocabulary.
        None: the engine was not asked for them.
        """
        start = len(self.tokens)
        self._append(tokens, True, logprobs, versions, [()] * len(tokens) if kept_ids is None else kept_ids)
        if routed_experts:
            note_rows(self.routed_experts, start, routed_experts)
        self.has_kept_ids |= kept_ids is not None
        self.is_truncated |= stop_reason == "length"

    def add(self, response: LLMResponse) -> None:
        """Append one turn of the model, with the columns that the request asked for."""
        made = response.output_tokens, response.output_logprobs, response.output_versions, response.stop_reason
        self.write(*made, response.extras.get("kept_ids"), response.extras.get(ROUTED, ()))

    def reward(self, reward: float) -> None:
        """Add the reward of the turn that was written last, on its last token."""
        assert self.loss_mask[-1]
        self.rewards[-1] += reward

    def drop_unanswered(self) -> None:
        """Remove the tokens after the last turn of the model."""
        while self.loss_mask and not self.loss_mask[-1]:
            columns = (self.loss_mask, self.logprobs, self.versions, self.rewards, self.kept_ids, self.routed_experts)
            for values in (self.tokens, *columns):
                values.pop()

    def row(self, *, has_rewards: bool = False) -> TensorDict:
        """Return the sequence as a trajectory of batch size [1].

        `has_rewards`: add `token_rewards` [1, L] float32. Returns `input_ids`, `attention_mask`, `loss_mask`,
        `logprobs` and `versions` [1, L], `truncated` [1]; with kept ids `kept_counts` [1, L] and `kept_ids` [1, M];
        with chosen experts `routed_experts` [1, L, B].
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
        if any(self.routed_experts):
            columns[ROUTED] = rows_tensor(self.routed_experts)
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
        self.routed_experts += [b""] * len(tokens)
        self.tokens += tokens  # at last: the thread that writes the record counts by them


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
    columns = dict(trajectory.items())  # a look into a TensorDict costs microseconds
    if (fault := next(_faults(columns), None)) is not None:
        raise DataError(f"{what}{fault}")
    check_ragged(columns, what)
    if "kept_ids" in columns:
        check_kept_ids(trajectory, what)


def _faults(columns: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the columns of a trajectory; the caller reads the first."""
    if missing := [key for key in ("input_ids", "attention_mask") if key not in columns]:
        yield f" has no {' and no '.join(missing)}; expected input_ids and attention_mask [1, L]"
    shape = columns["input_ids"].shape
    if len(shape) != 2 or 0 in shape:
        yield f": input_ids has shape {list(shape)}; expected [1, L] with L > 0"
    for key, value in columns.items():
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
    for key in sorted(INTEGER & columns.keys()):
        if columns[key].is_floating_point() or columns[key].dtype == torch.bool:
            yield f": {key} is {_describe(columns[key])}; expected whole numbers"
    mask = columns["attention_mask"].bool()
    if not mask.all() and ((mask[:, 1:] & ~mask[:, :-1]).any() or not mask[:, 0].all()):
        yield ": attention_mask must be ones and then zeros (right padding), and not all zeros"
    if ROUTED in columns and (columns[ROUTED].dtype != torch.uint8 or columns[ROUTED].shape[:2] != shape):
        yield f": {ROUTED} is {_describe(columns[ROUTED])}; expected uint8 {[*shape, 'B']}"
    if "loss_mask" in columns:
        chosen = columns["loss_mask"].bool()
        if (chosen & ~mask).any():
            yield ": loss_mask selects positions that attention_mask leaves out"
        if (columns["loss_mask"] != chosen).any():
            yield ": loss_mask holds other values than ones and zeros"
    if "sequence_index" in columns:
        index = columns["sequence_index"]
        if index.dim() != 1 or index[0] != 0 or ((index[1:] != index[:-1] + 1) & (index[1:] != 0)).any():
            yield f": sequence_index is {index.tolist()}; expected the rows counted from 0"


def pad_checked(trajectories: Sequence[TensorDict], group_ids: Sequence[int] | None = None) -> TensorDict:
    """Return what `pad_trajectories` returns, of trajectories that `check_trajectory` has passed."""
    all_columns, batch = _with_ragged(trajectories), {}
    for key, is_per_token in _checked_alike(all_columns).items():
        values, padding = [columns[key] for columns in all_columns], KEYS[key].padding if key in KEYS else 0
        rows = [row for value in values for row in value]
        batch[key] = pad_sequence(rows, True, padding) if is_per_token else torch.cat(values)
    ids = torch.tensor(range(len(trajectories)) if group_ids is None else group_ids, dtype=torch.int64)
    if len(ids) != len(trajectories):
        raise DataError(f"{len(ids)} group_ids for {len(trajectories)} trajectories; expected one each")
    batch["group_ids"] = ids.repeat_interleave(torch.tensor([len(row["input_ids"]) for row in trajectories]))
    return TensorDict(batch, batch_size=[len(batch["group_ids"])])


def check_alike(trajectories: Sequence[TensorDict]) -> dict[str, bool]:
    """Check that these fit into one batch.

    Returns whether each key is per token, [k, L, ...].
    """
    return _checked_alike(_with_ragged(trajectories))


def _checked_alike(all_columns: Sequence[dict[str, Any]]) -> dict[str, bool]:
    keys = [columns.keys() - {"group_ids"} for columns in all_columns]
    for index, own in enumerate(keys):
        if odd := sorted(own ^ keys[0]):
            has, lacks = (index, 0) if odd[0] in own else (0, index)
            raise DataError(f"trajectory {has} has {odd[0]!r} and trajectory {lacks} has not; expected the same keys")
    values = {key: [columns[key] for columns in all_columns] for key in all_columns[0] if key != "group_ids"}
    lengths = [ids.shape[1] for ids in values["input_ids"]]
    return {key: _is_per_token(key, found, lengths) for key, found in values.items()}


def _with_ragged(trajectories: Sequence[TensorDict]) -> list[dict[str, Any]]:
    """Return the columns of each, all with the same ragged and optional keys: without values, if it had none."""
    all_columns: list[dict[str, Any]] = [dict(trajectory.items()) for trajectory in trajectories]
    for key in OPTIONAL:
        if given := [each[key] for each in all_columns if key in each]:
            all_columns = [each if key in each else _filled(each, key, given[0]) for each in all_columns]
    for key, counts in RAGGED.items():
        if like := [each for each in all_columns if key in each]:
            all_columns = [each if key in each else _without_values(each, like[0], key, counts) for each in all_columns]
    return all_columns


def _without_values(columns: dict[str, Any], like: dict[str, Any], key: str, counts: str) -> dict[str, Any]:
    rows = columns["input_ids"]
    return {**columns, key: like[key].new_zeros(len(rows), 0), counts: like[counts].new_zeros(rows.shape)}


def _filled(columns: dict[str, Any], key: str, like: Tensor) -> dict[str, Any]:
    rows = columns["input_ids"]
    shape = rows.shape[:1] if like.dim() == 1 else (*rows.shape, like.shape[-1])
    return {**columns, key: like.new_full(shape, KEYS[key].padding)}


def layout(trajectory: TensorDict) -> frozenset[tuple[Any, ...]]:
    """Return what must agree within a batch, by key: the type, the number of dimensions, the sizes after the second."""
    free = {"group_ids", *OPTIONAL, *RAGGED, *RAGGED.values()}
    return frozenset((key, v.dtype, v.dim(), v.shape[2:]) for key, v in trajectory.items() if key not in free)


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
    # any row with an action comes after all rows without
    order = torch.where(batch["loss_mask"].any(1), rows + len(batch), rows)
    return torch.zeros(int(index[-1]) + 1, dtype=torch.int64).scatter_reduce(0, index, order, "amax") % len(batch)


def first_rows(batch: TensorDict) -> Tensor:
    """Return the first row [M] of each trajectory: values of the whole trajectory are read there, once."""
    return (trajectory_index(batch).diff(prepend=torch.tensor([-1])) > 0).nonzero()[:, 0]


def _is_per_token(key: str, values: list[Tensor], lengths: list[int]) -> bool:
    """Return whether these values are [k, L, ...]."""
    first = values[0]
    for index, value in enumerate(values):
        if value.dtype != first.dtype or value.dim() != first.dim() or value.shape[2:] != first.shape[2:]:
            found = f"{key} is {_describe(value)} in trajectory {index} and {_describe(first)} in trajectory 0"
            raise DataError(f"{found}; expected the same type, the same dimensions and the same sizes after the second")
    widths = [] if first.dim() == 1 else [value.shape[1] for value in values]
    if widths == lengths or (key in RAGGED and widths):  # a ragged key is padded like one
        return True
    if len(set(widths)) < 2:
        return False
    index, length = next((i, own) for i, own in enumerate(lengths) if widths[i] != own)
    found = f"{key} is {_describe(values[index])} in trajectory {index}, which has {length} tokens"
    raise DataError(f"{found}; expected [1, {length}] per token, or one shape in all trajectories")


def _describe(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


# -- batches -----------------------------------------------------------------------------------------------------------

BatchT = TypeVar("BatchT", bound=Any)


def with_keys(batch: BatchT, **columns: Any) -> BatchT:
    """Return a batch with further keys, or other values of some keys. Tensors are shared; `batch` is unchanged."""
    return batch.clone(recurse=False).update(columns)


def check_has(batch: Any, *names: str) -> None:
    """Check that a batch has these keys."""
    for name in names:
        if name not in batch:
            key, found = KEYS[name], ", ".join(sorted(map(str, batch.keys())))
            told = f"{key.meaning} Expected {key.dtype} {key.shape}; it has {found}"
            raise DataError(f"the batch has no {name!r}, which the {key.writer} must return: {told}")


def check_one_per_row(batch: Any, name: str) -> None:
    """Check that a key of a batch has one value for each row, not one for each token."""
    check_has(batch, name)
    if batch[name].dim() != 1:
        remedy = "rewards of single tokens are the key token_rewards, beside rewards with their sum"
        found = list(batch[name].shape)
        raise DataError(f"{name} has shape {found}; expected [{len(batch)}], one for each row: {remedy}")


def check_batch(batch: Any) -> None:
    """Check the form of a right-padded batch: input_ids and attention_mask [N, L], and N rows in every key."""
    if missing := [key for key in ("input_ids", "attention_mask") if key not in batch]:
        raise DataError(f"a batch needs input_ids and attention_mask [N, L]; missing: {', '.join(missing)}")
    shape, other = (tuple(batch[key].shape) for key in ("input_ids", "attention_mask"))
    if len(shape) != 2 or other != shape:
        raise DataError(f"input_ids {shape} and attention_mask {other}: expected both [N, L]")
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise DataError(f"{key}: expected a tensor [{shape[0]}] or [{shape[0]}, {shape[1]}], found {value!r}")
        fits = value.dim() == 1 or tuple(value.shape[:2]) == shape or value.shape[1] == 1
        if key not in RAGGED and (value.shape[0] != shape[0] or not fits):
            raise DataError(f"{key} {tuple(value.shape)}: expected [{shape[0]}] or [{shape[0]}, {shape[1]}]")
    mask = batch["attention_mask"].bool()
    if (wrong := (mask[:, 1:] & ~mask[:, :-1]).any(1) | ~mask[:, 0]).any():
        row = int(wrong.nonzero()[0])
        raise DataError(f"row {row}: attention_mask must be ones and then zeros (right padding), and not all zeros")
    check_ragged(batch, "the batch")


def check_ragged(batch: Any, what: str) -> None:
    """Check that each ragged key holds the values that its counts announce."""
    n, length = batch["input_ids"].shape
    for key, counts in RAGGED.items():
        if key not in batch and counts not in batch:
            continue
        if key not in batch or counts not in batch or tuple(batch[counts].shape) != (n, length):
            raise DataError(f"{what}: expected {key} [{n}, M] with {counts} [{n}, {length}], its values per token")
        values, number = batch[key], batch[counts]
        if values.dim() != 2 or len(values) != n or values.is_floating_point():
            expected = f"whole numbers [{n}, M], the values of each row end to end"
            raise DataError(f"{what}: {key} is {values.dtype} {list(values.shape)}; expected {expected}")
        if (number < 0).any() or (number[:, 0] != 0).any() or (number.bool() & ~batch["attention_mask"].bool()).any():
            raise DataError(f"{what}: {counts} must be at least 0, and 0 for the first token of a row and for padding")
        if (most := max(number.sum(-1).tolist(), default=0)) > values.shape[1]:
            raise DataError(f"{what}: {counts} counts {most} values in a row, and {key} has {values.shape[1]}")


def sequence_lengths(batch: Any) -> list[int]:
    """Return the tokens of each row of a right-padded batch."""
    return batch["attention_mask"].sum(-1).tolist()


def pair_rows(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the rows that stay in one pack with row 0, including itself: rows with the same `pair_ids`, if any."""
    if "pair_ids" not in batch:
        return [0]
    return (batch["pair_ids"] == batch["pair_ids"][0]).nonzero()[:, 0].tolist()


# -- packs -------------------------------------------------------------------------------------------------------------


class Pack(UserDict[str, Any]):
    """Rows of a batch, concatenated; each key is packed and moved to the device when it is first read."""

    on_host: Callable[[], Pack]
    """make the same pack on the CPU, to compute shapes without waiting for the device"""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, partial):  # not read yet
            value = self.data[key] = value()
        return value


def lazy_pack(
    batch: Mapping[str, Tensor], rows: Sequence[int], device: torch.device, sharing: Sharing | None = None
) -> Pack:
    """Concatenate rows of a right-padded batch.

    `batch`: keys [N, L, ...] per token, ragged keys [N, M], or [N] or [N, 1] per row. It must not change while the pack
    is read. `sharing`: tokens that the rows share, and that models compute once; see
    `rlite.runtime.parallel.prefix_tree`. Returns keys [T, ...] per token, [K] for ragged keys, and [n] or [n, 1] per
    sequence, with cu_seqlens [n + 1] int32, position_ids [T], max_seqlen, and prefix_tree if rows share tokens.
    """

    def packed_key(key: str, value: Tensor) -> Tensor:
        selected = value[index]
        if key in RAGGED:
            selected = selected[is_ragged_value(batch[RAGGED[key]][index], selected.shape[1])]
        elif selected.shape[:2] == mask.shape:
            selected = selected[mask]
        return upload(selected, device)

    index = torch.as_tensor(rows)
    mask = batch["attention_mask"][index].bool()
    lengths = mask.sum(-1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    packed = Pack({key: partial(packed_key, key, value) for key, value in batch.items() if key not in PACK_LAYOUT})
    packed.on_host = partial(lazy_pack, batch, rows, torch.device("cpu"))
    packed["cu_seqlens"] = upload(starts, device)
    packed["position_ids"] = upload(torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths), device)
    packed["max_seqlen"] = int(lengths.max())
    if sharing is not None and any(sharing.counts):
        packed["prefix_tree"] = PrefixTree(lengths.tolist(), sharing, device)
    return packed


# -- shares and microbatches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchShare:
    """One data rank's part of a batch."""

    rows: list[int]
    """row numbers in the whole batch, in the order of the microbatches"""
    batch: dict[str, Tensor]
    """tensors of these rows, cut to the longest of them"""
    microbatches: list[list[int]]
    """row numbers in this share, for each microbatch; every rank has the same number of microbatches"""
    sharing: list[Sharing | None]
    """tokens that the rows of each microbatch share; None if every row is computed whole"""

    @property
    def num_shared(self) -> int:
        """Tokens of the microbatches that are not computed again."""
        return sum(sum(each.counts) for each in self.sharing if each is not None)


def split_batch(
    what: str,
    batch: Mapping[str, Tensor],
    num_data_ranks: int,
    capacity: int,
    costs: Callable[[Sequence[int]], list[float]] | None = None,
    method: PackingMethod = "first_fit_decreasing",
    may_share: Callable[[], bool] | None = None,
) -> list[BatchShare]:
    """Divide the rows so that all data ranks have similar work.

    `batch`: right-padded batch; see `check_batch`. Rows of equal `pair_ids` [N] stay in one microbatch.
    `num_data_ranks`: number of shares. A share without rows of its own gets some rows for their shape, in no
    microbatch. `costs`: maps the lengths of the rows to the costs that ranks share evenly; without it, these are the
    lengths. `method`: packing method; see `plan_microbatches`. Returns one share for each data rank.
    """
    check_batch(batch)
    if len(batch["input_ids"]) == 0:
        raise DataError(f"{what}: the batch has no rows")
    lengths = sequence_lengths(batch)
    pairs = batch["pair_ids"].tolist() if "pair_ids" in batch else None
    row_costs = None if costs is None else costs(lengths)
    prefixes = Prefixes.of(batch, lengths, may_share)
    plan, is_shared = plan_sharing(lengths, num_data_ranks, capacity, pairs, prefixes, costs=row_costs, method=method)
    return [_share(batch, microbatches, lengths, prefixes if is_shared else None) for microbatches in plan]


def _share(
    batch: Mapping[str, Tensor], microbatches: list[list[int]], lengths: Sequence[int], prefixes: Prefixes | None
) -> BatchShare:
    rows = [row for microbatch in microbatches for row in microbatch] or pair_rows(batch)
    local = {row: index for index, row in enumerate(rows)}
    width, full_width = max(lengths[row] for row in rows), batch["input_ids"].shape[1]
    index = torch.tensor(rows)
    part = {key: value[index] for key, value in batch.items()}
    for key, value in part.items():
        if key in RAGGED:
            part[key] = value[:, : int(batch[RAGGED[key]][index].sum(-1).max())]
        elif value.dim() > 1 and value.shape[1] == full_width:
            part[key] = value[:, :width]
    sharing = [prefixes.within(each) if prefixes is not None and each else None for each in microbatches]
    return BatchShare(rows, part, [[local[row] for row in microbatch] for microbatch in microbatches], sharing)


def join_values(what: str, shares: Sequence[BatchShare], results: Sequence[Tensor], attention_mask: Tensor) -> Tensor:
    """Return values [N, L, ...] in the order of the whole batch, padded with 0.

    `results`: for each share, the values of the tokens of its own rows [T, ...]. `attention_mask`: mask of the whole
    batch, [N, L].
    """
    mask = attention_mask.bool()
    most = max(results, key=len)
    padded = most.new_zeros(*mask.shape, *most.shape[1:])
    for share, values in zip(shares, results, strict=True):
        rows = torch.tensor(share.rows[: sum(map(len, share.microbatches))], dtype=torch.long)  # all rows, or none
        row, column = mask[rows].nonzero(as_tuple=True)
        if values.shape[:1] != row.shape:
            what = f"{what}: found values of shape {list(values.shape)} for {len(row)} tokens"
            raise ConfigError(f"{what}; expected one value for each token of every pack")
        padded[rows[row], column] = values
    return padded
