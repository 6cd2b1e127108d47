"""A node dies, and what it held comes back on another node of the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rlite
from rlite.control import RLJobBuilder
from tests.integration.control_program import Actor, Rollout, Trainer
from tests.integration.test_control import Run, wait_for

pytestmark = pytest.mark.slow
SPARE_IP = "127.0.0.4"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    rlite.shutdown()
    cluster.shutdown()


def test_a_role_moves_to_another_node_with_a_rendezvous_that_all_know(cluster: Cluster, tmp_path: Path) -> None:
    nodes = {ip: cluster.add_node(num_cpus=1, node_ip_address=ip) for ip in ("127.0.0.2", "127.0.0.3")}
    job = RLJobBuilder().node_num(3).device_per_node(1).device_type("CPU").trainer(Trainer).config({"out": str(tmp_path)})
    job = job.actor(Actor).total(1).per_node(1).end()
    job = job.rollout(Rollout).total(2).per_node(1).on_failure("workload").end().options(backoff=0.1)
    run = Run(job, tmp_path, "moved", cluster.address)
    before = run.pids()
    ((address, port), _) = before["rendezvous"]
    cluster.add_node(num_cpus=1, node_ip_address=SPARE_IP)
    cluster.remove_node(nodes[address], allow_graceful=False)
    wait_for((tmp_path / "whole").exists)
    after = json.loads((tmp_path / "whole").read_text())
    assert after["rendezvous"][0] == after["rendezvous"][1]
    assert after["rendezvous"][0][0] in (SPARE_IP, *nodes.keys() - {address})
    assert set(after["rollouts"]).isdisjoint(before["rollouts"])
    result = run.finish()
    assert result.succeeded, result
    log = "\n".join(map(str, result.events))
    assert f"the peers of ROLLOUT expect rank 0 at {address}:{port}, and it is at {SPARE_IP} now" in log
