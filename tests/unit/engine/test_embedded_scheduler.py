from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.backends.embedded import scheduler as scheduling
from rlite.backends.embedded.scheduler import Move, RunningSequence, Scheduler
from rlite.types import GenerationHyperparameters, SequenceRequest


def sequence(
    request_id: int, prompt: list[int], max_new_tokens: int = 8, stop_ids: tuple[int, ...] = ()
) -> RunningSequence:
    request = SequenceRequest(
        request_id=request_id,
        input_ids=prompt,
        gconfig=GenerationHyperparameters(max_new_tokens=max_new_tokens),
        seed=request_id,
    )
    return RunningSequence(
        request=request,
        tokens=list(prompt),
        num_reported=len(prompt),
        max_tokens=len(prompt) + max_new_tokens,
        min_tokens=len(prompt),
        stop_ids=frozenset(stop_ids),
    )


def no_stop_strings(sequence: RunningSequence, start: int) -> None:
    raise AssertionError("nobody asked for stop strings")


def prefill_all(scheduler: Scheduler) -> list[tuple[list[Move], list[tuple[int, int, int]]]]:
    rounds = []
    while True:
        moves, chunks = scheduler.next_prefill()
        if not moves and not chunks:
            return rounds
        rounds.append((moves, [(c.slot, c.start, c.stop) for c in chunks]))


def test_a_prompt_is_prefilled_up_to_its_last_token_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(num_slots=4, max_prefill_tokens=4)
    scheduler.add(sequence(0, list(range(7))))
    scheduler.add(sequence(1, [9, 9, 9]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 4)]), ([], [(0, 4, 6), (1, 0, 2)])]


def test_a_prompt_that_one_forward_can_hold_is_not_split_and_a_shorter_one_takes_its_place() -> None:
    scheduler = Scheduler(num_slots=4, max_prefill_tokens=6)
    for i, length in enumerate((5, 5, 3)):
        scheduler.add(sequence(i, list(range(10 * i, 10 * i + length))))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 4), (2, 0, 2)]), ([], [(1, 0, 4)])]


def test_siblings_copy_a_prompt_instead_of_prefilling_it_again() -> None:
    scheduler = Scheduler(num_slots=4, max_prefill_tokens=100)
    for i in range(3):
        scheduler.add(sequence(i, [1, 2, 3, 4]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 3)]), ([Move(0, 1, 3), Move(0, 2, 3)], [])]
    # one that comes later copies from a sibling that already decodes
    scheduler.record([[5]] * 3, [[0.0]] * 3, [[0.0]] * 3, no_stop_strings)
    scheduler.add(sequence(3, [1, 2, 3, 4]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([Move(0, 3, 3)], [])]


def test_after_new_weights_siblings_share_the_prompt_and_prefill_their_own_completions() -> None:
    scheduler = Scheduler(num_slots=2, max_prefill_tokens=100)
    for i in range(2):
        scheduler.add(sequence(i, [1, 2, 3, 4]))
    scheduler.admit()
    prefill_all(scheduler)
    scheduler.record([[5, 6], [7, 8]], [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2, no_stop_strings)
    scheduler.forget_cache()
    assert prefill_all(scheduler) == [([], [(0, 0, 5)]), ([Move(0, 1, 3)], [(1, 3, 5)])]


def test_nothing_is_reported_behind_a_stop_token_and_the_stop_token_is() -> None:
    scheduler = Scheduler(num_slots=2, max_prefill_tokens=100)
    scheduler.add(sequence(0, [1, 2], stop_ids=(7,)))
    scheduler.add(sequence(1, [1, 2]))
    scheduler.admit()
    prefill_all(scheduler)
    moves = scheduler.record([[5, 7, 6], [7, 7, 7]], [[-1.0, -2.0, -3.0]] * 2, [[-1.0] * 3] * 2, no_stop_strings)
    assert moves == [Move(1, 0, 4)]
    first, second = scheduler.drain(version=3)
    assert (first.token_ids, first.logprobs, first.finish_reason, first.version) == ([5, 7], [-1.0, -2.0], "stop", 3)
    assert (second.token_ids, second.finish_reason) == ([7, 7, 7], None)
    assert scheduler.drain(version=3) == []


def test_a_burst_ends_where_the_first_row_ends_or_may_stop_for_the_first_time() -> None:
    scheduler = Scheduler(num_slots=3, max_prefill_tokens=100)
    scheduler.add(sequence(0, [1], max_new_tokens=9))
    scheduler.add(sequence(1, [1], max_new_tokens=5))
    scheduler.admit()
    assert scheduler.burst(100) == 5
    assert scheduler.burst(2) == 2
    scheduler.running[0].min_tokens = 4
    assert scheduler.burst(100) == 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_slots=st.integers(1, 5),
    budget=st.integers(1, 9),
    has_state=st.booleans(),
    keeps_caches=st.booleans(),
)
def test_slots_hold_what_their_sequences_believe_through_any_traffic(
    seed: int, num_slots: int, budget: int, has_state: bool, keeps_caches: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "MIN_SHARED", 2)
        serve_random_traffic(random.Random(seed), num_slots, budget, has_state, keeps_caches)


@pytest.mark.parametrize("has_state", [False, True])
def test_most_tokens_of_sessions_are_not_prefilled_again(has_state: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "MIN_SHARED", 2)
        assert sum(serve_random_traffic(random.Random(seed), 16, 9, has_state) for seed in range(20)) > 400


def serve_random_traffic(
    rng: random.Random, num_slots: int, budget: int, has_state: bool = False, keeps_caches: bool = True
) -> int:
    # a cache that stores the token itself: what a slot holds must be the tokens of the sequence that lives in it
    cache = [[-1] * 200 for _ in range(num_slots)]
    # all tokens of which a recurrent state knows, neither more nor fewer
    states: list[list[int]] = [[] for _ in range(num_slots)]

    def apply(moves: list[Move]) -> None:
        for move in moves:
            cache[move.target][: move.length] = cache[move.source][: move.length]
            states[move.target] = list(states[move.source])

    scheduler = Scheduler(num_slots, budget, keeps_caches, has_state)
    reported: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    prompts: list[list[int]] = []

    def ask(earlier: list[int]) -> None:
        prompts.append([*earlier, *(rng.randrange(3) for _ in range(rng.randrange(1, 6)))])
        scheduler.add(sequence(len(prompts) - 1, prompts[-1], rng.randrange(1, 9), stop_ids=(0,)))

    for _ in range(12):
        ask([])
    for _ in range(400):
        if not (scheduler.waiting or scheduler.running):
            break
        apply(scheduler.admit())
        while True:
            moves, chunks = scheduler.next_prefill()
            apply(moves)
            if not chunks:
                break
            assert sum(c.stop - c.start for c in chunks) <= budget
            for chunk in chunks:
                cache[chunk.slot][chunk.start : chunk.stop] = chunk.tokens
                before = states[chunk.slot] if chunk.start else []
                assert not has_state or before == scheduler.running[chunk.slot].tokens[: chunk.start]
                states[chunk.slot] = [*before, *chunk.tokens]
        steps = rng.randrange(1, scheduler.burst(4) + 1)
        made = [[rng.randrange(6) for _ in range(steps)] for _ in scheduler.running]
        for slot, running in enumerate(scheduler.running):
            assert running.slot == slot
            assert cache[slot][: len(running.tokens) - 1] == running.tokens[:-1]
            length = len(running.tokens) - 1
            if length == 0:
                states[slot] = []  # nothing was prefilled
            assert not has_state or states[slot] == running.tokens[:-1]
            states[slot] = [*states[slot], running.tokens[-1], *made[slot][:-1]]
            cache[slot][length : length + steps] = [running.tokens[-1], *made[slot][:-1]]
        zeros = [[0.0] * steps for _ in made]
        apply(scheduler.record(made, zeros, zeros, no_stop_strings))
        if rng.random() < 0.2:
            apply(scheduler.abort({rng.randrange(len(prompts))}))
        if rng.random() < 0.1:
            scheduler.forget_cache()
        for chunk in scheduler.drain(0):
            assert chunk.request_id not in ended
            assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.sampling_logprobs)
            reported.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.finish_reason:
                ended[chunk.request_id] = chunk.finish_reason
                if len(prompts) < 24 and rng.random() < 0.7:  # the next turn of its session
                    ask([*prompts[chunk.request_id], *reported[chunk.request_id]])
    assert sorted(ended) == list(range(len(prompts)))
    assert all(0 not in reported[i][:-1] for i, reason in ended.items() if reason == "stop")
    assert all(0 not in reported[i] for i, reason in ended.items() if reason == "length")
    return scheduler.num_reused


