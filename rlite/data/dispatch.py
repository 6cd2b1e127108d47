"""Split the arguments of one call over ranks, and gather their results.

All engines and role groups use this one implementation:

    args, kwargs --plan_shares--> Shares --scatter--> args, kwargs of each rank --(work)--> results --gather--> result

An argument wrapped in `NeedParallel` is split; every other argument is copied (the ranks get the same object). Lists,
tuples, tensors, TensorDicts, NumPy arrays, and dicts of them can be split, nested to any depth. A row is an item, or an
index of the first dimension. No row is lost or repeated, and balancing does not change the order of the results.

The control plane imports this module, so it must stay light: it imports neither torch nor NumPy. A value can only be a
tensor if other code has imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from rlite.errors import ConfigError, did_you_mean
from rlite.runtime.parallel.balancing import balanced_partitions

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""the arguments of one rank: (args, kwargs)"""
BalanceBy = Sequence[float] | Callable[[Any], float] | Literal["tokens"] | None
How = Literal["list", "concatenate", "first", "mean"]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class NeedParallel:
    """Marker for an argument that is split over ranks instead of copied to each.

    `NeedParallel(NeedParallel(x, "dp"), "seq")` splits the rows over data-parallel ranks, and the sequence dimension of
    each share over the context-parallel group.
    """

    value: Any
    """rows: a list, a tuple, a tensor, a TensorDict, a NumPy array, or dicts of them"""
    type: Literal["dp", "seq"] = "dp"
    """dp: rows over data-parallel ranks. seq: dimension 1 (of a list: each row) over a context-parallel group"""
    balance_by: BalanceBy = None
    """None: contiguous shares whose sizes differ by at most one, larger ones first. Otherwise shares of equal weight:
    one weight for each row, a function of a row, or "tokens": the sum of a row's attention_mask, or else its length"""

    def __post_init__(self) -> None:
        if self.type not in ("dp", "seq"):
            raise ConfigError(f"NeedParallel(type={self.type!r}); {did_you_mean(str(self.type), ('dp', 'seq'))}")
        if isinstance(by := self.balance_by, str) and by != "tokens":
            raise ConfigError(f"NeedParallel(balance_by={by!r}): expected 'tokens', weights, a function, or None")
        if self.type == "seq" and self.balance_by is not None:
            raise ConfigError("NeedParallel(type='seq') cuts every sequence evenly; balance_by is for type='dp'")
        if isinstance(self.value, NeedParallel) and {self.type, self.value.type} != {"dp", "seq"}:
            raise ConfigError(f"NeedParallel twice with type={self.type!r}: only 'dp' and 'seq' can be combined")


@dataclass(frozen=True)
class Shares:
    """The rows of each rank. A share of consecutive rows is a `range`, so that slices of tensors stay views."""

    rows: tuple[Sequence[int], ...]
    """`rows[rank]` = indices into the input; every row of the input occurs exactly once"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(map(_as_range, self.rows)))

    @classmethod
    def contiguous(cls, num_rows: int, num_ranks: int) -> Shares:
        """Return shares in input order whose sizes differ by at most one: seven rows over two ranks are 4 and 3."""
        return cls(tuple(_piece(num_rows, rank, num_ranks) for rank in range(num_ranks)))

    @classmethod
    def balanced(cls, weights: Sequence[float], num_ranks: int) -> Shares:
        """Return shares of nearly equal weight (see `balanced_partitions`); their sizes may differ."""
        return cls(tuple(balanced_partitions(weights, num_ranks)))

    @cached_property
    def positions(self) -> Sequence[int]:
        """`positions[row]` is the index of an input row in the concatenated shares: a `range` if they are the input."""
        order = list(chain(*self.rows))
        return _as_range(sorted(range(len(order)), key=order.__getitem__))


def _piece(length: int, index: int, num_pieces: int) -> range:
    """Return piece `index` of `num_pieces` contiguous pieces whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(length, num_pieces)
    start = index * size + min(index, extra)
    return range(start, start + size + (index < extra))


