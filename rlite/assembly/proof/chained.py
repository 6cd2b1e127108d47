"""The observer that writes the chain of hashes of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import rlite
from rlite import config
from rlite.assembly.proof.privacy import is_shown, public_command
from rlite.errors import StorageError
from rlite.services.record.chain import ChainWriter, hash_file, hash_files
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.folder import CHAIN, CONFIG
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun
from rlite.yaml_texts import flat

PACKAGES = ("rlite", "torch", "transformers", "numpy", "tensordict")
DATA, CODE = ("data", "train_data", "test_data"), ("imports", "map", "env_path", "path")
"""groups of options that name data, and last parts of the keys that name code"""
GIT_S = 5.0
"""seconds after which git is not waited for"""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a step depends on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def commit() -> str:
    """Return the commit of the code in the working directory, with "-dirty" if files differ; "" if there is none."""
    describe = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(describe, capture_output=True, text=True, timeout=GIT_S, check=False).stdout.strip()
    return ""


def device_facts() -> dict[str, Any]:
    """Return what decides the bits of a computation beside versions and layout."""
    return {"threads": torch.get_num_threads(), "processor": torch.backends.cpu.get_cpu_capability()}


def named_files(options: Any) -> dict[str, dict[str, Path]]:
    """Return the files of code and data that options name, by kind and by their names in the options."""
    named: dict[str, dict[str, Path]] = {"code": {}, "data": {}}
    for key, value in flat(config.to_container(options)):
        group, name = key.split(".")[0], key.split(".")[-1]
        for text in [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]:
            path = Path(text.rpartition(":")[0] if text.rpartition(":")[0].endswith(".py") else text).expanduser()
            if (name in CODE or "imports" in key) and path.suffix == ".py":
                named["code"][text] = path
            elif name == "path" and group != key and group in DATA:
                named["data"][text] = path
    return named


class HashChain(Observer):
    """Appends a link to the chain when the run starts, saves and ends. A chain that cannot be written costs a warning.

    It is the last of the observers: what the others write at the end is in its last link.
    """

    def __init__(self, trainer: Any, run: TrainingRun) -> None:
        kind = type(trainer)
        self._trainer = {"trainer": trainer.name}
        if not kind.__module__.startswith("rlite."):
            self._trainer["class"] = f"{kind.__module__}.{kind.__qualname__}"
        step = None if run.saved.begins_empty else run.step
        self._writer: ChainWriter | None = ChainWriter(run.folder, step)

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Append the link of a start, or of a resume."""
        session, found = rlite.current_session(), run.saved.checkpoints.found
        facts: dict[str, Any] = {
            **{kind: hash_files(own.items()) for kind, own in named_files(run.config).items()},
            "options": config.to_container(run.config, shows=is_shown),
            **self._trainer,
            "command": public_command(sys.argv),
            "commit": commit(),
            "total_steps": run.total_steps,
            "set": config.set_keys(run.config),
            "at": time.time(),
            "config": hash_file(run.folder / CONFIG),
            "versions": versions(),
            "devices": {
                "launcher": session.launcher.kind,
                "number": len(session.devices),
                "device": session.device,
                **device_facts(),
            },
        }
        self._append(run, lambda writer: writer.begin(run.step, None if found is None else found.name, facts))
        if self._writer is not None and self._writer.changed:
            told = ", ".join([*self._writer.changed][:5])
            rows = {"files": f"{len(self._writer.changed)}: {told}", "the chain": f"{CHAIN} says so, and so do audits"}
            run.console.warn("files of the run were changed or removed while it was stopped", rows)

    def on_save(self, run: TrainingRun, metrics: Metrics) -> None:
        """Append the link of a save."""
        self._append(run, lambda writer: writer.append({"kind": "save", "step": run.step}))

    def close(self, run: TrainingRun, error: BaseException | None) -> None:
        """Append the last link."""
        reason = {} if error is None else {"error": type(error).__name__}
        self._append(run, lambda writer: writer.append({"kind": "end", "step": run.step, **reason}))

    def _append(self, run: TrainingRun, append: Callable[[ChainWriter], None]) -> None:
        if self._writer is not None:
            try:
                append(self._writer)
            except StorageError as error:  # no proof is worth a run
                self._writer = None
                run.console.warn("the chain of hashes ends here", {"reason": error})
