"""Bundles: one file with what a step needs to be made again. It opens like a run, and executes nothing.

bundle.json                 format, step, versions, hashes, and what the file has
config.yaml                 the options, without secrets
metrics.jsonl               the lines of its steps
rows.jsonl                  fate, reward and advantage of each rollout; no texts
batches/STEP.safetensors    the tokens of a step, and what was computed for them   (--with-data)
state/step-N/...            the checkpoint before, and the one after it            (--with-weights)
models/GROUP/...            the model's config, tokenizer and weights              (--with-weights)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from safetensors.torch import save

from rlite.assembly.proof.chained import versions
from rlite.assembly.proof.options import ReplayConfig
from rlite.assembly.proof.source import BATCHES, BUNDLE, MADE, Source, columns_of
from rlite.errors import ConfigError, DataError, writing
from rlite.nn.pretrained import local_checkpoint
from rlite.runtime.storage.atomic import MANIFEST
from rlite.services.record.files import TRAIN
from rlite.services.record.reader import RecordReader

FORMAT = 1
MAX_FILES, MAX_BYTES = 10_000, 256 << 30
"""files of a bundle, and their bytes together"""
SECRET = re.compile(r"(?i)(api_?key|secret|password|passwd|credential|auth_token|access_token|bearer)")
"""keys whose values no bundle has"""
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
REMOVED = "(removed)"


def without_secrets(tree: Any, key: str = "") -> Any:
    """Return options without values that are, or look like, secrets: by their keys, and by the environment."""
    if isinstance(tree, Mapping):
        return {name: without_secrets(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value, key) for value in tree]
    if not isinstance(tree, str):
        return tree
    secrets = [value for name, value in os.environ.items() if SECRET.search(name) or name.endswith(("_KEY", "_TOKEN"))]
    if SECRET.search(key) or any(len(value) >= 8 and value in tree for value in secrets):
        return REMOVED
    return re.sub(r"(?<=://)[^/@\s]+@", f"{REMOVED}@", tree)


def write_bundle(source: Source, step: int, path: Path, options: ReplayConfig) -> dict[str, str]:
    """Write the bundle of a step.

    Args:
        source: the run.
        step: the step.
        path: the file.
        options: say what it has.

    Returns:
        What the file has, in words.

    Raises:
        ConfigError: the run is a bundle itself, or weights are asked for without data.
        StorageError: the file cannot be written.
    """
    if source.bundle is not None:
        raise ConfigError(f"{options.run}: this is a bundle already")
    if options.with_weights and not options.with_data:
        raise ConfigError(
            "--with-weights: a checkpoint has the prompts that were under way; add --with-data, or leave it"
        )
    own, first = source.run.options(source.folder, options.code, False), source.first_step(step)
    steps = range(first, step + 1)
    partial = path.with_name(f".{path.name}.partial")
    tree = without_secrets(source.run.saved)
    facts: dict[str, Any] = {"format": FORMAT, "step": step, "trainer": source.run.name, "versions": versions()}
    facts |= {"total_steps": source.total_steps(own), "complete": {n: source.is_complete(n) for n in steps}}
    facts |= {"has_data": options.with_data, "has_weights": options.with_weights, "checkpoints": {}}
    with writing(path), zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
        for number in steps if options.with_data else ():
            columns = {key: value.contiguous() for key, value in columns_of(source.batch(number, own)).items()}
            columns |= {f"{MADE}{key}": value.contiguous() for key, value in source.made(number).items()}
            file.writestr(f"{BATCHES}/{number}.safetensors", save(columns))
        for checkpoint in filter(None, [source.checkpoint_before(step), _after(source, step)]):
            facts["checkpoints"][checkpoint.name] = hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
            if options.with_weights:
                for folder in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}-*")):
                    _add(file, folder, f"state/{folder.name}", ("*",))
        if options.with_weights:
            for group, model in _models(source.run.saved).items():
                _add(file, local_checkpoint(model), f"models/{group}", MODEL_FILES)
                tree[group]["model_name"] = f"models/{group}"
        file.writestr("config.yaml", yaml.safe_dump(tree))
        lines = [json.dumps(source.metrics(number)) for number in steps if source.metrics(number)]
        file.writestr("metrics.jsonl", "".join(f"{line}\n" for line in lines))
        if source.run.is_rl:
            file.writestr("rows.jsonl", "".join(_rows(source.folder, steps)))
        facts["hashes"] = {each.filename: f"{each.CRC:08x}" for each in file.infolist()}
        file.writestr(BUNDLE, json.dumps(facts, indent=2))
    partial.replace(path)
    data = "its tokens" if options.with_data else "no tokens (--with-data): it cannot be replayed"
    weights = "checkpoint and model" if options.with_weights else "no weights (--with-weights): name a run, weights=RUN"
    return {"file": f"{path}, {path.stat().st_size / 1e6:.1f} MB", "has": f"{data}; {weights}"}


def _after(source: Source, step: int) -> Path | None:
    return source.checkpoint(step) if source.has_checkpoint(step) else None


def _models(saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the models that a run begins with, by their group of options."""
    groups = {group: own for group, own in saved.items() if isinstance(own, Mapping) and own.get("model_name")}
    return {group: str(own["model_name"]) for group, own in groups.items()}


