"""The trainer replays the experts that the engine chose: the same log-probabilities, with gradients of the routers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import rlite
from rlite import RliteTrainEngine, gathered
from rlite.algorithms import on_logprobs
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.embedded.worker import BACKEND
from rlite.data.packs import TokenHistory
from rlite.data.routing import ROUTED, RoutingShape, check_routing
from rlite.engine import registry
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError
from rlite.nn.pretrained import causal_lm_class
from rlite.rollout import SingleTurnWorkflow
from rlite.rollout.joined import pad_trajectories
from rlite.rollout.workflow import trajectory
from rlite.runtime.parallel.fsdp import full_tensor
from rlite.runtime.replicas.replica import Capabilities
from rlite.trainer.options import SamplingOptions, TrainerOptions
from rlite.trainer.ppo import PpoTrainer
from rlite.trainer.rl.objective import OwnLogprobs
from rlite.trainer.rl.options import ActorOptions, PpoConfig, PromptOptions, RolloutOptions
from rlite.trainer.rl.routing import RecordedLogprobs
from rlite.types import GenerationHyperparameters, LLMRequest, LLMResponse
from tests.integration.modules import Policy, on_meta
from tests.integration.rewards import digits
from tests.mixtures import build_mixture_dir

FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "ernie4_5_moe", "minimax_m2"]
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [21]]


class RoutedPolicy(Policy):
    """A policy whose router gradients can be read, and whose weights can be moved a little."""

    @gathered("first")
    def router_gradients(self) -> dict[str, float]:
        return {
            name: float(full_tensor(p.grad).abs().max())
            for name, p in self.named_parameters()
            if p.grad is not None and ("gate.weight" in name or "router" in name)
        }

    def move(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                own = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                own += scale * torch.randn(own.shape, generator=generator).to(own)


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    rlite.init(num_devices=1, num_threads=1)
    yield
    rlite.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            made[kind] = build_mixture_dir(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return folder_of


@pytest.fixture
def engines(folders: Any) -> Iterator[Any]:
    """engines(kind): the embedded engine and a trainer of one model."""
    built: list[Any] = []

    def build(kind: str, **options: Any) -> tuple[RliteInferenceEngine, Any]:
        rollout = RliteInferenceEngine(str(folders(kind)), executor="torch")
        rollout.build(max_model_len=64, max_num_seqs=4, **options.pop("serving", {}))
        actor: Any = RliteTrainEngine(on_meta(causal_lm_class(folders(kind), RoutedPolicy), folders(kind)))
        actor.build(colocate_with=rollout, **options)
        built.extend([actor, rollout])
        return rollout, actor

    yield build
    for engine in built:
        engine.release()


def ask(engine: Any, ids: list[int], number: int = 8, seed: int = 0) -> LLMResponse:
    gconfig = GenerationHyperparameters(max_new_tokens=number, min_new_tokens=number, seed=seed)
    request = LLMRequest(input_ids=ids, gconfig=gconfig, extras=(ROUTED,))
    return asyncio.run(engine.agenerate(request))


def batch_of(responses: list[LLMResponse]) -> TensorDict:
    return pad_trajectories([trajectory(response) for response in responses])


@on_logprobs
def mean_logprob(tokens: Any, data: dict[str, Any]) -> Tensor:
    return -tokens.logprobs.mean()


def num_tokens(data: dict[str, Any]) -> Tensor:
    return torch.tensor(float(len(data["input_ids"])))


@pytest.mark.parametrize("kind", FAMILIES)
def test_replayed_logprobs_are_the_sampled_ones_without_a_differing_choice(engines: Any, kind: str) -> None:
    rollout, actor = engines(kind)
    batch = batch_of([ask(rollout, ids, seed=index) for index, ids in enumerate(PROMPTS)])
    shape = actor.module.routing_shape()
    assert batch[ROUTED].shape == (*batch["input_ids"].shape, shape.num_bytes)
    chosen = shape.decode(batch[ROUTED])
    last = batch["attention_mask"].sum(-1) - 1
    assert (chosen[torch.arange(len(batch)), last] == -1).all(), "nobody read the last token"
    assert check_routing(batch, shape) == 1.0
    found = actor.forward(batch, OwnLogprobs())
    mask = batch["loss_mask"]
    torch.testing.assert_close(found[mask], batch["logprobs"][mask], atol=1e-5, rtol=0)
    stats = actor.forward_backward(batch, mean_logprob, num_tokens)
    assert stats["moe/replay_differs"] == 0.0
    assert all(value > 0 for value in actor.router_gradients().values())
    assert actor.router_gradients()


def test_other_weights_choose_otherwise_and_replay_counts_it(engines: Any) -> None:
    rollout, actor = engines("qwen3_moe")
    batch = batch_of([ask(rollout, ids, seed=index) for index, ids in enumerate(PROMPTS)])
    actor.move(0.1)
    stats = actor.forward_backward(batch, mean_logprob, num_tokens)
    assert 0.05 < stats["moe/replay_differs"] <= 1.0
    assert all(value > 0 for value in actor.router_gradients().values())
    replayed, own = (actor.forward(each, OwnLogprobs()) for each in (batch, batch.exclude(ROUTED)))
    assert not torch.allclose(replayed, own)


def test_the_trainers_own_pass_records_what_it_then_replays(engines: Any) -> None:
    rollout, actor = engines("qwen3_moe")
    batch = batch_of([ask(rollout, ids, seed=index) for index, ids in enumerate(PROMPTS)])
    shape, mask = actor.module.routing_shape(), batch["attention_mask"]
    plain = batch.exclude(ROUTED)
    logprobs, column = RecordedLogprobs.parts(actor.forward(plain, RecordedLogprobs()))
    assert torch.equal(logprobs[..., 0], actor.forward(plain, OwnLogprobs()))
    chosen, served = (shape.decode(each)[mask].sort(-1).values for each in (column, batch[ROUTED]))
    is_served = (served >= 0).all(-1).all(-1)
    assert (chosen >= 0).all()
    assert torch.equal(chosen[is_served], served[is_served])


def test_gradients_with_recomputed_activations_are_those_without(engines: Any) -> None:
    found = []
    for checkpointing in (False, True):
        rollout, actor = engines("qwen3_moe", gradient_checkpointing=checkpointing)
        batch = batch_of([ask(rollout, ids, seed=index) for index, ids in enumerate(PROMPTS)])
        actor.move(0.1)
        actor.forward_backward(batch, mean_logprob, num_tokens)
        found.append(actor.router_gradients())
        actor.release()
        rollout.release()
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_siblings_and_kept_caches_have_the_routing_of_the_pass_that_computed_them(engines: Any) -> None:
    rollout, actor = engines("qwen3_moe")
    prompt = list(range(5, 45))

    async def both() -> list[LLMResponse]:
        gconfig = GenerationHyperparameters(max_new_tokens=6, min_new_tokens=6)
        requests = [
            LLMRequest(input_ids=prompt, gconfig=gconfig.new(seed=seed), extras=(ROUTED,), rid="group")
            for seed in (0, 1)
        ]
        return list(await asyncio.gather(*map(rollout.agenerate, requests)))

    first, sibling = asyncio.run(both())
    assert first.extras[ROUTED][0] == sibling.extras[ROUTED][0]
    assert len(first.extras[ROUTED][0]) == len(prompt)
    history = TokenHistory()
    history.read(prompt)
    history.add(first)
    history.read([7, 8])
    history.add(ask(rollout, [*prompt, *first.output_tokens, 7, 8], number=3))
    batch = pad_trajectories([history.row(), trajectory(sibling)])
    assert check_routing(batch, actor.module.routing_shape()) == 1.0
    mask = batch["loss_mask"]
    torch.testing.assert_close(actor.forward(batch, OwnLogprobs())[mask], batch["logprobs"][mask], atol=1e-5, rtol=0)


def test_a_sequence_that_new_weights_interrupt_keeps_its_routing_in_place(engines: Any) -> None:
    rollout, actor = engines("qwen3_moe")
    gconfig = GenerationHyperparameters(max_new_tokens=50, min_new_tokens=50, seed=3)
    request = LLMRequest(input_ids=[5, 6, 7], gconfig=gconfig, extras=(ROUTED,))

    async def interrupted() -> LLMResponse:
        begun = threading.Event()
        task = asyncio.ensure_future(rollout.agenerate(request, lambda chunk: begun.set()))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        rollout.pause()
        actor.move(0.02)
        rollout.resume()
        await asyncio.to_thread(actor.p2p_weight_sync, rollout, "continue")
        return await task

    response = asyncio.run(interrupted())
    column, versions = response.extras[ROUTED], response.output_versions
    assert len(set(versions)) == 2
    assert [len(rows) for rows in column] == [3, *[1] * 49]
    batch = batch_of([response])
    mask = torch.zeros_like(batch["loss_mask"])
    mask[0, 3:] = torch.tensor(versions) == versions[-1]
    newest = actor.forward(batch, OwnLogprobs())
    chosen = actor.module.routing_shape().decode(batch[ROUTED])
    own = RecordedLogprobs.parts(actor.forward(batch.exclude(ROUTED), RecordedLogprobs()))[1]
    own = actor.module.routing_shape().decode(own)
    is_new = mask.roll(-1, 1)  # positions that predict the tokens of the new weights
    assert newest.isfinite().all()
    assert torch.equal(chosen[is_new].sort(-1).values, own[is_new].sort(-1).values)


def test_a_dense_model_is_refused_what_it_has_not(models: dict[str, Path]) -> None:
    rollout = RliteInferenceEngine(str(models["llama"]), executor="torch")
    rollout.build(max_model_len=64, max_num_seqs=2)
    with pytest.raises(DataError, match=r"has no experts whose choice could be recorded"):
        ask(rollout, [5, 6])
    rollout.release()


def test_a_choice_that_fits_another_model_is_refused(engines: Any) -> None:
    rollout, actor = engines("qwen3_moe")
    batch = batch_of([ask(rollout, ids) for ids in PROMPTS])
    other = RoutingShape(3, 2, 8)
    batch[ROUTED] = torch.zeros(*batch["input_ids"].shape, other.num_bytes, dtype=torch.uint8)
    with pytest.raises(Exception, match=r"6 bytes.*expected 4 for 2 layers"):
        actor.forward(batch, OwnLogprobs())


ROWS = [{"messages": [{"role": "user", "content": f"{a}+{b}="}]} for a in range(3) for b in range(3)]
SAMPLING = SamplingOptions(max_new_tokens=8)


def trainer(model: Path, folder: Path, kind: Any = SingleTurnWorkflow, **options: Any) -> PpoTrainer:
    rollout = RolloutOptions(
        train_sampling_params=SAMPLING, max_model_len=64, dynamic_filtering=False, **options.pop("rollout", {})
    )
    config = PpoConfig(
        actor=ActorOptions(model_name=str(model), lr=1e-4, update_per_rollout=2, **options),
        train_data=PromptOptions(prompts_per_rollout=2, responses_per_prompt=4),
        rollout=rollout,
        trainer=TrainerOptions(save_dir=str(folder), total_steps=2),
    )
    return PpoTrainer(config, kind(digits, SAMPLING.gconfig(), byte_tokenizer()), ROWS)


@pytest.mark.parametrize("source", ["auto", "old_policy", pytest.param("off", marks=pytest.mark.nightly)])
def test_grpo_trains_a_mixture_with_replayed_experts(folders: Any, tmp_path: Path, source: Any) -> None:
    run = trainer(folders("qwen3_moe"), tmp_path / "run", routing_replay=source, off_policy_metrics=True)
    run.fit()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert len(rows) == 2
    for row in rows:
        assert ("moe/replay_differs" in row) == (source != "off")
        assert row.get("moe/replay_differs", 0.0) < 0.2
        assert ("routing_recorded" in row) == (source == "auto")
        assert row.get("routing_recorded", 1.0) == 1.0
        assert row["logprob_drift"] < 1e-3
        if source == "auto":
            assert abs(row["off_policy/kl"]) < 1e-5
    told = {"auto": "the engine's choice of experts (the engine returns them)"}
    told |= {"old_policy": "the choice before the update (actor.routing_replay=old_policy)"}
    told |= {"off": "off (actor.routing_replay=off)"}
    assert run.parts.device_plan.routing.topic() == {"routing replay": told[source]}


class Poisoned(SingleTurnWorkflow):
    """Returns the zeros of an engine whose kernels pass by the record."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        found = await super().arun_episode(engine, data)
        return found.update({ROUTED: torch.zeros_like(found[ROUTED])})


