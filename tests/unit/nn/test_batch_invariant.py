"""A token's bits do not depend on the batch; values and gradients are those of the ordinary operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlite.backends.models.attention import causal_attention
from rlite.backends.models.batch_invariant import (
    BLOCK,
    COLUMNS,
    RotaryTable,
    attend,
    causal_attention_in_blocks,
    in_order,
    label_logprobs,
    linear,
    silu,
)
from rlite.backends.models.head_logprobs import linear_logprobs


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def on_one_thread(function: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = function()
    torch.set_num_threads(before)
    return result


@pytest.mark.parametrize(("width", "out"), [(16, 48), (64, 259), (100, 36), (256, 768), (768, 256), (96, COLUMNS + 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_of_a_product_have_the_same_bits_anywhere(threads: int, width: int, out: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1500, width), torch.randn(out, width)
    bias = torch.randn(out) if has_bias else None
    alone = on_one_thread(lambda: torch.cat([linear(row, weight, bias) for row in x[:70].split(1)]))
    for start, num in ((0, 70), (3, 1), (5, 17), (0, 300), (0, 1500)):
        found = linear(x[start : start + num], weight, bias)[: 70 - start]
        assert torch.equal(found, alone[start : start + len(found)])
    assert torch.equal(linear(x, weight[:COLUMNS], bias if bias is None else bias[:COLUMNS])[:70], alone[:, :COLUMNS])
    torch.testing.assert_close(alone, F.linear(x[:70], weight, bias), atol=1e-4, rtol=1e-4)


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape))


def test_gradients_are_those_of_the_ordinary_operations() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 75, 16), torch.randn(1, 2, 75, 16), torch.randn(1, 2, 75, 16)
    cases = [
        (linear, F.linear, (torch.randn(2, 5, 12), torch.randn(7, 12), torch.randn(7))),
        (silu, F.silu, (torch.randn(3, 35),)),
        (
            lambda *x: causal_attention_in_blocks(*x, scaling=0.2, window=None),
            lambda *x: causal_attention(*x, scaling=0.2, window=None),
            (q, k, v),
        ),
    ]
    for ours, plain, inputs in cases:
        torch.testing.assert_close(ours(*inputs), plain(*inputs), atol=1e-5, rtol=1e-5)
        for found, expected in zip(gradients(ours, *inputs), gradients(plain, *inputs), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [16, 24, 64, 128])
@pytest.mark.parametrize("heads", [2, 8])
def test_attention_of_a_token_has_the_same_bits_in_any_piece_of_its_sequence(
    threads: int, dim: int, heads: int
) -> None:
    torch.manual_seed(0)
    length = 5 * BLOCK
    q, keys, values = torch.randn(heads, length, dim), torch.randn(2, length, dim), torch.randn(2, length, dim)
    whole = on_one_thread(lambda: attend(q, keys, values, 0, 0.3))
    for start, stop in ((0, 1), (3, 70), (BLOCK, 2 * BLOCK), (200, 201), (100, length)):
        assert torch.equal(attend(q[:, start:stop], keys, values, start, 0.3), whole[:, start:stop])
    packed = causal_attention_in_blocks(q[None, :, :77], keys[None, :, :77], values[None, :, :77], 0.3, None)
    assert torch.equal(packed[0], whole[:, :77])
    in_a_pack = (x.transpose(0, 1).contiguous().transpose(0, 1)[None, :, : 2 * BLOCK] for x in (q, keys, values))
    assert torch.equal(causal_attention_in_blocks(*in_a_pack, 0.3, None)[0], whole[:, : 2 * BLOCK])


def test_a_product_in_order_is_a_product() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 30), torch.randn(21, 30)
    torch.testing.assert_close(in_order(x, weight), x @ weight.t(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num", [1, 31, 777, 32768, 100_003])
def test_silu_of_an_element_has_the_same_bits_anywhere(threads: int, num: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(100_100)
    before = x.clone()
    expected = on_one_thread(lambda: torch.cat([silu(part) for part in x.split(64)]))
    assert torch.equal(silu(x[7 : 7 + num]), expected[7 : 7 + num])
    assert torch.equal(x, before), "the input is left as it is"


def test_rotary_angles_of_a_position_have_the_same_bits_anywhere(threads: int) -> None:
    rates = 1 / 10000 ** (torch.arange(0, 36, 2) / 36)

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None].float() * rates).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    x, positions = torch.empty(0), torch.arange(1000)[None]
    table = on_one_thread(lambda: torch.stack(RotaryTable(forward)(x, positions)))
    grown = RotaryTable(forward)
    for asked in (torch.tensor([[0, 5, 3]]), torch.tensor([[900, 1]]), positions[:, 40:67]):
        assert torch.equal(torch.stack(grown(x, asked)), table[:, :, asked[0]])
    torch.testing.assert_close(table, torch.stack(forward(x, positions)))


@pytest.mark.parametrize("vocab_size", [259, 2 * COLUMNS + 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_have_the_same_bits_with_and_without_logits(threads: int, vocab_size: int, temperature: float) -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(150, 48), torch.randn(vocab_size, 48), torch.randint(0, vocab_size, (150,))
    trained = linear_logprobs(hidden, weight, labels, temperature, is_deterministic=True).logprobs
    rows = [
        label_logprobs(linear(hidden[r : r + 1], weight), labels[r : r + 1], temperature) for r in range(len(hidden))
    ]
    assert torch.equal(trained, torch.cat(rows))
    part = linear_logprobs(hidden[20:31], weight, labels[20:31], temperature, is_deterministic=True).logprobs
    assert torch.equal(part, trained[20:31])
    plain = linear_logprobs(hidden, weight, labels, temperature).logprobs
    torch.testing.assert_close(trained, plain, atol=1e-4, rtol=1e-4)
