"""Options of rewards: `reward.path=file.py:function` for one, `reward.NAME.path=...` for several. No torch here.

A reward is a function (`path`), a trained reward model (`model`) or an LLM judge (`judge`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field, model_validator

from rlite.config import Count, Finite, Options, Positive, Seconds
from rlite.errors import ConfigError
from rlite.help import single_or_named

PATIENCE = 120.0
"""seconds of a call of a model or a judge, which waits for others"""


SERVING = ("executor", "tp_size", "dtype", "gpu_memory_utilization", "max_num_seqs", "max_model_len")
"""options of a judge's own engine"""


class JudgeOptions(Options):
    """An LLM that scores answers by a rubric, on a server with OpenAI's chat API or on an engine of the run."""

    url: str | None = None
    """address of the server without /chat/completions, such as http://127.0.0.1:8000/v1 of `rlite serve`; null: an
    engine of the run serves the judge"""
    model: str
    """name of the model on the server; without url, folder or hub name of the checkpoint"""
    rubric: str
    """criteria of the judge, a text, or a file that ends in .md or .txt; {NAME} is the row's column of this name"""
    lowest: Finite = 0.0
    """lowest score"""
    highest: Finite = 10.0
    """highest score"""
    max_new_tokens: Count = 1024
    """longest reply of the judge"""
    key_env: str | None = None
    """name of the environment variable that holds the server's key"""
    key_file: str | None = None
    """file that holds the server's key, which nobody else can read (mode 0600)"""
    options: dict[str, Any] = {}
    """further fields of the request, such as {reasoning_effort: low}; of an engine, sampling parameters and
    chat_template_kwargs"""
    executor: str = "torch"
    """inference executor of the judge's engine, such as vllm"""
    tp_size: Count = 1
    """devices that share one replica of the judge's engine"""
    dtype: str | None = None
    """type of the judge's weights on its engine; default: the checkpoint's"""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.3
    """share of a GPU's memory for the judge's engine, beside that of the rollouts"""
    max_num_seqs: Count = 64
    """answers that a replica of the judge's engine judges at once"""
    max_model_len: Annotated[int, Ge(2)] | None = None
    """longest question and reply of the judge's engine, in tokens; default: as the longest prompt and answer need"""

    def problems(self) -> Iterator[str]:
        """Yield a message for an unusable address, for options that its place does not read, and an empty range."""
        changed = self.model_dump(exclude_defaults=True)
        unread = ("key_env", "key_file") if self.url is None else SERVING
        place = "on a server (url)" if self.url is None else "on an engine (no url)"
        for key in changed.keys() & {*unread}:
            yield f"{key} is an option of a judge {place}; leave it out"
        parts = urlsplit(self.url or "http://engine")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"url={self.url}: expected http://HOST:PORT/v1 or https://HOST/v1"
        if parts.username or parts.password or parts.query:
            yield "url: it holds a secret, which configs would keep; give key_env=NAME or key_file=FILE"
        if self.key_env is not None and self.key_file is not None:
            yield "key_env, key_file: two sources of one key; leave one out"
        if self.lowest >= self.highest:
            yield f"lowest={self.lowest:g}: expected less than highest={self.highest:g}"

    @property
    def engine_key(self) -> tuple[Any, ...]:
        """Options that are the same for all judges of one engine."""
        return (self.model, *(getattr(self, name) for name in SERVING))

    def rubric_text(self, key: str) -> str:
        """Return the rubric, from its file if it has one."""
        if not self.rubric.endswith((".md", ".txt")):
            return self.rubric
        try:
            return Path(self.rubric).expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}.rubric={self.rubric}: {error}") from error


class RewardOptions(Options):
    """A reward of single-turn answers, which runs in processes that can be killed."""

    path: str | None = None
    """file.py:function, package.module:function, or the name of a reward that `--import` registers"""
    model: str | None = None
    """in place of path: folder or hub name of a reward model, such as `rlite rm` trains"""
    label: str | None = None
    """label whose logit is the score, by its name in id2label or its number, for a model with several"""
    num_devices: Count | None = None
    """devices that only score, for a model or a judge on an engine; null: it shares the devices of the rollouts"""
    judge: JudgeOptions | None = None
    """in place of path: an LLM that scores answers by a rubric"""
    weight: Finite = 1.0
    """factor of this reward in the sum of all"""
    options: dict[str, Any] = {}
    """further keyword arguments of the function, the same for every answer"""
    timeout: Seconds = 15.0
    """seconds for one call; 120 by default for a model or a judge"""
    processes: Count | None = None
    """calls that run at the same time; default: the cores, at most 8"""
    memory_limit_gib: Positive | None = None
    """resident memory that a process may have; a call that takes more fails, alone; null: no limit"""
    max_concurrent: Count | None = None
    """calls that may wait for the function at the same time, such as for a judge's server; null: no limit"""
    in_process: bool = False
    """run the function in the trainer's own process: for async functions that only wait, such as for a judge"""
    env_vars: list[str] = []
    """names of environment variables that the processes get as well, such as the key of an API: they see none of the
    run's secrets"""

    @model_validator(mode="before")
    @classmethod
    def _patient(cls, given: Any) -> Any:
        is_served = isinstance(given, dict) and given.get("path") is None
        return {"timeout": PATIENCE, **given} if is_served else given

    def problems(self) -> Iterator[str]:
        """Yield a message unless there is one source of scores, and for options that the source does not read."""
        given = [key for key in ("path", "model", "judge") if getattr(self, key) is not None]
        if len(given) != 1:
            yield f"path: expected one of path, model and judge, found {' and '.join(given) or 'none'}"
        elif self.path is None:
            further = {"num_devices": self.served_model, "label": self.model}
            read = {"weight", "timeout", "max_concurrent", *given, *(key for key, has in further.items() if has)}
            for key in set(self.changed) - read:
                yield f"{key} is an option of functions or of another source than {given[0]}; leave it out"
        elif self.label is not None:
            yield "label is an option of reward.NAME.model"
        elif self.num_devices is not None:
            yield "num_devices is an option of reward.NAME.model; a function has processes"

    @property
    def served_model(self) -> str | None:
        """Checkpoint of the reward model, or of the judge on an engine; None without either."""
        return self.judge.model if self.judge is not None and self.judge.url is None else self.model

    @property
    def source(self) -> str:
        """The function, the model, or the judge with its place."""
        if (judge := self.judge) is not None:
            return f"judge {judge.model} at {judge.url}" if judge.url else f"judge {judge.model}"
        return self.path or self.model or ""

    @property
    def default_name(self) -> str:
        """Name of a reward that its user did not name: the function's, model or judge."""
        return name_of(self.path) if self.path else "judge" if self.judge else "model"

    @property
    def changed(self) -> list[str]:
        """Names of the options that are not at their defaults, without path and weight."""
        return list(self.model_dump(exclude_defaults=True, exclude={"path", "weight"}))


def name_of(path: str) -> str:
    """Return the name of the reward of a path: the function's name."""
    return re.sub(r"[^\w-]+", "_", re.split(r"[:.]", path)[-1]).strip("_-") or "reward"


def _named_by_function(rewards: dict[str, RewardOptions]) -> dict[str, RewardOptions]:
    return {name or own.default_name: own for name, own in rewards.items()}


Rewards = Annotated[
    dict[str, RewardOptions], AfterValidator(_named_by_function), Field(json_schema_extra=single_or_named)
]
"""rewards by name; one that its user did not name has its function's name"""
