"""Episodes of several turns with a real model: what is trained on is what was generated, to the token."""

import json

import pytest

import rlite
from rlite.assembly.quickstart.run import CHATML, byte_tokenizer
from rlite.rollout import GenerationHyperparameters, MultiTurnWorkflow, RewardFunction, ToolUseWorkflow
from rlite.rollout.tools.formats import ToolCall, ToolCallFormat
from rlite.trainer import ppo
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.recorded import recorded, said
from tests.tiny import build_model_dir

GUESSING = """
class Guessing:
    def __init__(self, longest):
        self.longest = longest

    def reset(self, seed):
        self.wanted = chr(97 + seed % 26)
        return f"A letter, at most {self.longest} times.", {}

    def step(self, action):
        return f"No, {self.wanted}.", action.count(self.wanted) / 8, len(action) > self.longest, False, {}

def make(longest=99):
    return Guessing(longest)
"""


@pytest.fixture
def model(tmp_path):
    return str(build_model_dir(tmp_path / "model", "qwen3", hidden=64))


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_gym_file_is_trained_on_from_the_command_line(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "game.py").write_text(GUESSING)
    rows = [{"seed": seed, "env_options": {"longest": 50 + seed}} for seed in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["train_data.path=rows.jsonl", "train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=4"]
    arguments += [f"actor.model_name={model}", "rollout.env_path=game.py", "rollout.max_turns=3", "num_devices=1"]
    arguments += ["rollout.train_sampling_params.max_new_tokens=6", "rollout.dynamic_filtering=false"]
    arguments += ["test_data.path=rows.jsonl", "trainer.total_steps=2", "trainer.save_dir=run"]
    ppo.main(arguments)
    first, *steps = logged(tmp_path / "run")
    assert first["accuracy"] >= 0
    assert [row["turns"] for row in steps] == [3.0, 3.0]
    assert all(6 < row["response_length"] <= 18 for row in steps), "only what the model has written"
    assert all(row["logprob_drift"] < 1e-4 for row in steps), "the trainer finds the probabilities of each turn"
    sample = recorded(tmp_path / "run")[0]
    assert "No, " in said(sample)
    assert [segment["role"] for segment in sample["segments"]] == ["prompt", *["model", "environment"] * 2, "model"]
    assert sample["seconds_environment"] > 0


def guess(completions, **row):
    return 0.5 * (len(completions) % 2)


def flip(times: int) -> int:
    """Flips a coin.

    Args:
        times: how often
    """
    return times


# a random model writes no calls: every text of even length is one
EVEN = ToolCallFormat("even", lambda text: (text, [ToolCall("flip", {"times": 3})] * (1 - len(text) % 2)), len)


@pytest.mark.parametrize("kind", ["retries", "retries rendered anew", "tools"])
def test_probabilities_of_every_turn_are_those_of_the_trainer(kind, model, tmp_path):
    tokenizer = byte_tokenizer()
    if kind == "retries rendered anew":  # leaves out how earlier answers began
        said = "message.content[3:] if message.role == 'assistant' else message.content"
        tokenizer.chat_template = CHATML.replace("message['content']", said)
    if kind == "tools":
        tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHATML
    gconfig = GenerationHyperparameters(max_new_tokens=8)
    reward = RewardFunction(guess, in_process=True)
    if kind == "tools":
        workflow = ToolUseWorkflow([flip], reward, gconfig, tokenizer, tool_format=EVEN, max_turns=3)
    else:
        history = "template" if kind == "retries rendered anew" else "tokens"
        workflow = MultiTurnWorkflow(reward, gconfig, tokenizer, turn_discount=0.5, feedback="No.", history=history)
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}]} for number in range(8)]
    options = PpoConfig(
        actor=ActorOptions(model_name=model, lr=1e-3),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(train_sampling_params=SamplingOptions(max_new_tokens=8), max_num_seqs=32),
        trainer=TrainerOptions(save_dir=str(tmp_path / "run"), total_steps=2),
    )
    rlite.init(num_devices=1)
    PpoTrainer(options, workflow, rows).fit()
    rlite.shutdown()
    rows = logged(tmp_path / "run")
    assert ("tool_calls" in rows[0]) == (kind == "tools")
    for row in rows:
        assert row["logprob_drift"] < 1e-4
        assert 1 < row["turns"] <= 3
