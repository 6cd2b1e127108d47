from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import tenacity

from benchmarks.reward_faults import FAULTS, REWARD, misbehave
from rlite.errors import ConfigError, DataError, RliteError
from rlite.rollout import RewardFunction, from_trl, from_verl
from rlite.rollout.failures import RewardCrash, RewardError, RewardInvalid, RewardMemory, RewardRaised, RewardTimeout
from rlite.runtime.sandbox import pool as pools
from rlite.runtime.sandbox.calls import MAX_TIMEOUTS, Call, Code, SandboxCrash, SandboxTimeout
from rlite.runtime.sandbox.child import describe
from rlite.runtime.sandbox.pool import SandboxPool, close_shared_pool
from tests import forked_python

ROOT = Path(__file__).parents[4]
CALL = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1, 2], "completion_ids": [3]}


@pytest.fixture(autouse=True, scope="module")
def _this_module_travels_by_value() -> Iterator[None]:
    """Like a script's `__main__`; and no process is left when the tests of this module are over."""
    close_shared_pool()
    before = set(psutil.Process().children())  # other modules' tests may have started helpers of multiprocessing
    by_value = (sys.modules[__name__], sys.modules[misbehave.__module__])
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in by_value:
        cloudpickle.unregister_pickle_by_value(module)
    close_shared_pool()
    assert set(psutil.Process().children()) <= before


def by_mood(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, mood: str, **data: Any) -> Any:
    if mood == "hang":
        time.sleep(3600)
    if mood == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mood == "exit":
        os._exit(3)
    if mood == "raise":
        raise KeyError("no such answer")
    return {"nan": float("nan"), "text": "1.0", "none": None}.get(mood, float(len(completions)))


async def attempt(reward: RewardFunction, mood: str) -> float | RewardError:
    try:
        return await reward(**CALL, mood=mood)
    except RewardError as error:
        return error


@pytest.mark.parametrize(
    ("mood", "kind", "message"),
    [
        ("hang", RewardTimeout, r"ran for more than 0\.3 s"),
        ("crash", RewardCrash, r"ended by signal 11 \(Segmentation fault"),
        ("exit", RewardCrash, "ended with exit code 3"),
        ("raise", RewardRaised, "^the reward function raised KeyError: 'no such answer'"),
        ("nan", RewardInvalid, "returned nan; expected a finite number"),
        ("text", RewardInvalid, "returned '1.0'"),
        ("none", RewardInvalid, "returned None"),
    ],
)
def test_each_end_is_an_outcome_of_its_own(mood: str, kind: type[RewardError], message: str) -> None:
    reward = RewardFunction(by_mood, timeout=0.3)
    with pytest.raises(kind, match=message):
        asyncio.run(reward(**CALL, mood=mood))
    assert reward.outcomes == {kind.outcome: 1}
    assert asyncio.run(reward(**CALL, mood="fine")) == 1.0, "the pool serves on"


