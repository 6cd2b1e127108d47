from __future__ import annotations

import asyncio
import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from rlite.rollout import GymEnvironment, RewardFunction
from rlite.rollout.environments.file import MAX_OBSERVATION, read_turn
from rlite.rollout.environments.workflow import Environment
from rlite.rollout.failures import EnvironmentFailure, RewardError, RewardInvalid, RewardRaised
from rlite.rollout.rewards.batches import read_batch
from rlite.runtime.sandbox import pool as pools
from rlite.runtime.sandbox.calls import Call, Code
from rlite.runtime.sandbox.pool import SandboxPool, close_shared_pool
from tests import hostile_rewards as hostile

has_landlock = sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) >= 6


@pytest.fixture(autouse=True, scope="module")
def _these_modules_travel_by_value() -> Iterator[None]:
    close_shared_pool()
    modules = (hostile, sys.modules[__name__])
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)
    close_shared_pool()


async def outcome(reward: RewardFunction, **call: Any) -> Any:
    try:
        return await reward.run(**call)
    except RewardError as error:
        return error.outcome


@pytest.mark.parametrize("is_foreign", [False, True])
def test_attacks_cost_their_own_call_and_neither_run_code_nor_block_nor_grow(tmp_path: Path, is_foreign: bool) -> None:
    reward = RewardFunction(hostile.attack, timeout=4, num_processes=4)
    marker = str(tmp_path / "marker")

    async def all_of_them() -> list[Any]:
        await asyncio.gather(*[outcome(reward, name="", marker=marker) for _ in range(8)])
        attacks = [outcome(reward, name=name, marker=marker, is_foreign=is_foreign) for name in hostile.ATTACKS]
        fair = [outcome(reward, name="", marker=marker) for _ in range(100)]
        return await asyncio.gather(*attacks, *fair)

    before, began = psutil.Process().memory_info().rss, time.monotonic()
    found = asyncio.run(all_of_them())
    assert time.monotonic() - began < 25
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert not os.path.exists(marker)
    for (attack, expected), end in zip(hostile.ENDS.items(), found, strict=False):
        assert end in expected, attack.__name__
    assert found[len(hostile.ENDS) :] == [hostile.FAIR] * 100


def test_changes_of_a_call_do_not_reach_the_next_call() -> None:
    for function in (hostile.change_everything, hostile.change_everything_itself, hostile.lower_hard_limits):
        reward = RewardFunction(function, num_processes=1, timeout=20)

        async def together(reward: RewardFunction) -> list[float]:
            return await asyncio.gather(*[reward.run(is_foreign=True) for _ in range(20)])

        assert [asyncio.run(reward.run(is_foreign=True)) for _ in range(3)] == [0.0] * 3, function.__name__
        assert asyncio.run(together(reward)) == [0.0] * 20, function.__name__
        assert reward.outcomes == {"ok": 23}


