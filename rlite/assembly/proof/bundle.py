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
from rlite.assembly.proof.privacy import public
from rlite.assembly.proof.source import BATCHES, BUNDLE, MADE, BundleFacts, Source
from rlite.assembly.proof.trainers import check_teachers, columns_of
from rlite.errors import ConfigError, DataError, RliteError, writing
from rlite.nn.pretrained import load_config, local_checkpoint
from rlite.runtime.storage.atomic import MANIFEST
from rlite.services.record.chain import METRICS, hash_file, hash_files
from rlite.services.record.files import TRAIN, record_files
from rlite.trainer.run.folder import CHAIN, CONFIG

MAX_FILES, MAX_BYTES, MAX_RATIO = 10_000, 256 << 30, 200
"""files of a bundle, their bytes together, and how many bytes a byte of the zip may become beyond the first GiB"""
FREE = 1 << 30
"""bytes of a disk that unpacking leaves free"""
MODEL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
ROWS = ("step", "group", "sample", "status", "reward", "advantage", "response_tokens", "version_min", "version_max")
"""columns of rollouts that a bundle has"""


def write_bundle(source: Source, step: int, path: Path, options: ReplayConfig) -> dict[str, str]:
    """Write the bundle of a step.

    Returns what the file has, in words.
    """
    if source.bundle is not None:
        raise ConfigError(f"{options.run}: this is a bundle already")
    if options.with_weights and not options.with_data:
        raise ConfigError(
            "--with-weights: a checkpoint has the prompts that were under way; add --with-data, or leave it"
        )
    spans = source.spans(step)
    if len(spans) > 1:
        raise ConfigError(
            f"step {step}: the run went on with other options after step {spans[0][1]}, of which there is no checkpoint"
        )
    run, steps = source.run_at(step), range(spans[0][0], step + 1)
    own = run.options(source.folder, options.code)
    check_teachers(own)
    total = source.total_steps(own, step)
    tree = public(run.saved, options.with_data)
    checkpoints = [each for each in (source.checkpoint_before(step), source.checkpoint(step)) if each is not None]
    partial = path.with_name(f".{path.name}.partial")
    try:
        with writing(path), zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
            for number in steps if options.with_data else ():
                columns = {key: value.contiguous() for key, value in columns_of(source.batch(number, own)).items()}
                columns |= {f"{MADE}{key}": value.contiguous() for key, value in source.made(number).items()}
                file.writestr(f"{BATCHES}/{number}.safetensors", save(columns))
            for checkpoint in checkpoints if options.with_weights else ():
                for folder in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}-*")):
                    _add(file, folder, f"state/{folder.name}", ("*",), inside=checkpoint.parent)
            for group, model in _models(run.saved) if options.with_weights else ():
                load_config(model)  # raises unless it is a model: the options of a run may name any folder
                _add(file, local_checkpoint(model), f"models/{group}", MODEL_FILES)
                tree[group]["model_name"] = f"models/{group}"
            file.writestr(CONFIG, yaml.safe_dump(tree))
            lines = [json.dumps(source.metrics[number]) for number in steps if number in source.metrics]
            file.writestr(METRICS, "".join(f"{line}\n" for line in lines))
            rows = [row for number in steps if run.is_rl for row in source.reader.rollouts(TRAIN, number)]
            file.writestr("rows.jsonl", "".join(json.dumps({key: row[key] for key in ROWS}) + "\n" for row in rows))
            facts = BundleFacts(
                format=1,
                step=step,
                versions=versions(),
                total_steps=total,
                complete={number: source.is_complete(number) for number in steps},
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
    yield from ((name, folder / name) for name in (CONFIG, CHAIN))
    yield from ((f"state/{path.name}/{MANIFEST}", path / MANIFEST) for path in checkpoints)
    for file in record_files(folder):
        if file.source == TRAIN and file.first <= steps[-1] and steps[0] <= file.last:
            yield f"record/{file.path.name}", file.path


def _models(saved: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the groups of options with a model that a run begins with, and the model."""
    groups = [(group, own) for group, own in saved.items() if isinstance(own, Mapping)]
    return [(group, str(own["model_name"])) for group, own in groups if own.get("model_name")]


def _add(file: zipfile.ZipFile, folder: Path, name: str, patterns: tuple[str, ...], inside: Path | None = None) -> None:
    """Add files of a folder."""
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        if inside is not None and not files.is_inside(path, inside):
            raise DataError(f"{path}: {files.LEADS_OUT}, and no bundle has its target")
        file.write(path, f"{name}/{path.name}", zipfile.ZIP_STORED)


@contextmanager
def open_source(options: ReplayConfig) -> Iterator[Source]:
    """Hold a run's folder, or a bundle that is unpacked meanwhile."""
    path = Path(options.run).expanduser()
    if path.is_dir():
        source = Source(path, options)
        if source.chain.is_empty:
            source.notes.append("the versions that made the run are not known: it has no chain.jsonl")
        else:
            there = source.chain.begins[-1].get("versions") if source.chain.begins else None
            check_versions(source, str(path), there, options.any_versions)
        yield source
        return
    if not path.is_file():
        raise ConfigError(f"{options.run}: expected the folder of a run, or a bundle")
    with tempfile.TemporaryDirectory(prefix="rlite-bundle-") as scratch, naming_bundle(path, scratch):
        folder = Path(scratch)
        unpack(path, folder)
        source = Source(folder, options)
        if (bundle := source.bundle) is None:
            raise DataError(f"{path}: no bundle of rlite: it has no {BUNDLE}")
        for group, model in _models(source.run.saved) if bundle.has_weights else ():
            source.run.saved[group]["model_name"] = str(folder / "models" / PurePosixPath(model).name)
        check_versions(source, str(path), bundle.versions, options.any_versions)
        if not bundle.has_weights and options.weights is None:
            raise ConfigError(f"{path}: it has no weights; name the folder of the run: weights=RUN")
        for name, wanted in bundle.hashes.items():
            is_checkpoint = options.weights is not None and name.startswith("state/") and name.endswith(MANIFEST)
            if is_checkpoint and hash_file(source.weights / name) != wanted:
                told = f"weights={options.weights}: its {name} is not that of the run that the bundle is from"
                raise ConfigError(told)
        yield source


@contextmanager
def naming_bundle(path: Path, folder: str) -> Iterator[None]:
    """Let errors of the block name a bundle, and not the folder into which it is unpacked."""
    try:
        yield
    except RliteError as error:
        error.args = tuple(each.replace(folder, str(path)) if isinstance(each, str) else each for each in error.args)
        raise


def check_versions(source: Source, path: str, there: Any, is_any_fine: bool) -> None:
    """Compare versions of packages; what differs is a note of the source if that is fine."""
    here, there = versions(), there if isinstance(there, Mapping) else {}
    odd = [f"{name} {there.get(name)} there, {here[name]} here" for name in here if there.get(name) != here[name]]
    if odd and not is_any_fine:
        raise ConfigError(f"{path}: made with other versions ({'; '.join(odd)}). any_versions=true goes on")
    source.notes += [f"other versions: {text}" for text in odd]


def unpack(path: Path, folder: Path) -> None:
    """Unpack a bundle, which may come from anyone."""
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
