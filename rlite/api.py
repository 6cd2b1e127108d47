"""`rlite.train` and `rlite.evaluate`: a run, or an evaluation, in one call.

    import rlite

    run = rlite.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=correct)
    run.metrics["reward"], run.model, run.generate("What is 3 + 4?")

    found = rlite.evaluate("Qwen/Qwen3-0.6B", run.model, data=test_rows, reward=correct, samples=8)
    found.metrics["pass@8"], found.comparison.difference, found.comparison.p_value

The trainers and their options are those of the commands: `rlite.train("sft", **{"actor.lr": 1e-5})` is
`rlite sft actor.lr=1e-5`. Only data, rewards and callbacks may be objects of the program.
"""

from __future__ import annotations

import difflib
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlite
from rlite import config
from rlite.assembly.commands.generate import prompt_item
from rlite.assembly.evaluate.command import evaluate as run_evaluation
from rlite.assembly.evaluate.options import EvalConfig
from rlite.assembly.trainers import TRAINERS
from rlite.data.readers.tables import Row
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, UnknownOptionError, did_you_mean
from rlite.evaluation.folder import EvaluationResult
from rlite.help import UNNAMED
from rlite.rollout.rewards.function import RewardFunction
from rlite.rollout.rewards.options import name_of
from rlite.rollout.workflow import prompt_ids
from rlite.runtime.cluster.session import has_session
from rlite.services.console.sinks import read_metrics
from rlite.trainer.callbacks import Callback
from rlite.trainer.held_out import KEY, key_of
from rlite.trainer.run.program_objects import IN_MEMORY, REWARD, ProgramObjects
from rlite.trainer.run.training_run import TrainerLoop
from rlite.wording import number

Data = str | os.PathLike[str] | Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""a path as on the command line, or rows: a list of dicts, a dict of equally long columns, a `datasets.Dataset`, any
iterable that ends. With
`streaming` of the data, training rows are iterated while training, again for each epoch and to resume"""
Reward = str | Callable[..., Any] | tuple[str | Callable[..., Any], float] | Mapping[str, Any]
"""a function, its path as on the command line, (one of these, its weight), or options: {"path": f, "timeout": 9}"""
Rewards = Reward | Sequence[Reward] | Mapping[str, Reward]
SHORT = {"save_dir": "trainer.save_dir", "total_steps": "trainer.total_steps", "n_epochs": "trainer.n_epochs"}
"""short names of options"""
_OF_SET = re.compile(rf"{KEY}(\.[^.]+)?\.{REWARD}")
"""group of options of a set's own rewards"""


