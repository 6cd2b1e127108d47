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

import json
import lzma
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from safetensors.torch import save

from rlite import files
from rlite.assembly.proof.chained import versions
from rlite.assembly.proof.options import ReplayConfig
from rlite.assembly.proof.source import BATCHES, BUNDLE, MADE, BundleFacts, Source, columns_of
from rlite.errors import ConfigError, DataError, writing
from rlite.nn.pretrained import load_config, local_checkpoint
from rlite.runtime.storage.atomic import MANIFEST
from rlite.services.record.chain import hash_file, hash_files
from rlite.services.record.files import TRAIN, record_files
from rlite.services.record.reader import RecordReader
from rlite.trainer.run.folder import CHAIN

MAX_FILES, MAX_BYTES, MAX_RATIO = 10_000, 256 << 30, 200
"""files of a bundle, their bytes together, and how many bytes a byte of the zip may become beyond the first GiB"""
FREE = 1 << 30
"""bytes of a disk that unpacking leaves free"""
_KEYS = (
    *("secret", "passw", "passphrase", "credential", "bearer", "authorization", "cookie", "^token$", "^dsn$"),
    *(r"(api|access|private|signing|ssh|encryption)_?key", r"(^|[_-])(auth|access|api|refresh|session|hf|hub)_?token$"),
)
SECRET = re.compile("|".join(_KEYS), re.IGNORECASE)
"""keys whose values no bundle has"""
VALUES = re.compile(
    r"\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|eyJ)[\w.-]{12,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""values that look like tokens of well-known services"""
PROMPTS = ("system_prompt", "rubric", "env_config", "chat_template_options")
"""keys whose values may be prompts, which a bundle without data does not have"""
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
REMOVED = "(removed)"


def without_secrets(tree: Any, key: str = "") -> Any:
    """Return options without values that are, or look like, secrets: by their keys, and by the environment."""
    if SECRET.search(key) and tree not in (None, "", {}, []):
        return REMOVED
    if isinstance(tree, Mapping):
        return {name: without_secrets(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [without_secrets(value) for value in tree]
    if not isinstance(tree, str):
        return tree
    secrets = [value for name, value in os.environ.items() if SECRET.search(name) or name.endswith(("_KEY", "_TOKEN"))]
    if VALUES.search(tree) or any(len(value) >= 8 and value in tree for value in secrets):
        return REMOVED
    without_user = re.sub(r"(?<=://)[^/@\s]+@", f"{REMOVED}@", tree)
    return re.sub(r"(://[^\s?]*)\?\S+", rf"\1?{REMOVED}", without_user)


def without_prompts(tree: Any, key: str = "") -> Any:
    """Return options without texts that are a part of prompts."""
    if isinstance(tree, Mapping):
        return {} if key in PROMPTS else {name: without_prompts(value, str(name)) for name, value in tree.items()}
    return REMOVED if key in PROMPTS and tree else tree


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
    source.check_options(step)
    steps = range(first, step + 1)
    partial = path.with_name(f".{path.name}.partial")
    tree = without_secrets(source.run.saved)
    tree = tree if options.with_data else without_prompts(tree)
    checkpoints = [each for each in (source.checkpoint_before(step), _after(source, step)) if each is not None]
    try:
        with writing(path), zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            for number in steps if options.with_data else ():
                columns = {key: value.contiguous() for key, value in columns_of(source.batch(number, own)).items()}
                columns |= {f"{MADE}{key}": value.contiguous() for key, value in source.made(number).items()}
                file.writestr(f"{BATCHES}/{number}.safetensors", save(columns))
            for checkpoint in checkpoints if options.with_weights else ():
                for folder in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}-*")):
                    _add(file, folder, f"state/{folder.name}", ("*",), inside=checkpoint.parent)
            for group, model in (_models(source.run.saved) if options.with_weights else {}).items():
                load_config(model)  # raises unless it is a model: the options of a run may name any folder
                _add(file, local_checkpoint(model), f"models/{group}", MODEL_FILES)
                tree[group]["model_name"] = f"models/{group}"
            file.writestr("config.yaml", yaml.safe_dump(tree))
            lines = [json.dumps(source.metrics(number)) for number in steps if source.metrics(number)]
            file.writestr("metrics.jsonl", "".join(f"{line}\n" for line in lines))
            if source.run.is_rl:
                file.writestr("rows.jsonl", "".join(_rows(source.folder, steps)))
            facts = BundleFacts(
                format=1,
                step=step,
                trainer=source.run.name,
                versions=versions(),
                total_steps=source.total_steps(own),
                complete={number: source.is_complete(number) for number in steps},
                has_data=options.with_data,
                has_weights=options.with_weights,
                hashes=hash_files(_named(source.folder, steps, checkpoints)),
            )
            file.writestr(BUNDLE, json.dumps(asdict(facts), indent=2))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    data = "its tokens" if options.with_data else "no tokens, no system prompts (--with-data): it cannot be replayed"
    weights = "checkpoint and model" if options.with_weights else "no weights (--with-weights): name a run, weights=RUN"
    return {"file": f"{path}, {path.stat().st_size / 1e6:.1f} MB", "has": f"{data}; {weights}"}


def _named(folder: Path, steps: range, checkpoints: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files of a run whose hashes a bundle has, by their names in the run's folder."""
    yield from ((name, folder / name) for name in ("config.yaml", CHAIN))
    yield from ((f"state/{path.name}/{MANIFEST}", path / MANIFEST) for path in checkpoints)
    for file in record_files(folder):
        if file.source == TRAIN and file.first <= steps[-1] and steps[0] <= file.last:
            yield f"record/{file.path.name}", file.path


def _after(source: Source, step: int) -> Path | None:
    return source.checkpoint(step) if source.has_checkpoint(step) else None


def _models(saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the models that a run begins with, by their group of options."""
    groups = {group: own for group, own in saved.items() if isinstance(own, Mapping) and own.get("model_name")}
    return {group: str(own["model_name"]) for group, own in groups.items()}


def _add(file: zipfile.ZipFile, folder: Path, name: str, patterns: tuple[str, ...], inside: Path | None = None) -> None:
    """Add files of a folder.

    Raises:
        DataError: a file lies elsewhere: a run's folder from anyone could name any file by a link.
    """
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        if inside is not None and not files.is_inside(path, inside):
            raise DataError(f"{path}: {files.LEADS_OUT}, and no bundle has its target")
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
    weights = Path(options.weights).expanduser() if options.weights else None
    if path.is_dir():
        source = Source(path, weights, options.code)
        if source.chain is None:
            source.notes.append("the versions that made the run are not known: it has no chain.jsonl")
        else:
            check_versions(source, str(path), source.chain.last_versions, options.any_versions)
        yield source
        return
    if not path.is_file():
        raise ConfigError(f"{options.run}: expected the folder of a run, or a bundle")
    with tempfile.TemporaryDirectory(prefix="rlite-bundle-") as folder:
        unpack(path, Path(folder))
        source = Source(Path(folder), weights, options.code)
        if source.bundle is None:
            raise DataError(f"{path}: no bundle of rlite: it has no {BUNDLE}")
        _place_models(source, Path(folder))
        check_versions(source, str(path), source.bundle.versions, options.any_versions)
        if not source.bundle.has_weights and weights is None:
            raise ConfigError(f"{path}: it has no weights; name the folder of the run: weights=RUN")
        for name, wanted in source.bundle.hashes.items():
            is_checkpoint = name.startswith("state/") and name.endswith(MANIFEST)
            if weights is not None and is_checkpoint and hash_file(weights / name) != wanted:
                raise ConfigError(f"weights={weights}: its {name} is not that of the run that the bundle is from")
        yield source


def check_versions(source: Source, path: str, there: Mapping[str, Any], is_any_fine: bool) -> None:
    """Compare versions of packages; what differs is a note of the source if that is fine.

    Args:
        source: the run.
        path: its path, for the message.
        there: the versions that made it, by package.
        is_any_fine: go on in any case.

    Raises:
        ConfigError: they differ.
    """
    here = versions()
    odd = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    if odd and not is_any_fine:
        raise ConfigError(f"{path}: made with other versions ({'; '.join(odd)}). any_versions=true goes on")
    source.notes += [f"other versions: {text}" for text in odd]


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
            size, free = sum(entry.file_size for entry in entries), shutil.disk_usage(folder).free - FREE
            most = min(MAX_BYTES, FREE + MAX_RATIO * path.stat().st_size, free)
            if len(entries) > MAX_FILES or size > most:
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
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, RuntimeError, ValueError) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}") from error
