import pytest
import torch
import torch.distributed as dist

from rlite.backends.models.attention import PackedLayout, packed_attention
from rlite.errors import ConfigError
from rlite.runtime.parallel.context_parallel import ContextShare


def pack_of(lengths, query_heads, key_heads, dim=8):
    total = sum(lengths)
    torch.manual_seed(total)
    shapes = ((1, query_heads, total, dim), (1, key_heads, total, dim), (1, key_heads, total, dim))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    return tensors, PackedLayout(cu_seqlens, max(lengths))


@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 4], [20, 19, 2, 18, 1]])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_sequence_of_a_pack_attends_as_if_it_were_alone(lengths, key_heads):
    (query, key, value), layout = pack_of(lengths, 4, key_heads)
    out, _ = packed_attention(None, query, key, value, None, scaling=0.3, packed_layout=layout)
    sequence = torch.arange(len(layout.lengths)).repeat_interleave(torch.tensor(layout.lengths))
    sees = (sequence[:, None] == sequence).tril()
    all_keys, all_values = (x.repeat_interleave(4 // key_heads, dim=1) for x in (key, value))
    scores = (query @ all_keys.transpose(-1, -2) * 0.3).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ all_values).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    actual_gradients = torch.autograd.grad((out * weights).sum(), [query, key, value])
    expected_gradients = torch.autograd.grad((expected * weights).sum(), [query, key, value])
    for actual, reference in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, reference)


def test_the_neighbours_in_a_pack_do_not_change_a_bit_of_a_sequence():
    (query, key, value), layout = pack_of([20, 19, 2, 18, 1], 4, 2)
    out, _ = packed_attention(None, query, key, value, None, packed_layout=layout)
    rows = slice(20, 39)
    alone = PackedLayout(torch.tensor([0, 19]), 19)
    expected, _ = packed_attention(None, *(x[:, :, rows] for x in (query, key, value)), None, packed_layout=alone)
    assert torch.equal(out[:, rows], expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[5], [3, 9, 1, 4], [20, 19, 2, 18, 1]])
def test_the_bounds_of_all_ranks_shares_give_every_token_the_keys_of_its_sequence_up_to_itself(lengths, size):
    _, whole = pack_of(lengths, 1, 1)
    positions = torch.arange(sum(lengths))
    starts = whole.cu_seqlens[:-1].repeat_interleave(torch.tensor(lengths))
    seen = {}
    for rank in range(size):
        share = ContextShare(whole.cu_seqlens, dist.ProcessGroup(rank, size))
        index, bounds = PackedLayout(whole.cu_seqlens, max(lengths), share).segments
        assert bounds.max_queries == bounds.cu_queries.diff().max()
        assert bounds.max_keys == bounds.cu_keys.diff().max()
        mine = share.take(positions + 1) - 1  # -1 is what fills up
        for queries, keys in zip(
            mine.split(bounds.cu_queries.diff().tolist()), index.split(bounds.cu_keys.diff().tolist()), strict=True
        ):
            for back, query in enumerate(reversed(queries.tolist())):  # a causal mask that ends where the keys end
                seen[query] = keys[: len(keys) - back].tolist()
    seen.pop(-1, None)
    assert seen == {query: list(range(start, query + 1)) for query, start in enumerate(starts.tolist())}


def window_of(lengths, window):
    """Return the mask of the tokens that each token of a pack attends to."""
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position = torch.arange(sum(lengths))
    steps_back = position[:, None] - position
    return (sequence[:, None] == sequence) & (steps_back >= 0) & (steps_back < window)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 4, 18, 19, 20, 100])
def test_a_sliding_window_is_kept_within_each_sequence_on_any_number_of_ranks(window, size):
    lengths = [20, 19, 2, 18, 1]
    (query, key, value), layout = pack_of(lengths, 4, 2)
    sees = window_of(lengths, window)
    all_keys, all_values = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (query @ all_keys.transpose(-1, -2) * 0.3).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ all_values).transpose(1, 2)
    if size == 1:
        out, _ = packed_attention(
            None, query, key, value, None, scaling=0.3, packed_layout=layout, sliding_window=window
        )
        torch.testing.assert_close(out, expected)
        return
    both = torch.cat([key, value], dim=-1)[0].transpose(0, 1)
    for rank in range(size):
        share = ContextShare(layout.cu_seqlens, dist.ProcessGroup(rank, size))
        filled = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, 2 * size * share.chunk - sum(lengths)))
        share.gather_keys = lambda _, filled=filled: filled
        q, k, v = (share.take(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, value))
        shared = PackedLayout(layout.cu_seqlens, max(lengths), share)
        out, _ = packed_attention(None, q, k, v, None, scaling=0.3, packed_layout=shared, sliding_window=window)
        torch.testing.assert_close(out[0], share.take(expected[0]).where(share.take(torch.ones(60, 1, 1)) > 0, out[0]))


def test_packed_attention_without_a_layout_is_refused():
    (query, key, value), _ = pack_of([3], 1, 1)
    with pytest.raises(ConfigError, match="packed_layout"):
        packed_attention(None, query, key, value, None)


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(1)}])
def test_a_model_that_asks_for_another_attention_is_refused(asked):
    (query, key, value), layout = pack_of([3, 9], 1, 1)
    with pytest.raises(ConfigError, match=next(iter(asked))):
        packed_attention(None, query, key, value, None, packed_layout=layout, **asked)
    packed_attention(None, query, key, value, None, packed_layout=layout, softcap=None)
