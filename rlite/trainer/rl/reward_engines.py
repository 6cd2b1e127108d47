"""Reward models on devices: an engine for each checkpoint, beside the rollout engine or on devices of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import rlite
from rlite.data.rows import stream_of
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.rollout.rewards.models import RewardModel, reward_models
from rlite.rollout.workflow import RolloutWorkflow
from rlite.runtime.replicas.engine import Engine
from rlite.trainer.model.modules import critic_module
from rlite.trainer.model.options import ModelOptions, frozen_build_options
from rlite.wording import counted

MICROBATCH = 4096
"""tokens of a microbatch, unless a sequence is longer"""
Asked = tuple[RolloutWorkflow, Sequence[Mapping[str, Any]], str]
"""a workflow, its prompts, and their option for messages"""


def own_scores(scores: Tensor, data: Mapping[str, Any]) -> Tensor:
    """Return the scores [T] of a pack: a post_hook for `forward`.

    Args:
        scores: the model's output `[T]`.
        data: the pack's keys.
    """
    return scores.float()


def score_rows(engine: RliteTrainEngine, is_alone: bool, rows: Sequence[Sequence[int]]) -> list[float]:
    """Return the score at the last token of each row.

    Args:
        engine: holds the reward model.
        is_alone: compute each row alone, so that its score does not depend on the others, bit by bit.
        rows: tokens of prompt and answer.
    """
    if is_alone and len(rows) > 1:
        return [score for row in rows for score in score_rows(engine, True, [row])]
    lengths = torch.tensor([len(row) for row in rows])
    input_ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    batch = TensorDict({"input_ids": input_ids, "attention_mask": mask}, batch_size=[len(rows)])
    scores = engine.forward(batch, own_scores)
    return scores.gather(1, lengths[:, None] - 1)[:, 0].tolist()


@dataclass(frozen=True)
class RewardEngines:
    """The engines of all reward models of a run. A checkpoint that several rewards name has one engine."""

    models: Mapping[tuple[str, int | None], Sequence[RewardModel]]
    """reward models by checkpoint and number of own devices"""
    engines: Mapping[tuple[str, int | None], RliteTrainEngine]
    """their engines"""
    length: int
    """tokens of the longest sequence"""
    is_deterministic: bool
    """a score has the same bits with any other answers"""

    @classmethod
    def of(cls, asked: Sequence[Asked], length: int, is_deterministic: bool) -> RewardEngines:
        """Return the engines of the models in the rewards of workflows, which are not built yet.

        Args:
            asked: the workflows.
            length: tokens of the longest sequence.
            is_deterministic: a score has the same bits with any other answers.

        Raises:
            ConfigError: a model has no score head, no chat template for messages, or a shorter context than the run.
            DataError: a model's chat template refuses a prompt.
        """
        models: dict[tuple[str, int | None], list[RewardModel]] = {}
        for workflow, rows, where in asked:
            for model in reward_models(getattr(workflow, "reward_fn", None)):
                model.check(getattr(workflow, "tokenizer", None), () if stream_of(rows) else rows, length, where)
                models.setdefault((model.path, model.num_devices), []).append(model)
        return cls(models, {key: _engine(*own) for key, own in models.items()}, length, is_deterministic)

    def build_apart(self, world: int, seed: int) -> int:
        """Place the models that have devices of their own, before other engines.

        Args:
            world: number of devices.
            seed: seed of the run.

        Returns:
            The number of devices that are left.

        Raises:
            ConfigError: none is left.
        """
        num_own = sum(own or 0 for _, own in self.engines)
        if num_own >= world:
            raise ConfigError(
                f"reward.NAME.num_devices: reward models take {num_own} devices of their own, and there are {world} in "
                "all. Give more (num_devices=2 launcher=ray), or leave it out: they share those of the rollouts"
            )
        for path, own in self.engines:
            if own is not None:
                self._build((path, own), None, own, seed)
        return world - num_own

    def build_beside(self, rollout: Engine, num_devices: int, seed: int) -> None:
        """Place the models that are not placed yet on the devices of the rollout engine.

        Args:
            rollout: the engine.
            num_devices: number of its devices.
            seed: seed of the run.
        """
        for key, engine in self.engines.items():
            if not engine.is_built:
                self._build(key, rollout, num_devices, seed)

    def _build(self, key: tuple[str, int | None], beside: Engine | None, num_devices: int, seed: int) -> None:
        model = ModelOptions(model_name=key[0], max_length_per_device=max(self.length, MICROBATCH))
        options = frozen_build_options(model.build_options(num_devices, seed), rlite.current_session().device)
        self.engines[key].build(**options, colocate_with=beside)
        for each in self.models[key]:
            each.scores = partial(score_rows, self.engines[key], self.is_deterministic)

    def release(self) -> None:
        """Free the devices."""
        for engine in self.engines.values():
            engine.release()

    def topic(self) -> dict[str, str]:
        """Return where each model scores and what it reads, for the plan; {} without a model."""
        told = []
        for (path, own), engine in self.engines.items():
            where = f"on {counted(own, 'device')} of its own" if own else "on the devices of the rollouts"
            reads = (
                "the policy's tokens" if self.models[path, own][0].reads_tokens else "texts in its own chat template"
            )
            told.append(f"{path}, {engine.num_parameters / 1e6:.2f} M parameters, {where}, reads {reads}")
        return {"reward models": "; ".join(told)} if told else {}


def _engine(model: RewardModel, *others: RewardModel) -> RliteTrainEngine:
    module = critic_module(model.path)
    if not hasattr(module, "score"):
        raise ConfigError(f"{model.what}: its class has no head `score`; expected a decoder, such as `rlite rm` trains")
    return RliteTrainEngine(module)
