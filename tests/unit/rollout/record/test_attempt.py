"""Histories of attempts that give no trajectory."""

from __future__ import annotations

from contextlib import suppress

from rlite.rollout.draws import AttemptHistory
from rlite.types import TokenChunk


def chunk(*ids: int, version: int = 3) -> TokenChunk:
    return TokenChunk(request_id=0, version=version, token_ids=list(ids), logprobs=[-0.5] * len(ids))


def tokens(attempt: AttemptHistory) -> list[tuple[list[int], list[int]]]:
    return [(sequence["ids"].tolist(), sequence["versions"].tolist()) for sequence in attempt.arrays()]


def test_turns_of_one_conversation_are_one_sequence() -> None:
    attempt = AttemptHistory()
    with attempt.turn([1, 2]) as first:
        first(chunk(5))
        first(chunk(6, version=4))
    with attempt.turn([1, 2, 5, 6, 7]) as second:
        second(chunk(8, version=4))
    assert tokens(attempt) == [([1, 2, 5, 6, 7, 8], [-1, -1, 3, 4, -1, 4])]
    [columns] = attempt.arrays()
    assert columns["mask"].tolist() == [False, False, True, True, False, True]
    assert columns["logprobs"].tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]


def test_other_prompts_and_requests_at_the_same_time_are_sequences_of_their_own() -> None:
    attempt = AttemptHistory()
    with attempt.turn([1, 2]) as first, attempt.turn([1, 2]) as second:
        first(chunk(5))
        second(chunk(6))
    with attempt.turn([1, 9]) as third:
        third(chunk(7))
    assert [ids for ids, _ in tokens(attempt)] == [[1, 2, 5], [1, 2, 6], [1, 9, 7]]


def test_an_answer_that_broke_off_is_kept_and_asked_for_again_beside_it() -> None:
    attempt = AttemptHistory()
    with suppress(TimeoutError), attempt.turn([1, 2]) as first:
        first(chunk(5))
        raise TimeoutError
    with suppress(ValueError), attempt.turn([]):
        raise ValueError("the prompt is empty")
    assert [ids for ids, _ in tokens(attempt)] == [[1, 2, 5]], "an empty sequence does not count"
    with attempt.turn([1, 2]) as again:
        again(chunk(6))
    assert [ids for ids, _ in tokens(attempt)] == [[1, 2, 5], [1, 2, 6]]


def test_an_attempt_is_saved_and_loaded() -> None:
    attempt = AttemptHistory()
    with attempt.turn([1, 2]) as first:
        first(chunk(5))
    again = AttemptHistory.from_state(attempt.state_dict())
    assert tokens(again) == tokens(attempt)
    assert AttemptHistory.from_state([]).arrays() == []
