import random

from rlite.rollout.collector.lost_groups import FailureStreaks


def test_a_run_of_failures_is_counted_in_the_order_of_the_starts() -> None:
    runs = FailureStreaks()
    assert [runs.add(place) for place in (5, 7, 1, 6, 2, 9, 8)] == [1, 1, 1, 3, 2, 1, 5]


def test_every_order_of_ending_finds_the_same_runs() -> None:
    places = [place for place in range(60) if place % 7]
    for seed in range(20):
        random.Random(seed).shuffle(places)
        runs = FailureStreaks()
        assert max(runs.add(place) for place in places) == 6
