"""The same program on every launcher, what they leave behind, and Ray with several nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rlite
from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlite.engine.weights import sync_weights
from rlite.errors import ConfigError, PlacementError, RliteError, WorkerError
from tests import forked_python
from tests.integration.modules import LlamaPolicy, Qwen2Policy, on_meta
from tests.integration.worlds import MARK, environment, free_port, processes_with, ray_session, world

PROGRAM = str(Path(__file__).with_name("program.py"))
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def command(launcher: str, num_devices: int, model: Path, out: Path) -> list[str]:
    """Start the driver in the process by Python itself, and the others as forks."""
    python = [sys.executable if launcher == "inprocess" else forked_python.python()]
    if launcher == "torchrun":
        python += [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={num_devices}",
            f"--master_port={free_port()}",
        ]
    return [*python, PROGRAM, str(model), str(num_devices), launcher, str(out)]


@pytest.mark.slow
def test_one_program_gives_one_result_on_every_launcher_and_leaves_no_process(
    models: dict[str, Path], tmp_path: Path
) -> None:
    results = {}
    for launcher, num_devices in (("inprocess", 1), ("torchrun", 2), ("ray", 2)):
        mark, out = uuid.uuid4().hex, tmp_path / f"{launcher}.json"
        ran = subprocess.run(
            command(launcher, num_devices, models["qwen2"], out),
            env=environment(**{MARK: mark, forked_python.RANKS: "children"}),
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert ran.returncode == 0, ran.stderr
        assert processes_with(MARK, mark) == []
        results[launcher] = json.loads(out.read_text())
        assert "shutdown()" in results[launcher]["second_init"]
    alone = results["inprocess"]
    assert alone["rows"] == [[0, 1, 2, 3, 4]]
    for launcher in ("torchrun", "ray"):
        assert results[launcher]["losses"] == pytest.approx(alone["losses"], abs=1e-4)
        assert results[launcher]["tokens"] == alone["tokens"]
        assert results[launcher]["rows"] == [[0, 1, 2], [3, 4]]


class Odd(LlamaPolicy):
    def lock(self, argument: object = None) -> object:
        return threading.Lock()


def test_unpicklable_values_fail_only_their_call_under_torchrun(models: dict[str, Path]) -> None:
    with world(2):
        engine = RliteTrainEngine(on_meta(Odd, models["llama"]))
        engine.build(tensor_parallel_size=2)
        with pytest.raises(WorkerError, match=r"the result.* cannot travel .*lock"):
            engine.lock()
        with pytest.raises(WorkerError, match=r"an argument .* cannot travel .*lock"):
            engine.lock(threading.Lock(), timeout=30)
        assert engine.first_tokens([[7]]) == [[7], [7]]


@pytest.mark.slow
def test_a_killed_driver_takes_its_ray_with_it(models: dict[str, Path], tmp_path: Path) -> None:
    mark, out = uuid.uuid4().hex, tmp_path / "ready"
    driver = subprocess.Popen(
        [*command("ray", 2, models["qwen2"], out), "wait"],
        env=environment(**{MARK: mark}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 200
        while not out.exists() and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert out.exists()
        assert len(processes_with(MARK, mark)) > 4, "a driver, Ray's own processes and four workers"
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        deadline = time.monotonic() + 100
        while processes_with(MARK, mark) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert processes_with(MARK, mark) == []
    finally:
        for process in processes_with(MARK, mark):
            process.kill()


@pytest.mark.nightly
def test_the_address_of_a_cluster_that_was_killed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
    left.parent.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    for text in (f"127.0.0.1:{free_port()}", "nonsense"):
        left.write_text(text)
        session = rlite.init(device="cpu", num_devices=1, launcher="ray")
        assert len(session.devices) == 1
        rlite.shutdown()
        assert processes_with(MARK, mark) == []
    left.unlink()


@pytest.mark.nightly
@pytest.mark.slow
def test_ray_with_two_nodes_places_by_address_and_syncs_between_them(models: dict[str, Path]) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=2, node_ip_address="127.0.0.2")
        session = rlite.init(device="cpu", launcher="ray", address=cluster.address, num_threads=1)
        assert len(session.devices) == 4
        assert len({device.node for device in session.devices}) == 2

        serve = RliteInferenceEngine(models["llama"])
        with pytest.raises(PlacementError, match=r"127\.0\.0\.2"):
            serve.build(tensor_parallel_size=2, data_parallel_size=2, acceptable_node_ips=["127.0.0.2"])
        serve.build(tensor_parallel_size=2, acceptable_node_ips=["127.0.0.2"], max_model_len=64, max_num_seqs=4)
        assert {device.ip for device in serve.group.devices} == {"127.0.0.2"}
        train = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
        train.build(tensor_parallel_size=2, not_colocate_with=serve)
        assert "127.0.0.2" not in {device.ip for device in train.group.devices}

        before = serve.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
        train.train_step(NeedParallel([[1, 2, 3]] * 2))
        for transport in ("broadcast", "shared"):  # both nodes are this machine: its memory is theirs, too
            report = sync_weights(train, serve, "continue", verify_checksums=True, transport=transport)
            assert report.num_bytes >= sum(tensor.nbytes for tensor in train.state_dict().values())
        after = serve.generate([[1, 2, 3]], GREEDY)[0].outputs[0]
        assert after.token_ids != before
        assert after.versions == [2] * 8

        serve.release()
        train.release()
        train.build(tensor_parallel_size=4)  # one copy over both nodes
        assert len({device.node for device in train.group.devices}) == 2
        assert [result["rows"] for result in train.train_step(NeedParallel([[1, 2, 3]] * 5))] == [2, 1, 1, 1]
    finally:
        rlite.shutdown()
        cluster.shutdown()


# -- without any process -----------------------------------------------------------------------------------------------


def test_init_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, words in [
        ({"device": "tpu"}, "device='tpu'"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"launcher": "slurm"}, "launcher='slurm'"),
        ({"launcher": "inprocess", "num_devices": 2}, "one device, not 2"),
        ({"launcher": "torchrun"}, "torchrun --nproc_per_node"),
    ]:
        with pytest.raises(ConfigError, match=words):
            rlite.init(**{"device": "cpu", **arguments})  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rlite\[ray\].*num_devices=1"):
        rlite.init(device="cpu", num_devices=2)


def test_engines_need_a_session_and_survive_its_end(models: dict[str, Path]) -> None:
    rlite.shutdown()
    engine = RliteTrainEngine(on_meta(Qwen2Policy, models["qwen2"]))
    with pytest.raises(RliteError, match=r"call rlite\.init\(\) first"):
        engine.build()
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine.build()
    rlite.shutdown()
    with pytest.raises(RliteError, match="was released"):
        engine.train_step([[1, 2]])
    engine.release()
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    try:
        engine.build()
        assert engine.counter(by=1) == 1
    finally:
        rlite.shutdown()


def test_the_program_keeps_its_handler_of_sigterm() -> None:
    handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    mine = signal.getsignal(signal.SIGTERM)
    try:
        with ray_session(1):
            assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, handler)
