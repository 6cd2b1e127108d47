"""Trainers of recorded steps: a run's own trainer, whose batches come from the record and whose weights go nowhere.

No inference engine is built, no reward, environment or callback of the user runs, and nothing is written into the run's
folder. The options of the run decide the rest, so that a step computes what it has computed before.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict
from torch import Tensor

import rlite
from rlite import config, files
from rlite.assembly.trainers import TRAINERS
from rlite.data.tokens import Tally, TokenRows
from rlite.engine.train import RliteTrainEngine
from rlite.errors import ConfigError, RliteError
from rlite.observability import stats_tracker
from rlite.rollout import RolloutWorkflow
from rlite.runtime.storage.atomic import FACTS
from rlite.runtime.storage.sharded import naming
from rlite.trainer.options import LaunchOptions, TableOptions
from rlite.trainer.rl.options import PpoConfig
from rlite.trainer.rl.rollouts import Generated
from rlite.types import AsyncInference, GenerationHyperparameters
from rlite.yaml_texts import flat

ONE_DEVICE = {"launcher": "inprocess", "num_devices": 1}
LENGTHS = ("trainer.total_steps", "trainer.n_epochs")
NO_STEP = ("imports", "reward", "test_data", "trainer", "launcher", "num_devices")
"""groups of options that decide nothing about a step whose rollouts are given"""
OBSERVED = (
    *("sinks", "use_wandb", "callbacks", "best_metric", "best_is_highest", "stop_at", "load_ckpt_from"),
    *("evaluate", "evaluation_devices", "max_recoveries"),
)
GENERATED = (
    *("executor", "executor_options", "tp_size", "num_devices", "max_head_offpolicyness", "speculation"),
    *("env_path", "env_config", "workflow", "max_turns"),
)
REPLACED = {"trainer": OBSERVED, "rollout": GENERATED}
"""options by their groups that have no part in a step whose rollouts are given; defaults take their place"""
SIZES = dict.fromkeys(("actor", "critic", "ref_actor"), ("ddp_size", "tp_size", "sp_size", "ep_size"))
"""sizes of a layout by their groups, in whose place defaults mean one device"""
Logged = Mapping[int, Mapping[str, float]]
"""metrics of steps, by their numbers"""


@dataclass(frozen=True, eq=False)
class RunOfTrainer:
    """The options of a run, and its trainer."""

    trainer: Any
    """class of the trainer"""
    saved: dict[str, Any]
    """the tree of config.yaml"""
    folder: Path
    """the run's folder"""
    variables: Sequence[str] = ()
    """variables of the environment that the options may read"""

    @classmethod
    def of(cls, saved: Any, folder: Path, variables: Sequence[str] = ()) -> RunOfTrainer:
        """Return the trainer of a run."""
        saved = saved if isinstance(saved, dict) else {}
        groups = ("trainer", *(["rollout", "train_data", "actor"] if "rollout" in saved else []))
        found = [*map(saved.get, groups), saved.get("reward") or {}]
        if not all(isinstance(group, dict) for group in found):
            raise ConfigError(f"{folder}: its config.yaml is no config of a run: it needs {', '.join(groups)}")
        trainers = [entry.find_trainer() for entry in TRAINERS.values()]
        fitting = [trainer for trainer in trainers if saved.keys() <= trainer.config_class.model_fields.keys()]
        if not fitting:
            raise ConfigError(f"{folder}: its config.yaml is of none of the trainers {', '.join(TRAINERS)}")
        kinds = {kind_of(path) for path in sorted((folder / "state").glob("step-*/" + FACTS))}
        named = [trainer for trainer in fitting if trainer.config_class.__name__ in kinds]
        # presets differ in defaults alone, and a saved config has no defaults left
        return cls((named or fitting)[0], saved, folder, variables)

    @property
    def is_rl(self) -> bool:
        """True if the run learns from rollouts."""
        return "rollout" in self.saved

    @property
    def is_one_device(self) -> bool:
        """True if the run trained on one device, as a replay does."""
        return self.saved.get("num_devices") in (None, 1) and self.saved.get("launcher") in (None, "inprocess")

    @property
    def model(self) -> str:
        """Folder or hub name of the trained model."""
        return str(self.saved[self.trainer.key]["model_name"])

    @cached_property
    def deciding(self) -> dict[str, Any]:
        """Options that decide what a step computes: the trainer's only if learning rates follow them."""
        tree = dict(flat(self.saved))
        rates = [value for key, value in tree.items() if key.endswith((".scheduler", ".warmup_ratio"))]
        lasting = () if set(map(str, rates)) <= {"constant", "None", "0", "0.0"} else LENGTHS
        return {key: value for key, value in tree.items() if key.split(".")[0] not in NO_STEP or key in lasting}

    def options(self, folder: Path, code: str | None, is_own_layout: bool = False, asks_rewards: bool = False) -> Any:
        """Return the options of a run that makes steps again in a folder of its own.

        `folder`: the folder that takes the place of the run's. `code`: a file of the user that registers losses,
        advantages or optimizers; None runs no code of the user. `is_own_layout`: keep the devices of the run; else one
        device. `asks_rewards`: keep the rewards and the prompts of the run; else nobody asks for them.
        """
        tree = {key: value for key, value in self.saved.items() if key not in ("imports", "test_data")}
        for group, names in (REPLACED | ({} if is_own_layout else SIZES)).items():
            if isinstance(own := tree.get(group), dict):
                tree[group] = {name: value for name, value in own.items() if name not in names}
        tree["trainer"]["save_dir"] = str(folder)
        if self.is_rl and not asks_rewards:
            sizes = {name: tree["train_data"].get(name) for name in ("prompts_per_rollout", "responses_per_prompt")}
            reward = tree.get("reward") or {}
            rewards = [("", reward)] if "path" in reward else reward.items()
            named = {name: own.get("weight", 1.0) for name, own in rewards if isinstance(own, dict)}
            tree["reward"] = {name: {"path": RECORDED, "weight": weight} for name, weight in named.items()}
            tree["train_data"] = {"path": RECORDED, **sizes}
        tree |= {} if is_own_layout else ONE_DEVICE
        given = literal({**tree, "imports": [code] if code else []}, self.variables)
        try:
            return config.load(self.trainer.config_class, [], given=given)
        except RliteError as error:
            hint = "" if code else "; if code of the run registers it, name the file: --code FILE.py"
            if read := sorted(set(re.findall(r"\$\{oc\.env:(\w+)", str(given)))):
                hint += f"; the run read variables of its environment: set them, and add variables=[{', '.join(read)}]"
            raise ConfigError(f"{self.folder}: its options cannot be used: {error}{hint}") from error


