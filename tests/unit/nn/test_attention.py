import pytest
import torch
import torch.distributed as dist

from rlite.backends.models import attention
from rlite.backends.models.attention import Bounds, PackedLayout, Softmax, packed_attention, varlen
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


ASKED = {
    "capped": (Softmax(softcap=1.5), 8),
    "sinks": (Softmax(sinks=torch.linspace(-2, 3, 4, dtype=torch.float64)), 8),
    "both": (Softmax(1.5, torch.linspace(-2, 3, 4, dtype=torch.float64)), 8),
    "narrow values": (Softmax(), 5),
    "wide values": (Softmax(), 13),
    "narrow values and sinks": (Softmax(sinks=torch.linspace(-2, 3, 4, dtype=torch.float64)), 5),
}
"""a softmax, and the width of values beside keys of width 8"""
LENGTHS = [20, 300, 2, 18, 1]
"""one sequence has more queries than scores are held for"""


def reference(query, key, value, sees, softmax):
    """Return attention by the formula: a sink is a column of scores whose probability belongs to no value."""
    keys, values = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = query @ keys.transpose(-1, -2) * 0.3
    if softmax.softcap is not None:
        scores = softmax.softcap * (scores / softmax.softcap).tanh()
    weights = scores.masked_fill(~sees, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if softmax.sinks is not None:
        total = total + softmax.sinks.exp()[:, None, None]
    return (weights / total @ values).transpose(1, 2)


def operands(width, softmax):
    """Return queries, keys and values of LENGTHS, and a softmax whose sinks have a gradient."""
    (query, key, _), layout = pack_of(LENGTHS, 4, 2)
    value = torch.randn(1, 2, sum(LENGTHS), width, dtype=torch.float64, requires_grad=True)
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.clone().requires_grad_())
    learnt = [x for x in (query, key, value, softmax.sinks) if x is not None]
    return (query, key, value), softmax, learnt, layout


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ASKED)
def test_sinks_caps_and_values_of_another_width_are_computed_with_their_gradients(kind, window):
    (query, key, value), softmax, learnt, layout = operands(ASKED[kind][1], ASKED[kind][0])
    expected = reference(query, key, value, window_of(LENGTHS, window or sum(LENGTHS)), softmax)
    asked = {"softcap": softmax.softcap, "s_aux": softmax.sinks, "sliding_window": window}
    out, _ = packed_attention(None, query, key, value, None, scaling=0.3, packed_layout=layout, **asked)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * weights).sum(), learnt) for x in (out, expected))
    for gradient, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, right)


def test_two_ranks_of_a_pack_compute_sinks_of_their_tokens():
    (query, key, value), softmax, _, layout = operands(5, ASKED["sinks"][0])
    expected = reference(query, key, value, window_of(LENGTHS, 7), softmax)
    both = torch.cat([key, value], dim=-1)[0].transpose(0, 1)
    for rank in range(2):
        share = ContextShare(layout.cu_seqlens, dist.ProcessGroup(rank, 2))
        filled = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, 4 * share.chunk - sum(LENGTHS)))
        share.gather_keys = lambda _, filled=filled: filled
        q, k, v = (share.take(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in (query, key, value))
        shared = PackedLayout(layout.cu_seqlens, max(LENGTHS), share)
        asked = {"s_aux": softmax.sinks, "sliding_window": 7}
        out, _ = packed_attention(None, q, k, v, None, scaling=0.3, packed_layout=shared, **asked)
        is_token = share.take(torch.ones(sum(LENGTHS), 1, 1)) > 0
        torch.testing.assert_close(out[0], share.take(expected[0]).where(is_token, out[0]))


def flash(query, key, value, cu_queries, cu_keys, *sizes, window_size, scale, return_aux=None, enable_gqa=False):
    """Compute what torch's flash attention does on a GPU: equal widths, and no gradient of the log-sum-exp [H, T]."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert enable_gqa or query.shape[1] == key.shape[1]
    sees = window_of(cu_queries.diff().tolist(), window_size[0] + 1 or len(query))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)
    out = (scores.softmax(-1) @ values)[0].transpose(0, 1)
    return (out, scores.logsumexp(-1)[0].detach().float()) if return_aux is not None else out


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["sinks", "narrow values", "wide values", "narrow values and sinks"])
def test_flash_attention_gets_equal_widths_and_sinks_have_gradients_through_its_log_sum_exp(kind, window, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", flash)
    (query, key, value), softmax, learnt, layout = operands(ASKED[kind][1], ASKED[kind][0])
    expected = reference(query, key, value, window_of(LENGTHS, window or sum(LENGTHS)), softmax)
    bounds = Bounds(layout.cu_seqlens, layout.cu_seqlens, max(LENGTHS), max(LENGTHS))
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    out = varlen(*rows, bounds, 0.3, window, softmax)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * weights).sum(), learnt) for x in (out, expected[0]))
    for gradient, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)


def test_flash_attention_refuses_a_soft_cap():
    (query, key, value), _ = pack_of([3], 1, 1)
    bounds = Bounds(torch.tensor([0, 3]), torch.tensor([0, 3]), 3, 3)
    with pytest.raises(ConfigError, match=r"caps its attention scores \(30.0\)"):
        varlen(query[0], key[0], value[0], bounds, 0.3, None, Softmax(softcap=30.0))
