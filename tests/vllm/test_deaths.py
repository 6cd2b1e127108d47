"""Death of vLLM's processes, of rlite's worker and of the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.errors import WorkerDied
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse, TokenChunk
from tests.integration.modules import POLICIES, on_meta
from tests.integration.worlds import MARK, environment, ray_session
from tests.marks import nightly
from tests.tiny import build_model_dir
from tests.vllm.processes import engine_core_of, servers, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(840)]
SOON_S = 10.0
NUM = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", hidden=128)


@pytest.fixture
def mark() -> Iterator[str]:
    """A value of the environment variable MARK that every process of the session inherits."""
    with ray_session(3) as mark:
        yield mark


def requests() -> list[LLMRequest]:
    gconfig = GenerationHyperparameters(max_new_tokens=1500, ignore_eos=True)
    return [LLMRequest(input_ids=[7 * i + 1, 3], gconfig=gconfig.new(seed=i)) for i in range(NUM)]


def answers(engine: RliteInferenceEngine, on_chunk: Callable[[TokenChunk], object]) -> list[LLMResponse]:
    async def all_of_them() -> list[LLMResponse]:
        return await asyncio.gather(*(engine.agenerate(request, on_chunk) for request in requests()))

    return asyncio.run(all_of_them())


def killer(pid: int) -> tuple[Callable[[TokenChunk], None], threading.Event]:
    """A callback that kills a process after the first chunks."""
    counter = iter(range(10**6))
    killed = threading.Event()

    def see(chunk: TokenChunk) -> None:
        if next(counter) == NUM:
            os.kill(pid, signal.SIGKILL)
            killed.set()

    return see, killed


def test_requests_of_a_killed_replica_finish_on_another_and_the_last_death_is_named(mark: str, path: Path) -> None:
    engine = RliteInferenceEngine(path, executor="vllm", max_replacements=0)
    engine.build(data_parallel_size=2, max_model_len=2048, max_num_seqs=8)
    first, second = servers(mark=MARK, value=mark)
    undisturbed = answers(engine, lambda chunk: None)

    # rlite's worker is killed while it generates, and vLLM ends with it
    worker = psutil.Process(second).parent()
    assert worker is not None
    see, killed = killer(worker.pid)
    made = answers(engine, see)
    assert killed.is_set()
    assert [each.output_tokens for each in made] == [each.output_tokens for each in undisturbed]
    (lost,) = engine.lost_replicas
    assert lost.num_moved > 0
    assert wait_until_gone(second, SOON_S) == []
    assert len(engine.generate([[1], [2], [3]], {"max_tokens": 4})) == 3

    # no replica is left
    see, killed = killer(engine_core_of(first))
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"inference-0 rank \d .*EngineCore.* has ended"):
        answers(engine, see)
    assert killed.is_set()
    assert time.monotonic() - started < SOON_S
    with pytest.raises(WorkerDied):
        engine.generate([[1]], {"max_tokens": 1})
    assert wait_until_gone(first, SOON_S) == []


@pytest.mark.nightly
def test_a_killed_replica_is_replaced_and_the_next_sync_brings_it_the_weights(mark: str, path: Path) -> None:
    engine = RliteInferenceEngine(path, executor="vllm", max_replacements=2)
    engine.build(data_parallel_size=2, max_model_len=2048, max_num_seqs=8)
    train = RliteTrainEngine(on_meta(POLICIES["qwen2"], path))
    train.build(data_parallel_size=1)
    first, second = servers(mark=MARK, value=mark)
    undisturbed = answers(engine, lambda chunk: None)

    # one of vLLM's processes is killed; with the checkpoint's weights, the new replica joins at once
    made = disturbed(engine, second)
    assert [each.output_tokens for each in made] == [each.output_tokens for each in undisturbed]
    (lost,) = engine.lost_replicas
    assert lost.num_moved > 0
    assert "EngineCore" in lost.reason
    assert wait_until_gone(second, SOON_S) == []
    engine.wait_for_replacements()
    assert [replaced.version for replaced in engine.replaced_replicas] == [0]
    assert second not in servers(mark=MARK, value=mark)

    # after a sync, it joins at the next one
    train.scale_weights(1.5)
    train.p2p_weight_sync(engine)
    expected = answers(engine, lambda chunk: None)
    assert [each.output_tokens for each in expected] != [each.output_tokens for each in undisturbed]
    check_same(disturbed(engine, first), expected, version=1)
    engine.wait_for_replacements()
    assert engine.num_replicas == 1
    train.scale_weights(1.5)
    train.p2p_weight_sync(engine, verify_checksums=True)
    assert engine.num_replicas == 2
    expected = answers(engine, lambda chunk: None)
    (third, _) = servers(mark=MARK, value=mark)
    check_same(disturbed(engine, third), expected, version=2)  # the newest replica has answered the rest
    train.release()
    engine.release()


def disturbed(engine: RliteInferenceEngine, server: int) -> list[LLMResponse]:
    """The answers while the process of a server that computes is killed."""
    see, killed = killer(engine_core_of(server))
    made = answers(engine, see)
    assert killed.is_set()
    return made


def check_same(made: list[LLMResponse], expected: list[LLMResponse], version: int) -> None:
    assert [each.output_tokens for each in made] == [each.output_tokens for each in expected]
    assert {at for each in made for at in each.output_versions} == {version}


PROGRAM = """
import sys, time, rlite
if __name__ == "__main__":
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine = rlite.RliteInferenceEngine(sys.argv[1], executor="vllm")
    engine.build(max_model_len=64, max_num_seqs=2)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("who", ["driver", *nightly("server and driver")])
def test_a_killed_driver_leaves_no_process(path: Path, who: str) -> None:
    value = uuid.uuid4().hex
    command = [sys.executable, "-c", PROGRAM, str(path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(**{MARK: value}))
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    (server,) = servers(mark=MARK, value=value)
    if who != "driver":
        os.kill(server, signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
    driver.kill()
    driver.wait()
    assert wait_until_gone(server, SOON_S) == []