def check_named(option: str, function: str, code: str | None) -> None:
    """Check that a function which a run names is in the file that the user names: no other code runs."""
    file, _, _ = function.rpartition(":")
    if code is None or Path(file).expanduser().resolve() != Path(code).expanduser().resolve():
        named = "" if code is None else f", and --code names {code}"
        raise ConfigError(f"{option}: this function of the run is needed{named}; name its file: --code FILE.py")


def check_rows(data: TableOptions, key: str, code: str | None) -> None:
    """Check that reading rows runs no function but those in the user's file."""
    for source in data.sources(key).values():
        if source.map is not None:
            check_named(f"{source.key}.map={source.map}", source.map, code)


def check_rewards(options: PpoConfig, code: str) -> None:
    """Check that rewards, and the rows that they judge, run no function but those in the user's file."""
    for name, own in options.reward.items():
        if own.path is None:
            raise ConfigError(f"reward {name}: a model or a judge gives it, which an audit does not ask")
        if ":" in own.path or own.path.endswith(".py"):  # else the user's file registers it under this name
            check_named(f"reward.path={own.path}", own.path, code)
    check_rows(options.train_data, "train_data", code)


def check_teachers(options: Any) -> None:
    """Check that the teachers of a run ask no server, run no function, and need neither rows nor earlier weights."""
    own = options.distill.teacher.values() if isinstance(options, PpoConfig) else ()
    if any(not each.has_engine or each.context is not None for each in own) or len(own) > 1:
        told = "a teacher on a server, with a context, with the student's weights, or one of several"
        raise ConfigError(f"distill: {told} cannot be asked again")


