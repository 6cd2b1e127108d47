"""PPO with executor="sglang" over a server that keeps SGLang's contract. SGLang itself needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlite.trainer import ppo
from tests.contracts import sglang_wheel as wheel
from tests.contracts.test_sglang import installed  # noqa: F401  # an autouse fixture
from tests.tiny import build_model_dir

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not wheel.IS_HERE, reason=wheel.REASON)]

ENVIRONMENT = """
async def step(state, action, extra_info):
    turn = extra_info.get("turn", 0)
    reward = sum(c.isdigit() for c in action) / max(len(action), 1)
    extra_info = {**extra_info, "turn": turn + 1}
    next_state = None if turn else state + action + "\\nonce more:"
    return {"next_state": next_state, "reward": reward, "score": reward, "done": bool(turn), "extra_info": extra_info}
"""


def test_ppo_trains_on_two_turns_of_a_step_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model_dir(tmp_path / "model", "qwen3", hidden=64)
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{a}+{b}=", "extra_info": {"answer": str(a + b)}} for a in range(2) for b in range(2)]
    Path("rows.json").write_text(json.dumps(rows))
    settings = {
        "actor.model_name": model,
        "actor.max_length_per_device": 512,
        "critic.model_name": model,
        "adv.estimator": "gae",
        "kl.type": "reward",
        "kl.reward_estimator": "k1",
        "train_data.path": "rows.json",
        "train_data.prompts_per_rollout": 4,
        "train_data.responses_per_prompt": 4,
        "rollout.executor": "sglang",
        "rollout.env_path": "env.py",
        "rollout.max_turns": 2,
        "rollout.train_sampling_params.max_new_tokens": 6,
        "trainer.total_steps": 2,
        "trainer.save_dir": "run",
        "num_devices": 1,
    }
    ppo.main([f"{name}={value}" for name, value in settings.items()])
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["turns"] for row in steps] == [2.0, 2.0]
    assert all(row["logprob_drift"] < 1e-4 for row in steps), "the trainer finds the probabilities of each turn"
