"""Build the modules to train: any Hugging Face causal model, or a score model, with an optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from tensordict import TensorDict
from torch import Tensor

import rlite
from rlite import config
from rlite.algorithms import lr_factor
from rlite.engine.train import RliteTrainEngine
from rlite.nn import HuggingFaceFsdp2ScoreModule, HuggingFaceFsdp2TrainModule, LoraOptions, LoraTrainModule
from rlite.nn.pretrained import causal_lm_class, opening, score_class
from rlite.trainer.model.optimizers import ParameterGroup, make_optimizer, parameter_groups
from rlite.trainer.model.options import FrozenModelOptions, ModelOptions, OptimizerOptions, frozen_build_options
from rlite.trainer.rl.objective import OwnLogprobs


class _Optimized(LoraTrainModule):
    """A module with the optimizer described by `optimizer_options`. Without options it is a reference model."""

    _keeps_dropout = False
    optimizer_options: OptimizerOptions | None = None
    parameter_groups: Sequence[ParameterGroup] = ()

    def on_weights_materialized(self) -> None:
        """Create the optimizer and the learning-rate scheduler."""
        options = self.optimizer_options
        if options is None:
            return
        self.optimizer = make_optimizer(self, self.parameter_groups)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule(options))

    def on_state_loaded(self) -> None:
        """Set the peak learning rates and the weight decay of this run's options.

        The saved state may have other values.
        """
        options, scheduler = self.optimizer_options, self.lr_scheduler
        if options is None or self.optimizer is None or scheduler is None:
            return
        factor = schedule(options)(scheduler.last_epoch)
        scheduler.base_lrs = [group.lr for group in self.parameter_groups]
        for held, group in zip(self.optimizer.param_groups, self.parameter_groups, strict=True):
            held.update(initial_lr=group.lr, lr=group.lr * factor, weight_decay=group.weight_decay)


class PolicyModule(_Optimized, HuggingFaceFsdp2TrainModule):
    """A causal language model."""


class CriticModule(_Optimized, HuggingFaceFsdp2ScoreModule):
    """A model with one number per token: a critic's values, or a reward model's scores."""


def schedule(options: OptimizerOptions) -> Callable[[int], float]:
    """Return step -> factor of the peak rate: linear warm-up to 1, then the schedule down to `lr_end`."""
    return partial(
        lr_factor,
        schedule=options.scheduler,
        total_steps=options.total_steps,
        warmup_steps=options.warmup_steps,
        min_factor=options.lr_end / options.lr if options.lr else 0.0,
        power=options.power,
    )


def policy_module(
    path: str | Path,
    optimizer_options: OptimizerOptions | None = None,
    lora: LoraOptions | None = None,
    disable_dropout: bool = True,
) -> PolicyModule:
    """Return a train module on the meta device, built from a causal model's checkpoint.

    Args:
        path: folder or hub name of the checkpoint.
        optimizer_options: options of the optimizer; None makes a model that is not trained.
        lora: train adapters beside the weights, and only the adapters.
        disable_dropout: train without the dropout of the checkpoint's config.
    """
    return made(causal_lm_class, PolicyModule, path, optimizer_options, lora, disable_dropout)


def critic_module(
    path: str | Path,
    optimizer_options: OptimizerOptions | None = None,
    lora: LoraOptions | None = None,
    disable_dropout: bool = True,
) -> CriticModule:
    """Return a train module on the meta device, built from the checkpoint of a causal model or of an earlier critic.

    Args:
        path: folder or hub name of the checkpoint.
        optimizer_options: options of the optimizer; None makes a model that is not trained.
        lora: train the head, and adapters beside the other weights.
        disable_dropout: train without the dropout of the checkpoint's config.
    """
    return made(score_class, CriticModule, path, optimizer_options, lora, disable_dropout)


def trained_engine(make_module: Callable[..., Any], model: ModelOptions, total_steps: int) -> RliteTrainEngine:
    """Return the engine of a model that is trained; it is not built yet."""
    optimizer = model.optimizer_options(total_steps)
    return RliteTrainEngine(make_module(model.model_name, optimizer, model.lora, model.disable_dropout))


def made(
    class_of: Callable[..., Any], carrier: Any, path: str | Path, optimizer_options: Any, lora: Any, no_dropout: bool
) -> Any:
    """Return a module on meta of a class with the carrier's methods.

    Checkpoints identify a module by the carrier's name.
    """
    if not no_dropout:
        carrier = type(carrier.__name__, (carrier,), {"_keeps_dropout": True})
    cls = class_of(path, carrier)
    with init_empty_weights(), opening(path, "config of a model"):
        module = cls.from_pretrained(path)
    if lora is not None:
        module.add_lora(lora)
    module.optimizer_options = optimizer_options
    if optimizer_options is not None:
        module.parameter_groups = parameter_groups(module, optimizer_options)
    return module


class Reference:
    """A frozen model beside the actor, or the actor without its adapters."""

    def __init__(self, options: FrozenModelOptions, actor: ModelOptions, engine: RliteTrainEngine) -> None:
        self._options, self._actor, self._actor_engine = options, actor, engine
        self._name = options.model_name or actor.model_name
        is_plain = self._name == actor.model_name and options.use_liger_kernel is None and not options.offload_model
        self.is_actor = actor.lora is not None and is_plain
        """the reference is the actor without its adapters"""
        self.engine = engine if self.is_actor else RliteTrainEngine(policy_module(self._name))

    def describe(self) -> str:
        """Return the reference in words."""
        return "reference: the model without its adapters" if self.is_actor else f"reference {self._name}"

    def build(self, build_options: Mapping[str, Any]) -> None:
        """Place the reference beside the actor, if it is a model of its own."""
        if self.is_actor:
            return
        own = config.inherit(self._options, self._actor)
        options = frozen_build_options(build_options, rlite.current_session().device)
        options["use_liger_kernel"] = own.use_liger_kernel
        self.engine.build(**options, colocate_with=self._actor_engine)
        if self._options.offload_model:
            self.engine.cpu()

    def logprobs(self, *batches: TensorDict) -> list[Tensor]:
        """Return the reference's log-probability of each token, [N, L] for each batch."""
        if self._options.offload_model:
            self.engine.cuda()
        found = [self.engine.forward(batch, OwnLogprobs(), without_adapters=self.is_actor) for batch in batches]
        if self._options.offload_model:
            self.engine.cpu()
        return found
