from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlite.backends.models.attention import PackedLayout, packed_attention
from rlite.data.packs import lazy_pack, split_batch
from rlite.errors import DataError
from rlite.runtime.parallel.context_parallel import ContextShare
from rlite.runtime.parallel.microbatch_plan import plan_sharing
from rlite.runtime.parallel.prefix_tree import MIN_SHARED, Prefixes, PrefixTree, Sharing, select_rows

CPU = torch.device("cpu")


def always() -> bool:
    return True


def batch_of(rows: list[list[int]], **columns: Any) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, **columns}


def siblings(num_groups: int = 2, size: int = 3, prompt: int = 40, answer: int = 8) -> list[list[int]]:
    """Rows of several groups: a prompt of its own, and an answer that begins with the sibling's number."""
    rows = []
    for group in range(num_groups):
        start = [1 + group, *range(100, 100 + prompt - 1)]
        rows += [[*start, 200 + sibling, *range(answer - 1)] for sibling in range(size)]
    return rows


def prefixes_of(rows: list[list[int]], **columns: Any) -> Prefixes:
    found = Prefixes.of(batch_of(rows, **columns), [len(row) for row in rows], always)
    assert found is not None
    return found


token_rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=7)


@given(token_rows, st.integers(1, 3))
def test_nodes_hold_every_row_and_stand_for_equal_beginnings_with_equal_labels(
    rows: list[list[int]], size: int
) -> None:
    order = sorted(range(len(rows)), key=rows.__getitem__)
    counts = [0]
    for before, own in pairwise(order):
        pairs = list(zip(rows[before], rows[own], strict=False))
        common = next((n for n, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
        counts.append(max(common - 1, 0))
    tree = PrefixTree([len(row) for row in rows], Sharing(order, counts), CPU)
    tokens = torch.tensor([token for row in rows for token in row])
    assert torch.equal(tokens[tree.tokens][tree.index], tokens)
    begins = [(*row[: n + 1], *row[n + 1 : n + 2]) for row in rows for n in range(len(row))]
    for token, node in enumerate(tree.index.tolist()):
        assert begins[tree.tokens[node]] == begins[token]
    assert torch.equal(tree.counts, torch.bincount(tree.index))
    cu_seqlens = torch.tensor([len(row) for row in rows]).cumsum(0)
    for rank in range(size):
        share = ContextShare(cu_seqlens, dist.ProcessGroup(rank, size), tree)
        mine = share.take(torch.arange(1, len(tokens) + 1)) - 1
        assert torch.equal(mine, share.own_positions())
        assert share.own_counts(mine).sum() == sum(tree.counts[tree.index[own]] for own in mine.tolist() if own >= 0)
        for segment in share.segments:  # a query sees the beginning of its row, up to itself
            queries, keys = mine[segment.queries].tolist(), segment.keys
            for back, query in enumerate(reversed(queries)):
                if query >= 0:
                    seen = tokens[tree.tokens[keys[: len(keys) - back]]].tolist()
                    row = next(n for n in range(len(rows)) if query < cu_seqlens[n])
                    assert seen == rows[row][: query - (int(cu_seqlens[row]) - len(rows[row])) + 1]


def test_only_rows_with_much_in_common_share_tokens() -> None:
    rows = siblings()
    assert Prefixes.of(batch_of(rows), [48] * 6, None) is None
    assert Prefixes.of(batch_of(rows), [48] * 6, lambda: False) is None
    found = prefixes_of(rows)
    assert found.within([0, 1, 2]) == Sharing([0, 1, 2], [0, 39, 39])
    assert found.within([4, 0, 3]) == Sharing([1, 2, 0], [0, 0, 39])
    assert found.num_unique(range(6)) == 6 * 48 - 4 * 39
    short = [[1, 2, 3, 4 + n] for n in range(4)]
    assert Prefixes.of(batch_of(short), [4] * 4, always) is None
    header = [[*range(MIN_SHARED + 1), *([50 + n] * 200)] for n in range(4)]
    assert Prefixes.of(batch_of(header), [len(row) for row in header], always) is None, "less than an eighth"


def test_rows_of_other_routing_versions_or_kept_ids_share_only_what_comes_before() -> None:
    rows = siblings(1, 2)
    routed = torch.zeros(2, 48, 3, dtype=torch.uint8)
    routed[1, 30] = 1
    assert prefixes_of(rows, routed_experts=routed).shared == [0, 29]
    versions = torch.full((2, 48), -1)
    versions[0, 20:40], versions[1, 25:40] = 3, 3
    assert prefixes_of(rows, versions=versions).shared == [0, 39], "an unknown version agrees with every other"
    versions[1, 33:] = 4
    assert prefixes_of(rows, versions=versions).shared == [0, 32]
    counts, kept = torch.zeros(2, 48, dtype=torch.int32), torch.zeros(2, 20, dtype=torch.int32)
    counts[:, 22:32] = 2
    assert prefixes_of(rows, kept_counts=counts, kept_ids=kept).shared == [0, 39]
    kept[0, 15] = 7  # the second id of the eighth counted token, number 29
    assert prefixes_of(rows, kept_counts=counts, kept_ids=kept).shared == [0, 28]
    counts[1, 25] = 1
    assert prefixes_of(rows, kept_counts=counts, kept_ids=kept).shared == [0, 24]


@pytest.mark.parametrize(("num_ranks", "most"), [(1, 4 * 75), (2, 2 * 75), (4, 75), (8, 57)])
def test_a_plan_keeps_siblings_together_as_far_as_ranks_have_equal_work(num_ranks: int, most: int) -> None:
    rows = siblings(4, 4)
    lengths, found = [len(row) for row in rows], prefixes_of(rows)
    plan, has_sharing = plan_sharing(lengths, num_ranks, 1000, None, found)
    assert has_sharing
    assert sorted(row for share in plan for pack in share for row in pack) == list(range(16))
    work = [sum(found.num_unique(pack) for pack in share) for share in plan]
    assert max(work) == most


@given(st.integers(1, 5), st.integers(1, 6), st.integers(48, 200), st.integers(1, 4))
def test_a_microbatch_computes_at_most_its_capacity(groups: int, size: int, capacity: int, num_ranks: int) -> None:
    rows = siblings(groups, size)
    batch = batch_of(rows)
    shares = split_batch("test", batch, num_ranks, capacity, may_share=always)
    assert sorted(row for share in shares for row in share.rows if share.microbatches[0]) == sorted(
        row for share in shares for pack in share.microbatches for row in map(share.rows.__getitem__, pack)
    )
    for share in shares:
        for pack, sharing in zip(share.microbatches, share.sharing, strict=True):
            if pack:
                data = lazy_pack(share.batch, pack, CPU, sharing)
                tree = data.get("prefix_tree")
                computed = len(data["input_ids"]) if tree is None else len(tree.tokens)
                assert computed <= capacity
                assert computed == len(data["input_ids"]) - sum(sharing.counts if sharing else ())


def test_pairs_that_must_stay_together_may_exceed_a_microbatch_by_what_they_share() -> None:
    rows, pairs = siblings(2, 2), [0, 0, 1, 1]
    plan, has_sharing = plan_sharing([48] * 4, 2, 60, pairs, prefixes_of(rows))
    assert (plan, has_sharing) == ([[[0, 1]], [[2, 3]]], True)
    with pytest.raises(DataError, match="has 96 tokens"):
        plan_sharing([48] * 4, 2, 60, pairs, None)


def test_a_plan_shares_nothing_if_whole_rows_take_no_longer() -> None:
    rows = siblings(1, 2, prompt=20, answer=400)
    assert not plan_sharing([420, 420], 2, 1000, None, Prefixes([0, 1], [0, 19], [420, 420]))[1]
    assert Prefixes.of(batch_of(rows), [420, 420], always) is None


def test_the_gradient_of_a_selected_row_is_added_up_in_float32() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0] * 300 + [1])
    select_rows(x, index).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [300.0, 1.0], "bfloat16 alone stops at 256"


