from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from rlite.errors import ConfigError, DataError
from rlite.rollout.reward_pool import RewardPool, close_shared_pool
from rlite.rollout.rewards import (
    RewardCrash,
    RewardError,
    RewardFunction,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
    from_trl,
    from_verl,
)

ROOT = Path(__file__).parents[3]
CALL = {"prompt": "2+2=", "completions": "4", "prompt_ids": [1, 2], "completion_ids": [3]}


@pytest.fixture(autouse=True, scope="module")
def _this_module_travels_by_value() -> Iterator[None]:
    """Like a script's `__main__`; and no process is left when the tests of this module are over."""
    close_shared_pool()
    before = set(psutil.Process().children())  # other modules' tests may have started helpers of multiprocessing
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
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
        ("raise", RewardRaised, "KeyError: 'no such answer'"),
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


def test_faults_among_many_calls_are_counted_exactly_and_leave_no_process_behind() -> None:
    moods = (["fine"] * 16 + ["hang", "crash", "raise", "nan"]) * 5
    reward = RewardFunction(by_mood, timeout=0.3)

    async def all_of_them() -> list[float | RewardError]:
        return await asyncio.gather(*[attempt(reward, mood) for mood in moods])

    found = asyncio.run(all_of_them())
    kinds = {"hang": RewardTimeout, "crash": RewardCrash, "raise": RewardRaised, "nan": RewardInvalid, "fine": float}
    assert [type(result) for result in found] == [kinds[mood] for mood in moods]
    assert reward.outcomes == Counter(ok=80, timeout=5, crash=5, raised=5, invalid=5)
    assert [p for p in psutil.Process().children() if p.status() == psutil.STATUS_ZOMBIE] == []


def test_what_a_hung_function_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def start_and_hang(**data: Any) -> None:
        child = subprocess.Popen(["sleep", "3600"])
        note.write_text(str(child.pid))
        child.wait()

    with pytest.raises(RewardTimeout):
        asyncio.run(RewardFunction(start_and_hang, timeout=0.5)(**CALL))
    gone = time.monotonic() + 5
    while psutil.pid_exists(int(note.read_text())) and time.monotonic() < gone:
        time.sleep(0.01)  # init reaps it
    assert not psutil.pid_exists(int(note.read_text())) or (
        psutil.Process(int(note.read_text())).status() == psutil.STATUS_ZOMBIE
    )


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
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=60,
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
    late = time.monotonic() + 30
    while not (note.exists() and note.read_text()) and time.monotonic() < late:
        time.sleep(0.02)
    worker = psutil.Process(int(note.read_text()))
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs([worker], timeout=10)
    assert alive == []


def test_a_closed_pool_fails_what_is_under_way() -> None:
    reward = RewardFunction(by_mood, timeout=60)

    async def close_meanwhile() -> None:
        call = asyncio.create_task(reward(**CALL, mood="hang"))
        await asyncio.sleep(0.5)
        close_shared_pool()
        await call

    with pytest.raises(Exception, match="the reward pool was closed"):
        asyncio.run(close_meanwhile())
    assert asyncio.run(reward(**CALL, mood="fine")) == 1.0, "the next call opens another"


def test_processes_that_cannot_start_are_an_error_and_not_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = RewardPool(1)
    future = pool.submit(RewardFunction(by_mood)._code, cloudpickle.dumps(CALL), 1.0)
    with pytest.raises(Exception, match="reward processes cannot be started: the last of 3 ended with exit code 1"):
        future.result(timeout=30)
    assert not pool.is_usable


def test_options_and_functions_that_cannot_work_are_refused_at_once() -> None:
    lock = threading.Lock()
    for make in (
        lambda: RewardFunction("score"),  # type: ignore[arg-type]
        lambda: RewardFunction(by_mood, timeout=0),
        lambda: RewardFunction(by_mood, retries=-1),
        lambda: RewardFunction(lambda **call: lock),
    ):
        with pytest.raises(ConfigError):
            make()
    with pytest.raises(DataError, match="cannot be sent to the reward process"):
        asyncio.run(RewardFunction(by_mood)(**CALL, mood="fine", handle=lock))


def test_in_process_functions_have_the_same_outcomes() -> None:
    async def hang(**call: Any) -> None:
        await asyncio.sleep(3600)

    assert asyncio.run(RewardFunction(by_mood, in_process=True)(**CALL, mood="fine")) == 1.0
    for fn, mood, kind in (
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
