"""The SGLang executor over a server that keeps SGLang's contract: what every executor promises, and its own promises.

Not verified here: SGLang itself, which needs a GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.backends.serving.http import CallRefused
from rlite.backends.sglang.replica import SglangReplica
from rlite.backends.sglang.server import ServerProcess, SglangOptions, server_arguments
from rlite.backends.sglang.worker import SglangWorker
from rlite.errors import ConfigError, UnknownOptionError, WeightSyncError, WorkerError
from rlite.runtime.cluster.session import current_session
from rlite.runtime.replicas.replica import InFlightRequest
from rlite.runtime.replicas.router import Router
from rlite.runtime.replicas.workers import WorkerSet
from rlite.types import SequenceRequest
from tests import (
    faulty_serving,  # noqa: F401  # registers sglang-faulty
    forked_python,
)
from tests.contracts import sglang_wheel as wheel
from tests.contracts import test_inference_executors as promises
from tests.contracts.sglang_server import stand_in
from tests.contracts.test_inference_executors import GREEDY, PROMPTS, Running, request_of
from tests.integration.modules import Qwen3Policy, on_meta
from tests.tiny import build_model_dir

pytestmark = pytest.mark.skipif(not wheel.IS_HERE, reason=wheel.REASON)
FIXTURES = ("path", "session")
OF_ANY_EXECUTOR = ("test_the_common_options", "test_a_backend_that_is_none")
globals().update(
    {
        name: value
        for name, value in vars(promises).items()
        if name in FIXTURES or (name.startswith("test_") and not name.startswith(OF_ANY_EXECUTOR))
    }
)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A package `sglang`, for this process and its children."""
    if not wheel.IS_HERE:
        pytest.skip(wheel.REASON)
    folder = tmp_path_factory.mktemp("stand-in")
    stand_in(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        root = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), root, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RLITE_SGLANG_WHEEL", str(wheel.FOLDER))
        yield


@pytest.fixture(scope="module")
def engine(path: Path, session: None, installed: None) -> Iterator[RliteInferenceEngine]:
    engine = RliteInferenceEngine(path, executor="sglang")
    engine.build(max_model_len=promises.max_model_len(engine), max_num_seqs=4, seed=3)
    yield engine
    engine.release()


# -- servers that run already ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(path: Path, installed: None) -> Iterator[ServerProcess]:
    """A server that another program started, with SGLang's defaults."""
    process = ServerProcess("127.0.0.1", {"model_path": str(path), "dtype": "float32"}, "its key", [])
    process.wait_until_ready(200)
    yield process
    process.stop()


@pytest.fixture(scope="module")
def attached(
    engine: RliteInferenceEngine,
    server: ServerProcess,
    path: Path,
) -> Iterator[RliteInferenceEngine]:
    attached = RliteInferenceEngine(path, executor="sglang")
    attached.build(addresses=[server.endpoint.url], api_key="its key", seed=3, colocate_with=engine)
    yield attached
    attached.release()


