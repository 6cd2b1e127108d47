from __future__ import annotations

import asyncio
import gc
import itertools
import pickle
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlite.errors import ConfigError, UnknownOptionError
from rlite.observability import stats_tracker
from rlite.observability.stats_tracker import StatsTracker


def test_keys_carry_their_scopes_and_timings_stand_under_timeperf() -> None:
    stats_tracker.export()
    with stats_tracker.record_timing("train_step"), stats_tracker.scope("actor"):
        stats_tracker.scalar(loss=1.0)
        with stats_tracker.scope("optimizer"), stats_tracker.record_timing("step"):
            stats_tracker.scalar(lr=torch.tensor(0.5, requires_grad=True))
            time.sleep(0.01)
    stats_tracker.scalar(reward=2)
    report = stats_tracker.export()
    timings = {key: report.pop(key) for key in ("timeperf/train_step", "actor/optimizer/timeperf/step")}
    assert report == {"actor/loss": 1.0, "actor/optimizer/lr": 0.5, "reward": 2.0}
    assert timings["timeperf/train_step"] >= timings["actor/optimizer/timeperf/step"] >= 0.01
    assert stats_tracker.export() == {}


def test_a_scalar_is_the_mean_of_its_calls_and_export_may_keep_it() -> None:
    tracker = StatsTracker()
    for loss in (1.0, torch.tensor([2.0], dtype=torch.bfloat16), 6):
        tracker.scalar(loss=loss)
    assert tracker.export(reset=False) == tracker.export() == {"loss": 3.0}
    assert tracker.export() == {}


def test_a_count_is_the_sum_of_its_calls() -> None:
    tracker = StatsTracker()
    tracker.count(lost=2, found=0)
    tracker.count(lost=3)
    assert tracker.export() == {"found": 0.0, "lost": 5.0}


def test_a_stat_looks_only_where_its_mask_is_true_and_weighs_every_element_alike() -> None:
    tracker = StatsTracker()
    with tracker.scope("actor"):
        tracker.denominator(tokens=torch.tensor([[1, 1], [1, 0]]))
        tracker.stat(denominator="tokens", entropy=torch.tensor([[1.0, 2.0], [3.0, float("nan")]]))
        tracker.denominator(tokens=torch.tensor([True, False]))
        tracker.stat(denominator="tokens", entropy=torch.tensor([10.0, -50.0], requires_grad=True))
        tracker.denominator(nothing=torch.zeros(3, dtype=torch.bool), none=torch.zeros(0))
        tracker.stat(denominator="nothing", kl=torch.ones(3))
        tracker.stat(denominator="none", kl=torch.ones(0))
    assert tracker.export() == {
        "actor/entropy/max": 10.0,
        "actor/entropy/mean": 4.0,
        "actor/entropy/min": 1.0,
        "actor/none": 0.0,
        "actor/nothing": 0.0,
        "actor/tokens": 4.0,
    }


def test_a_program_that_never_exports_keeps_one_number_for_each_key() -> None:
    def num_tensors() -> int:
        return sum(type(thing) is torch.Tensor for thing in gc.get_objects())

    tracker, num_before = StatsTracker(), num_tensors()
    for number in range(300):
        tracker.denominator(tokens=torch.ones(2, dtype=torch.bool))
        tracker.stat(denominator="tokens", entropy=torch.tensor([number + 0.5, -number / 3]))
        if number % 7 == 0:  # statistics of a worker arrive as numbers
            with tracker.apart() as recording:
                tracker.denominator(tokens=torch.ones(1, dtype=torch.bool))
                tracker.stat(denominator="tokens", entropy=torch.tensor([1000.0 + number]))
            tracker.add(pickle.loads(pickle.dumps(recording)))
    assert num_tensors() - num_before < 20
    exported = tracker.export()
    assert (exported["entropy/min"], exported["entropy/max"]) == (torch.tensor(-299 / 3).item(), 1294.0)


def test_a_failing_block_leaves_its_scope_and_its_time() -> None:
    tracker = StatsTracker()
    with pytest.raises(ZeroDivisionError), tracker.scope("actor"), tracker.record_timing("step"):
        _ = 1 / 0
    tracker.scalar(x=1)
    assert sorted(tracker.export()) == ["actor/timeperf/step", "x"]