class Forgetful(SingleTurnWorkflow):
    """Forgets which experts were chosen."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> TensorDict:
        return (await super().arun_episode(engine, data)).exclude(ROUTED)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Poisoned, r"one expert twice in one layer \(zeros"),
        (Forgetful, r"trajectories of Forgetful have no routed_exp"),
    ],
)
def test_a_poisoned_or_forgotten_routing_stops_the_run(folders: Any, tmp_path: Path, kind: Any, message: str) -> None:
    run = trainer(folders("qwen3_moe"), tmp_path / "run", kind)
    run.start()
    with pytest.raises(DataError, match=message):
        run.rollouts.next_batch()
    run.run.close()


def test_only_an_explicit_rollout_is_refused_where_the_engine_cannot(
    folders: Any, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dataclasses.replace(BACKEND, capabilities=Capabilities(extras=frozenset({"kept_ids"})))
    monkeypatch.setitem(registry._backends, ("inference", "silent"), silent)
    mixture, other = folders("qwen3_moe"), {"rollout": {"executor": "silent"}}
    with pytest.raises(ConfigError, match=r"routing_replay=rollout: rollout.executor=silent does not return the exp"):
        trainer(mixture, tmp_path / "a", routing_replay="rollout", **other)
    found = trainer(mixture, tmp_path / "b", **other).parts.device_plan.routing
    assert (found.source, found.extras) == ("off", ())
    assert "executor=silent does not return" in found.reason
    with pytest.raises(ConfigError, match=r"routing_replay=old_policy: has no experts"):
        trainer(models["llama"], tmp_path / "c", routing_replay="old_policy")
    dense = trainer(models["llama"], tmp_path / "d").parts.device_plan.routing
    assert dense.source == "off"
    assert dense.topic() == {}