RECORDED = "recorded"
"""path of rewards that are never called: rewards are those of the record"""
MAX_FACTS = 1 << 24
"""bytes of a checkpoint's facts that are read"""


def kind_of(facts: Path) -> str:
    """Return the name of the class of options that a checkpoint's facts name; "" if they name none."""
    with suppress(OSError, ValueError, AttributeError, RecursionError), files.reading(facts) as file:
        return str(json.loads(file.read(MAX_FACTS)).get("config", ""))
    return ""


def literal(tree: Any, variables: Sequence[str] = ()) -> Any:
    """Return a tree whose texts read nothing from the environment; references to other options stay.

    An interpolation after an even number of backslashes would be resolved.
    """
    if isinstance(tree, Mapping):
        return {key: literal(value, variables) for key, value in tree.items()}
    if isinstance(tree, list):
        return [literal(value, variables) for value in tree]
    if not isinstance(tree, str) or re.fullmatch(r"\$\{[\w.]+\}", tree):
        return tree
    for name in [name for name in variables if f"${{oc.env:{name}}}" in tree]:
        if name not in os.environ:
            raise ConfigError(f"variables=[{name}]: this variable is not set")
        tree = tree.replace(f"${{oc.env:{name}}}", os.environ[name])
        tree = re.sub(r"\$\{oc\.decode:([^${}]*)\}", r"\1", tree)
    return re.sub(r"(?<!\\)(\\*)\$\{", lambda found: found[0] if len(found[1]) % 2 else f"\\{found[0]}", tree)


class RecordedWorkflow(RolloutWorkflow):
    """Workflow of a run whose rollouts are recorded: it is never run."""

    needs_prompt = False

    def __init__(self, gconfig: GenerationHyperparameters, batch: TensorDict) -> None:
        self.gconfig = gconfig
        self.num_seats = int(batch["seat_ids"].max()) + 1 if "seat_ids" in batch else 1

    async def arun_episode(self, engine: AsyncInference, data: dict[str, Any]) -> TensorDict | None:
        """Return None: no item is asked."""
        return None


