from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rlite.data.packs import TokenHistory, check_alike, layout
from rlite.errors import DataError
from rlite.rollout import check_trajectory, pad_trajectories
from rlite.rollout.joined import join_batches


def row(length: int, **columns: Any) -> TensorDict:
    base = {
        "input_ids": torch.arange(1, length + 1)[None],
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "versions": torch.full((1, length), 7),
        "rewards": torch.tensor([float(length)]),
    }
    return TensorDict({**base, **columns}, batch_size=[1])


def test_token_keys_are_padded_on_the_right_and_row_keys_stacked() -> None:
    batch = pad_trajectories([row(2), row(4)], group_ids=[11, 12])
    assert batch.batch_size == torch.Size([2])
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert batch["versions"].tolist() == [[7, 7, -1, -1], [7] * 4]
    assert batch["rewards"].tolist() == [2.0, 4.0]
    assert batch["group_ids"].tolist() == [11, 12]


def test_keys_with_further_dimensions_keep_them() -> None:
    per_token = [row(n, hidden=torch.full((1, n, 3), float(n)), summary=torch.full((1, 5), float(n))) for n in (1, 2)]
    batch = pad_trajectories(per_token)
    assert batch["hidden"].shape == (2, 2, 3)
    assert batch["hidden"][0, 1].tolist() == [0.0, 0.0, 0.0]
    assert batch["summary"].shape == (2, 5)


def test_a_trajectory_of_several_rows_is_one_group() -> None:
    pair = pad_trajectories([row(3), row(5)])
    batch = pad_trajectories([pair, row(1)], group_ids=[4, 9])
    assert batch["group_ids"].tolist() == [4, 4, 9]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 1]


def test_rewards_may_be_of_tokens() -> None:
    batch = pad_trajectories([row(length, rewards=torch.full((1, length), float(length))) for length in (2, 3)])
    assert batch["rewards"].tolist() == [[2.0, 2.0, 0.0], [3.0, 3.0, 3.0]]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (row(2, extra=torch.zeros(1)), "trajectory 1 has 'extra' and trajectory 0 has not"),
        (row(2).exclude("rewards"), "trajectory 0 has 'rewards' and trajectory 1 has not"),
        (row(2, rewards=torch.zeros(1, 3)), r"rewards has shape \[1, 3\]; expected \[1\], .* or \[1, 2\]"),
        (row(2, input_ids=torch.ones(1, 2)), r"trajectory 1: input_ids is float32 \[1, 2\]; expected whole numbers"),
        (row(2, versions=torch.ones(1, 2, dtype=torch.bool)), r"trajectory 1: versions is bool \[1, 2\]"),
        (
            row(2, loss_mask=torch.tensor([[0.0, 0.5]])),
            "trajectory 1: loss_mask holds other values than ones and zeros",
        ),
        (row(2, rewards=torch.zeros(1, dtype=torch.int64)), "rewards is int64"),
        (row(2, rewards=torch.tensor([float("nan")])), "trajectory 1: rewards holds a value that is not finite"),
        (row(2, loss_mask=torch.ones(1, 3)), r"trajectory 1: loss_mask has shape \[1, 3\], input_ids \[1, 2\]"),
        (row(2, attention_mask=torch.tensor([[False, True]])), "trajectory 1: attention_mask must be ones"),
        (row(2, sequence_index=torch.tensor([1])), r"trajectory 1: sequence_index is \[1\]; expected the rows"),
        (row(2).exclude("attention_mask"), "trajectory 1 has no attention_mask"),
        (row(2, input_ids=torch.arange(2)[:1]), r"trajectory 1: input_ids has shape \[1\]"),
        ({"input_ids": torch.zeros(1, 2)}, "trajectory 1 is dict: expected a TensorDict"),
    ],
)
def test_mismatched_trajectories_are_named_with_key_and_index(second: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pad_trajectories([row(3), second])


def test_a_key_that_is_neither_per_token_nor_of_one_shape_is_named() -> None:
    with pytest.raises(DataError, match=r"scores is float32 \[1, 4\] in trajectory 1, which has 2 tokens"):
        pad_trajectories([row(3, scores=torch.zeros(1, 3)), row(2, scores=torch.zeros(1, 4))])


def test_a_loss_on_padding_is_refused() -> None:
    padded = row(3, attention_mask=torch.tensor([[1, 1, 0]]), loss_mask=torch.tensor([[0, 1, 1]]))
    with pytest.raises(DataError, match="loss_mask selects positions that attention_mask leaves out"):
        check_trajectory(padded)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(DataError, match="the list is empty"):
        pad_trajectories([])


def written(kept_ids: list[list[int]] | None, tokens: tuple[int, ...] = (3, 4)) -> TensorDict:
    history = TokenHistory()
    history.read([1, 2])
    history.write(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", kept_ids)
    return history.row()


def test_kept_ids_of_a_turn_follow_its_tokens() -> None:
    history = TokenHistory()
    history.read([1, 2])
    history.write([3, 4], [-1.0, -1.0], [0, 0], "stop", [[3, 9], [4]])
    history.read([5])
    history.write([6], [-1.0], [0], "stop")
    history.read([7])
    history.drop_unanswered()
    row = history.row()
    check_trajectory(row)
    assert row["kept_counts"].tolist() == [[0, 0, 2, 1, 0, 0]]
    assert row["kept_ids"].tolist() == [[3, 9, 4]]
    assert (row["kept_counts"].dtype, row["kept_ids"].dtype) == (torch.int32, torch.int32)
    assert "kept_ids" not in written(None)


def test_kept_ids_are_padded_and_trajectories_without_them_join_as_untruncated() -> None:
    batch = pad_trajectories([written([[3], [4, 5, 6]]), written(None), written([[], []]), written([[3]], (3,))])
    assert batch["kept_counts"].tolist() == [[0, 0, 1, 3], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert batch["kept_ids"].tolist() == [[3, 4, 5, 6], [-1] * 4, [-1] * 4, [3, -1, -1, -1]]
    again = join_batches([batch[:1], batch[1:].exclude("kept_ids", "kept_counts"), batch[3:]])
    assert again["kept_ids"].tolist() == [[3, 4, 5, 6], *[[-1] * 4] * 3, [3, -1, -1, -1]]
    assert check_alike([written(None), written([[3], [4]])])
    assert layout(written(None)) == layout(written([[3], [4]]))


@pytest.mark.parametrize(
    ("kept_ids", "words"),
    [
        ([[3], [5]], "token 4 at position 3 of row 0 is not among its kept_ids"),
        ([[3, 3], [4]], "or occurs twice"),
        ([[3, -2], [4]], "kept_ids holds -2"),
        ([[3]], r"kept_counts has shape \[1, 3\]"),
    ],
)
def test_kept_ids_that_do_not_fit_their_tokens_are_refused(kept_ids: list[list[int]], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_trajectory(written(kept_ids))


def test_trajectories_without_a_mark_of_newer_versions_go_with_others() -> None:
    older = TensorDict(
        {"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 3, dtype=torch.bool)}, [2]
    )
    newer = older.clone().set("turn_limited", torch.ones(2))
    batch = pad_trajectories([older, newer])
    assert batch["turn_limited"].tolist() == [0, 0, 1, 1]
    assert layout(older) == layout(newer)
    assert "turn_limited" not in pad_trajectories([older, older])
