from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlite.backends.embedded import pages as paging
from rlite.backends.embedded import scheduler as scheduling
from rlite.backends.embedded.pages import TRASH
from rlite.backends.embedded.scheduler import Copies, RunningSequence, Scheduler
from rlite.backends.models.batch_invariant import BLOCK
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


def prefill_all(scheduler: Scheduler) -> list[list[tuple[int, int, int]]]:
    """Chunks (number of the request, start, stop) of each forward."""
    rounds = []
    while True:
        _, chunks = scheduler.next_prefill()
        if not chunks:
            return rounds
        numbers = [scheduler.running[c.row].request.request_id for c in chunks]
        rounds.append([(number, c.start, c.stop) for number, c in zip(numbers, chunks, strict=True)])


def decode(scheduler: Scheduler, *made: list[int]) -> None:
    zeros = [[0.0] * len(made[0])] * len(made)
    assert scheduler.burst(len(made[0])) == len(made[0])
    scheduler.record(list(made), zeros, zeros, no_stop_strings)


def test_a_prompt_is_prefilled_up_to_its_last_token_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(num_rows=4, max_prefill_tokens=4, num_pages=9)
    scheduler.add(sequence(0, list(range(7))))
    scheduler.add(sequence(1, [9, 9, 9]))
    assert prefill_all(scheduler) == [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)]]


def test_a_prompt_that_one_forward_can_hold_is_not_split_and_a_shorter_one_takes_its_place() -> None:
    scheduler = Scheduler(num_rows=4, max_prefill_tokens=6, num_pages=9)
    for i, length in enumerate((5, 5, 3)):
        scheduler.add(sequence(i, list(range(10 * i, 10 * i + length))))
    assert prefill_all(scheduler) == [[(0, 0, 4), (2, 0, 2)], [(1, 0, 4)]]


def test_siblings_share_the_full_pages_of_a_prompt_and_copy_the_last_one() -> None:
    scheduler = Scheduler(num_rows=4, max_prefill_tokens=100, num_pages=20)
    prompt = list(range(70))
    for i in range(3):
        scheduler.add(sequence(i, prompt))
    assert scheduler.next_prefill()[1][0][:3] == (0, 0, 69)
    copies, chunks = scheduler.next_prefill()
    first, second, third = (s.pages for s in scheduler.running)
    assert not chunks
    assert copies.pages == [(first[1], second[1]), (first[1], third[1])]
    assert first[0] == second[0] == third[0]
    # one that comes later shares with those that already decode
    decode(scheduler, [5], [5], [5])
    scheduler.add(sequence(3, prompt))
    assert scheduler.next_prefill() == (Copies([(first[1], scheduler.running[3].pages[1])], []), [])


def test_after_new_weights_siblings_share_the_prompt_and_prefill_their_own_completions() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=9)
    for i in range(2):
        scheduler.add(sequence(i, [1, 2, 3, 4]))
    prefill_all(scheduler)
    decode(scheduler, [5, 6], [7, 8])
    scheduler.forget_cache()
    assert prefill_all(scheduler) == [[(0, 0, 5)], [(1, 4, 5)]], "the last token of the prompt is in the pages, too"


def test_the_youngest_waits_when_pages_run_out_and_continues_from_its_tokens() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=4)
    for i in range(2):
        scheduler.add(sequence(i, [i] * 60, max_new_tokens=60))
    prefill_all(scheduler)
    while len(scheduler.running) == 2:
        steps = scheduler.burst(9)
        made = [[7] * steps] * len(scheduler.running)
        scheduler.record(made, made, made, no_stop_strings)
    assert (scheduler.num_preempted, len(scheduler.waiting[0].tokens)) == (1, 65)
    assert prefill_all(scheduler) == [], "there is no room until the older one has ended"
    assert [len(chunk.token_ids) for chunk in scheduler.drain(0)] == [len(scheduler.running[0].tokens) - 60, 5]
    while scheduler.running:
        decode(scheduler, [7])
    assert prefill_all(scheduler) == []
    assert scheduler.running[0].num_cached == 64, "its first page was not needed"


def test_a_sequence_whose_cache_cannot_be_recomputed_has_all_its_pages_from_the_beginning() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=4, keeps_caches=False)
    for i in range(2):
        scheduler.add(sequence(i, [i] * 60, max_new_tokens=80))
    prefill_all(scheduler)
    assert [len(s.pages) for s in scheduler.running] == [3]


def test_nothing_is_reported_behind_a_stop_token_and_the_stop_token_is() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=9)
    scheduler.add(sequence(0, [1, 2], stop_ids=(7,)))
    scheduler.add(sequence(1, [1, 2]))
    prefill_all(scheduler)
    scheduler.record([[5, 7, 6], [7, 7, 7]], [[-1.0, -2.0, -3.0]] * 2, [[-1.0] * 3] * 2, no_stop_strings)
    assert [(s.request.request_id, s.row) for s in scheduler.running] == [(1, 0)]
    first, second = scheduler.drain(version=3)
    assert (first.token_ids, first.logprobs, first.finish_reason, first.version) == ([5, 7], [-1.0, -2.0], "stop", 3)
    assert (second.token_ids, second.finish_reason) == ([7, 7, 7], None)
    assert scheduler.drain(version=3) == []


