"""Failures are reported soon, by name and with their type; afterwards the engine can be built again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaForCausalLM

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import CallTimeout, ResidencyError, RliteError, WorkerDied, WorkerError
from rlite.runtime.cluster import group
from rlite.runtime.replicas.engine import Engine
from tests import forked_python
from tests.integration.modules import Policy, on_meta
from tests.integration.worlds import MARK, environment, free_port, process_of, processes_with, ray_session

pytestmark = pytest.mark.slow
SOON_S = 10.0


class Fragile(Policy, LlamaForCausalLM):
    """Breaks in the ways that tests ask for."""

    def sum_over_ranks(self) -> float:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    def raise_on_one_rank(self, broken: int) -> float:
        if dist.get_rank() == broken:
            raise LookupError("broken on purpose")
        return self.sum_over_ranks()

    def sleep_on_one_rank(self, late: int, seconds: float) -> None:
        if dist.get_rank() == late:
            time.sleep(seconds)

    def wait_for_one_rank(self, late: int) -> float:
        self.sleep_on_one_rank(late, 600.0)
        return self.sum_over_ranks()

    def return_early(self, early: int) -> None:
        if dist.get_rank() != early:
            self.sum_over_ranks()

    def train_for_ever(self, rows: list[list[int]]) -> None:
        while True:
            self.train_step(rows)

    def die(self, rank: int) -> float:
        if dist.get_rank() == rank:
            print(f"dying at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum_over_ranks()

    def leave_slowly(self, seconds: float) -> None:
        self.delay = seconds

    def postprocess_named_parameter(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        time.sleep(getattr(self, "delay", 0.0))
        return name, tensor


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session(2):
        yield


@pytest.fixture(scope="module")
def train(models: dict[str, Path]) -> RliteTrainEngine:
    """Built again by each test that finds it broken: `sound(train)`."""
    return RliteTrainEngine(on_meta(Fragile, models["llama"]))


def sound(engine: RliteTrainEngine, size: int = 2) -> RliteTrainEngine:
    """The engine, built again if it is broken; it computes."""
    if not engine.is_built or engine.group.failure is not None:
        engine.release()
        engine.build(tensor_parallel_size=size, data_parallel_size=1)
    assert engine.sum_over_ranks() == [size] * size
    return engine


@contextmanager
def soon() -> Iterator[None]:
    """Check that the block takes less than SOON_S."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_S


def kill(engine: Engine, rank: int, after: float, number: int = signal.SIGKILL) -> threading.Timer:
    """Send the process of this rank a signal, in so many seconds."""
    timer = threading.Timer(after, os.kill, (process_of(engine, rank), number))
    timer.start()
    return timer


def generate_for_ever(engine: RliteInferenceEngine) -> None:
    while True:
        engine.generate([[1, 2, 3]] * 64, {"max_tokens": 2000, "ignore_eos": True})


# -- on Ray ------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_late_rank_is_named_and_the_engine_goes_on(train: RliteTrainEngine) -> None:
    sound(train)
    with soon(), pytest.raises(CallTimeout, match=r"no answer within 0\.5 s from 1 of 2 workers: .*rank 1") as caught:
        train.sleep_on_one_rank(1, 2.0, timeout=0.5)
    assert caught.value.late == (train.group.describe(1),)
    assert isinstance(caught.value, TimeoutError)
    assert sound(train).group.failure is None


def test_an_exception_on_one_rank_frees_the_peers_that_wait_for_it(train: RliteTrainEngine) -> None:
    sound(train)
    name = train.group.describe(1)
    with soon(), pytest.raises(LookupError, match="broken on purpose") as caught:
        train.raise_on_one_rank(1)
    assert f"raised in worker {name}" in str(caught.value.__cause__)
    assert "raise_on_one_rank" in str(caught.value.__cause__), "the remote traceback"
    with soon(), pytest.raises(WorkerError, match="waited for it in a collective"):
        train.sum_over_ranks()
    sound(train)


def test_an_exception_on_every_rank_leaves_the_engine_sound(train: RliteTrainEngine) -> None:
    sound(train)
    with soon(), pytest.raises(IndexError):
        train.first_tokens([[]])
    assert sound(train).group.failure is None