class RecordedSteps:
    """A trainer that makes recorded steps again. Needs a session."""

    def __init__(
        self, run: RunOfTrainer, options: LaunchOptions, total_steps: int, example: TensorDict, logged: Logged
    ) -> None:
        check_teachers(options)
        self.run, self.options, self._is_rl = run, options, run.is_rl
        kind = _with_logged(_alone(run.trainer), logged) if self._is_rl else _alone(run.trainer)
        if isinstance(options, PpoConfig):
            workflow = RecordedWorkflow(options.rollout.train_sampling_params.gconfig(), example)
            self.trainer = kind(options, workflow, [{"prompt": RECORDED}] * options.train_data.prompts_per_rollout)
        else:
            own: Any = options  # as many epochs of one batch as all epochs had batches
            trainer = own.trainer.replace(n_epochs=total_steps, total_steps=None)
            own = own.replace(trainer=trainer, data=own.data.replace(streaming=False))
            self.trainer = kind(own, _rows_of(example))

    @property
    def engines(self) -> dict[str, RliteTrainEngine]:
        """The trained engines by name; the main one is called ""."""
        if not self._is_rl:
            return {"": self.trainer.engine}
        return {"": self.trainer.engines.actor, **self.trainer.engines.other_trained}

    def begin(self) -> None:
        """Build the engines that train."""
        stats_tracker.export()  # an audit may have left what belongs to no step
        if not self._is_rl:
            self.trainer.engine.build(**self.trainer.build_options)
            self.trainer.engine.train()
            if self.trainer.reference is not None:
                self.trainer.reference.build(self.trainer.build_options)
            return
        engines = self.trainer.engines
        for engine, own, _ in self.trainer.parts.device_plan.models(len(rlite.current_session().devices)):
            engine.build(**own, colocate_with=None if engine is engines.actor else engines.actor)
        engines.takes_turns = dict.fromkeys([engines.rollout, *engines.workers], False)

    def load(self, checkpoint: Path) -> int:
        """Load a checkpoint of the run.

        Returns the step after which it was written.
        """
        for name, engine in self.engines.items():
            if name:
                engine.load_state(beside(checkpoint, name))
        facts = self.engines[""].load_state(checkpoint)
        with naming(checkpoint / FACTS):
            if self._is_rl:
                self.trainer.coefficients.load_state_dict(facts.get("kl", {}))
            files.expect(checkpoint.name == f"step-{facts['step']}", f"step {facts['step']}")
            self.trainer.run.step = int(facts["step"])
        return self.trainer.run.step

    def save(self, checkpoint: Path) -> None:
        """Write a checkpoint, which `load` takes."""
        facts = {
            "step": self.trainer.run.step,
            **({"kl": self.trainer.coefficients.state_dict()} if self._is_rl else {}),
        }
        for name, engine in self.engines.items():
            engine.save_state(beside(checkpoint, name), **facts).result()

    def step(self, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """Make one step.

        Returns the batch as it was trained on, and the metrics of the step.
        """
        if not self._is_rl:
            return self.trainer.step(batch)
        generated = Generated()
        generated.add(batch)
        learnt, metrics = self.trainer.step(batch)
        return learnt, generated.metrics() | metrics


def _with_logged(kind: Any, logged: Logged) -> Any:
    """Return a class of trainers whose coefficients are those that were logged."""

    def prepare(self: Any, batch: TensorDict) -> TensorDict:
        """Return a batch with all keys that the losses of the next step read, with the coefficients of the step."""
        if (line := logged.get(self.run.step + 1)) is not None:
            self.coefficients.take(line)
        self.begin_step()
        made: TensorDict = kind.prepare(self, batch)
        return made

    return type(kind.__name__, (kind,), {"prepare": prepare})


def _alone(kind: Any) -> Any:
    """Return a class of trainers without a run around them: nobody generates, evaluates, logs or saves."""

    def step(self: Any, batch: TensorDict) -> tuple[TensorDict, dict[str, float]]:
        """Return the batch of a step as it was trained on, and the metrics of the step."""
        metrics = self._finish(self.learn(batch))
        return self.run.batch, metrics

    def _end_step(self: Any, batch: TensorDict, metrics_of: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Count a step."""
        self.run.step, self.run.batch = self.run.step + 1, batch
        return metrics_of()

    def sync(self: Any) -> None:
        """Do nothing."""

    return type(f"Recorded{kind.__name__}", (kind,), {"step": step, "_end_step": _end_step, "sync": sync})


def beside(checkpoint: Path, name: str) -> Path:
    """Return the checkpoint of another engine beside the main one, whose name is ""."""
    return checkpoint.with_name(f"{checkpoint.name}-{name}") if name else checkpoint


def columns_of(batch: TensorDict) -> dict[str, Tensor]:
    """Return the tensors of a batch by key."""
    return {str(key): value for key, value in batch.items() if isinstance(value, Tensor)}


def _rows_of(batch: TensorDict) -> TokenRows:
    """Return the rows of a batch as data; nobody reads them, and only their number counts."""
    per_item = 2 if "pair_ids" in batch else 1
    mask, items = batch["attention_mask"], len(batch) // per_item
    known = ("input_ids", "attention_mask", "loss_mask")
    return TokenRows(
        input_ids=batch["input_ids"][mask].numpy().astype(np.int32),
        loss_mask=batch["loss_mask"][mask].numpy(),
        starts=np.concatenate([[0], mask.sum(-1).cumsum(0).numpy()]),
        source=np.arange(items),
        rows_per_item=per_item,
        per_row={key: value.numpy() for key, value in columns_of(batch).items() if key not in known},
        tally=Tally(num_read=items, max_length=mask.shape[1], num_kept=items),
    )
