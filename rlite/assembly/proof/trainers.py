"""Trainers of recorded steps: a run's own trainer, whose batches come from the record and whose weights go nowhere.

No inference engine is built, no reward, environment or callback of the user runs, and nothing is written into the run's
folder. The options of the run decide the rest, so that a step computes what it has computed before.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

import rlite
from rlite import config, files
from rlite.assembly.trainers import TRAINERS, TrainerEntry
from rlite.data.tokens import Tally, TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, RliteError
from rlite.rollout import RolloutWorkflow
from rlite.runtime.storage.atomic import FACTS
from rlite.runtime.storage.sharded import naming
from rlite.trainer.model.options import frozen_build_options
from rlite.trainer.options import LaunchOptions, TableOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rl.rollouts import Generated
from rlite.trainer.run.training_run import step_metrics
from rlite.types import AsyncInference, GenerationHyperparameters
from rlite.yaml_texts import read_saved

ONE_DEVICE = {"launcher": "inprocess", "num_devices": 1}
ALONE = ("ddp_size", "tp_size", "sp_size", "ep_size")
"""sizes of a layout, which are 1 on one device"""
NO_OBSERVERS: Mapping[str, Any] = {
    "sinks": [],
    "use_wandb": False,
    "callbacks": [],
    "best_metric": None,
    "best_is_highest": None,
    "stop_at": {},
    "trace": False,
    "trace_steps": [],
    "overwrite": False,
}
"""options of a run that have no part in its steps"""
IN_TURNS = {"evaluate": "in_turns", "evaluation_devices": None, "max_recoveries": 0}
ROLLOUTS: Mapping[str, Any] = {
    "executor": "torch",
    "executor_options": {},
    "tp_size": 1,
    "num_devices": None,
    "max_head_offpolicyness": 0,
    "env_path": None,
    "env_config": {},
    "workflow": None,
    "max_turns": 1,
    "speculation": False,
}
"""options of rollouts, which are not generated again"""


class RunOfTrainer(NamedTuple):
    """The options of a run, and its trainer."""

    name: str
    entry: TrainerEntry
    saved: Mapping[str, Any]
    """the tree of config.yaml"""

    @property
    def is_rl(self) -> bool:
        """True if the run learns from rollouts."""
        return "rollout" in self.saved

    @classmethod
    def read(cls, folder: Path) -> RunOfTrainer:
        """Return the trainer of the run in a folder, and the options that it has saved.

        Raises:
            ConfigError: the folder holds no run of a trainer.
        """
        try:
            saved = read_saved(folder / "config.yaml")
        except FileNotFoundError:
            raise ConfigError(f"{folder}: there is no config.yaml: expected the folder of a run") from None
        groups = ("trainer", *(["rollout", "train_data", "actor"] if "rollout" in saved else []))
        if not all(isinstance(saved.get(name), dict) for name in groups) or isinstance(saved.get("reward"), list):
            raise ConfigError(f"{folder}: its config.yaml is no config of a run: it needs {', '.join(groups)}")
        fitting = [name for name, entry in TRAINERS.items() if _fits(entry, saved)]
        if not fitting:
            raise ConfigError(f"{folder}: its config.yaml is of none of the trainers {', '.join(TRAINERS)}")
        kinds = {kind_of(path) for path in sorted((folder / "state").glob("step-*/" + FACTS))}
        named = [name for name in fitting if TRAINERS[name].options.rpartition(":")[2] in kinds]
        name = (named or fitting)[0]  # presets differ in defaults alone, and a saved config has no defaults left
        return cls(name, TRAINERS[name], saved)

    def options(self, folder: Path, code: str | None, is_own_layout: bool) -> Any:
        """Return the options of a run that makes steps again in a folder of its own.

        Args:
            folder: the folder that takes the place of the run's.
            code: a file of the user that registers losses, advantages or optimizers; None runs no code of the user.
            is_own_layout: keep the devices of the run; else one device.

        Raises:
            ConfigError: the options need code of the user, or are not those of this version of rlite.
        """
        kind = _options_class(self.entry)
        tree = {key: value for key, value in self.saved.items() if key not in ("imports", "reward", "test_data")}
        rewards = {name: {"weight": own.get("weight", 1.0)} for name, own in self._rewards() if isinstance(own, dict)}
        trainer = {**tree["trainer"], **NO_OBSERVERS, "save_dir": str(folder), "load_ckpt_from": None}
        tree |= {"trainer": trainer, "imports": [] if code is None else [code]}
        if self.is_rl:
            trainer |= {name: value for name, value in IN_TURNS.items() if name in trainer}
            tree["rollout"] = {**tree["rollout"], **ROLLOUTS}
            sizes = {name: tree["train_data"].get(name) for name in ("prompts_per_rollout", "responses_per_prompt")}
            tree["train_data"] = {"path": RECORDED, **sizes}
            tree["reward"] = {name: {"path": RECORDED, **own} for name, own in rewards.items()}
        if not is_own_layout:
            tree |= ONE_DEVICE
            for group in ("actor", "critic", "ref_actor"):
                if isinstance(tree.get(group), dict):
                    tree[group] = {**tree[group], **{name: 1 for name in ALONE if tree[group].get(name)}}
        try:
            return config.load(kind, [], given=_literal(tree))
        except RliteError as error:
            hint = "" if code else "; if code of the run registers it, name the file: --code FILE.py"
            raise ConfigError(f"the saved options cannot be used: {error}{hint}") from error

    def original_options(self, code: str) -> Any:
        """Return the options of the run as they were, with rewards whose functions are all in the user's file.

        Raises:
            ConfigError: a reward, or the function that maps rows, is elsewhere, or the options cannot be used.
        """
        tree = {key: value for key, value in self.saved.items() if key != "test_data"}
        trainer, rollout = {**tree["trainer"], **NO_OBSERVERS}, {**tree["rollout"], **ROLLOUTS}
        tree |= {"imports": [code], "trainer": trainer, "rollout": rollout}
        options = config.load(_options_class(self.entry), [], given=_literal(tree))
        for name, own in options.reward.items():
            if own.path is None:
                raise ConfigError(f"reward {name}: a model or a judge gives it, which an audit does not ask")
            if ":" in own.path or own.path.endswith(".py"):  # else the user's file registers it under this name
                check_named(f"reward.path={own.path}", own.path, code)
        check_rows(options.train_data, "train_data", code)
        return options

    def _rewards(self) -> list[tuple[str, Any]]:
        reward = self.saved.get("reward") or {}
        return [("", reward)] if "path" in reward else list(reward.items())


def check_named(option: str, function: str, code: str | None) -> None:
    """Check that a function which a run names is in the file that the user names: no other code runs.

    Args:
        option: the option that names it, with its value.
        function: the function, `FILE.py:NAME`.
        code: the user's file.

    Raises:
        ConfigError: it is elsewhere.
    """
    file, _, _ = function.rpartition(":")
    if code is None or Path(file).expanduser().resolve() != Path(code).expanduser().resolve():
        named = "" if code is None else f", and --code names {code}"
        raise ConfigError(f"{option}: this function of the run is needed{named}; name its file: --code FILE.py")


def check_rows(data: TableOptions, key: str, code: str | None) -> None:
    """Check that reading rows runs no function but those in the user's file, and reads no endless template.

    Args:
        data: options of the tables.
        key: name of this group of options.
        code: the user's file.

    Raises:
        ConfigError: a function is elsewhere, or the template is no file.
    """
    for source in data.sources(key).values():
        if source.map is not None:
            check_named(f"{source.key}.map={source.map}", source.map, code)
    if (template := data.chat_template_path) is not None and not os.path.isfile(Path(template).expanduser()):
        raise ConfigError(f"{key}.chat_template_path={template}: no such file")


RECORDED = "recorded"
"""path of rewards that are never called: rewards are those of the record"""
MAX_FACTS = 1 << 24
"""bytes of a checkpoint's facts that are read"""


