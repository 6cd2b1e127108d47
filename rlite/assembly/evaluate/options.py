"""Options of `rlite eval`. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from rlite.config import Count, Finite, Natural, Seconds, Seed
from rlite.data.source import Source
from rlite.errors import ConfigError
from rlite.files import file_name
from rlite.key_value import named, spelled, split_positional
from rlite.rollout.environments.file import EnvironmentOptions, brings_items
from rlite.rollout.rewards.options import Rewards
from rlite.trainer.held_out import SOLVED_AT, problems_of_k
from rlite.trainer.options import LaunchOptions, SamplingOptions, ServingOptions, SingleTableOptions, Temperature
from rlite.types import GenerationHyperparameters

MAX_NAME = 60
"""characters of the name of the data in the name of a folder"""
ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".py", ".arrow", ".gz")
"""endings of files that a name leaves out"""
_GENERAL = ("latest", "best", "")
"""names of folders that do not tell whose they are"""


def names_of(model: str, other: str | None) -> list[str]:
    """Return a name for each model: that of its folder, or of the run that has written it.

    Two models of one name are distinguished by the next parts of their paths, such as `latest` and `best` of a run, or
    else by the folders above: `a/model` and `b/model` are a-model and b-model.

    `other`: name of the second model; None without one.
    """
    if other is None:
        return [next(_names(model))]
    pairs = [list(pair) for pair in zip(_names(model), _names(other), strict=False)]
    return next((pair for pair in pairs if len(set(pair)) == 2), [pairs[0][0], f"{pairs[0][1]}-2"])


def name_of_questions(source: str) -> str:
    """Return a name for tasks, or for the path of data or of an environment, without the ending of a file."""
    stem = Path(source).stem if Path(source).suffix in ENDINGS else Path(source).name
    return _as_file_name(stem)[:MAX_NAME]


def _names(given: str) -> Iterator[str]:
    """Yield the names of a model: its own, the end of its path from there on, then with one more folder each time."""
    parts = Path(given).expanduser().resolve().parts
    own = max((place for place, part in enumerate(parts) if part not in _GENERAL), default=0)
    yield _as_file_name(parts[own])
    for first in range(own, 0, -1):
        yield _as_file_name("-".join(parts[first:]))


def _as_file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip("._-") or "model"


SHORT = {"data": "data.path", "reward": "reward.path", "env": "env_path", "save_dir": "out"}
"""short names of options, and the trainers' name of one"""
NAME = "{name}"
"""stands in `out` for the names of the models"""
DATA = "{data}"
"""stands in `out` for the name of what they answer"""
_OF_EPISODES = ("timeout", "retries", "solved_at")
"""options without a meaning for tasks"""


def default_temperature(samples: int) -> float:
    """Return the temperature of answers to each prompt: one is greedy, several are drawn."""
    return 0.0 if samples == 1 else 1.0


class EvalDataOptions(SingleTableOptions):
    """The prompts to answer. A column `id` names the items."""

    def source(self) -> Source:
        """Return the table."""
        return Source(self.path or "", "data", self.columns, self.system_prompt)


