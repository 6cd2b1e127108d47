"""First use with a loss and a callback of your own, and the same command after a failure."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlite.algorithms import ADVANTAGES, POLICY_LOSSES
from rlite.cli import main
from rlite.trainer.callbacks import CALLBACKS


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with data. What a test registers is forgotten after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])  # which `rlite` below replaces
    rows = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(32)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables: list[tuple[Any, set[str]]] = [(table, set(table)) for table in (ADVANTAGES, CALLBACKS, POLICY_LOSSES)]
    yield
    for table, known in tables:
        for name in set(table) - known:
            del table[name]


def rlite(*arguments: str) -> list[dict[str, float]]:
    """Run a command, and return the metrics of its run."""
    sys.argv = ["rlite", *arguments]
    main()
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def sft(model: str, *options: str) -> list[dict[str, float]]:
    given = [f"actor.model_name={model}", "data.path=rows.jsonl", "data.batch_size=8", "actor.lr=1e-3"]
    return rlite("sft", *given, "trainer.n_epochs=3", "trainer.save_dir=run", *options)


def test_an_own_loss_by_import(model: str) -> None:
    Path("my_loss.py").write_text(
        "from rlite.algorithms import TokenLoss, register_policy_loss\n\n\n@register_policy_loss('plain')\n"
        "def plain(inputs, *, factor=1.0):\n"
        "    return TokenLoss(-factor * inputs.advantages * inputs.logprobs, {'own': inputs.logprobs.detach()})\n"
    )
    Path("my_reward.py").write_text("def length(prompt, completions, **row):\n    return len(completions)\n")
    options = ["train_data.prompts_per_rollout=4", "rollout.train_sampling_params.max_new_tokens=4"]
    options += ["trainer.total_steps=1", "trainer.save_dir=run", "reward.path=my_reward.py:length"]
    loss = ["--import", "my_loss.py", "actor.policy_loss.name=plain", "actor.policy_loss.options.factor=2"]
    [step] = rlite("grpo", f"actor.model_name={model}", "train_data.path=rows.jsonl", *loss, *options)
    assert step["own"] < 0


def test_a_callback_that_stops_early(model: str) -> None:
    Path("patience.py").write_text(
        "from rlite.trainer.callbacks import Callback, register_callback\n\n\n@register_callback('patience')\n"
        "class Patience(Callback):\n    def on_step(self, run, metrics):\n"
        "        if metrics['loss'] < 5.5:\n            run.stop('good enough')\n"
    )
    steps = sft(model, "--import", "patience.py", "trainer.callbacks=[patience]")
    assert len(steps) < 12
    assert steps[-1]["loss"] < 5.5 <= steps[-2]["loss"]


def test_the_same_command_goes_on_after_a_failure(model: str) -> None:
    Path("trip.py").write_text(
        "from pathlib import Path\nfrom rlite.trainer.callbacks import Callback, register_callback\n\n\n"
        "@register_callback('trip')\nclass Trip(Callback):\n    def on_step(self, run, metrics):\n"
        "        if run.step == 5 and not Path('tripped').exists():\n"
        "            Path('tripped').touch()\n            raise OSError('the network is down')\n"
    )
    command = ["--import", "trip.py", "trainer.callbacks=[trip]"]
    with pytest.raises(SystemExit, match="callback 'trip' raised OSError in on_step at step 5"):
        sft(model, *command)
    assert [step["step"] for step in sft(model, *command)] == list(range(1, 13))
    resumed = Path("run/latest/model.safetensors").read_bytes()
    sft(model, *command, "trainer.overwrite=true")
    assert Path("run/latest/model.safetensors").read_bytes() == resumed


def ppo(model: str, *options: str) -> str:
    """Run a command that fails, and return its message."""
    Path("my_reward.py").write_text("def length(prompt, completions, **row):\n    return len(completions)\n")
    given = [f"actor.model_name={model}", "train_data.path=rows.jsonl", "reward.path=my_reward.py:length"]
    small = ["train_data.prompts_per_rollout=4", "rollout.train_sampling_params.max_new_tokens=4", "kl.type=null"]
    with pytest.raises(SystemExit) as ended:
        rlite("grpo", *given, *small, "trainer.save_dir=run", "--import", "mine.py", *options)
    return str(ended.value.code)


def test_a_mistake_in_an_own_loss_is_told_in_a_few_lines_that_begin_with_its_place(model: str) -> None:
    Path("mine.py").write_text(
        "from rlite.algorithms import TokenLoss, register_policy_loss\n\n\n@register_policy_loss('mistaken')\n"
        "def mistaken(inputs):\n    return TokenLoss(-inputs.logits, {})\n"
    )
    told = ppo(model, "actor.policy_loss.name=mistaken").splitlines()
    assert told[0].startswith("rlite grpo: OwnCodeError: policy loss 'mistaken': mistaken (")
    assert told[0].endswith("mine.py:4) raised AttributeError")
    assert told[2].endswith('mine.py", line 6, in mistaken')
    assert len(told) < 8


def test_a_mistake_in_an_own_estimator_is_told_before_anything_is_built(model: str) -> None:
    Path("mine.py").write_text(
        "from rlite.algorithms import register_advantage\n\n\n@register_advantage('short')\n"
        "def short(rewards, group_ids):\n    return rewards[1:]\n"
    )
    told = ppo(model, "adv.estimator=short")
    assert "ConfigError: advantage 'short': short (" in told
    assert "mine.py:4), called at the start with 40 example rewards, returned a tensor of shape [39]; expected" in told
    assert not Path("run").exists()
