"""A node dies, and what it held comes back on another node of the cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

import rlite
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.control import RLJobBuilder
from rlite.trainer import ppo
from tests.integration.control_program import Actor, Rollout, Trainer
from tests.integration.modules import LlamaPolicy, on_meta
from tests.integration.test_control import Run, wait_for
from tests.integration.test_lost_replicas import BUILD, answers, requests
from tests.integration.test_multi_node import ENVIRONMENT
from tests.integration.test_ppo_trainer import logged
from tests.integration.test_replaced_replicas import check_same, silent, wait_until_lost
from tests.integration.worlds import kill, process_of
from tests.tiny import build_model_dir

pytestmark = pytest.mark.slow
IPS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SPARE_IP = "127.0.0.5"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    rlite.shutdown()
    cluster.shutdown()


@pytest.mark.nightly
def test_a_role_moves_to_another_node_with_a_rendezvous_that_all_know(cluster: Cluster, tmp_path: Path) -> None:
    nodes = {ip: cluster.add_node(num_cpus=1, node_ip_address=ip) for ip in IPS}
    config = {"out": str(tmp_path), "recoverable": True}  # Ray may have put the trainer on the node that dies
    job = RLJobBuilder().node_num(3).device_per_node(1).device_type("CPU").trainer(Trainer).config(config)
    job = job.actor(Actor).total(1).per_node(1).on_failure("workload").end()
    job = job.rollout(Rollout).total(2).per_node(1).on_failure("workload").end().options(backoff=0.1)
    run = Run(job, tmp_path, "moved", cluster.address)
    before = run.pids()
    ((address, port), _) = before["rendezvous"]
    cluster.add_node(num_cpus=1, node_ip_address=SPARE_IP)
    cluster.remove_node(nodes[address], allow_graceful=False)
    wait_for(lambda: rollouts(tmp_path) != before["rollouts"])
    result = run.finish()
    assert result.succeeded, result
    log = "\n".join(map(str, result.events))
    assert f"the peers of ROLLOUT expect rank 0 at {address}:{port}, and it is at {SPARE_IP} now" in log, log
    assert "restart role ROLLOUT with a new rendezvous" in log, log
    assert "restart the job" not in log
    noted = latest(tmp_path)
    assert set(noted["rollouts"]).isdisjoint(before["rollouts"])
    assert noted["rendezvous"][0] == noted["rendezvous"][1]
    assert noted["rendezvous"][0][0] == SPARE_IP


def latest(out: Path) -> dict[str, Any]:
    """Return the trainer's latest note, from before or after its own restart."""
    whole, runs = out / "whole", out / "runs"
    texts = [*runs.read_text().splitlines(), *([whole.read_text()] if whole.exists() else [])]
    return json.loads(texts[-1])


def rollouts(out: Path) -> list[int]:
    return latest(out)["rollouts"]


@pytest.mark.nightly
def test_replicas_and_train_workers_move_to_another_node(
    cluster: Cluster, models: dict[str, Path], tmp_path: Path
) -> None:
    nodes = {ip: cluster.add_node(num_cpus=1, node_ip_address=ip) for ip in IPS[:2]}
    rlite.init(device="cpu", num_devices=2, launcher="ray", address=cluster.address, num_threads=1)
    serve = RliteInferenceEngine(models["llama"])
    serve.build(**BUILD)
    train = RliteTrainEngine(on_meta(LlamaPolicy, models["llama"]))
    train.build(tensor_parallel_size=2, colocate_with=serve)
    train.scale_weights(1.5)
    train.p2p_weight_sync(serve)
    train.save_state(tmp_path / "state")
    asked = requests(greedy=True)[:8]
    expected = answers(serve, asked, silent)
    stays, dies = serve.group.devices
    assert {stays.ip, dies.ip} == set(IPS[:2])

    cluster.add_node(num_cpus=1, node_ip_address=SPARE_IP)
    cluster.remove_node(nodes[dies.ip], allow_graceful=False)
    check_same(asked, answers(serve, asked, silent), expected, version=1)
    wait_until_lost(serve, 1)
    serve.wait_for_replacements()
    assert [(replaced.replica, replaced.version) for replaced in serve.replaced_replicas] == [(1, 1)]
    assert [device.ip for device in serve.group.devices] == [stays.ip, SPARE_IP]
    train.recover(tmp_path / "state")
    assert train.group.devices == serve.group.devices
    train.scale_weights(1.5)
    assert train.p2p_weight_sync(serve, verify_checksums=True).version == 2
    expected = answers(serve, asked, silent)
    kill(process_of(serve, 0))
    check_same(asked, answers(serve, asked, silent), expected, version=2)
    serve.wait_for_replacements()
    train.release()
    serve.release()


@pytest.mark.nightly
def test_ppo_goes_on_from_disk_if_the_state_in_memory_went_with_a_node(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    model = str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]))
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    nodes = {ip: cluster.add_node(num_cpus=1, node_ip_address=ip) for ip in IPS[:2]}
    cluster.add_node(num_cpus=1, node_ip_address=SPARE_IP)

    def run(name: str) -> list[dict[str, Any]]:
        settings = [f"actor.model_name={model}", f"train_data.path={tmp_path}/rows.json", "rollout.deterministic=true"]
        settings += [f"rollout.env_path={tmp_path}/environment.py", "rollout.dtype=float32", "trainer.max_recoveries=2"]
        settings += ["train_data.prompts_per_rollout=8", "train_data.responses_per_prompt=4", "trainer.total_steps=6"]
        settings += ["rollout.train_sampling_params.max_new_tokens=8", "rollout.max_model_len=64"]
        settings += ["rollout.dynamic_filtering=false", "trainer.save_freq=1", "num_devices=2", "launcher=ray"]
        ppo.main([*settings, f"trainer.save_dir={tmp_path / name}"])
        return logged(tmp_path / name)

    calm = run("calm")
    killer = threading.Thread(target=kill_after, args=(tmp_path / "fire/metrics.jsonl", cluster, nodes[IPS[0]]))
    killer.start()
    fire = run("fire")
    killer.join()
    assert [row["step"] for row in fire] == [1, 2, 3, 4, 5, 6]
    assert [(row["reward"], row["loss"]) for row in fire] == [(row["reward"], row["loss"]) for row in calm]


def kill_after(metrics: Path, cluster: Cluster, node: Any) -> None:
    """Kill a node as soon as a run has made its first steps."""
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) == 2)
    cluster.remove_node(node, allow_graceful=False)
