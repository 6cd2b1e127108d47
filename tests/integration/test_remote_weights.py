"""`executor="remote"` with `weights_folder`: real `rlite serve` processes get the weights of each step."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

import rlite
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.remote.server import ADMIN_VARIABLE, KEY_VARIABLE
from rlite.engine.inference import RliteInferenceEngine
from rlite.engine.train import RliteTrainEngine
from rlite.rollout import SingleTurnWorkflow
from rlite.trainer import ppo
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from tests.integration.modules import Qwen3Policy, on_meta
from tests.integration.rewards import digits
from tests.integration.test_remote_servers import KEY, Server
from tests.tiny import build_model_dir

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
REWARD = """
def correct(prompt, completions, prompt_ids, completion_ids, **row):
    return float(len(completion_ids) % 2)
"""
ADMIN = "the-token-of-the-administrator"
ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(4) for b in range(4)]
PROMPTS = [[5, 6, 7], [8, 9, 10]]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_dir(tmp_path_factory.mktemp("models") / "tiny", "qwen3", hidden=64)


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[list[Server]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        patch.setenv(ADMIN_VARIABLE, ADMIN)
        servers = [Server(model) for _ in range(2)]
        yield servers
        for server in servers:
            server.kill()


@pytest.fixture
def session(servers: list[Server]) -> Iterator[None]:
    rlite.init(num_devices=1)
    yield
    rlite.shutdown()


class Keeping(PpoTrainer):
    """Keeps the batches that it learns from."""

    batches: list[TensorDict]

    def learn(self, batch: TensorDict) -> TensorDict:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().learn(batch)


def test_grpo_trains_on_a_server_that_serves_the_weights_of_each_step(
    model: Path, servers: list[Server], session: None, tmp_path: Path
) -> None:
    shared, sampling = tmp_path / "weights", SamplingOptions(max_new_tokens=8)
    executor = {"addresses": [servers[0].url], "weights_folder": str(shared)}
    options = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=3e-3),
        train_data=PromptOptions(prompts_per_rollout=4, responses_per_prompt=4),
        rollout=RolloutOptions(
            executor="remote", executor_options=executor, train_sampling_params=sampling, max_model_len=64
        ),
        trainer=TrainerOptions(save_dir=str(tmp_path / "run"), total_steps=3),
    )
    trainer = Keeping(options, SingleTurnWorkflow(digits, sampling.gconfig(), byte_tokenizer()), ROWS)
    trainer.fit()
    versions = [batch["versions"][batch["loss_mask"].bool()].unique().tolist() for batch in trainer.batches]
    assert versions == [[0], [1], [2]]
    assert sorted(folder.name for folder in shared.iterdir()) == ["version-2", "version-3"]
    own, theirs = (
        AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("run/latest", "weights/version-3")
    )
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    (answer, _) = trainer.engines.rollout.generate(PROMPTS, SAMPLING)
    made = answer.outputs[0]
    assert made.logprobs == pytest.approx(logprobs(own, PROMPTS[0], made.token_ids), abs=1e-4)
    before = AutoModelForCausalLM.from_pretrained(model)
    assert made.logprobs != pytest.approx(logprobs(before, PROMPTS[0], made.token_ids), abs=1e-2)


def test_the_command_of_the_page_trains_on_the_servers(
    model: Path, servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/remote.md: the command as printed, but for its model, addresses and size."""
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("## Training on servers of your own")[2].partition("```bash\n")[2]
    command = section.partition("```")[0].replace("\\\n", " ").partition("rlite ppo ")[2]
    assert command.count("Qwen/Qwen3-0.6B") == 1
    assert "[http://127.0.0.1:8000,http://127.0.0.1:8001]" in command
    command = command.replace("Qwen/Qwen3-0.6B", str(model)).replace("/shared/run-7", str(tmp_path / "weights"))
    for port, server in enumerate(servers, 8000):
        command = command.replace(f"http://127.0.0.1:{port}", server.url)
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("my.py").write_text(REWARD)
    few = ["train_data.prompts_per_rollout=4", "train_data.responses_per_prompt=2", "trainer.total_steps=2"]
    small = ["launcher=inprocess", "num_devices=1", "rollout.max_model_len=64", "trainer.save_dir=run"]
    ppo.main([*shlex.split(command), *few, *small, "rollout.train_sampling_params.max_new_tokens=6"])
    rlite.shutdown()
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 2
    own, theirs = (load_file(each) for each in ("run/latest/model.safetensors", "weights/version-2/model.safetensors"))
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def logprobs(model: Any, prompt: list[int], made: list[int]) -> list[float]:
    """Log-probabilities of the tokens after a prompt."""
    with torch.no_grad():
        rows = model.eval()(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(made)[:, None])[:, 0].tolist()


@pytest.mark.nightly
def test_a_server_that_is_killed_between_syncs_is_left_out_and_joins_at_a_sync(
    model: Path, servers: list[Server], session: None, tmp_path: Path
) -> None:
    engine = RliteInferenceEngine(model, executor="remote")
    engine.build(
        addresses=[server.url for server in servers], weights_folder=str(tmp_path / "weights"), start_timeout_s=120
    )
    train = RliteTrainEngine(on_meta(Qwen3Policy, model))
    train.build(colocate_with=engine)

    def check(version: int) -> None:
        """Compare what each server serves with the trainer."""
        own = AutoModelForCausalLM.from_pretrained(model)
        own.load_state_dict(train.state_dict(), strict=False)
        answers = engine.generate(PROMPTS * 2, SAMPLING)
        for prompt, answer in zip(PROMPTS * 2, answers, strict=True):
            made = answer.outputs[0]
            assert made.logprobs == pytest.approx(logprobs(own, prompt, made.token_ids), abs=1e-4)
            assert set(made.versions) == {version}

    def synced() -> None:
        train.train_step([[1, 2, 3, 4, 5, 6]])
        check(train.p2p_weight_sync(engine, verify_checksums=True).version)

    check(0)  # also where a server has had weights of an earlier run
    synced()
    assert engine.num_replicas == 2
    servers[1].kill()
    synced()
    assert engine.num_replicas == 1
    assert [lost.replica for lost in engine.lost_replicas] == [1]
    servers[1] = Server(model, servers[1].port)
    engine.wait_for_replacements()
    assert engine.num_replicas == 1
    synced()
    assert engine.num_replicas == 2