def train(
    algorithm: str | type[TrainerLoop],
    *,
    model: str | os.PathLike[str] | None = None,
    data: Data | None = None,
    test_data: Data | Mapping[str, Data] | None = None,
    reward: Rewards | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> TrainedRun:
    """Train a model, as the command of the same name does.

    If the program has begun a session (`rlite.init`), the run uses it. Otherwise the run has its own session. Under
    torchrun, ranks other than 0 serve the run and exit.

    Args:
        algorithm: name of the command: "sft", "rm", "dpo", "orpo", "simpo", "cpo", "kto", "grpo", "ppo" or
            "distill"; or a class that extends its trainer, such as `GrpoTrainer`.
        model: folder or hub name of a Hugging Face checkpoint.
        data: rows to train on, or their path.
        test_data: rows to evaluate on, or their path; or several of these by the names of their sets.
        reward: of "grpo", "ppo" and "distill": one reward, a list of rewards, or rewards by name, as a function, a
            path, a pair with a weight, or a mapping of options, whose `path` may be a function. Functions have the
            signature of rlite, TRL or verl.
        callbacks: callbacks besides those of `trainer.callbacks`.
        **options: options of the command by their keys, `**{"actor.lr": 1e-5}`, or nested, `actor={"lr": 1e-5}`. The
            options in SHORT also have a short name. The reward of a set to evaluate on may hold functions as `reward`
            does, `**{"test_data.NAME.reward": f}`.

    Returns:
        The run.

    Raises:
        ConfigError: an option is wrong, or the run cannot start.
        UnknownOptionError: an option is unknown.
        DataError: some rows cannot be used.
    """
    trainer = _trainer(algorithm)
    is_named = isinstance(test_data, Mapping) and not has_columns(test_data)
    sets: Any = test_data if is_named else {UNNAMED: test_data}
    data, tests = as_rows(data), {key_of(name): as_rows(rows) for name, rows in sets.items()}
    tables = {trainer.data_key: data, **tests}
    of_sets = {name: value for name, value in options.items() if _OF_SET.fullmatch(name)}
    reward_options, functions = _split({REWARD: reward, **of_sets})
    given = {
        **({} if model is None else {f"{trainer.key}.model_name": model}),
        **{f"{key}.path": _path(value, key) for key, value in tables.items() if value is not None},
        **reward_options,
        **{_key(name): value for name, value in options.items() if name not in of_sets},
    }
    settings = config.load(trainer.config_class, [], aliases=trainer.config_class.aliases, given=given)
    rows = _rows(data, trainer.data_key, getattr(settings, trainer.data_key).streaming)
    test_rows = {key: found for key, own in tests.items() if (found := _rows(own, key)) is not None}
    metrics = trainer.train(settings, ProgramObjects(rows, test_rows, functions, callbacks))
    return TrainedRun(Path(settings.trainer.save_dir), metrics, trainer.key == "actor")


def evaluate(
    model: str | os.PathLike[str],
    other: str | os.PathLike[str] | None = None,
    *,
    data: Data | None = None,
    reward: Rewards | None = None,
    **options: Any,
) -> EvaluationResult:
    """Evaluate a model, or compare two, as `rlite eval` does.

    If the program has begun a session (`rlite.init`), the evaluation uses it. Otherwise it has its own session.

    Args:
        model: folder of a model, of a run, or of an earlier evaluation; or hub name.
        other: as `model`; answers the same prompts, and is compared with it.
        data: rows to answer, or their path.
        reward: as for `train`.
        **options: options of the command by their keys, such as `samples=16`. Files are written, and an interrupted
            evaluation continues, only with a folder: `out="runs/eval"`.

    Returns:
        Metrics and samples; of two models also the comparison.

    Raises:
        ConfigError: an option or a model cannot be used, or `out` holds samples of other settings.
        UnknownOptionError: an option is unknown.
        DataError: some rows cannot be used, or the two models answered other items.
    """
    data = as_rows(data)
    reward_options, functions = _split({REWARD: reward})
    named = {"other": other, "data.path": None if data is None else _path(data, "data")}
    named = {key: value for key, value in named.items() if value is not None}
    settings = config.load(EvalConfig, [], given={"model": model, "out": None, **named, **reward_options, **options})
    return run_evaluation(settings, ProgramObjects(_rows(data, "data"), rewards=functions))


def _trainer(algorithm: Any) -> Any:
    """Return a class of trainers by the name of its command, or the class itself."""
    if isinstance(algorithm, str) and algorithm in TRAINERS:
        return TRAINERS[algorithm].find_trainer()
    if isinstance(algorithm, type) and issubclass(algorithm, TrainerLoop) and hasattr(algorithm, "config_class"):
        return algorithm
    hint = did_you_mean(algorithm, TRAINERS) if isinstance(algorithm, str) else "expected a name, or a class"
    raise ConfigError(f"train({algorithm!r}): {hint}")


SHOWN = ("reward", "accuracy", "loss", "test_loss")
"""metrics that describe a run in one line"""


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run that has ended."""

    folder: Path
    """folder of the run, `trainer.save_dir`"""
    own_metrics: Mapping[str, float]
    """metrics of the last step; empty if the run had ended before this call"""
    is_policy: bool = True
    """the model generates text"""

    def __repr__(self) -> str:
        """Return the folder, the last step, and those of its metrics that describe a run."""
        last = self._last if (self.folder / "metrics.jsonl").is_file() else {}
        metrics = {**self.own_metrics, **last}
        names = [name for key in SHOWN for name in metrics if name.rpartition("/")[2] == key]
        step = [f"step {last['step']}"] if last else []
        values = [f"{name} {number(name, metrics[name])}" for name in names]
        return f"{type(self).__name__}({', '.join([str(self.folder), *step, *values])})"

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last step, also of a run that had ended before this call."""
        return self.own_metrics or self._last

    @property
    def _last(self) -> Mapping[str, float]:
        return (self.history or [{}])[-1]

    @property
    def model(self) -> Path:
        """Folder of the trained model, a Hugging Face checkpoint."""
        return self.folder / "latest"

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics of all steps and evaluations, also of those before a resume; each has its `step`.

        Raises:
            ConfigError: the run wrote no metrics.jsonl.
        """
        path = self.folder / "metrics.jsonl"
        try:
            return read_metrics(path)
        except OSError as error:
            hint = "; history needs jsonl among trainer.sinks" if isinstance(error, FileNotFoundError) else ""
            raise ConfigError(f"{path}: {error.strerror or error}{hint}") from error

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[Mapping[str, Any]]],
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        chat: bool | None = None,
        **sampling: Any,
    ) -> list[str]:
        """Return the trained model's answers, one for each prompt. The defaults are those of `rlite generate`.

        Each call loads the model: in the program's session, or on one device. An `RliteInferenceEngine` serves longer.

        Args:
            prompts: texts, or chats as lists of messages; or one text.
            max_new_tokens: tokens of the longest answer.
            temperature: 0 is greedy.
            chat: whether a text is the user's message in the model's chat template. False completes it as it is, as in
                training on texts. None: if the model has a template.
            **sampling: further parameters, such as `top_p` and `stop`.

        Raises:
            ConfigError: the model is a reward model, or has no chat template for `chat=True`.
        """
        if not self.is_policy:
            raise ConfigError(f"{self.model} is a reward model, which generates no text")
        given = [prompts] if isinstance(prompts, str) else prompts
        has_own_session = not has_session()
        if has_own_session:
            rlite.init(launcher="inprocess", num_devices=1)  # torchrun's other ranks have exited
        engine = RliteInferenceEngine(self.model)
        try:
            own = engine.tokenizer
            items = [prompt_item(each, own, chat) if isinstance(each, str) else {"prompt": each} for each in given]
            tokens = [prompt_ids(item, own) for item in items]
            engine.build(max_model_len=max(map(len, tokens)) + max_new_tokens)
            sampled = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling}
            return [output.outputs[0].text for output in engine.generate(tokens, sampled)]
        finally:
            engine.release()
            if has_own_session:
                rlite.shutdown()


def _key(name: str) -> str:
    """Return the key of an option that may have a short name."""
    if name in SHORT:
        return SHORT[name]
    if close := difflib.get_close_matches(name, [*SHORT, "model", "reward", "callbacks"], n=1, cutoff=0.75):
        raise UnknownOptionError(f"train: unknown keyword {name!r}; did you mean {close[0]!r}?")
    return name


def has_columns(data: Any) -> bool:
    """Return whether data are columns by name: lists, one of which holds something else than rows."""
    if not isinstance(data, Mapping) or not data or not all(isinstance(each, list | tuple) for each in data.values()):
        return False
    return any(len(column) and not isinstance(column[0], Mapping) for column in data.values())


def as_rows(data: Any) -> Any:
    """Return the rows of columns by name. Other data are unchanged.

    Raises:
        DataError: the columns have different lengths.
    """
    if not has_columns(data):
        return data
    lengths = {name: len(column) for name, column in data.items()}
    if len({*lengths.values()}) > 1:
        raise DataError(f"columns of one table have equal lengths; found {lengths}")
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _path(data: Any, key: str) -> str | os.PathLike[str]:
    """Return the path of data; IN_MEMORY if they are rows of the program."""
    if isinstance(data, str | os.PathLike):
        return data
    if isinstance(data, Mapping):
        splits = ", ".join(f"data[{name!r}]" for name in data)
        raise DataError(
            f"{key}: expected rows, found a mapping; choose one of its entries ({splits}), or give options as "
            f'**{{"{key}.NAME": ...}}'
        )
    if not isinstance(data, Iterable):
        raise DataError(f"{key}={data!r}: expected a path, or rows")
    return IN_MEMORY


def _rows(data: Any, key: str, is_streamed: bool = False) -> Iterable[Row] | None:
    """Return the rows of a program, unread if they are streamed; None if they have a path."""
    if data is None or isinstance(data, str | os.PathLike):
        return None
    if is_streamed:
        return data
    rows = list(data)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{key}, row index {index}: expected a dict of columns, found {type(row).__name__}")
    if not rows:
        raise DataError(f"{key}: no rows; expected at least one")
    return [dict(row) for row in rows]


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Callable[..., Any]]]]:
    """Return the options of the rewards of a call, and their functions by group and name.

    `given`: value of each group of options; None if the call gives none.
    """
    options: dict[str, Any] = {}
    functions: dict[str, dict[str, Callable[..., Any]]] = {}
    for key, value in given.items():
        for name, own in _rewards(value).items() if value is not None else ():
            options[f"{key}.{name}"] = {**own, "path": _path_of(own["path"])} if "path" in own else own
            if callable(own.get("path")):
                functions.setdefault(key, {})[name] = own["path"]
    return options, functions


def _rewards(reward: Any) -> dict[str, dict[str, Any]]:
    """Return the options of rewards by name. The path may be a function."""
    if isinstance(reward, Mapping) and "path" not in reward:
        return {name: _one(value) for name, value in reward.items()}
    found: dict[str, dict[str, Any]] = {}
    for each in map(_one, reward if isinstance(reward, list) else [reward]):
        name = name_of(str(_path_of(each.get("path"))))
        is_taken = sum(known == name or known.startswith(f"{name}_") for known in found)
        found[f"{name}_{is_taken + 1}" if is_taken else name] = each
    return found


def _one(reward: Any) -> dict[str, Any]:
    if isinstance(reward, Mapping):
        return dict(reward)
    source, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, 1.0)
    if not isinstance(weight, numbers.Real):
        raise ConfigError(f"reward={reward!r}: expected (function, weight); several rewards are a list")
    if not isinstance(source, str | os.PathLike) and not callable(source):
        raise ConfigError(f"reward={source!r}: expected a function, a path, (one of these, its weight), or options")
    return {"path": source, "weight": weight}


def _path_of(source: Any) -> Any:
    """Return the path of a function. Another source is unchanged."""
    named = source.fn if isinstance(source, RewardFunction) else source
    names = (getattr(named, name, getattr(type(named), name)) for name in ("__module__", "__qualname__"))
    return ":".join(map(str, names)) if callable(source) else source