def test_a_running_server_serves_and_outlives_the_engine(
    engine: RliteInferenceEngine, attached: RliteInferenceEngine, server: ServerProcess, path: Path
) -> None:
    expected = [result.outputs[0] for result in engine.generate(PROMPTS, GREEDY)]
    made = [result.outputs[0] for result in attached.generate(PROMPTS, GREEDY)]
    assert [output.token_ids for output in made] == [output.token_ids for output in expected]
    assert asyncio.run(attached.agenerate(request_of(60))).output_len == 60, "cumulative events"
    with pytest.raises(ConfigError, match=r"enable_memory_saver|enable_weights_cpu_backup"):
        attached.cpu()
    attached.pause()
    attached.release()
    assert server.failure() is None
    assert server.endpoint.call("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
    attached.build(addresses=[server.endpoint.url], api_key="its key", seed=3, colocate_with=engine)


def test_a_process_group_brings_weights_to_a_running_server(attached: RliteInferenceEngine, path: Path) -> None:
    train = RliteTrainEngine(on_meta(Qwen3Policy, path))
    train.build(colocate_with=attached)
    train.train_step([[1, 2, 3, 4, 5, 6]])
    running = Running(attached, request_of())
    for version in (1, 2):
        train.p2p_weight_sync(attached, verify_checksums=True)
        assert attached.get_version() == version
    versions = running.wait().output_versions
    assert versions == sorted(versions)
    assert len(versions) == 150
    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict(train.state_dict(), strict=False)
    made = attached.generate(PROMPTS[:1], GREEDY)[0].outputs[0].token_ids
    with torch.no_grad():
        rows = model.eval()(torch.tensor([PROMPTS[0] + made])).logits[0, len(PROMPTS[0]) - 1 : -1]
    assert made == rows.argmax(-1).tolist()
    train.release()
    attached.load(path)
    attached.set_version(0)


def test_a_server_of_another_model_is_refused(
    engine: RliteInferenceEngine, server: ServerProcess, tmp_path: Path
) -> None:
    other = RliteInferenceEngine(build_model_dir(tmp_path / "llama", "llama", hidden=64), executor="sglang")
    with pytest.raises(ConfigError, match=r"'qwen3'.*'llama'"):
        other.build(addresses=[server.endpoint.url], api_key="its key", colocate_with=engine)
    with pytest.raises(ConfigError, match="Unauthorized"):
        other.build(addresses=[server.endpoint.url], api_key="another", colocate_with=engine)
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        other.build(addresses=[server.endpoint.url], data_parallel_size=2, colocate_with=engine)


# -- the contract ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("/generate", {"input_ids": [1], "no_such_field": 1}),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 1}}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [], "no_such_field": 1}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [""], "load_format": "flattened_bucket"}),
        ("/pause_generation", {"mode": "retract", "no_such_field": 1}),
    ],
)
def test_the_server_refuses_what_sglang_does_not_know(server: ServerProcess, call: str, body: dict[str, Any]) -> None:
    with pytest.raises(CallRefused) as refused:
        server.endpoint.call(call, body)
    assert refused.value.status in (400, 500)


def test_every_server_argument_and_no_other_is_an_option(path: Path) -> None:
    common = {"max_model_len": 64, "max_num_seqs": 2, "gpu_memory_utilization": 0.5, "dtype": None, "seed": 1}
    options = SglangOptions(**common, page_size=16)
    assert vars(options).items() >= common.items()
    assert options.passed_on == {"page_size": 16}
    assert server_arguments() == {name for name in wheel.server_arguments() if not name.startswith("_")}
    with pytest.raises(UnknownOptionError, match="did you mean 'chunked_prefill_size'"):
        RliteInferenceEngine(path, executor="sglang").build(chunked_prefil_size=4)
    with pytest.raises(ConfigError, match="use tensor_parallel_size"):
        RliteInferenceEngine(path, executor="sglang").build(tp_size=2)
    with pytest.raises(ConfigError, match=r"dtype, page_size: with addresses"):
        RliteInferenceEngine(path, executor="sglang").build(addresses=["http://a:1"], page_size=1, dtype="float32")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_cannot_start_is_named_with_its_cause(engine: RliteInferenceEngine, path: Path) -> None:
    other = RliteInferenceEngine(path, executor="sglang")
    with pytest.raises(ConfigError, match=r"could not start: .* exit code 1: .*Error: .*no_such_template"):
        other.build(chat_template="no_such_template", colocate_with=engine)
    assert not other.is_built


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_a_server_that_dies_or_hangs_is_reported_within_seconds(
    engine: RliteInferenceEngine,
    path: Path,
    number: signal.Signals,
) -> None:
    other = RliteInferenceEngine(path, executor="sglang")
    other.build(max_model_len=1024, colocate_with=engine)
    (server,) = [process for process in psutil.process_iter() if is_server_of(other, process)]
    running = Running(other, request_of(1000))
    began = time.monotonic()
    server.send_signal(number)
    error = running.wait()
    assert time.monotonic() - began < 60
    assert isinstance(error, WorkerError)
    assert "the SGLang server at http://127.0.0.1:" in str(error)
    with pytest.raises(WorkerError, match="is lost"):
        other.generate(PROMPTS, GREEDY)
    other.release()
    server.wait(20)