def test_a_burst_ends_where_the_first_row_ends_or_may_stop_for_the_first_time() -> None:
    scheduler = Scheduler(num_rows=3, max_prefill_tokens=100, num_pages=9)
    scheduler.add(sequence(0, [1], max_new_tokens=9))
    scheduler.add(sequence(1, [1], max_new_tokens=5))
    scheduler.next_prefill()
    assert scheduler.burst(100) == 5
    assert scheduler.burst(2) == 2
    scheduler.running[0].min_tokens = 4
    assert scheduler.burst(100) == 3


LENGTH = 24
"""longest sequence of the random traffic, of pages of 4 tokens"""


class Traffic:
    """Random requests, and a cache that stores the token itself.

    What the pages of a sequence hold must be its tokens. A state stores all tokens that it has seen, neither more nor
    fewer.
    """

    def __init__(self, rng: random.Random, num_rows: int, num_pages: int, has_state: bool, keeps_caches: bool) -> None:
        self.rng, self.has_state = rng, has_state
        self.scheduler = Scheduler(num_rows, rng.randrange(3, 9), num_pages, keeps_caches, has_state)
        self.pages = [[-1] * 4 for _ in range(num_pages)]
        self.states: list[list[int]] = [[] for _ in range(2 * num_rows)]
        self.reported: dict[int, list[int]] = {}
        self.prompts: list[list[int]] = []
        self.open: set[int] = set()

    def ask(self) -> None:
        """A new prompt, a sibling, a branch or the next turn of an earlier one."""
        rng, number = self.rng, len(self.prompts)
        earlier = rng.choice(self.prompts[-8:]) if self.prompts and rng.random() < 0.7 else []
        if earlier and rng.random() < 0.5:
            earlier = earlier + self.reported.get(rng.randrange(max(0, number - 8), number), [])
        further = [rng.randrange(3) for _ in range(rng.randrange(0 if earlier else 1, 6))]
        self.prompts.append([*earlier, *further][: LENGTH - 9])
        self.open.add(number)
        self.scheduler.add(sequence(number, self.prompts[-1], rng.randrange(1, 9), stop_ids=(0,)))

    def apply(self, copies: Copies) -> None:
        for source, target in copies.pages:
            self.pages[target] = list(self.pages[source])
        for source, target in copies.states:
            self.states[target] = list(self.states[source])

    def write(self, sequence: RunningSequence, start: int, tokens: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            self.pages[sequence.pages[position // 4]][position % 4] = token

    def prefill(self) -> None:
        while True:
            copies, chunks = self.scheduler.next_prefill()
            self.apply(copies)
            if not chunks:
                return
            assert sum(c.stop - c.start for c in chunks) <= self.scheduler.max_prefill_tokens
            for chunk in chunks:
                running = self.scheduler.running[chunk.row]
                self.write(running, chunk.start, chunk.tokens)
                before = self.states[chunk.row] if chunk.start else []
                assert not self.has_state or before == running.tokens[: chunk.start]
                self.states[chunk.row] = [*before, *chunk.tokens]

    def decode(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        steps = scheduler.burst(rng.randrange(1, 5)) if scheduler.running else 0
        self.apply(scheduler.take_copies())
        self.check()
        made = [[rng.choice((0, 1, 1, 2, 3, 4, 5)) for _ in range(steps)] for _ in scheduler.running]
        for row, (running, new) in enumerate(zip(scheduler.running, made, strict=True)):
            length = len(running.tokens) - 1
            assert running.row == row
            assert self.held(running)[:length] == running.tokens[:-1]
            assert not self.has_state or length == 0 or self.states[row] == running.tokens[:-1]
            read = [running.tokens[-1], *new[:-1]]
            self.states[row] = [*running.tokens[:-1], *read]
            self.write(running, length, read)
        zeros = [[0.0] * steps for _ in made]
        scheduler.record(made, zeros, zeros, no_stop_strings)
        for chunk in scheduler.drain(0):
            assert chunk.request_id in self.open
            assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.sampling_logprobs)
            self.reported.setdefault(chunk.request_id, []).extend(chunk.token_ids)
            if chunk.finish_reason:
                self.open.remove(chunk.request_id)

    def held(self, sequence: RunningSequence) -> list[int]:
        return [token for page in sequence.pages for token in self.pages[page]]

    def check(self) -> None:
        """References are exact, no page leaks, and no page has two writers."""
        pool, running = self.scheduler.pool, self.scheduler.running
        nodes, above = [], [pool._root]
        while above:
            node = above.pop()
            above += node.children.values()
            nodes += node.children.values()
        known, used = Counter(n.page for n in nodes), Counter(page for s in running for page in s.pages)
        assert [known[page] for page in range(len(self.pages))] == pool._num_nodes
        assert [known[page] + used[page] for page in range(len(self.pages))] == pool._num_refs
        assert sorted(pool._free) == [p for p in range(1, len(self.pages)) if not pool._num_refs[p]]
        assert pool._num_idle == sum(page not in used for page in known)
        assert set(pool._leaves) == {node for node in nodes if not node.children}
        assert {n.state for n in pool._stateful} == {n.state for n in nodes if n.state is not None}
        assert TRASH not in used
        for s in running:
            written = s.pages[s.num_cached // 4 :]
            assert all(used[page] == 1 for page in written)
        for node in nodes:
            tokens = np.frombuffer(node.key, dtype=np.int64).tolist()
            assert self.pages[node.page][: len(tokens)] == tokens, "nobody has written to what others may read"


def serve(seed: int, num_steps: int, num_rows: int, has_state: bool, keeps_caches: bool) -> Scheduler:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in ((scheduling, "MIN_SHARED", 2), (scheduling, "PAGE", 4), (paging, "PAGE", 4)):
            patch.setattr(module, name, value)
        traffic = Traffic(rng, num_rows, 1 + LENGTH // 4 + rng.randrange(0, 4 * num_rows), has_state, keeps_caches)
        for _ in range(num_steps):
            action = rng.random()
            if action < 0.3 and len(traffic.open) < 3 * num_rows:
                traffic.ask()
            elif action < 0.34 and traffic.open:
                traffic.scheduler.abort({rng.choice(sorted(traffic.open))})
            elif action < 0.345:
                traffic.scheduler.forget_cache()
            else:
                traffic.prefill()
                traffic.decode()
        while traffic.open:
            traffic.prefill()
            traffic.decode()
        traffic.scheduler.pool.forget()
        traffic.check()
        assert traffic.scheduler.pool.num_available == len(traffic.pages) - 1
    for number, tokens in traffic.reported.items():
        assert 0 not in tokens[:-1], number
    return traffic.scheduler


KINDS = [(False, True), (True, True), (False, False), (True, False)]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), num_rows=st.integers(1, 5), kind=st.sampled_from(KINDS))
def test_pages_hold_what_their_sequences_believe_through_any_traffic(
    seed: int, num_rows: int, kind: tuple[bool, bool]
) -> None:
    serve(seed, 100, num_rows, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=["plain", "state", "prompts alone", "state, nothing shared"])
def test_no_page_leaks_and_none_has_two_writers_in_100_000_operations(kind: tuple[bool, bool]) -> None:
    schedulers = [serve(seed, 5_000, 4, *kind) for seed in range(5)]
    assert (sum(s.num_preempted for s in schedulers) > 50) == kind[1]


@pytest.mark.parametrize("has_state", [False, True])
def test_tokens_of_siblings_and_sessions_are_not_prefilled_again(has_state: bool) -> None:
    assert sum(serve(seed, 100, 16, has_state, True).num_reused for seed in range(5)) > 250


def test_siblings_copy_a_state_when_exactly_their_prompt_is_prefilled() -> None:
    scheduler = Scheduler(num_rows=4, max_prefill_tokens=100, num_pages=20, has_state=True)
    for i in range(2):
        scheduler.add(sequence(i, [1, 2, 3, 4]))
    assert [c[1:3] for c in scheduler.next_prefill()[1]] == [(0, 3)]
    copies, _ = scheduler.next_prefill()
    assert copies.states == [(0, 4), (4, 1)], "the first one's state is kept, and the sibling begins with it"
    decode(scheduler, [5], [5])
    scheduler.add(sequence(2, [1, 2, 3, 4]))  # comes when the states of the others are beyond the prompt
    assert scheduler.next_prefill()[0].states == [(4, 2)]
    scheduler.forget_cache()  # the first of the siblings stops at the prompt, for the others
    assert prefill_all(scheduler) == [[(0, 0, 3)], [(0, 3, 4), (1, 3, 4)]]


def test_a_state_is_continued_where_a_sequence_ended_and_at_the_last_page_border_of_a_prompt() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=20, has_state=True)
    prompt = list(range(80))
    scheduler.add(sequence(0, prompt, max_new_tokens=2))
    assert prefill_all(scheduler) == [[(0, 0, 64)], [(0, 64, 79)]]
    decode(scheduler, [7, 8])  # 81 tokens are in the state
    scheduler.add(sequence(1, [*prompt[:70], 9, 9]))
    assert prefill_all(scheduler) == [[(1, 64, 71)]], "a state cannot be shortened"
    scheduler.add(sequence(2, [*prompt, 7, 8, 9]))
    assert prefill_all(scheduler) == [[(2, 81, 82)]]
    assert scheduler.num_reused == 64 + 81


def test_a_state_behind_a_stop_is_not_kept() -> None:
    scheduler = Scheduler(num_rows=2, max_prefill_tokens=100, num_pages=20, has_state=True)
    prompt = list(range(1, 41))
    scheduler.add(sequence(0, prompt, stop_ids=(0,)))
    prefill_all(scheduler)
    decode(scheduler, [7, 0, 3])
    scheduler.add(sequence(1, [*prompt, 7, 0, 5]))
    assert prefill_all(scheduler) == [[(1, 0, 42)]]


def test_a_page_is_a_block_of_keys() -> None:
    assert paging.PAGE == BLOCK