def _add(file: zipfile.ZipFile, folder: Path, name: str, patterns: tuple[str, ...]) -> None:
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        file.write(path, f"{name}/{path.name}", zipfile.ZIP_STORED)


def _rows(folder: Path, steps: range) -> Iterator[str]:
    reader = RecordReader(folder)
    reader.refresh()
    kept = ("step", "group", "sample", "status", "reward", "advantage", "response_tokens", "version_min", "version_max")
    for step in steps:
        for row in reader.rollouts(TRAIN, step):
            yield json.dumps({name: row[name] for name in kept}) + "\n"


@contextmanager
def open_source(options: ReplayConfig) -> Iterator[Source]:
    """Hold a run's folder, or a bundle that is unpacked meanwhile.

    Args:
        options: name the run.

    Yields:
        The run.

    Raises:
        ConfigError: there is no such run, or it was made with other versions of packages.
        DataError: the bundle cannot be opened safely.
    """
    path = Path(options.run).expanduser()
    weights = None if options.weights is None else Path(options.weights).expanduser()
    if path.is_dir():
        yield Source(path, weights, options.code)
        return
    if not path.is_file():
        raise ConfigError(f"{options.run}: expected the folder of a run, or a bundle")
    with tempfile.TemporaryDirectory(prefix="rlite-bundle-") as folder:
        unpack(path, Path(folder))
        source = Source(Path(folder), weights, options.code)
        if source.bundle is None or source.bundle.get("format") != FORMAT:
            raise DataError(f"{path}: no bundle of rlite, or of a later version")
        _place_models(source, Path(folder))
        there, here = source.bundle["versions"], versions()
        odd = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
        if odd and not options.any_versions:
            raise ConfigError(f"{path}: made with other versions ({'; '.join(odd)}). any_versions=true goes on")
        source.notes += [f"other versions: {text}" for text in odd]
        if not source.bundle["has_weights"] and weights is None:
            raise ConfigError(f"{path}: it has no weights; name the folder of the run: weights=RUN")
        yield source


def _place_models(source: Source, folder: Path) -> None:
    for own in source.run.saved.values():
        if isinstance(own, dict) and str(own.get("model_name", "")).startswith("models/"):
            own["model_name"] = str(folder / "models" / PurePosixPath(own["model_name"]).name)


def unpack(path: Path, folder: Path) -> None:
    """Unpack a bundle, which may come from anyone.

    Args:
        path: the file.
        folder: an empty folder.

    Raises:
        DataError: it is damaged, has a path that leads out of the folder, or is too large.
    """
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
            size = sum(entry.file_size for entry in entries)
            if len(entries) > MAX_FILES or size > min(MAX_BYTES, shutil.disk_usage(folder).free):
                raise DataError(f"{path}: {len(entries)} files of {size / 1e9:.1f} GB: too many, or no room for them")
            for entry in entries:
                parts = PurePosixPath(entry.filename).parts
                is_link = stat.S_ISLNK(entry.external_attr >> 16)
                if is_link or entry.is_dir() or not parts or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
                    raise DataError(f"{path}: it has an entry {entry.filename!r}, which no bundle has")
                if ".." in parts:
                    raise DataError(f"{path}: its entry {entry.filename!r} leads out of the bundle")
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(entry) as packed, target.open("xb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from error