@pytest.mark.nightly
@pytest.mark.slow
def test_scoring_ends_with_a_server_that_hangs(engine: RliteInferenceEngine, path: Path) -> None:
    other = RliteInferenceEngine(path, executor="sglang")
    other.build(max_model_len=1024, colocate_with=engine)
    (server,) = [process for process in psutil.process_iter() if is_server_of(other, process)]
    server.send_signal(signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"the SGLang server at http://127\.0\.0\.1:\d+ is lost"):
        other.prompt_logprobs(PROMPTS)
    other.release()
    server.wait(60)


def is_server_of(engine: RliteInferenceEngine, process: psutil.Process) -> bool:
    port = int(engine._replicas.all[0]._endpoint.url.rpartition(":")[2])  # type: ignore[attr-defined]
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any(connection.laddr.port == port for connection in process.net_connections("tcp4"))
    return False


class Alone(WorkerSet):
    """Has a group of its own."""

    @property
    def ranks(self) -> range:
        return range(self.size)


def replica_of(index: int, options: SglangOptions, path: Path, router: Router) -> SglangReplica:
    launcher = current_session().launcher
    group = launcher.start(str(index), launcher.devices, lambda context: SglangWorker(context, str(path), options, 1))
    return SglangReplica(Alone(index, group, 1), options, router.replica_failed)


@pytest.mark.slow
def test_requests_of_a_lost_server_go_on_elsewhere_from_their_tokens(
    engine: RliteInferenceEngine,
    server: ServerProcess,
    path: Path,
) -> None:
    doomed = ServerProcess("127.0.0.1", {"model_path": str(path), "dtype": "float32"}, "its key", [])
    doomed.wait_until_ready(60)
    router = Router("two")
    for index, of_server in enumerate((doomed, server)):
        options = SglangOptions(addresses=[of_server.endpoint.url], api_key="its key")
        router.add(replica_of(index, options, path, router))
    sequence = SequenceRequest(request_id=1, input_ids=[72, 73, 74], gconfig=request_of(600).gconfig, seed=5)
    has_begun = threading.Event()
    request = InFlightRequest(sequence, lambda chunk: has_begun.set())
    router.route([[request]])
    assert has_begun.wait(30)
    doomed.stop()
    request.done.result(timeout=60)
    undisturbed = InFlightRequest(replace(sequence, request_id=2))
    router.route([[undisturbed]])
    assert undisturbed.done.result(timeout=60).token_ids == request.token_ids
    assert [loss.num_moved for loss in router.lost] == [1]
    for replica in router.replicas:
        replica.close()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("is_keeper", [False, True])
def test_a_server_ends_with_the_process_that_started_it(path: Path, installed: None, is_keeper: bool) -> None:
    program = (
        "from rlite.backends.sglang.server import ServerProcess\n"
        f"process = ServerProcess('127.0.0.1', {{'model_path': {str(path)!r}}}, None, [])\n"
        "process.wait_until_ready(200)\n"
        "print('ready', flush=True)\n"
        "import time; time.sleep(600)\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != forked_python.FOLDER}  # no fork
    owner = subprocess.Popen([sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    children = psutil.Process(owner.pid).children(recursive=True)
    assert len(children) >= 2, "the keeper and the server"
    (children[0] if is_keeper else psutil.Process(owner.pid)).kill()
    _, alive = psutil.wait_procs(children[1:], timeout=20)
    assert alive == []
    owner.kill()
    owner.wait()


def test_a_verified_sync_notices_a_server_whose_checksums_stay(
    engine: RliteInferenceEngine, server: ServerProcess, path: Path
) -> None:
    attached = RliteInferenceEngine(path, executor="sglang-faulty")
    attached.build(addresses=[server.endpoint.url], api_key="its key", seed=3, colocate_with=engine)
    train = RliteTrainEngine(on_meta(Qwen3Policy, path))
    train.build(colocate_with=engine)
    train.p2p_weight_sync(attached, verify_checksums=True)
    train.train_step([[1, 2, 3, 4, 5, 6]])
    with pytest.raises(WeightSyncError, match="the checksums are those of the last verified sync"):
        train.p2p_weight_sync(attached, verify_checksums=True)
    train.p2p_weight_sync(attached, verify_checksums=True)
    train.release()
    attached.release()
