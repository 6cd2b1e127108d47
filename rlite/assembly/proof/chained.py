"""The observer that writes the chain of hashes of a run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import rlite
from rlite import config
from rlite.errors import StorageError
from rlite.services.record.chain import ChainWriter, hash_file, hash_files
from rlite.trainer.callbacks import Metrics
from rlite.trainer.run.folder import CONFIG
from rlite.trainer.run.observer import Observer
from rlite.trainer.run.training_run import TrainingRun
from rlite.yaml_texts import flat

PACKAGES = ("rlite", "torch", "transformers", "numpy", "tensordict")
DATA, CODE = ("data", "train_data", "test_data"), ("imports", "map", "env_path", "path")
"""groups of options that name data, and last parts of the keys that name code"""


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a step depends on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def device_facts() -> dict[str, Any]:
    """Return what decides the bits of a computation beside versions and layout."""
    return {"threads": torch.get_num_threads(), "processor": torch.backends.cpu.get_cpu_capability()}


def options_hash(options: Any) -> str:
    """Return a hash of the options that decide what a step computes: the trainer's only if rates follow them."""
    tree = dict(flat(config.to_container(options)))
    is_constant = all(
        value in ("constant", None, 0) for key, value in tree.items() if key.endswith((".scheduler", ".warmup_ratio"))
    )
    lasting = () if is_constant else ("trainer.total_steps", "trainer.n_epochs")
    kept = {key: value for key, value in tree.items() if not key.startswith("trainer.") or key in lasting}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def named_files(options: Any) -> Iterator[tuple[str, str, Path]]:
    """Yield the files that options name, each with "code" or "data" and with its name in the options."""
    for key, value in flat(config.to_container(options)):
        groups, name = key.split(".")[:-1], key.split(".")[-1]
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            path = Path(text.rpartition(":")[0] if text.rpartition(":")[0].endswith(".py") else text).expanduser()
            if (name in CODE or "imports" in key) and path.suffix == ".py":
                yield "code", text, path
            elif name == "path" and groups[:1] and groups[0] in DATA:
                yield "data", text, path


class HashChain(Observer):
    """Appends a link to the chain when the run starts, saves and ends. A chain that cannot be written costs a warning.

    It is the last of the observers: what the others write at the end is in its last link.

    Args:
        name: name of the command.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._writer: ChainWriter | None = None

    def on_start(self, run: TrainingRun, metrics: Metrics) -> None:
        """Append the link of a start, or of a resume."""
        session, found = rlite.current_session(), run.saved.checkpoints.found
        named: dict[str, dict[str, Path]] = {"code": {}, "data": {}}
        for kind, text, path in named_files(run.config):
            named[kind][text] = path
        facts: dict[str, Any] = {kind: hash_files(own.items()) for kind, own in named.items()}
        facts |= {
            "options": options_hash(run.config),
            "trainer": self._name,
            "config": hash_file(run.folder / CONFIG),
            "versions": versions(),
        }
        facts["devices"] = {
            "launcher": session.launcher.kind,
            "number": len(session.devices),
            "device": session.device,
            **device_facts(),
        }
        self._writer = ChainWriter(run.folder)
        self._append(run, lambda writer: writer.begin(run.step, None if found is None else found.name, facts))

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
