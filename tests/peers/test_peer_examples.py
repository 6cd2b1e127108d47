"""The examples for OpenRLHF and verl call what the pinned releases define, as far as their source says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.conftest import FOLDER
from tests.peers.signatures import Library, Program

EXAMPLES = Path(__file__).parents[2] / "examples" / "control"
OPENRLHF_CALLS = {
    *("PolicyModelActor", "CriticModelActor", "ReferenceModelActor", "RewardModelActor", "RolloutRayActor.__init__"),
    *("PolicyModelActor.init_model_from_pretrained", "PolicyModelActor.fit", "PolicyModelActor.broadcast_to_vllm"),
    *("PolicyModelActor.forward", "CriticModelActor.forward", "ReferenceModelActor.forward"),
    *("CriticModelActor.init_model_from_pretrained", "CriticModelActor.fit", "CriticModelActor.append"),
    *("ReferenceModelActor.init_model_from_pretrained", "RewardModelActor.init_model_from_pretrained"),
    *("RewardModelActor.forward", "RolloutRayActor.generate_responses", "RolloutRayActor.update_weight"),
    *("RemoteExperienceMaker.compute_advantages_and_returns", "get_strategy", "compute_approx_kl"),
}
VERL_CALLS = {
    *("ActorRolloutRefWorker", "ActorRolloutRefWorker.init_model", "ActorRolloutRefWorker.update_actor"),
    *("ActorRolloutRefWorker.compute_log_prob", "ActorRolloutRefWorker.compute_ref_log_prob"),
    *("ActorRolloutRefWorker.update_weights", "ActorRolloutRefWorker.save_checkpoint"),
    *("TrainingWorkerConfig", "TrainingWorker", "TrainingWorker.train_mini_batch", "TrainingWorker.infer_batch"),
    *("RewardLoopWorker.compute_score_batch", "LLMServerManager.create", "CheckpointEngineManager.sleep_replicas"),
    *("AgentLoopManager.generate_sequences", "compute_advantage", "verl.utils.tensordict_utils.chunk_tensordict"),
}


def library(name: str) -> Library:
    if not (FOLDER / name).is_dir():
        pytest.skip(f"{name} is not in {FOLDER}: `make test` installs it, for the platforms that have it")
    return Library(FOLDER, (name,))


@pytest.mark.parametrize(("name", "calls"), [("openrlhf", OPENRLHF_CALLS), ("verl", VERL_CALLS)])
def test_every_call_of_an_example_fits_the_signature_in_the_release(name: str, calls: set[str]) -> None:
    program = Program((EXAMPLES / f"{name}_ppo.py").read_text(), library(name))
    assert program.wrong == []
    assert calls - program.checked == set()


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("self.worker.broadcast_to_vllm()", "self.worker.broadcast()", "PolicyModelActor.broadcast: no method"),
        ("fit(kl_ctl=kl_coef)", "fit(kl=kl_coef)", "PolicyModelActor.fit: no parameter 'kl'"),
        ("self.rank, address, port)", "self.rank, address)", "PolicyModelActor: 'master_port' is not given"),
        ("each.attention_mask) for", "each.attention_mask, 1, 2, 3) for", "6 positional arguments for 5"),
        ("import get_strategy,", "import get_strategies,", "openrlhf.utils.utils has no get_strategies"),
    ],
)
def test_a_call_that_does_not_fit_is_found(right: str, wrong: str, message: str) -> None:
    source = (EXAMPLES / "openrlhf_ppo.py").read_text()
    assert right in source
    program = Program(source.replace(right, wrong), library("openrlhf"))
    assert any(message in each for each in program.wrong), program.wrong


@pytest.mark.parametrize(("name", "need"), [("openrlhf", "flash_attn"), ("verl", "codetiming")])
def test_without_its_environment_an_example_ends_at_the_first_missing_import(name: str, need: str) -> None:
    library(name)
    if importlib.util.find_spec(need):
        pytest.skip(f"{need} is installed")
    environment = {**os.environ, "PYTHONPATH": f"{EXAMPLES.parents[1]}:{FOLDER}"}
    command = [sys.executable, str(EXAMPLES / f"{name}_ppo.py"), "options.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"No module named {need!r}")
