"""The bytes of chosen experts: their form, their way into a batch, and the records that cannot be true."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from rlite.data.packs import TokenHistory, check_trajectory, lazy_pack, pad_checked
from rlite.data.routing import ROUTED, RoutingShape, RoutingTable, check_routing
from rlite.errors import DataError
from rlite.types import LLMResponse

SHAPE = RoutingShape(num_layers=2, top_k=2, num_experts=8)
TABLE = RoutingTable(SHAPE, layers=(1, 2), num_all=3)


def choices(count: int, shape: RoutingShape = SHAPE, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, shape.num_layers, shape.num_experts, generator=generator).topk(shape.top_k).indices


def rows_of(chosen: Tensor, shape: RoutingShape = SHAPE) -> list[bytes]:
    return [row.numpy().tobytes() for row in shape.encode(chosen)]


def response(prompt: list[int], output: list[int], column: list[list[bytes]]) -> LLMResponse:
    return LLMResponse(
        input_tokens=prompt,
        output_tokens=output,
        output_logprobs=[-1.0] * len(output),
        output_versions=[0] * len(output),
        stop_reason="stop",
        latency=0.0,
        ttft=0.0,
        extras={ROUTED: column},
    )


@pytest.mark.parametrize("num_experts", [8, 256, 257, 512])
@pytest.mark.parametrize("top_k", [1, 4])
def test_choices_travel_as_bytes_with_a_sign_for_none(num_experts: int, top_k: int) -> None:
    shape = RoutingShape(3, top_k, num_experts)
    chosen = choices(20, shape)
    chosen[0, 0, 0] = num_experts - 1
    chosen[::5] = -1
    column = shape.encode(chosen)
    assert column.dtype == torch.uint8
    assert column.shape == (20, shape.num_bytes)
    assert shape.num_bytes == 3 * top_k * (1 if num_experts < 256 + (top_k > 1) else 2)
    assert torch.equal(shape.decode(column), chosen)


def test_two_turns_of_one_sequence_keep_what_was_recorded_first_and_fill_what_was_not() -> None:
    chosen = rows_of(choices(9))
    other = rows_of(choices(9, seed=1))
    history = TokenHistory()
    history.read([1, 2, 3])
    history.add(response([1, 2, 3], [4, 5], [chosen[:3], [chosen[3]]]))
    history.read([6, 7])
    history.add(response([1, 2, 3, 4, 5, 6, 7], [8, 9], [[*other[:4], *chosen[4:7]], [chosen[7]]]))
    assert history.routed_experts == [*chosen[:8], b""]
    row = history.row()
    check_trajectory(row)
    assert torch.equal(SHAPE.decode(row[ROUTED])[0, :8], choices(9)[:8])
    assert (SHAPE.decode(row[ROUTED])[0, 8] == -1).all(), "nobody read the last token"


def test_batches_and_packs_keep_the_rows_of_their_tokens_and_rows_without_choices() -> None:
    history, plain = TokenHistory(), TokenHistory()
    for each in (history, plain):
        each.read([1, 2])
    history.add(response([1, 2], [3, 4], [rows_of(choices(2)), rows_of(choices(3)[2:])]))
    plain.write([3], [-1.0], [0], "stop")
    batch = pad_checked([plain.row(), history.row()])
    assert batch[ROUTED].shape == (2, 4, SHAPE.num_bytes)
    pack = lazy_pack(batch, [1, 0], torch.device("cpu"))
    found = SHAPE.decode(pack[ROUTED])
    assert torch.equal(found[:3], choices(3))
    assert (found[3:] == -1).all()


def batch_with(chosen: Tensor) -> TensorDict:
    mask = torch.ones(1, len(chosen), dtype=torch.bool)
    return TensorDict({"attention_mask": mask, ROUTED: SHAPE.encode(chosen)[None]}, batch_size=[1])


def test_a_good_record_counts_the_tokens_that_have_one() -> None:
    chosen = choices(41)
    chosen[-1] = -1
    assert check_routing(batch_with(chosen), SHAPE) == 1.0
    chosen[:20] = -1
    assert check_routing(batch_with(chosen), SHAPE) == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.fill_(0), "one expert twice"),
        (lambda x: x[5, 1].fill_(3), "one expert twice"),
        (lambda x: x.copy_(x[:1].clone().expand_as(x)), "all 40 tokens have the same experts"),
        (lambda x: x[7, 1].copy_(torch.tensor([1, 8])), "expert 8 of 8"),
        (lambda x: x.fill_(-1), "it has none for the 40 tokens"),
    ],
)
def test_a_poisoned_record_is_refused(change: object, message: str) -> None:
    chosen = choices(40)
    change(chosen)  # type: ignore[operator]
    with pytest.raises(DataError, match=message):
        check_routing(batch_with(chosen), SHAPE)


def test_a_record_of_further_layers_is_refused() -> None:
    column = RoutingShape(3, 2, 8).encode(choices(5, RoutingShape(3, 2, 8)))
    with pytest.raises(DataError, match=r"6 bytes.*expected 4 for 2 layers.*predict further tokens"):
        SHAPE.decode(column)


@pytest.mark.parametrize("has_dense_layers", [True, False])
def test_a_table_of_vllm_or_sglang_becomes_entries(has_dense_layers: bool) -> None:
    chosen = choices(6)
    table = np.zeros((6, 3 if has_dense_layers else 2, 2), np.int32)
    table[:, 1 if has_dense_layers else 0 :] = chosen.numpy()
    entries = TABLE.entries(table, 3)
    assert [len(rows) for rows in entries] == [4, 1, 1]
    assert [row for rows in entries for row in rows] == rows_of(chosen)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((6, 4, 2), np.int32), "shape [6, 4, 2]; expected at least 4 tokens, 3 layers"),
        (np.zeros((6, 3, 3), np.int32), "shape [6, 3, 3]"),
        (np.zeros((3, 3, 2), np.int32), "shape [3, 3, 2]"),
        (np.full((6, 3, 2), 8, np.int32), "up to 8; expected 0 to 7"),
    ],
)
def test_a_table_of_another_form_is_refused(table: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        TABLE.entries(table, 4)