@pytest.mark.nightly
@pytest.mark.slow
def test_failed_rewards_leave_no_process() -> None:
    # in a process of its own: what other tests leave to their ends would be counted
    command = [sys.executable, "-m", "benchmarks.reward_faults", "--count", "120", "--num-processes", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["outcomes"] == {"ok": 78, "timeout": 12, "crash": 12, "memory": 6, "invalid": 6, "raised": 6}
    assert report["lost"] == {
        "RewardTimeout": 12,
        "RewardCrash": 12,
        "RewardMemory": 6,
        "RewardInvalid": 6,
        "RewardRaised": 6,
    }
    assert report["seconds"] < 60


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory is a Linux kernel's")
@pytest.mark.parametrize("fault", FAULTS["memory"])
def test_a_function_that_eats_memory_costs_its_process_even_if_it_catches_the_error(fault: str) -> None:
    reward = RewardFunction(misbehave, memory_limit_gib=0.125, num_processes=1)
    with pytest.raises(RewardMemory, match=r"the reward function ran out of memory of at most 0\.125 GiB: .* killed"):
        asyncio.run(reward.run(fault=fault, tag=""))
    assert asyncio.run(reward.run(fault="none of them", tag="")) == REWARD


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on memory is a Linux kernel's")
def test_memory_kept_by_one_function_does_not_count_for_others() -> None:
    def keep(**call: Any) -> float:
        sys.kept = bytearray(b"x" * (200 << 20))  # type: ignore[attr-defined]
        return os.getpid()

    keeping = RewardFunction(keep, num_processes=1)
    small = RewardFunction(lambda **call: os.getpid(), memory_limit_gib=0.125, num_processes=1)
    close_shared_pool()
    kept = asyncio.run(keeping(**CALL))
    first, second = asyncio.run(small(**CALL)), asyncio.run(small(**CALL))
    assert kept != first == second, "a fresh process took over, and stays"


def test_a_process_that_ends_after_its_answer_is_no_crash_of_the_next_call() -> None:
    def leave_a_thread(**call: Any) -> float:
        threading.Timer(0.1, os._exit, (0,)).start()
        return os.getpid()

    class SlowToLoad:
        def __reduce__(self) -> Any:
            return time.sleep, (0.4,)

    reward = RewardFunction(leave_a_thread, num_processes=1)
    close_shared_pool()
    pid = asyncio.run(reward(**CALL))
    assert asyncio.run(reward(**CALL, item=SlowToLoad())) != pid, "it ended while this was loaded"
    assert reward.outcomes == {"ok": 2}


def test_an_answer_that_is_read_together_with_garbage_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SEND_TIMEOUT", 4.0)

    def end(seconds: float, fault: str) -> Any:
        time.sleep(seconds)
        return misbehave(fault, "3600")

    pool = SandboxPool(2)
    quick, slow = (Code.of(end, seconds=0.0) for _ in range(2))

    def submit(code: Code, seconds: float, fault: str) -> Future[Any]:
        return pool.submit(Call(code, cloudpickle.dumps({"seconds": seconds, "fault": fault}), timeout=20))

    try:
        wait([submit(slow, 0.5, "none of them") for _ in range(4)], timeout=60)  # both processes are there
        odd, garbage = submit(quick, 1.0, "nan"), submit(quick, 0.0, "garbage")
        busy = submit(quick, 0.3, "none of them")
        busy.add_done_callback(lambda _: time.sleep(2))  # in the pool's thread, which reads nothing meanwhile
        assert math.isnan(odd.result(timeout=60))
        with pytest.raises(SandboxCrash):
            garbage.result(timeout=60)
        assert busy.result(timeout=60) == REWARD
    finally:
        pool.close()


def test_every_call_ends_if_the_pool_fails() -> None:
    def start_and_hang() -> Iterator[None]:
        yield
        time.sleep(3600)

    pool, code, has_started = SandboxPool(2), Code.of(start_and_hang), threading.Event()
    sent = pool.submit(Call(code, cloudpickle.dumps({}), timeout=3600, on_piece=lambda _: has_started.set()))
    assert has_started.wait(timeout=60)
    failing = pool.submit(Call(Code.of(lambda: time.sleep(3600)), cloudpickle.dumps({}), timeout="soon"))  # type: ignore[arg-type]
    for call in (failing, sent):
        with pytest.raises(RliteError, match="unsupported operand"):
            call.result(timeout=60)
    pool.close()  # waits for its thread
    assert not pool._workers
    with pytest.raises(RliteError, match="has stopped"):
        pool.submit(Call(code, cloudpickle.dumps({}), timeout=20))


def test_a_function_that_hangs_again_and_again_fails_at_once_but_for_a_try_now_and_then() -> None:
    def hang(is_hanging: bool) -> float:
        time.sleep(3600 if is_hanging else 0)
        return 1.0

    pool, code = SandboxPool(1), Code.of(hang)

    def submit(is_hanging: bool, timeout: float) -> Future[Any]:
        return pool.submit(Call(code, cloudpickle.dumps({"is_hanging": is_hanging}), timeout))

    try:
        code.num_timeouts = MAX_TIMEOUTS - 1
        began = time.monotonic()
        calls = [submit(True, 0.2), submit(True, 3.0), *(submit(True, 60.0) for _ in range(1000))]
        wait(calls, timeout=200)
        errors = [call.exception() for call in calls]
        assert time.monotonic() - began < 200
        assert {type(error) for error in errors} == {SandboxTimeout}
        assert str(errors[1]) == "the function ran for more than 3 s; its process was killed", "it was tried again"
        assert str(errors[2]) == f"the function was not called: its last {MAX_TIMEOUTS + 1} calls have all timed out"
        code.next_try = 0.0
        assert submit(False, 60.0).result(timeout=60) == 1.0
        assert submit(False, 60.0).result(timeout=60) == 1.0, "it is called as ever again"
    finally:
        pool.close()


def test_a_function_whose_loading_ends_its_process_is_a_crash() -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (5,)

    with pytest.raises(RewardCrash, match="exit code 5"):
        asyncio.run(RewardFunction(by_mood)(**CALL, mood="fine", item=Deadly()))


def test_an_answer_of_a_forked_child_is_not_an_answer() -> None:
    def both_return(**call: Any) -> float:
        return float(os.fork() > 0)

    reward = RewardFunction(both_return, num_processes=1)
    assert [asyncio.run(reward(**CALL)) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_children_of_a_hung_function_end_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def start_and_hang(**data: Any) -> None:
        children = [subprocess.Popen(["sleep", "3600"], start_new_session=apart) for apart in (False, True)]
        note.write_text(" ".join(str(child.pid) for child in children))
        children[0].wait()

    with pytest.raises(RewardTimeout):
        asyncio.run(RewardFunction(start_and_hang, timeout=1)(**CALL))
    for pid in map(int, note.read_text().split()):
        gone = time.monotonic() + 60
        while psutil.pid_exists(pid) and time.monotonic() < gone:
            time.sleep(0.01)  # init reaps it
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_retries_run_a_flaky_function_again(tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def fails_twice(**data: Any) -> float:
        with tries.open("a") as file:
            file.write("x")
        if len(tries.read_text()) < 3:
            os._exit(1)
        return 0.5

    reward = RewardFunction(fails_twice, retries=2)
    assert asyncio.run(reward(**CALL)) == 0.5
    assert reward.outcomes == {"crash": 2, "ok": 1}


def test_lambdas_closures_and_coroutines_travel() -> None:
    bonus = 0.25

    async def judge(completions: str, **data: Any) -> float:
        await asyncio.sleep(0)
        return len(completions) + bonus

    assert asyncio.run(RewardFunction(lambda **call: call["answer"] == 4)(**CALL, answer=4)) == 1.0
    assert asyncio.run(RewardFunction(judge)(**CALL)) == 1.25


def test_time_spent_before_the_functions_own_start_does_not_count() -> None:
    class SlowToLoad:
        def __reduce__(self) -> Any:
            return time.sleep, (0.5,)

    reward = RewardFunction(lambda **call: 1, timeout=0.25)
    assert asyncio.run(reward(**CALL, item=SlowToLoad())) == 1.0


def test_a_function_of_main_runs_and_its_process_loads_no_torch(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, sys, torch\n"
        "from rlite.rollout import RewardFunction\n"
        "def is_light(**call):\n"
        "    import sys\n"
        "    return float('torch' not in sys.modules and 'tensordict' not in sys.modules)\n"
        "call = dict(prompt='', completions='', prompt_ids=[], completion_ids=[])\n"
        "print(asyncio.run(RewardFunction(is_light)(**call)))\n"
    )
    done = subprocess.run(
        [forked_python.python(), str(program)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["1.0"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a hung process that its parent is gone")
def test_a_killed_driver_leaves_no_hung_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\n"
        "from rlite.rollout import RewardFunction\n"
        "def hang(**call):\n"
        "    import os, time\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(3600)\n"
        "call = dict(prompt='', completions='', prompt_ids=[], completion_ids=[])\n"
        "asyncio.run(RewardFunction(hang, timeout=3600)(**call))\n"
    )
    driver = subprocess.Popen([sys.executable, str(program)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    note = tmp_path / "pid"
    late = time.monotonic() + 100
    while not (note.exists() and note.read_text()) and time.monotonic() < late:
        time.sleep(0.02)
    worker = psutil.Process(int(note.read_text()))
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs([worker], timeout=60)
    assert alive == []


def test_a_closed_pool_fails_what_is_under_way() -> None:
    reward = RewardFunction(by_mood, timeout=60)

    async def close_meanwhile() -> None:
        call = asyncio.create_task(reward(**CALL, mood="hang"))
        await asyncio.sleep(0.5)
        close_shared_pool()
        await call

    with pytest.raises(Exception, match="the sandbox was closed"):
        asyncio.run(close_meanwhile())
    assert asyncio.run(reward(**CALL, mood="fine")) == 1.0, "the next call opens another"


def test_a_function_that_yields_returns_no_number() -> None:
    def yielding() -> Iterator[float]:
        yield 1.0

    with pytest.raises(RewardInvalid, match="returned <generator object"):
        asyncio.run(RewardFunction(yielding).run())


def test_processes_that_cannot_start_are_an_error_and_not_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = SandboxPool(1)
    future = pool.submit(Call(Code.of(by_mood), cloudpickle.dumps(CALL), 1.0))
    with pytest.raises(Exception, match="sandbox processes cannot be started: the last of 3 ended with exit code 1"):
        future.result(timeout=100)
    assert not pool.is_usable


def test_options_and_functions_that_cannot_work_are_refused_at_once() -> None:
    lock = threading.Lock()
    for make in (
        lambda: RewardFunction("score"),  # type: ignore[arg-type]
        lambda: RewardFunction(by_mood, timeout=0),
        lambda: RewardFunction(by_mood, retries=-1),
        lambda: RewardFunction(by_mood, retries=tenacity.Retrying()),  # type: ignore[arg-type]
        lambda: RewardFunction(by_mood, memory_limit_gib=0.001),
        lambda: RewardFunction(by_mood, memory_limit_gib=1, in_process=True),
        lambda: RewardFunction(by_mood, max_concurrent=0),
        lambda: RewardFunction(by_mood, batch_size=0),
        lambda: from_trl([by_mood], weights=[1.0, 2.0]),
        lambda: from_trl([]),
        lambda: RewardFunction(lambda **call: lock),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(DataError, match="cannot be sent to the process of the reward function"):
        asyncio.run(RewardFunction(by_mood)(**CALL, mood="fine", handle=lock))


def test_exception_is_one_line_above_its_traceback() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    noted = ValueError("first\nsecond")
    noted.add_note("a note")
    for error, line in (
        (noted, "ValueError: first"),
        (KeyError(), "KeyError"),
        (SyntaxError("oops", ("f.py", 1, 1, "a b", 1, 2)), "SyntaxError: oops (f.py, line 1)"),
        (Mute(), "Mute: <its text cannot be made: RuntimeError>"),
    ):
        assert describe(error).partition("\n")[0] == line
    assert "second\na note" in describe(noted)


def test_in_process_functions_have_the_same_outcomes() -> None:
    async def hang(**call: Any) -> None:
        await asyncio.sleep(3600)

    async def quit(**call: Any) -> None:
        sys.exit(1)

    assert asyncio.run(RewardFunction(by_mood, in_process=True)(**CALL, mood="fine")) == 1.0
    for fn, mood, kind in (
        (quit, "", RewardRaised),
        (lambda **call: sys.exit(1), "", RewardRaised),
        (by_mood, "raise", RewardRaised),
        (by_mood, "nan", RewardInvalid),
        (hang, "", RewardTimeout),
    ):
        with pytest.raises(kind):
            asyncio.run(RewardFunction(fn, in_process=True, timeout=0.05)(**CALL, mood=mood))


def test_a_function_for_trl_is_called_with_lists_of_one() -> None:
    def trl(prompts: list, completions: list, completion_ids: list, answer: list, **columns: Any) -> list[float]:
        return [float(p + c == f"2+2={a}") for p, c, a in zip(prompts, completions, answer, strict=True)]

    async def trl_chat(prompts: list, completions: list, messages: list | None = None, **columns: Any) -> list[float]:
        return [
            float(prompts[0][-1]["content"] == "2+2=" and completions[0][0] == {"role": "assistant", "content": "4"})
        ]

    assert asyncio.run(RewardFunction(from_trl(trl))(**CALL, answer=4)) == 1.0
    chat = RewardFunction(from_trl(trl_chat, is_conversational=True))
    assert asyncio.run(chat(**CALL, messages=[{"role": "user", "content": "2+2="}])) == 1.0


def test_a_function_for_verl_gets_the_rows_ground_truth() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
        return {"score": float(data_source == "sums" and solution_str == ground_truth), "acc": True}

    row = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}}
    assert asyncio.run(RewardFunction(from_verl(compute_score))(**CALL, **row)) == 1.0


def test_a_row_for_verl_without_a_ground_truth_raises_and_an_async_score_is_awaited() -> None:
    async def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": float(extra_info == {} and solution_str == ground_truth)}

    reward = RewardFunction(from_verl(compute_score))
    assert asyncio.run(reward(**CALL, ground_truth="4")) == 1.0
    with pytest.raises(RewardRaised, match="ground_truth"):
        asyncio.run(reward(**CALL, data_source="sums"))


def test_several_functions_for_trl_are_weighted_and_none_does_not_count() -> None:
    def length(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    async def if_even(completions: list[str], log_metric: Any, trainer_state: Any, **columns: Any) -> list[Any]:
        log_metric("calls", 1)
        return [1.0 if len(text) % 2 == 0 else None for text in completions]

    def never(completions: list[str], **columns: Any) -> list[None]:
        return [None] * len(completions)

    def strict(prompts: list, completions: list, completion_ids: list) -> Any:
        return np.array([len(completions), 0.0])

    reward = RewardFunction(from_trl([length, if_even, never], weights=[0.5, 10.0, 1.0]))
    rows = [{**CALL, "completions": text} for text in ("a", "ab", "abc")]
    assert [asyncio.run(reward(**row)) for row in rows] == [0.5, 11.0, 1.5]
    assert asyncio.run(reward.batch(rows)) == [0.5, 11.0, 1.5]
    with pytest.raises(RewardInvalid, match="returned None"):
        asyncio.run(RewardFunction(from_trl(never))(**CALL))
    with pytest.raises(RewardInvalid, match="2 values from strict for 1 completions"):
        asyncio.run(RewardFunction(from_trl(strict))(**CALL))
    assert asyncio.run(RewardFunction(from_trl(strict)).batch(rows[:2])) == [2.0, 0.0]


def rank(completions: list[str], mood: list[str], **columns: Any) -> Any:
    """Each row's place by length in its batch; the row's mood may end all of it."""
    for own in mood:
        if own != "nan" and own != "fine":
            return by_mood("", "", [], [], own) if own != "short" else [0.0] * (len(mood) - 1)
    order = sorted(range(len(completions)), key=lambda row: len(completions[row]))
    return [float("nan") if mood[row] == "nan" else float(order.index(row)) for row in range(len(order))]


def test_a_whole_group_is_one_call_that_fails_as_a_whole() -> None:
    reward = RewardFunction(rank, timeout=0.5)
    rows = [{**CALL, "completions": text, "mood": "fine"} for text in ("abc", "", "ab", "a")]
    assert asyncio.run(reward.batch(rows)) == [3.0, 0.0, 2.0, 1.0]
    for mood, kind in (
        ("hang", RewardTimeout),
        ("exit", RewardCrash),
        ("nan", RewardInvalid),
        ("short", RewardInvalid),
    ):
        with pytest.raises(kind):
            asyncio.run(reward.batch([*rows[:3], {**rows[3], "mood": mood}]))
    assert reward.outcomes == {"ok": 4, "timeout": 4, "crash": 4, "invalid": 8}


def test_calls_that_come_together_make_batches_and_a_bad_row_costs_only_itself() -> None:
    moods = ["fine"] * 10 + ["nan", "exit", "raise", "short", "hang"] + ["fine"] * 5
    reward = RewardFunction(rank, timeout=0.5, batch_size=5, batch_wait=0.1)

    async def all_of_them() -> list[float | RewardError]:
        return await asyncio.gather(*[attempt(reward, mood) for mood in moods])

    found = asyncio.run(all_of_them())
    assert found[:10] == [0.0, 1.0, 2.0, 3.0, 4.0] * 2 == [*found[15:], *found[15:]]
    kinds = [RewardInvalid, RewardCrash, RewardRaised, RewardInvalid, RewardTimeout]
    assert [type(result) for result in found[10:15]] == kinds
    assert reward.outcomes == {"ok": 15, "invalid": 2, "crash": 1, "raised": 1, "timeout": 1}

    async def one_is_cancelled() -> float | RewardError:
        cancelled, kept = (asyncio.create_task(attempt(reward, "fine")) for _ in range(2))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        return await kept

    assert asyncio.run(one_is_cancelled()) == 0.0


def test_a_judge_that_awaits_needs_no_process_and_no_more_than_its_limit_run_at_once() -> None:
    running, most = 0, 0

    async def judge(mood: str, **call: Any) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(3600 if mood == "hang" else 0.05)
        finally:
            await asyncio.sleep(0.01)  # closes its connection
            running -= 1
        return 1.0

    reward = RewardFunction(judge, in_process=True, max_concurrent=3, timeout=0.4)

    async def all_of_them() -> list[float | RewardError]:
        others = [asyncio.create_task(attempt(reward, "fine")) for _ in range(20)]
        await asyncio.sleep(0.02)
        for cancelled in (others.pop(0), others.pop(), others.pop(5)):  # one that runs, two that wait
            cancelled.cancel()
        return await asyncio.gather(*others, *[attempt(reward, "hang") for _ in range(3)])

    began = time.monotonic()
    found = asyncio.run(all_of_them())
    assert found[:17] == [1.0] * 17, "their turn came after 0.3 s; the time-out counted from there"
    assert [type(result) for result in found[17:]] == [RewardTimeout] * 3
    assert most == 3
    assert running == 0, "what was cancelled or late has ended"
    assert time.monotonic() - began < 60


def test_a_judge_that_blocks_stalls_neither_its_callers_loop_nor_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlite.rollout.rewards.judges.BLOCKED_AFTER", 0.3)
    release = threading.Event()

    async def judge(mood: str, **call: Any) -> float:
        if mood == "hang":
            release.wait(30)
        return 1.0

    reward = RewardFunction(judge, in_process=True, timeout=0.2)

    async def beside_another_task() -> int:
        ticks = 0
        blocked = asyncio.create_task(reward(**CALL, mood="hang"))
        while not blocked.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(RewardTimeout, match="blocks its event loop"):
            await blocked
        return ticks

    assert asyncio.run(beside_another_task()) > 5, "the caller's loop went on turning"
    assert asyncio.run(reward(**CALL, mood="fine")) == 1.0
    release.set()


def test_retries_wait_as_tenacity_says_and_end_with_the_last_error() -> None:
    times: list[float] = []

    async def judge(mood: str, **call: Any) -> float:
        if mood == "nan":
            return float("nan")
        times.append(time.monotonic())
        if len(times) < 3:
            raise ConnectionError("503: try again")
        return 1.0

    retries = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(3),
        wait=tenacity.wait_fixed(0.1),
        retry=tenacity.retry_if_exception_type((RewardRaised, RewardTimeout)),
    )
    reward = RewardFunction(judge, in_process=True, retries=retries)

    async def together() -> list[float | RewardError]:
        return await asyncio.gather(attempt(reward, "busy"), attempt(reward, "nan"))

    score, invalid = asyncio.run(together())
    assert score == 1.0
    assert isinstance(invalid, RewardInvalid), "not attempted again, for this rule does not say so"
    assert reward.outcomes == {"raised": 2, "invalid": 1, "ok": 1}
    assert times[-1] - times[0] >= 0.19