def test_tasks_and_threads_have_scopes_and_masks_of_their_own() -> None:
    tracker = StatsTracker()

    async def episode(name: str, size: int) -> None:
        with tracker.scope(name):
            tracker.denominator(tokens=torch.ones(size))
            await asyncio.sleep(0.001 * (5 - size))
            tracker.stat(denominator="tokens", reward=torch.full((size,), float(size)))

    async def main() -> None:
        await asyncio.gather(*(episode(f"task{size}", size) for size in range(1, 5)))

    def count() -> None:
        with tracker.scope("thread"):
            for _ in range(500):
                tracker.scalar(n=1.0)
                tracker.denominator(seen=torch.ones(1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join()
    report = tracker.export()
    assert report["thread/n"] == 1.0
    assert report["thread/seen"] == 2000.0
    assert [report[f"task{size}/reward/mean"] for size in range(1, 5)] == [1.0, 2.0, 3.0, 4.0]


def test_misuse_is_named() -> None:
    tracker = StatsTracker()
    with pytest.raises(UnknownOptionError, match=r"no denominator 'token' here; announce it first"):
        tracker.stat(denominator="token", x=torch.ones(3))
    with pytest.raises(ConfigError, match="denominator tokens is list; expected a bool tensor"):
        tracker.denominator(tokens=[True])
    tracker.denominator(tokens=torch.ones(3))
    with pytest.raises(UnknownOptionError, match=r"'token' here; did you mean 'tokens'"):
        tracker.stat(denominator="token", x=torch.ones(3))
    with pytest.raises(ConfigError, match=r"x has shape \[2\], its denominator 'tokens' \[3\]"):
        tracker.stat(denominator="tokens", x=torch.ones(2))
    with pytest.raises(ConfigError, match="x has 2 elements"):
        tracker.scalar(x=torch.ones(2))
    with pytest.raises(ConfigError, match="x='high': expected a number"):
        tracker.scalar(x="high")
    with pytest.raises(
        ConfigError, match="'tokens' is recorded in two ways, as a denominator or a count and as a scalar"
    ):
        tracker.scalar(tokens=3)


def test_importing_it_imports_no_torch() -> None:
    program = "import sys, rlite.observability.stats_tracker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


ELEMENTS = st.lists(st.tuples(st.floats(allow_nan=False, allow_infinity=False, width=16), st.booleans()), max_size=40)


def record(tracker: StatsTracker, elements: list[tuple[float, bool]]) -> None:
    values = torch.tensor([value for value, _ in elements], dtype=torch.float64)
    with tracker.scope("actor"):
        tracker.denominator(tokens=torch.tensor([is_counted for _, is_counted in elements], dtype=torch.bool))
        tracker.stat(denominator="tokens", entropy=values)
        for value, _ in elements:
            tracker.scalar(loss=value)


@given(elements=ELEMENTS, cuts=st.lists(st.integers(0, 40), max_size=6), order=st.randoms(use_true_random=False))
def test_any_split_of_the_elements_over_ranks_and_calls_exports_the_same(
    elements: list[tuple[float, bool]], cuts: list[int], order: random.Random
) -> None:
    # sums of so few half-precision numbers are exact in float64, in any order
    whole, gathered = StatsTracker(), StatsTracker()
    with whole.scope("step"):
        record(whole, elements)
    bounds = sorted({0, len(elements), *(cut for cut in cuts if cut < len(elements))})
    parts = [elements[start:stop] for start, stop in itertools.pairwise(bounds)] or [[]]
    order.shuffle(parts)
    answers = []
    for part in parts:  # a worker's process has a tracker and scopes of its own
        worker = StatsTracker()
        with worker.scope("elsewhere"), worker.apart() as recording:
            record(worker, part)
        assert worker.export() == {}
        answers.append(pickle.dumps(recording))
    with gathered.scope("step"):
        for answer in answers:
            gathered.add(pickle.loads(answer))
    assert gathered.export(reset=False) == whole.export()
    assert gathered.export() != {}
    assert gathered.export() == {}


def test_separate_recordings_of_a_task_exclude_other_tasks() -> None:
    tracker = StatsTracker()

    async def inside() -> int:
        with tracker.apart() as recording:
            await asyncio.sleep(0.001)
            tracker.scalar(x=1.0)
            await asyncio.create_task(asyncio.sleep(0))
        return len(recording.stats)

    async def outside() -> None:
        tracker.scalar(y=2.0)

    async def main() -> list[int | None]:
        return await asyncio.gather(inside(), outside(), inside())

    assert asyncio.run(main()) == [1, None, 1]
    assert tracker.export() == {"y": 2.0}


def test_a_scope_that_was_made_earlier_nests_where_it_is_entered() -> None:
    tracker = StatsTracker()
    inner = tracker.scope("inner")

    @tracker.scope("decorated")
    def record() -> None:
        tracker.scalar(x=1.0)

    with tracker.scope("outer"):
        record()
        with inner:
            tracker.scalar(x=2.0)
    assert tracker.export() == {"outer/decorated/x": 1.0, "outer/inner/x": 2.0}