def kind_of(facts: Path) -> str:
    """Return the name of the class of options that a checkpoint's facts name; "" if they name none."""
    with suppress(OSError, ValueError, AttributeError, RecursionError), files.reading(facts) as file:
        return str(json.loads(file.read(MAX_FACTS)).get("config", ""))
    return ""


def _options_class(entry: TrainerEntry) -> Any:
    module, name = entry.options.split(":")
    return getattr(importlib.import_module(module), name)


def _fits(entry: TrainerEntry, saved: Mapping[str, Any]) -> bool:
    return set(saved) <= set(_options_class(entry).model_fields)


def _literal(tree: Any) -> Any:
    """Return a tree whose texts read nothing from the environment; references to other options stay.

    An interpolation after an even number of backslashes would be resolved.
    """
    if isinstance(tree, Mapping):
        return {key: _literal(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_literal(value) for value in tree]
    if not isinstance(tree, str) or re.fullmatch(r"\$\{[\w.]+\}", tree):
        return tree
    return re.sub(r"(?<!\\)(\\*)\$\{", lambda found: found[0] if len(found[1]) % 2 else f"\\{found[0]}", tree)


class RecordedWorkflow(RolloutWorkflow):
    """Workflow of a run whose rollouts are recorded: it is never run.

    Args:
        gconfig: the sampling of the run.
        num_seats: seats that were trained.
    """

    needs_prompt = False

    def __init__(self, gconfig: GenerationHyperparameters, num_seats: int) -> None:
        self.gconfig, self.num_seats = gconfig, num_seats

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict | None:
        """Return None: no item is asked."""
        return None


class RecordedSteps:
    """A trainer that makes recorded steps again. Needs a session.

    Args:
        run: the run's trainer.
        options: its options, from `RunOfTrainer.options`.
        total_steps: steps of the whole run, over which the learning rate moves.
        example: a batch of the run.
    """

    def __init__(self, run: RunOfTrainer, options: LaunchOptions, total_steps: int, example: TensorDict) -> None:
        self.options, self._is_rl = options, isinstance(options, PpoConfig)
        kind = _without_sync(run.entry.find_trainer()) if self._is_rl else run.entry.find_trainer()
        if isinstance(options, PpoConfig):
            seats = int(example["seat_ids"].max()) + 1 if "seat_ids" in example else 1
            workflow = RecordedWorkflow(options.rollout.train_sampling_params.gconfig(), seats)
            self.trainer = kind(options, workflow, [{"prompt": RECORDED}] * options.train_data.prompts_per_rollout)
        else:
            own: Any = options  # one epoch of as many steps as all epochs had
            own = own.replace(trainer=own.trainer.replace(n_epochs=1))
            self.trainer = kind(own, _rows_like(example, total_steps * own.data.batch_size))

    @property
    def engines(self) -> dict[str, RliteTrainEngine]:
        """The trained engines by name; the main one is called ""."""
        if not self._is_rl:
            return {"": self.trainer.engine}
        return {"": self.trainer.engines.actor, **self.trainer.engines.other_trained}

    def begin(self) -> None:
        """Build the engines that train."""
        if not self._is_rl:
            self.trainer.engine.build(**self.trainer.build_options)
            self.trainer.engine.train()
            if self.trainer.reference is not None:
                self.trainer.reference.build(self.trainer.build_options)
            return
        options, engines, session = self.trainer.options, self.trainer.engines, rlite.current_session()
        world, seed = len(session.devices), options.trainer.seed
        engines.actor.build(**options.actor.build_options(world, seed))
        for engine, others in ((engines.critic, options.critic), (engines.reference, options.ref_actor)):
            if engine is not None:
                own = others.as_model(options.actor).build_options(world, seed)
                own = frozen_build_options(own, session.device) if engine is engines.reference else own
                engine.build(**own, colocate_with=engines.actor)
        engines.takes_turns = dict.fromkeys([engines.rollout, *engines.workers], False)

    def load(self, checkpoint: Path) -> int:
        """Load a checkpoint of the run.

        Returns:
            The step after which it was written.
        """
        for name, engine in self.engines.items():
            if name:
                engine.load_state(checkpoint.with_name(f"{checkpoint.name}-{name}"))
        facts = self.engines[""].load_state(checkpoint)
        with naming(checkpoint / FACTS):
            if self._is_rl:
                self.trainer.kl.load_state_dict(facts.get("kl", {}))
            self.trainer.run.step = int(facts["step"])
        return self.trainer.run.step

    def step(self, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """Make one step.

        Args:
            batch: what the step has received.

        Returns:
            The batch as it was trained on, and the metrics of the step.
        """
        if self._is_rl:
            generated = Generated()
            generated.add(batch)
            learnt = self.trainer.learn(batch)
            self.trainer.run.step += 1
            return learnt, generated.metrics() | self.trainer.metrics_of_step(learnt)
        learnt, stats = self.trainer.learn(batch)
        self.trainer.run.step += 1
        return learnt, {**stats, **step_metrics(learnt)}

    def before_update(self, batch: TensorDict) -> TensorDict:
        """Return a batch with everything that its loss reads, without an update."""
        if not self._is_rl:
            return self.trainer.prepare(batch)
        passes, critic = self.trainer.logprobs, self.trainer.critic
        batch = passes.with_reference(batch)
        batch = batch if critic is None else critic.with_values(batch)
        return self.trainer.with_advantages(passes.with_old(batch))


def _without_sync(kind: Any) -> Any:
    """Return a class of trainers whose new weights go to no inference engine."""

    def sync(self: Any) -> None:
        """Do nothing: nobody generates."""

    def metrics_of_step(self: Any, batch: TensorDict) -> dict[str, float]:
        """Return the metrics of a step after its end."""
        return self._metrics_of(batch)

    return type(f"Recorded{kind.__name__}", (kind,), {"sync": sync, "metrics_of_step": metrics_of_step})


def _rows_like(batch: TensorDict, num_items: int) -> TokenRows:
    """Return as many items as a run had, each the beginning of the first item of a batch: nobody reads them."""
    per_item = 2 if "pair_ids" in batch else 1
    lengths = batch["attention_mask"][:per_item].sum(-1).clamp(max=2)
    ids = torch.cat([row[:length] for row, length in zip(batch["input_ids"], lengths[:per_item], strict=False)])
    starts = np.concatenate([[0], lengths.numpy().cumsum()])
    known = ("input_ids", "attention_mask", "loss_mask")
    return TokenRows(
        input_ids=np.resize(ids.numpy().astype(np.int32), len(ids) * num_items),
        loss_mask=np.ones(len(ids) * num_items, dtype=bool),
        starts=np.concatenate([*(starts[:-1] + len(ids) * item for item in range(num_items)), [len(ids) * num_items]]),
        source=np.arange(num_items),
        rows_per_item=per_item,
        per_row={
            str(key): np.resize(torch.as_tensor(value[:per_item]).numpy(), (num_items * per_item, *value.shape[1:]))
            for key, value in batch.items()
            if key not in known
        },
        tally=Tally(num_read=num_items, max_length=batch["input_ids"].shape[1], num_kept=num_items),
    )