def test_quick_calls_that_ran_beside_a_change_are_done_again_alone(tmp_path: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    os.mkfifo(gate)

    def wait_at_the_gate() -> float:
        return float(len(gate.read_bytes()))

    def patched_sometimes(index: int) -> float:
        with log.open("a") as file:
            file.write(f"{index} {os.getpid()} {abs(-1)}\n")
        value = float(abs(-index))
        if index == 5:
            hostile.change_everything_itself()
        return value

    pool = SandboxPool(1)
    slow, quick = Code.of(wait_at_the_gate), Code.of(patched_sometimes, seconds=0.0)
    try:
        pool.submit(Call(slow, cloudpickle.dumps({}), timeout=60))
        rewards = [pool.submit(Call(quick, cloudpickle.dumps({"index": index}), timeout=60)) for index in range(10)]
        gate.write_bytes(b"open")  # as soon as the only process reads from it: all others wait behind this call
        assert [reward.result(60) for reward in rewards] == [float(index) for index in range(10)]
    finally:
        pool.close()
    assert "1000.0" in log.read_text(), "they did go together"


def pid_of(code: str | None, is_async: bool) -> Any:
    async def later() -> float:
        return find()

    def find() -> float:
        names: dict[str, Any] = {}
        if code is not None:
            exec(code, names)
        return float(os.getpid())

    return later() if is_async else find()


@pytest.mark.parametrize("is_async", [False, True])
def test_code_made_in_a_call_costs_its_process_once_and_then_runs_in_forks(is_async: bool) -> None:
    reward = RewardFunction(pid_of, num_processes=1)
    close_shared_pool()

    def run(code: str | None) -> int:
        return int(asyncio.run(reward.run(code=code, is_async=is_async)))

    plain = run(None)
    assert run("len((1, 2)) + 1") == plain, "a mere expression"
    assert run("x = [].append(1)") == plain, "nobody knew that this function makes code"
    assert not psutil.pid_exists(plain), "and nobody uses that process again"
    forks = [run(code) for code in ("x = [].append(1)", "y = 1\nz = 2", None)]
    assert len({plain, *forks}) == 4
    assert not any(map(psutil.pid_exists, forks))


def test_a_file_that_a_call_has_written_is_imported_in_a_fork(tmp_path: Path) -> None:
    def import_it(text: str) -> float:
        (tmp_path / "written_by_a_model.py").write_text(text)
        sys.path.insert(0, str(tmp_path))
        sys.dont_write_bytecode = True
        return float(__import__("written_by_a_model").answer)

    reward = RewardFunction(import_it, num_processes=1)
    assert asyncio.run(reward.run(text="import builtins\nbuiltins.abs = print\nanswer = 1")) == 1.0
    assert asyncio.run(reward.run(text="answer = abs(-2)")) == 2.0


def test_a_function_with_threads_runs_such_code_itself_and_its_process_is_replaced() -> None:
    def threaded(code: str) -> float:
        import threading

        threading.Thread(target=threading.Event().wait, daemon=True).start()
        names: dict[str, Any] = {}
        exec(code, names)
        return float(os.getpid() + names["extra"])

    reward = RewardFunction(threaded, num_processes=1)
    calls = [asyncio.run(reward.run(code="import os\nextra = 0")) for _ in range(3)]
    assert len(set(calls)) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_leftover_processes_end_before_the_next_call_unless_the_function_keeps_them(
    tmp_path: Path,
) -> None:
    reward = RewardFunction(hostile.start_program, num_processes=1, timeout=60)
    go = tmp_path / "go"
    daemon = hostile.DAEMON.replace("GO", repr(str(go)))
    for _ in range(4):
        assert asyncio.run(outcome(reward, code=daemon)) == 1.0, "it met its own daemon alone"
        assert asyncio.run(outcome(reward, code="", go=str(go))) == 0.0, "the daemon is gone, and has not killed it"
        go.unlink()
    assert [asyncio.run(outcome(reward, code="", keep=True)) for _ in range(3)] == [1.0] * 3
    assert asyncio.run(outcome(reward, code=daemon)) == 2.0
    assert asyncio.run(outcome(reward, code="", go=str(go))) == 1.0, "the daemon is gone, and what was kept is not"


def test_a_time_out_of_the_functions_own_holds_for_code_that_it_runs() -> None:
    def limited(code: str) -> float:
        import signal

        def too_late(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, too_late)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            exec(code)
        except TimeoutError:
            return 0.5
        return 1.0

    reward = RewardFunction(limited, timeout=20)
    assert asyncio.run(reward.run(code="while True: [].append(1)")) == 0.5


def test_processes_see_no_secrets_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hostile.SECRETS:
        monkeypatch.setenv(name, "secret")
    close_shared_pool()
    parent = os.getpid() if has_landlock else -1
    assert asyncio.run(RewardFunction(hostile.count_secrets).run(parent=parent)) == 0.0
    named = RewardFunction(hostile.count_secrets, env_vars=["OPENAI_API_KEY", "NO_SUCH"])
    assert asyncio.run(named.run(parent=-1)) == 1.0
    assert asyncio.run(RewardFunction(hostile.count_secrets).run(parent=-1)) == 0.0, "in processes of their own"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_hold_no_descriptor_beside_the_wire_and_what_they_print() -> None:
    assert asyncio.run(RewardFunction(hostile.count_descriptors).run()) == 0.0


@pytest.mark.skipif(not has_landlock, reason="needs Landlock's rules for signals, Linux 6.12")
def test_a_process_cannot_signal_the_program_that_started_it() -> None:
    reward = RewardFunction(hostile.end_parent)
    assert [asyncio.run(reward.run(is_foreign=is_foreign)) for is_foreign in (False, True, True)] == [2.0, 2.0, 2.0]


HOSTILE_ENVIRONMENT = """
class Bomb:
    def __reduce__(self):
        return eval, ("open(MARKER, 'a').write(str(__import__('os').getpid()) + ' ') and {}",)

async def step(state, action, extra_info):
    return dict(next_state="x", reward=1, score=1, done=False, extra_info=Bomb())
"""


def test_environment_state_is_loaded_only_by_its_processes(tmp_path: Path) -> None:
    path, marker = tmp_path / "env.py", tmp_path / "pids"
    path.write_text(HOSTILE_ENVIRONMENT.replace("MARKER", repr(str(marker))))
    environment = Environment(path, num_processes=1)

    async def steps() -> None:
        memory, _ = await environment.step("s", "a", cloudpickle.dumps({}))
        _, turn = await environment.step("s", "a", memory)
        assert turn.reward == 1.0

    asyncio.run(steps())
    assert marker.read_text()
    assert str(os.getpid()) not in marker.read_text().split()


@pytest.mark.parametrize(
    "answer",
    [
        None,
        3,
        [b""],
        [b"", ["x", 1e9, 1.0]],
        [b"", ["x", math.inf, 1.0, True]],
        [b"", [1, 1.0, 1.0, True]],
        ["", ["x", 1.0, 1.0, True]],
    ],
)
def test_a_forged_turn_of_an_environment_is_no_turn(answer: Any) -> None:
    assert read_turn(answer) is None


def test_an_observation_that_would_hold_up_the_event_loop_is_refused() -> None:
    text = "x" * (MAX_OBSERVATION + 1)
    assert read_turn([b"", [text, 1.0, 1.0, True]]) is None

    class Talkative:
        def reset(self, seed: int) -> Any:
            return "go", {}

        def step(self, action: str) -> Any:
            return text, 0.0, False, False, {}

    async def one_step() -> None:
        async with GymEnvironment(Talkative, num_processes=1).episode(0) as episode:
            await episode.step("a")

    with pytest.raises(EnvironmentFailure, match="step\\(\\) returned 1048577 characters; at most 1048576 are taken"):
        asyncio.run(one_step())


def test_a_value_that_was_not_asked_for_is_an_invalid_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SEND_TIMEOUT", 1.0)

    def answer_something_else(value: Any) -> None:
        hostile.server().say("value", value)
        time.sleep(60)

    for value in ([1.0], {"a": 1}, b"x"):
        reward = RewardFunction(answer_something_else)
        with pytest.raises(RewardInvalid, match="which is not the expected form"):
            asyncio.run(reward.run(value=value))
        assert reward.outcomes == {"invalid": 1}


def test_error_texts_of_processes_are_short_and_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SEND_TIMEOUT", 1.0)

    def fail() -> Any:
        hostile.server().say("raised", "\x1b[2J\ud800\n" + "x" * 1_000_000)
        time.sleep(60)

    with pytest.raises(RewardRaised) as caught:
        asyncio.run(RewardFunction(fail).run())
    assert "raised \\x1b[2J\\ud800\nxxx" in str(caught.value)
    assert len(str(caught.value)) < 20_000
    assert read_batch(["\x1b"], 1) == ["\\x1b"]


def test_a_state_that_is_too_large_to_be_kept_is_said() -> None:
    class Growing:
        def reset(self, seed: int) -> Any:
            self.memory = bytes(40 << 20)
            return "go", {}

        def step(self, action: str) -> Any: ...

    async def begin() -> None:
        async with GymEnvironment(Growing, num_processes=1).episode(0):
            pass

    with pytest.raises(EnvironmentFailure, match=r"and 4\d+ of raw data; at most 262144 and 33554432 are taken"):
        asyncio.run(begin())