def test_ranks_that_wait_for_one_that_returned_are_named_with_the_place(
    train: RliteTrainEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound(train)
    monkeypatch.setattr(group, "UNEVEN_S", 0.5)
    with soon(), pytest.raises(CallTimeout):
        train.return_early(0, timeout=3.0)
    (said,) = [record.getMessage() for record in caplog.records if "waits in a collective" in record.getMessage()]
    early, late = train.group.describe(0), train.group.describe(1)
    assert said.startswith(f"return_early: returned on {early}; for 0.5 s and more waits in a collective: {late} in ")
    assert re.search(r"all_reduce \(distributed_c10d.py:\d+\), called from sum_over_ranks \(test_faults.py:\d+\)", said)
    caplog.clear()
    train.return_early(1)  # the other's turn, so that their collectives meet
    train.sleep_on_one_rank(1, 1.5)
    assert not caplog.records, "who is late at work is no news"
    sound(train)


def test_a_worker_that_dies_in_training_is_named(train: RliteTrainEngine) -> None:
    sound(train)
    name = train.group.describe(1)
    timer = kill(train, 1, after=0.5)
    with soon(), pytest.raises(WorkerDied, match="worker process ended") as caught:
        train.train_for_ever([[1, 2, 3]])
    timer.join()
    assert caught.value.workers == (name,)
    with soon(), pytest.raises(WorkerDied):
        train.sum_over_ranks()
    sound(train)


@pytest.mark.parametrize("late", [0, 1])
def test_a_worker_that_is_terminated_in_a_call_is_noticed_as_soon_as_one_that_is_killed(
    train: RliteTrainEngine, late: int
) -> None:
    sound(train)
    name = train.group.describe(1)
    timer = kill(train, 1, after=0.5, number=signal.SIGTERM)  # it sleeps in Python, or waits in a collective
    started = time.monotonic()
    with soon(), pytest.raises(WorkerDied, match="worker process ended") as caught:
        train.wait_for_one_rank(late, timeout=SOON_S)
    assert time.monotonic() - started < SOON_S / 2, "before the time-out"
    timer.join()
    assert caught.value.workers == (name,)


def test_a_worker_that_dies_between_calls_is_named_by_the_next(train: RliteTrainEngine) -> None:
    sound(train)
    kill(train, 0, after=0.0).join()
    with soon(), pytest.raises(WorkerDied, match="rank 0"):
        train.sum_over_ranks()
    train.release()


def test_a_worker_that_dies_in_generation_or_in_weight_sync_is_named(
    train: RliteTrainEngine, models: dict[str, Path]
) -> None:
    sound(train, size=1)
    serve = RliteInferenceEngine(models["llama"])
    options = {"colocate_with": train, "max_model_len": 2048, "max_num_seqs": 64}
    serve.build(**options)
    name = serve.group.describe(0)
    timer = kill(serve, 0, after=0.5)
    with soon(), pytest.raises(WorkerDied, match="inference-"):
        generate_for_ever(serve)
    timer.join()
    with soon(), pytest.raises(WorkerDied) as caught:
        serve.generate([[1]], {"max_tokens": 1})
    assert caught.value.workers == (name,)

    serve.release()
    serve.build(**options)
    train.leave_slowly(0.2)
    timer = kill(train, 0, after=0.5)
    with soon(), pytest.raises(WorkerDied, match="train-"):
        train.p2p_weight_sync(serve)
    timer.join()
    with pytest.raises(ResidencyError, match="not written yet"):
        serve.generate([[1]], {"max_tokens": 1})

    train.release()
    train.build(colocate_with=serve)
    train.leave_slowly(0.2)
    timer = kill(serve, 0, after=0.5)
    with soon(), pytest.raises(WorkerDied, match="inference-"):
        train.p2p_weight_sync(serve)
    timer.join()
    serve.release()
    serve.build(**options)
    train.leave_slowly(0.0)
    train.p2p_weight_sync(serve)
    assert len(serve.generate([[1]], {"max_tokens": 1})) == 1
    serve.release()
    train.release()


class Elsewhere(Fragile):
    """Its weights are those of another model. Workers find out, because the source is the module's own."""

    source: str

    def materialization_source(self) -> str:
        return self.source


def test_a_worker_that_cannot_be_made_leaves_nothing_behind(train: RliteTrainEngine, models: dict[str, Path]) -> None:
    train.release()
    module = on_meta(Elsewhere, models["llama"])
    module.source = str(models["qwen2"])
    broken = RliteTrainEngine(module)
    with pytest.raises(RliteError, match=r"holds 6 tensors that Elsewhere does not have"):
        broken.build(tensor_parallel_size=2)
    assert not broken.is_built
    sound(train).release()


# -- under torchrun ----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
import rlite
from tests.integration.modules import on_meta
from tests.integration.test_faults import Fragile

rlite.init(device="cpu")
engine = rlite.RliteTrainEngine(on_meta(Fragile, sys.argv[1]))
engine.build(tensor_parallel_size=2)
print(f"calling at {time.time()}", flush=True)
getattr(engine, sys.argv[2])(int(sys.argv[3]))
"""


BUILD_AGAIN = """
    pass
except LookupError:
    engine.release()
    engine.build(tensor_parallel_size=2)
"""


def run_under_torchrun(
    model: Path, folder: Path, method: str, rank: int, program: str = PROGRAM
) -> tuple[subprocess.CompletedProcess, float]:
    """Run `engine.method(rank)`; its output, and the seconds from the call to the end of the run."""
    script, mark, python = folder / "program.py", uuid.uuid4().hex, forked_python.python()
    script.write_text(program)
    launch = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    ran = subprocess.run(
        [*launch, str(script), str(model), method, str(rank)],
        env=environment(**{MARK: mark}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    ended = time.time()
    psutil.wait_procs(processes_with(MARK, mark), timeout=SOON_S)
    assert processes_with(MARK, mark) == []
    called = re.search(r"calling at ([\d.]+)", ran.stdout)
    assert called is not None, ran.stderr
    return ran, ended - float(called[1])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_under_torchrun_ends_the_run_soon_and_is_named(
    models: dict[str, Path], tmp_path: Path, rank: int
) -> None:
    ran, seconds = run_under_torchrun(models["llama"], tmp_path, "die", rank)
    assert ran.returncode != 0
    assert seconds < SOON_S
    assert re.search(rf"rank\s+: {rank} ", ran.stderr)
    assert "SIGKILL" in ran.stderr


def test_an_exception_on_one_rank_under_torchrun_ends_the_run_soon_with_its_traceback(
    models: dict[str, Path], tmp_path: Path
) -> None:
    ran, seconds = run_under_torchrun(models["llama"], tmp_path, "raise_on_one_rank", 1)
    assert ran.returncode != 0
    assert seconds < 2 * SOON_S
    assert "LookupError: broken on purpose" in ran.stderr
    assert "raised in worker train-0 rank 1" in ran.stderr


@pytest.mark.nightly
def test_an_engine_under_torchrun_is_not_built_where_a_peer_is_stuck_and_says_so(
    models: dict[str, Path], tmp_path: Path
) -> None:
    program = PROGRAM.replace("getattr(engine", "try:\n    getattr(engine") + BUILD_AGAIN
    ran, seconds = run_under_torchrun(models["llama"], tmp_path, "raise_on_one_rank", 1, program)
    assert ran.returncode != 0
    assert seconds < 4 * SOON_S
    assert "cannot start on rank 0: a call of a stopped engine is still under way" in ran.stderr


COLLECTIVES = """
import torch, torch.distributed as dist
from rlite.runtime.cluster import group
from rlite.errors import CallTimeout

group.UNEVEN_S = 0.5
dist.barrier()
own = torch.ones(1)
dist.all_reduce(own)
print("alone:", own.item(), dist.get_world_size(), "together:", engine.sum_over_ranks())
for early in (0, 1):
    try:
        engine.return_early(early, timeout=2.0)
    except CallTimeout as error:
        print(error)
print("together:", engine.sum_over_ranks())
"""


def test_under_torchrun_a_collective_of_the_program_returns_and_uneven_ranks_are_named(
    models: dict[str, Path], tmp_path: Path
) -> None:
    program = PROGRAM.replace("getattr(engine, sys.argv[2])(int(sys.argv[3]))", COLLECTIVES)
    ran, seconds = run_under_torchrun(models["llama"], tmp_path, "", 0, program)
    assert ran.returncode == 0, ran.stderr
    assert seconds < 2 * SOON_S
    assert "alone: 1.0 1 together: [2.0, 2.0]" in ran.stdout
    assert ran.stdout.count("together: [2.0, 2.0]") == 2
    assert re.search(
        r"return_early: returned on train-0 rank 0 .*; for 0.5 s .* train-0 rank 1 on .* in all_reduce", ran.stderr
    )


@pytest.mark.parametrize("moment", ["in a call", pytest.param("at the start", marks=pytest.mark.nightly)])
def test_ranks_end_soon_after_the_agent_was_killed(models: dict[str, Path], tmp_path: Path, moment: str) -> None:
    script, mark = tmp_path / "program.py", uuid.uuid4().hex
    script.write_text(PROGRAM)
    python = forked_python.python() if moment == "in a call" else sys.executable
    launch = [python, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    agent = subprocess.Popen(
        [*launch, str(script), str(models["llama"]), "wait_for_one_rank", "0"],  # rank 1 sits in a collective
        env=environment(**{MARK: mark, forked_python.RANKS: "children"}, PYTHON_EXEC=python),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert agent.stdout is not None
        if moment == "in a call":
            assert b"calling" in agent.stdout.readline()
            time.sleep(1.0)
        else:
            while len(processes_with(MARK, mark)) < 3:
                time.sleep(0.02)
        agent.kill()
        agent.wait()
        imports_s = 0.0 if moment == "in a call" else 60.0  # before they are done nothing of ours runs
        deadline = time.monotonic() + SOON_S + imports_s
        while processes_with(MARK, mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_with(MARK, mark) == []
    finally:
        for process in processes_with(MARK, mark):
            process.kill()