def _as_range(rows: Sequence[int]) -> Sequence[int]:
    first = rows[0] if rows else 0
    consecutive = range(first, first + len(rows))
    return consecutive if list(rows) == list(consecutive) else tuple(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Containers of rows: a leaf is a list, a tuple, a tensor, a TensorDict or a NumPy array, also below keys of dicts
# ---------------------------------------------------------------------------------------------------------------------


def _is_instance(value: Any, module: str, name: str) -> bool:
    """Return isinstance(value, module.name) without an import: no instance exists before `module` is loaded."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def _is_array(value: Any) -> bool:
    return _is_instance(value, "torch", "Tensor") or _is_instance(value, "numpy", "ndarray")


def _is_tensordict(value: Any) -> bool:
    return hasattr(value, "batch_size") and hasattr(value, "batch_dims")


def _is_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_tensordict(value)


def _is_list(value: Any) -> bool:
    is_text = isinstance(value, str | bytes | bytearray)
    return isinstance(value, Sequence) and not is_text and not hasattr(value, "_fields")


def _below(where: str, key: Any) -> str:
    return f"{where.rstrip(',')}, key {key!r},"


def _walk(function: Callable[..., Any], where: str, *values: Any) -> Any:
    """Return what a function makes of the leaves at each place, in dicts with the keys of the given dicts."""
    first = values[0]
    if not _is_dict(first):
        return function(where, *values)
    for value in values:
        if not _is_dict(value):
            raise ValueError(f"{where} are of different types: dict and {type(value).__name__}")
        if set(value) != set(first):
            raise ValueError(f"{where} have different keys: {sorted(first)} and {sorted(value)}")
    return {key: _walk(function, _below(where, key), *(value[key] for value in values)) for key in first}


def num_rows(value: Any, where: str = "value") -> int:
    """Return the number of rows of a container."""
    if _is_dict(value):
        counts = {key: num_rows(entry, _below(where, key)) for key, entry in value.items()}
        if len(found := {*counts.values()}) == 1:
            return found.pop()
        raise ValueError(f"{where} is a dict whose entries must have one number of rows; found {counts or 'no entry'}")
    is_tensor = _is_array(value) or _is_tensordict(value)
    if _is_list(value) or (is_tensor and value.ndim):
        return len(value)
    raise TypeError(
        f"{where} is a {type(value).__name__}{' without dimensions' * is_tensor}; rows can be a list, a tuple, a "
        "tensor, a TensorDict, a NumPy array, or a dict of them. Without NeedParallel the argument is copied to every "
        "rank"
    )


def _take(value: Any, rows: Sequence[int]) -> Any:
    """Return the rows in that order, in a container of the same type. For a `range`, tensors are views."""

    def take(where: str, leaf: Any) -> Any:
        if _is_list(leaf):
            return _like(leaf, [leaf[row] for row in rows])
        return leaf[slice(rows.start, rows.stop) if isinstance(rows, range) else list(rows)]

    return _walk(take, "", value)


def _like(value: Any, items: list[Any]) -> Any:
    return tuple(items) if isinstance(value, tuple) else items


def split(value: Any, shares: Shares) -> list[Any]:
    """Return one container per rank, of the same type as `value`. A share without rows is an empty container."""
    return [_take(value, rows) for rows in shares.rows]


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


def _weights(value: Any, balance_by: Sequence[float] | Callable[[Any], float] | str, where: str) -> Sequence[float]:
    count = num_rows(value, where)
    if isinstance(balance_by, str):
        return _token_counts(value, where)
    if callable(balance_by):
        return [balance_by(_walk(lambda _, leaf, row=row: leaf[row], "", value)) for row in range(count)]
    if (found := len(balance_by)) != count:
        raise ValueError(f"{where} has {count} rows, and balance_by has {found} weights; expected one per row")
    return balance_by


def _token_counts(value: Any, where: str) -> list[float]:
    """Return the number of tokens of each row."""
    if not isinstance(value, Mapping) and not _is_tensordict(value):
        return [_tokens(row, where) for row in value]
    keys = list(value.keys())
    for key, count in (("attention_mask", _total), ("input_ids", len)):
        if key in keys:
            return list(map(count, value[key]))
    raise ValueError(f"{where}: balance_by='tokens' needs the key attention_mask or input_ids; found {keys}")


def _tokens(row: Any, where: str) -> float:
    if isinstance(row, Mapping) or _is_tensordict(row):
        return _token_counts({key: [entry] for key, entry in row.items()}, where)[0]
    if (_is_array(row) and row.ndim) or _is_list(row) or isinstance(row, str):
        return len(row)  # of text, the characters: they are in proportion to its tokens
    raise ValueError(f"{where}: balance_by='tokens' needs rows with a length; found a {type(row).__name__}")


def _total(mask: Any) -> float:
    return sum(map(_total, mask)) if _is_list(mask) else float(mask.sum() if _is_array(mask) else mask)


# ---------------------------------------------------------------------------------------------------------------------
# Sequences, for context parallelism
# ---------------------------------------------------------------------------------------------------------------------


def _sequence_lengths(value: Any, where: str) -> list[int] | None:
    """Return the length of each row's sequence, or None for rows without one (such as one reward per row)."""
    if isinstance(value, Mapping) or _is_tensordict(value):
        places = {_below(where, key): entry for key, entry in value.items()}
        return _agreed({place: _sequence_lengths(entry, place) for place, entry in places.items()})
    if _is_array(value):
        return [int(value.shape[1])] * len(value) if value.ndim > 1 else None
    if _is_list(value) and all(_is_list(row) or (_is_array(row) and row.ndim) for row in value):
        return [len(row) for row in value]
    return None


def _agreed(lengths: Mapping[str, list[int] | None]) -> list[int] | None:
    found = {place: own for place, own in lengths.items() if own is not None}
    for (first, own), (other, others) in pairwise(found.items()):
        if own != others:
            raise ValueError(f"{first} and {other} have sequences of different lengths, and cannot be cut together")
    return next(iter(found.values()), None)


def _cut(value: Any, index: int, num_pieces: int) -> Any:
    """Return piece `index` of every row's sequence; rows without a sequence stay whole."""

    def cut(where: str, leaf: Any) -> Any:
        if _is_tensordict(leaf) and leaf.ndim == 1:
            entries = {key: _cut(entry, index, num_pieces) for key, entry in leaf.items()}
            return leaf.clone(recurse=False).update(entries)
        if _sequence_lengths(leaf, "") is None:
            return leaf
        if not _is_list(leaf):
            piece = _piece(leaf.shape[1], index, num_pieces)
            return leaf[:, piece.start : piece.stop]
        pieces = [_piece(len(row), index, num_pieces) for row in leaf]
        return _like(leaf, [row[piece.start : piece.stop] for row, piece in zip(leaf, pieces, strict=True)])

    return _walk(cut, "", value)


# ---------------------------------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------------------------------


class _Marked(NamedTuple):
    """An unwrapped `NeedParallel` argument."""

    where: str
    value: Any
    types: set[str]
    balance_by: BalanceBy


def _arguments(args: Sequence[Any], kwargs: Mapping[Any, Any]) -> dict[int | str, Any]:
    return {**dict(enumerate(args)), **kwargs}


def _marked(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int | str, _Marked]:
    found: dict[int | str, _Marked] = {}
    for key, marker in _arguments(args, kwargs).items():
        if isinstance(marker, NeedParallel):
            inner = marker.value if isinstance(marker.value, NeedParallel) else marker
            balance_by = inner.balance_by if marker.balance_by is None else marker.balance_by
            found[key] = _Marked(f"argument {key!r}", inner.value, {marker.type, inner.type}, balance_by)
    return found


def plan_shares(
    args: Sequence[Any], kwargs: Mapping[str, Any], num_ranks: int, *, allow_empty: bool = False
) -> Shares | None:
    """Plan how all rows of a call are split over data-parallel ranks.

    An argument with `balance_by` decides for all others, which must follow to keep their rows together.

    Returns the plan, or None if the call has nothing to split.
    """
    rows = [argument for argument in _marked(args, kwargs).values() if "dp" in argument.types]
    if not rows:
        return None
    first, *others = rows
    count = num_rows(first.value, first.where)
    for other in others:
        if (found := num_rows(other.value, other.where)) != count:
            remedy = "all arguments in NeedParallel of one call are split together, and need the same number of rows"
            raise ValueError(f"{first.where} has {count} rows and {other.where} has {found}; {remedy}")
    if count < num_ranks and not allow_empty:
        raise ValueError(
            f"{first.where} has {count} rows for {num_ranks} data-parallel ranks, and every rank needs at least one; "
            f"pass at least {num_ranks} rows, or build with data_parallel_size of at most {max(count, 1)}"
        )
    weights = {at.where: _weights(at.value, at.balance_by, at.where) for at in rows if at.balance_by is not None}
    plans = {where: Shares.balanced(own, num_ranks) for where, own in weights.items()}
    for (where, plan), (elsewhere, another) in pairwise(plans.items()):
        if plan != another:
            odd = f"{where} and {elsewhere} are balanced by different weights, and their rows must stay together"
            raise ValueError(f"{odd}; give balance_by to one of them")
    return next(iter(plans.values()), None) or Shares.contiguous(count, num_ranks)


def cuts_sequences(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call gives the ranks of a context-parallel group different tokens."""
    return any("seq" in argument.types for argument in _marked(args, kwargs).values())


def _check_sequences(marked: Mapping[int | str, _Marked], num_seq_ranks: int, allow_empty: bool) -> None:
    cut = {argument.where: argument.value for argument in marked.values() if "seq" in argument.types}
    found = {where: _sequence_lengths(value, where) for where, value in cut.items()}
    for where, lengths in found.items():
        if lengths is None:
            how = "NeedParallel(type='seq') cuts dimension 1 of tensors, and each inner list of a list"
            raise TypeError(f"{where} has no sequence dimension; {how}")
        if lengths and max(lengths) < num_seq_ranks and not allow_empty:
            raise ValueError(
                f"{where} has sequences of at most {max(lengths)} tokens for {num_seq_ranks} context-parallel ranks, "
                "and every rank needs at least one; pad them, or use a smaller context-parallel group"
            )
    _agreed(found)


def scatter(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_ranks: int,
    num_seq_ranks: int = 1,
    *,
    allow_empty: bool = False,
    shares: Shares | None = None,
) -> list[Call]:
    """Return the arguments of each rank, data-parallel rank first: rank = dp_rank * num_seq_ranks + seq_rank.

    `num_seq_ranks`: ranks of a context-parallel group, over which `type="seq"` arguments are cut. They and copied
    arguments are the same on every data-parallel rank.
    """
    marked = _marked(args, kwargs)
    shares = shares or plan_shares(args, kwargs, num_ranks, allow_empty=allow_empty)
    _check_sequences(marked, num_seq_ranks, allow_empty)

    parts: dict[int | str, list[Any]] = {}
    for key, (_, value, types, _) in marked.items():
        by_rank = split(value, shares) if shares and "dp" in types else [value] * num_ranks
        pieces = range(num_seq_ranks)
        parts[key] = [_cut(rows, i, num_seq_ranks) if "seq" in types else rows for rows in by_rank for i in pieces]
    return [_with_parts(args, kwargs, parts, rank) for rank in range(num_ranks * num_seq_ranks)]


def _with_parts(args: Sequence[Any], kwargs: Mapping[str, Any], parts: Mapping[Any, Sequence[Any]], rank: int) -> Call:
    """Return a call with the rank's parts in place of whole arguments."""
    return (
        tuple(parts[key][rank] if key in parts else value for key, value in enumerate(args)),
        {key: parts[key][rank] if key in parts else value for key, value in kwargs.items()},
    )


def deal(args: Sequence[Any], kwargs: Mapping[str, Any], num_targets: int, auto_shard: bool) -> list[Call]:
    """Return the arguments of each member of a role group.

    `NeedParallel` is split. With `auto_shard`, lists are split, one item per member, if every list among the other
    arguments has exactly one item per member. Everything else is copied.
    """
    for argument in _marked(args, kwargs).values():
        if "seq" in argument.types:
            raise ValueError(f"{argument.where} is NeedParallel(type='seq'); a role group splits rows only (type='dp')")
    calls = scatter(args, kwargs, num_targets)
    lists = {key: value for key, value in _arguments(args, kwargs).items() if isinstance(value, list)}
    if auto_shard and all(len(items) == num_targets for items in lists.values()):
        calls = [_with_parts(*call, lists, rank) for rank, call in enumerate(calls)]
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def gathered(how: How) -> Callable[[Function], Function]:
    """Return a decorator that states how the results of a method are gathered; see `gather`.

    Raises:
        ConfigError: there is no such way.
    """
    if how not in get_args(How):
        raise ConfigError(f"unknown way to gather {how!r}; {did_you_mean(str(how), get_args(How))}")

    def mark(function: Function) -> Function:
        function.__rlite_gather__ = how  # type: ignore[attr-defined]
        return function

    return mark


def gather_of(function: Callable[..., Any]) -> How:
    """Return how the results of a method are gathered: "list" if the method does not state it."""
    return getattr(function, "__rlite_gather__", "list")


def gather(results: Sequence[Any], how: How = "list", shares: Shares | None = None) -> Any:
    """Combine the results of the data-parallel ranks.

    - "list": a list with one entry per rank.
    - "concatenate": containers of rows become one, in the order of the input even if `shares` are balanced.
    - "first": the result of rank 0.
    - "mean": numbers, tensors, or dicts of them are averaged over ranks, not weighted by their rows.

    `shares`: the plan of the call. Ranks without rows are left out of "concatenate" and "mean".
    """
    if how == "list":
        return list(results)
    if not results:
        raise ValueError(f"there are no results to gather by {how!r}")
    if how == "first":
        return results[0]
    if shares is not None:
        results = [result for result, rows in zip(results, shares.rows, strict=True) if rows] or results[:1]
    joined = _walk(_mean if how == "mean" else _concatenate, "the results", *results)
    if how == "mean" or shares is None or isinstance(shares.positions, range):
        return joined
    for result, rows in zip(results, filter(None, shares.rows), strict=True):
        if (found := num_rows(result, "a result")) != len(rows):
            odd = f"a rank returned {found} rows for a share of {len(rows)}"
            remedy = "return one row for each, or drop balance_by"
            raise ValueError(f"{odd}, and balanced shares can only be put back in order row by row; {remedy}")
    return _take(joined, shares.positions)


def _concatenate(where: str, *leaves: Any) -> Any:
    first = leaves[0]
    for leaf in leaves:
        num_rows(leaf, where)  # refuses what is no container
        if not isinstance(leaf, type(first)) and not isinstance(first, type(leaf)):
            raise ValueError(f"{where} are of different types: {type(first).__name__} and {type(leaf).__name__}")
    if _is_list(first):
        return _like(first, list(chain(*leaves)))
    shapes = {tuple(leaf.shape[1:]) for leaf in leaves}
    if _is_array(first) and len(shapes) > 1:
        raise ValueError(f"{where} have rows of shapes {sorted(shapes)}; pad them alike, or return lists")
    is_numpy = _is_instance(first, "numpy", "ndarray")
    return sys.modules["numpy"].concatenate(leaves) if is_numpy else sys.modules["torch"].cat(leaves, 0)


def _mean(where: str, *leaves: Any) -> Any:
    for leaf in leaves:
        if not (isinstance(leaf, int | float) or _is_array(leaf) or _is_instance(leaf, "numpy", "number")):
            kind = type(leaf).__name__
            raise TypeError(f"{where} hold a {kind}; a mean is made of numbers, tensors, or dicts of them")
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    if len(set(shapes)) > 1:
        raise ValueError(f"{where} have different shapes: {shapes}")
    return sum(leaves, start=0.0) / len(leaves)
