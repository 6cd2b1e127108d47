"""The OpenRLHF example's order of calls and its data, through real role groups of this process.

OpenRLHF's worker classes need GPUs, DeepSpeed and vLLM, so stand-ins with the same methods take their places here. The
example, the role groups, and OpenRLHF's own experience maker and sample reader are real.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import ray
import torch

from rlite.control.role_group import RoleGroup, role_groups
from rlite.control.spec import RLRoleType
from rlite.control.workers import make_workload
from rlite.runtime.cluster.group import WorkerGroup
from rlite.runtime.cluster.host import WorkerContext
from rlite.runtime.cluster.placement import Device
from tests.peers import conftest
from tests.peers.conftest import ABSENT, stand_ins
from tests.unit.control.threads import ThreadHandle

EXAMPLE = Path(__file__).parents[2] / "examples" / "control" / "openrlhf_ppo.py"
PROMPTS = [f"p{index}" for index in range(8)]
calls: list[tuple[str, int, str, Any]] = []
"""class, rank, method and detail of every call of a stand-in"""


def arguments() -> SimpleNamespace:
    options = {
        "actor": {"model_name_or_path": "actor"},
        "critic": {"model_name_or_path": "critic"},
        "reward": {"model_name_or_path": "reward", "clip_range": None},
        "algo": {
            "kl": {"init_coef": 0.1, "estimator": "k1", "use_loss": False},
            "advantage": {"estimator": "gae", "gamma": 1.0, "lambd": 1.0, "no_std_norm": False},
        },
        "rollout": {
            "batch_size": 4,
            "micro_batch_size": 1,
            "n_samples_per_prompt": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": 4,
        },
        "train": {"dynamic_batch_enable": False, "seed": 0, "num_episodes": 1},
        "ckpt": {"save_steps": 2},
        "data": {"max_len": 16},
    }
    return namespace(options)


def namespace(value: Any) -> Any:
    return SimpleNamespace(**{k: namespace(v) for k, v in value.items()}) if isinstance(value, dict) else value


class Prompts(list):
    """A data loader with a state."""

    def state_dict(self) -> dict:
        return {"is": "state"}


class StandIn:
    """Notes the calls of an OpenRLHF worker."""

    def __init__(self, world_size: int, rank: int, address: str, port: int) -> None:
        self.rank, self.seen = rank, []

    def note(self, method: str, detail: Any = None) -> None:
        calls.append((type(self).__name__, self.rank, method, detail))

    def init_model_from_pretrained(self, strategy: Any, name: str, *args: Any, **kwargs: Any) -> None:
        self.note("init", (name, *args, *kwargs.values()))

    def append(self, sample: Any) -> None:
        self.seen.append(sample)

    def fit(self, **kwargs: Any) -> dict:
        self.note("fit", (self.seen, kwargs))
        self.seen = []
        return {type(self).__name__: 1.0}

    def save_checkpoint(self, tag: str, client_states: Any = None) -> None:
        self.note("save", (tag, client_states))


class Policy(StandIn):
    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.note("forward", sequences[0, 0].item())
        return -0.5 * action_mask.float()

    def broadcast_to_vllm(self) -> None:
        self.note("broadcast")

    def get_checkpoint_states(self) -> dict:
        return {}


class Reference(Policy):
    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(sequences, action_mask, attention_mask) * 3


class Critic(Policy):
    pass


class Reward(StandIn):
    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor, pad_sequence: bool) -> torch.Tensor:
        self.note("forward", sequences[0, 0].item())
        return sequences[:, 0].float()


class Engine:
    async def __init__(self, **kwargs: Any) -> None:
        self.rank = kwargs["seed"]

    async def generate_responses(
        self, prompt: str, label: str, sampling: Any, longest: int, tokenizer: Any, num_samples: int
    ) -> list:
        calls.append(("Engine", self.rank, "generate", prompt))
        tokens = [int(prompt[1:]), 11, 12, 13]  # the first says which prompt it was
        found = {"observation_tokens": tokens, "action_ranges": [(2, 4)], "rollout_log_probs": None}
        return [found | {"prompt": prompt, "label": label}] * num_samples


@pytest.fixture
def example(peer: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # not for all tests: TRL, for one, asks for the version of a vLLM that it finds
    monkeypatch.setattr(conftest, "ABSENT", ABSENT | {"flash_attn", "vllm"})
    peer("openrlhf.trainer.ppo_utils.experience_maker")  # skips without OpenRLHF
    spec = importlib.util.spec_from_file_location("openrlhf_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with stand_ins():
        spec.loader.exec_module(module)
    for workload, cls in (("Actor", Policy), ("Critic", Critic), ("Reference", Reference), ("Reward", Reward)):
        monkeypatch.setattr(getattr(module, workload), "worker_class", ray.remote(cls))
    monkeypatch.setattr(module.Rollout, "worker_class", ray.remote(Engine))
    monkeypatch.setattr(module, "strategy_of", lambda config: SimpleNamespace(args=arguments()))
    monkeypatch.setattr(module, "get_tokenizer", lambda *args: SimpleNamespace(pad_token_id=0))
    monkeypatch.setattr(module, "prepare_datasets", lambda *args: (prompts(), None, 2))
    calls.clear()
    return module


def prompts() -> Prompts:
    return Prompts([(["source"], [prompt], [f"label of {prompt}"], [None]) for prompt in PROMPTS])


@pytest.fixture
def trainer(example: ModuleType) -> Iterator[Any]:
    classes = {role: getattr(example, str(role).capitalize()) for role in RLRoleType}
    groups, handles = [], {}
    for role, cls in classes.items():
        devices, processes = [Device("local", rank) for rank in range(2)], [ThreadHandle(), ThreadHandle()]
        group = WorkerGroup(str(role), devices, processes, 10.0)
        group.replica_size = 1
        ranks = ((0, 2), (1, 2))
        factory = partial(make_workload, cloudpickle.dumps(cls), role, {}, "master", ranks, ("127.0.0.1", 1234), None)
        contexts = [WorkerContext(rank, 2, device, "cpu", 0, (0, 1)) for rank, device in enumerate(devices)]
        group.create(factory, contexts, 10.0)
        groups.append(RoleGroup(role, cls, group, lambda *late: None))
        handles[role] = [f"{role} 0", f"{role} 1"]
    trainer = example.Trainer(handles, classes, {})
    trainer._groups = role_groups(groups)
    yield trainer
    for group in groups:
        group._group.stop()


def of(name: str, method: str) -> list[tuple[int, Any]]:
    return [(rank, detail) for cls, rank, called, detail in calls if (cls, called) == (name, method)]


def test_the_example_calls_the_roles_in_openrlhfs_order_with_every_sample_once(trainer: Any) -> None:
    trainer.init()
    order = [cls for cls, _, method, _ in calls if method == "init"]
    assert order == ["Reference"] * 2 + ["Reward"] * 2 + ["Policy"] * 2 + ["Critic"] * 2
    assert {detail for _, detail in of("Critic", "init")} == {("critic", 2)}
    assert of("Policy", "init")[0][1] == ("actor", 2, ["ROLLOUT 0", "ROLLOUT 1"])
    calls.clear()
    trainer.fit()
    assert sorted(detail for _, detail in of("Engine", "generate")) == PROMPTS
    assert len({rank for rank, _ in of("Engine", "generate")}) == 2
    for name in ("Policy", "Reference", "Critic", "Reward"):
        assert sorted(detail for _, detail in of(name, "forward")) == list(range(8))
    phases = [method for cls, rank, method, _ in calls if cls == "Policy" and rank == 0 and method != "forward"]
    assert phases == ["fit", "broadcast", "fit", "broadcast", "save"]
    assert {detail[0] for _, detail in of("Critic", "save")} == {"global_step2"}
    assert of("Policy", "save")[0][1] == ("global_step2", {"step": 2, "prompts": {"is": "state"}})


def test_samples_reach_the_actor_with_rewards_less_the_kl_penalty_as_returns(trainer: Any) -> None:
    trainer.init()
    trainer.fit()
    trained = list(chain.from_iterable(samples for _, (samples, _) in of("Policy", "fit")))
    assert sorted(sample.prompts[0] for sample in trained) == PROMPTS
    for sample in trained:
        reward, penalty = int(sample.prompts[0][1:]), 0.1  # k1 = -0.5 + 1.5 at each of two tokens, times 0.1
        expected = torch.tensor([[reward - 2 * penalty, reward - penalty]])
        torch.testing.assert_close(sample.returns[sample.action_mask.bool()][None], expected)
        assert sample.info["kl"].item() == pytest.approx(1.0)
    assert {options["kl_ctl"] for _, (_, options) in of("Policy", "fit")} == {0.1}
