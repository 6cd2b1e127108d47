"""Two torchrun agents, each a node of its own, run one job."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forked_python
from tests.integration.worlds import environment, free_port


def run_on_two_nodes(*argv: str, cwd: Path) -> list[str]:
    """Run a module as one job of two agents with one process each; what each agent wrote."""
    python = forked_python.python()
    endpoint = f"127.0.0.1:{free_port()}"
    torchrun = [python, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_id=job"]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--local_addr=127.0.0.1"]
    agents = [
        subprocess.Popen(
            [*torchrun, f"--node_rank={rank}", "-m", *argv],
            env=environment(),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=280)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    for agent, output in zip(agents, outputs, strict=True):
        assert agent.returncode == 0, output
    return outputs


@pytest.mark.nightly
@pytest.mark.slow
def test_sft_on_two_nodes_learns_what_one_process_learns(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    settings = [f"actor.model_name={models['qwen2']}", "data.path=rows.json", "data.batch_size=16", "actor.lr=1e-3"]
    outputs = run_on_two_nodes("rlite.trainer.sft", *settings, "trainer.save_dir=two", cwd=tmp_path)
    assert "2 x cpu, launcher torchrun" in "".join(outputs)
    alone = [forked_python.python(), "-m", "rlite.trainer.sft", *settings, "trainer.save_dir=one"]
    subprocess.run(alone, env=environment(), cwd=tmp_path, check=True, timeout=200, stdout=subprocess.DEVNULL)
    one, two = (
        [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("one", "two")
    )
    assert len(one) == 4
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
    assert two[-1]["loss"] < two[0]["loss"]
    assert [row["num_tokens"] for row in two] == [row["num_tokens"] for row in one]
    ours, theirs = (load_file(tmp_path / out / "latest" / "model.safetensors") for out in ("one", "two"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[key] - theirs[key]).abs().max() < 1e-3) for key in ours)


ENVIRONMENT = """
async def step(state, action, extra_info):
    reward = sum(character.isdigit() for character in action) / max(len(action), 1)
    return {"next_state": None, "reward": reward, "score": reward, "done": True, "extra_info": extra_info}
"""


@pytest.mark.slow
def test_ppo_on_two_nodes_trains_and_serves_on_both(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(8) for b in range(8)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    settings = [f"actor.model_name={models['qwen3']}", "actor.lr=1e-3", "train_data.path=rows.json"]
    settings += ["train_data.prompts_per_rollout=8", "train_data.responses_per_prompt=4", "trainer.total_steps=2"]
    settings += ["rollout.env_path=environment.py", "rollout.train_sampling_params.max_new_tokens=8"]
    settings += ["rollout.max_model_len=64", "rollout.dynamic_filtering=false", "trainer.save_dir=out"]
    outputs = run_on_two_nodes("rlite.trainer.ppo", *settings, cwd=tmp_path)
    assert "2 replicas of 1 device," in "".join(outputs)
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [1, 2]
    # the policy that both replicas serve is the one that is trained, also after the first weight sync
    assert all(row["logprob_drift"] < 1e-4 for row in logged)
    before, after = (load_file(path / "model.safetensors") for path in (models["qwen3"], tmp_path / "out" / "latest"))
    assert max(float((after[key] - before[key]).abs().max()) for key in after) > 1e-4