class EvalConfig(SamplingOptions, EnvironmentOptions, ServingOptions, LaunchOptions):
    """Options of `rlite eval CHECKPOINT [CHECKPOINT2]`."""

    aliases: ClassVar[Mapping[str, str]] = {"save_dir": "out"}
    help_arguments: ClassVar[str] = "MODEL [MODEL2] [--data ROWS] [--reward FILE.py:NAME] [--KEY VALUE]..."
    help_example: ClassVar[str] = "runs/grpo --data test.jsonl --reward my.py:correct --samples 16 --out runs/eval"
    help_first: ClassVar[tuple[str, ...]] = ("other", "data.path", "reward", "env_path", "tasks", "samples", "out")
    prints_json: ClassVar[bool] = True

    model: str
    """folder of a model, of a run (its newest model), or of an earlier evaluation of one model; or hub name; the first
    argument without a key"""
    other: str | None = None
    """second model; it answers the same prompts and is compared with the first; the second argument without a key"""
    data: EvalDataOptions = EvalDataOptions()
    reward: Rewards = {}
    """rewards of single-turn answers: reward.path=file.py:function, or reward.NAME.path=... for several, whose weighted
    sum counts; keys: path, weight, timeout, processes, memory_limit_gib, max_concurrent, in_process, env_vars"""
    env_path: str | None = None
    """Python file with an environment, as rollout.env_path of ppo. A file with `make`, and an environment
    CONTRACT:NAME of another library, need no data: seeds 0, 1, ..."""
    tasks: list[str] = []
    """tasks of lm-evaluation-harness, in place of data; package lm_eval"""
    num_fewshot: Natural | None = None
    """examples before each question of tasks; null: as the task says"""
    task_path: str | None = None
    """folder with further tasks"""
    chat: bool = False
    """ask tasks in the model's chat template"""
    temperature: Temperature | None = None  # type: ignore[assignment]
    """0 is greedy; default: 0 with samples=1, else 1"""
    samples: Count = 1
    """answers to each prompt, or to each question of tasks that generate text; other tasks are done once"""
    k: Count | None = None
    """largest k of pass@k and majority@k; default: samples"""
    solved_at: Finite = SOLVED_AT
    """score from which an answer counts as solved, for pass@k and majority@k"""
    limit: Count | None = None
    """first prompts, or questions of each task, to answer; null: all. Without data, episodes of the environment;
    default: 100"""
    seed: Seed = 0
    """seed of sampling and of the sign-flip test"""
    confidence: Annotated[float, Gt(0), Lt(1)] = 0.95
    """level of confidence intervals"""
    out: str | None = f"runs/eval-{NAME}-{DATA}"
    """folder for results.json, samples and the record, which `rlite view` shows; save_dir, the trainers' name, means
    the same. The same command continues what it holds. {name} stands for the model's name, or for BEFORE-vs-AFTER, and
    {data} for the data, environment or tasks. null writes nothing"""
    name: Annotated[str, AfterValidator(file_name)] | None = None
    """name of the evaluation in the record; default: the model's folder, or the run of latest and best"""
    overwrite: bool = False
    """replace the evaluations that out holds, also of other models; leave it out to continue an interrupted command"""
    record_tokens: Natural = 16
    """first prompts whose answers are recorded with their tokens"""
    timeout: Seconds = 3600.0
    """seconds for one attempt at an episode"""
    retries: Natural = 3
    """further attempts at an episode that raised; data and config errors are final"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.9
    """share of a GPU's memory for generation"""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest prompt and answers together, in tokens; default: as long as the longest prompt and max_new_tokens need,
    or at most 16384 if they do not say it, as with tasks and several turns"""

    @classmethod
    def arguments(cls, argv: Sequence[str]) -> list[str]:
        """Return the arguments as `KEY=VALUE`: also `--samples 16`, `--tasks a,b`, and models without a key."""
        keys = {**{name: name for name in cls.model_fields}, **SHORT}
        plain = named(spelled(argv, keys), ["model", "other"])
        if more := split_positional(plain)[0]:
            raise ConfigError(f"{more[0]}: a third model; one command compares two at most")
        return [re.sub(r"^tasks=(?!\[)(.*)", r"tasks=[\1]", argument) for argument in plain]

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule between sources, samples and names that does not hold."""
        yield from super().problems()
        if len(sources := self.sources_of_scores) > 1:
            yield f"{' and '.join(sources)} are given; expected one of them"
        if self.tasks and self.data.path is not None:
            yield f"data.path={self.data.path}: tasks bring their own questions; give one of them"
        if not self.tasks and (self.num_fewshot is not None or self.task_path is not None or self.chat):
            yield "num_fewshot, task_path and chat are options of tasks; give tasks=[NAME], or leave them out"
        odd = [name for name in _OF_EPISODES if getattr(self, name) != type(self).model_fields[name].default]
        if self.tasks and odd:
            yield f"{odd[0]}={getattr(self, odd[0])}: an option of episodes, and tasks have none; leave it out"
        if sources:
            yield from problems_of_k(self.k, self.samples)
        if self.samples > 1 and self.temperature == 0:
            yield f"samples={self.samples} temperature=0: all answers to a prompt would be the same; sample above 0"
        yield from self.problems_with(self.reward)
        if self.workflow is not None and self.data.chat_template_options:
            yield "data.chat_template_options: a registered workflow renders prompts itself; set them there"
        if self.name is not None and self.other is not None:
            yield "name: two models have the names of their folders; leave it out"

    def check_complete(self) -> None:
        """Check that there are questions."""
        if self.data.path is not None or self.tasks or not self.sources_of_scores:
            return
        if self.env_path is None or not brings_items(self.env_path):
            raise ConfigError("missing: data.path=FILE, the prompts (an environment file with `make` alone needs none)")

    @property
    def names(self) -> list[str]:
        """A name for each model."""
        return names_of(self.model, self.other) if self.name is None else [self.name]

    @property
    def folder(self) -> Path | None:
        """The folder `out`, with the names of the models and of what they answer; None to write nothing."""
        if self.out is None:
            return None
        answered = name_of_questions(self.questions) if self.sources_of_scores else ""
        out = self.out if answered else self.out.replace(f"-{DATA}", "")
        return Path(out.replace(NAME, "-vs-".join(self.names)).replace(DATA, answered)).expanduser()

    @property
    def questions(self) -> str:
        """The tasks, the data or the environment."""
        return ",".join(self.tasks) or self.data.path or self.env_path or self.workflow or ""

    @property
    def sources_of_scores(self) -> list[str]:
        """Options that name a source of scores; an evaluation needs one."""
        sources = {"reward": self.reward, "env_path": self.env_path, "workflow": self.workflow, "tasks": self.tasks}
        return [key for key, value in sources.items() if value]

    @property
    def sampling(self) -> GenerationHyperparameters:
        """Sampling of the answers."""
        return self.gconfig({"temperature": default_temperature(self.samples)})

    @property
    def sampling_of_tasks(self) -> dict[str, Any] | None:
        """Options of generation in place of the tasks' own, by the harness's names; None if none is given.

        Several samples are always drawn by the options of the command.
        """
        own, given = self.sampling, self.model_fields_set
        sampled_by = ("temperature", "top_p", "top_k")
        names = sampled_by if self.samples > 1 else [name for name in sampled_by if name in given]
        chosen: dict[str, Any] = {name: getattr(own, name) for name in names}
        if "temperature" in chosen:
            chosen["do_sample"] = own.temperature > 0
        if "max_new_tokens" in given:
            chosen["max_gen_toks"] = own.max_new_tokens
        if self.stop:
            chosen["until"] = self.stop
        if self.stop_token_ids:
            chosen["stop_token_ids"] = self.stop_token_ids
        return chosen or None

    def num_concurrent(self, num_replicas: int) -> int:
        """Return the number of answers to ask for at the same time.

        It is twice the number that is decoded at once, so that rewards and environments do not leave the engine idle.
        """
        return 2 * self.max_num_seqs * num_replicas

    def headline(self) -> str:
        """Return in a few words what is evaluated, on which data, and where the result goes."""
        models = self.model if self.other is None else f"{self.model} and {self.other}"
        # without a source of scores, the models are earlier evaluations
        on = f" on {self.questions or 'rows of the program'}" if self.sources_of_scores else ""
        return f"{models}{on}{f', into {self.folder}' if self.folder else ''}"
