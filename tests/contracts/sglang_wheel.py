"""Facts about SGLang that its wheel states: the fields of its requests and responses, and code that needs only torch.

`make test` unpacks the wheel next to the libraries of tests/peers, without its dependencies. It is never imported:
fields come from its syntax trees, and the few functions that are run are taken out of its files one by one.
"""

from __future__ import annotations

import ast
import base64
import functools
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

FOLDER = Path(os.environ.get("RLITE_SGLANG_WHEEL", f"{sys.prefix}/peers"))
PACKAGE = FOLDER / "sglang"
IS_HERE = (PACKAGE / "srt").is_dir()
REASON = f"SGLang's wheel is not in {FOLDER}: `make test` puts it there, for the platforms that have it"


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(), path)


def classes(path: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree(path).body if isinstance(node, ast.ClassDef)}


@functools.cache
def fields_of(name: str) -> frozenset[str]:
    """Fields of a request class, with those of its bases."""
    known = classes("srt/managers/io_struct.py")
    node = known[name]
    own = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
    return frozenset(own.union(*map(fields_of, bases)))


@functools.cache
def routes() -> dict[str, str | None]:
    """The request class of each path, None for a path that takes no JSON object."""
    found: dict[str, str | None] = {}
    known = classes("srt/managers/io_struct.py")
    for function in tree("srt/entrypoints/http_server.py").body:
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        notes = [ast.unparse(argument.annotation) for argument in function.args.args if argument.annotation]
        names = [note.removeprefix("Annotated[").removesuffix(", Body()]") for note in notes]
        taken = next((name for name in names if name in known), None)
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("app.get", "app.post", "app.api_route"):
                found[ast.unparse(call.args[0]).strip("'")] = taken
    return found


@functools.cache
def sampling_fields() -> frozenset[str]:
    """Names that SGLang's own check of `sampling_params` admits; it refuses others."""
    return _literal("api/v1/api_types.py", "_FIELDS_SamplingParams")


@functools.cache
def server_arguments() -> frozenset[str]:
    return _literal("srt/arg_groups/field_order.py", "POSITIONAL_FIELD_ORDER")


def _literal(path: str, name: str) -> frozenset[str]:
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return frozenset(ast.literal_eval(node.value))
    raise LookupError(f"{name} is not in {path}")


@functools.cache
def response_keys(path: str) -> frozenset[str]:
    """Keys of the dictionaries that a file writes."""
    return frozenset(_written(tree(path)))


def _written(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        keys: list[Any] = []
        if isinstance(child, ast.Dict):
            keys = child.keys
        elif isinstance(child, ast.Subscript) and isinstance(child.ctx, ast.Store):
            keys = [child.slice]
        yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def tensor_bucket() -> ModuleType:
    """SGLang's module of flattened buckets, which imports nothing but torch."""
    spec = importlib.util.spec_from_file_location("tensor_bucket", PACKAGE / "srt/weight_sync/tensor_bucket.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def common() -> SimpleNamespace:
    """SGLang's reader of pickled tensors, and its way into a process group."""
    wanted = {
        *("MultiprocessingSerializer", "SafeUnpickler", "_safe_load_torch_storage", "init_custom_process_group"),
        *("normalize_serialized_named_tensor_payload", "_looks_like_pickle_payload"),
    }
    path = "srt/utils/common.py"
    nodes = [node for node in tree(path).body if getattr(node, "name", None) in wanted]
    future = ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0)
    module = ast.fix_missing_locations(ast.Module([future, *nodes], []))
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    names: dict[str, Any] = {"io": io, "pickle": pickle, "torch": torch, "pybase64": base64, "torch_release": release}
    exec(compile(module, path, "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in wanted})