def test_siblings_copy_a_state_when_exactly_their_prompt_is_prefilled() -> None:
    scheduler = Scheduler(num_slots=4, max_prefill_tokens=100, has_state=True)
    for i in range(2):
        scheduler.add(sequence(i, [1, 2, 3, 4]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 3)]), ([Move(0, 1, 3)], [])]
    scheduler.record([[5]] * 2, [[0.0]] * 2, [[0.0]] * 2, no_stop_strings)
    scheduler.add(sequence(2, [1, 2, 3, 4]))  # comes when the states of the others are beyond the prompt
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(2, 0, 3)])]
    scheduler.forget_cache()  # the first of the siblings stops at the prompt, for the others
    assert prefill_all(scheduler) == [
        ([], [(0, 0, 3)]),
        ([Move(0, 1, 3), Move(0, 2, 3)], [(0, 3, 4), (1, 3, 4)]),
    ]


def test_a_state_is_continued_from_its_end_alone() -> None:
    scheduler = Scheduler(num_slots=2, max_prefill_tokens=100, has_state=True)
    prompt = list(range(40))
    scheduler.add(sequence(0, prompt, max_new_tokens=2))
    scheduler.admit()
    prefill_all(scheduler)
    scheduler.record([[7, 8]], [[0.0, 0.0]], [[0.0, 0.0]], no_stop_strings)  # 41 tokens are in the state
    scheduler.add(sequence(1, [*prompt, 9, 9]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 41)])], "a state cannot be shortened"
    scheduler.add(sequence(2, [*prompt, 7, 8, 9]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(1, 41, 42)])]
    assert scheduler.num_reused == 41


def test_a_state_behind_a_stop_is_not_kept() -> None:
    scheduler = Scheduler(num_slots=2, max_prefill_tokens=100, has_state=True)
    prompt = list(range(1, 41))
    scheduler.add(sequence(0, prompt, stop_ids=(0,)))
    scheduler.admit()
    prefill_all(scheduler)
    scheduler.record([[7, 0, 3]], [[0.0] * 3], [[0.0] * 3], no_stop_strings)
    scheduler.add(sequence(1, [*prompt, 7, 0, 5]))
    scheduler.admit()
    assert prefill_all(scheduler) == [([], [(0, 0, 42)])]
