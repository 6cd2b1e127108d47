"""Settings that decide the samples of an evaluation. Samples of other settings are not mixed with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlite import config
from rlite.nn.pretrained import local_checkpoint
from rlite.trainer.evaluate.options import EvalConfig
from rlite.trainer.evaluate.scorer_digest import code_of, digest
from rlite.trainer.run.program_objects import ProgramObjects

WEIGHTS = (".safetensors", ".bin", ".json", ".jinja", ".model")
"""files of a checkpoint that decide its answers"""
TASK_FILES = (".yaml", ".yml", ".py", ".json", ".jsonl")
"""files of a folder with tasks that decide its questions"""
_SCORED_BY = ("env_path", "env_timeout", "env_memory_limit_gib", "max_turns", "workflow")
_TASKS = ("tasks", "num_fewshot", "chat", "limit")
_SAMPLED_BY = ("samples", "seed", "executor", "dtype", "deterministic", "max_model_len")
_REWARD = ("path", "weight", "timeout", "memory_limit_gib", "in_process")


def settings_of(options: EvalConfig, given: ProgramObjects, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that decide the samples, except for the model's, as values of JSON.

    Args:
        options: options of the command.
        given: rewards of a program, in place of those that the paths name.
        rows: the prompts, as they are asked.
    """
    plain = config.to_container(options)
    sampling = {name: getattr(options.sampling, name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")}
    if options.stop_token_ids:  # absent from settings of older versions
        sampling["stop_token_ids"] = options.stop_token_ids
    rewards = {name: {key: own[key] for key in _REWARD} for name, own in plain["reward"].items()}
    return {
        "questions": {"number": len(rows), "content": digest(_text(row) for row in rows)} if rows else {},
        "chat_template_options": plain["data"]["chat_template_options"],
        "scores": {"reward": rewards, **{name: plain[name] for name in _SCORED_BY}, "code": code_of(options, given)},
        "tasks": _tasks(plain, options.sampling_of_tasks) if options.tasks else {},
        "sampling": {**sampling, "stop": plain["stop"], **{name: plain[name] for name in _SAMPLED_BY}},
    }


def model_settings(folder: str) -> dict[str, str]:
    """Return the identity of a checkpoint: its folder, and sizes and times of its files."""
    path = local_checkpoint(folder).resolve()
    files = sorted(file for file in path.iterdir() if file.suffix in WEIGHTS and file.is_file())
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return {"folder": str(path), "files": digest(stamps)}


def _tasks(plain: Mapping[str, Any], sampling: Mapping[str, Any] | None) -> dict[str, Any]:
    files = sorted(Path(plain["task_path"]).rglob("*")) if plain["task_path"] else []
    own = [file.read_bytes() for file in files if file.suffix in TASK_FILES]
    generation = {} if sampling is None else {"generation": dict(sampling)}
    return {**{name: plain[name] for name in _TASKS}, "task_path": digest(own), **generation}


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)