@pytest.mark.parametrize("asked", [{}, {"sliding_window": 5}, {"softcap": 1.5}, {"s_aux": torch.randn(4).double()}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_attention_over_a_tree_is_that_of_whole_rows(asked: dict[str, Any], size: int) -> None:
    rows = [[*range(9)], [*range(7), 70, 71], [*range(7), 70, 80, 81], [50, 51], [50, 52, 53]]
    lengths = [len(row) for row in rows]
    tree = PrefixTree(lengths, Sharing([0, 1, 2, 3, 4], [0, 6, 7, 0, 0]), CPU)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    torch.manual_seed(0)
    nodes = [torch.randn(len(tree.tokens), h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2)]
    whole = [select_rows(x, tree.index).transpose(0, 1)[None] for x in nodes]
    expected, _ = packed_attention(None, *whole, None, packed_layout=PackedLayout(cu_seqlens, 10), **asked)
    found = torch.zeros(len(tree.tokens), 4, 8, dtype=torch.float64)
    weights = torch.randn(sum(lengths), 4, 8, dtype=torch.float64)
    gradients = [torch.zeros_like(x) for x in nodes]
    counted = torch.zeros_like(found).index_add(0, tree.index, weights)
    for rank in range(size):
        share = ContextShare(cu_seqlens, dist.ProcessGroup(rank, size) if size > 1 else None, tree)
        own = [share._own(x) for x in nodes]
        filled = torch.cat(nodes[1:], dim=-1)
        if size > 1:
            filled = torch.nn.functional.pad(filled, (0, 0, 0, 0, 0, 2 * size * share.chunk - len(filled)))
        share.gather_keys = lambda _, filled=filled: filled  # type: ignore[method-assign]
        layout = PackedLayout(cu_seqlens, 10, share)
        out, _ = packed_attention(None, *(x.transpose(0, 1)[None] for x in own), None, packed_layout=layout, **asked)
        mine = share.own_positions()
        real = mine >= 0
        found[tree.index[mine[real]]] = out[0, real].detach()
        for total, grad in zip(
            gradients, torch.autograd.grad((out[0] * share._own(counted)).sum(), nodes), strict=True
        ):
            total += grad
    torch.testing.assert_close(found[tree.index], expected[0])
    for total, grad in zip(gradients, torch.autograd.grad((expected[0] * weights).sum(), nodes), strict=True):
        torch.testing.assert_close(total, grad)
