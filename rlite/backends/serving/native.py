"""Compile and call `decode.c`: all of a decode step on CPU but its matrix products.

The library is compiled once for each machine, by the C compiler `$CC` or `cc`, in about a second. Without a compiler,
PyTorch computes these operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlite.backends.models.attention import Weighting
from rlite.backends.models.batch_invariant import BLOCK

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("decode.c")
# without -ffast-math, which would hide NaN
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
COMPILE_S = 120.0


_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIZES = ("num_rows", "num_heads", "num_kv_heads", "key_width", "value_width", "table_width", "window", "num_threads")


class _Shape(ctypes.Structure):
    _fields_ = (*((name, _INT) for name in _SIZES), ("scale", _FLOAT), ("softcap", _FLOAT))


SIGNATURES: dict[str, list[Any]] = {
    "decode_attention": [ctypes.POINTER(_Shape), *[_POINTER] * 9],
    "add_rms_norm": [_INT, _INT, _FLOAT, _INT, *[_POINTER] * 4],
    "rms_norm_rotate": [_INT, _INT, _INT, _FLOAT, _INT, *[_POINTER] * 4],
    "split_rotate": [_INT, _INT, _INT, _INT, _FLOAT, _INT, *[_POINTER] * 8],
    "split_silu_multiply": [_INT, _INT, _INT, _POINTER, _POINTER],
    "silu_multiply": [_INT, _INT, _POINTER, _POINTER],
    "draw": [_INT, _INT, _INT, *[_POINTER] * 5],
}
"""types of the arguments of each function in decode.c"""


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    weighting: Weighting,
) -> Tensor:
    """Write tokens to one layer of the paged cache, and return their attention.

    Rows of one sequence see each other up to their own position.

    `query`: `[rows, heads, key width]`. `key`: `[rows, kv_heads, key width]`. `value`: `[rows, kv_heads, value width]`.
    `positions`: `[rows]`, int64. `table`: pages of each row's sequence, `[rows, pages]`, int64. `keys`: `[all pages,
    kv_heads, key width, BLOCK]`. `values`: `[all pages, kv_heads, BLOCK, value width]`. Returns the output, `[rows,
    heads, value width]`.
    """
    rows, heads, dim = query.shape
    scale, window, softmax = weighting
    tensors = [t.contiguous() for t in (query, key, value, positions, table)]
    output = query.new_empty(rows, heads, width := value.shape[-1])
    sizes = (rows, heads, key.shape[1], dim, width, table.shape[1], window or 0, torch.get_num_threads())
    sinks = None if softmax.sinks is None else softmax.sinks.contiguous()
    shape = _Shape(*sizes, scale, softmax.softcap or 0)
    call("decode_attention", ctypes.byref(shape), *tensors, keys, values, sinks, output)
    return output


def draw(logits: Tensor, uniform: Tensor, is_greedy: Tensor) -> tuple[Tensor, Tensor]:
    """Return one token for each row, and its log-probability: NaN if the row holds NaN or infinity.

    `logits`: `[rows, vocabulary]`; -inf is never chosen. `uniform`: where to invert the cumulative distribution, in [0,
    1), `[rows]`. `is_greedy`: whether the row takes its most likely token, bool `[rows]`.
    """
    given = [t.contiguous() for t in (logits, uniform, is_greedy)]
    tokens, logprobs = logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits))
    call("draw", *logits.shape, torch.get_num_threads(), *given, tokens, logprobs)
    return tokens, logprobs


def call(name: str, *arguments: Any) -> None:
    """Call a function of decode.c.

    `*arguments`: its arguments. Tensors are contiguous and on CPU.
    """
    getattr(compiled(), name)(*map(_pointer, arguments))


def _pointer(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    assert argument.is_cpu
    assert argument.is_contiguous()
    return argument.data_ptr()


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the compiled library, None if this machine cannot compile it."""
    flags = (*FLAGS, f"-DBLOCK={BLOCK}")
    key = hashlib.sha256("\0".join((SOURCE.read_text(), *flags, _machine(), torch.__version__)).encode())
    try:
        path = _folder() / f"decode-{key.hexdigest()[:24]}.so"
        if not path.exists():
            _compile(path, flags)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        logger.info("decode steps run in PyTorch, which is slower: decode.c could not be compiled (%s)", told)
        return None
    for name, types in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def _compile(library: Path, flags: tuple[str, ...]) -> None:
    """Compile the library for the OpenMP that torch has loaded, so that both share one pool of threads."""
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects, made = Path(scratch) / "decode.o", Path(scratch) / "decode.so"
        # -fopenmp for the compiler alone: the linker would add the system's OpenMP as a second one
        for command in (
            [compiler, *flags, "-fopenmp", "-c", str(SOURCE), "-o", str(objects)],
            [compiler, "-shared", str(objects), "-o", str(made), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
        os.replace(made, library)  # at once: other processes may compile it too


def _folder() -> Path:
    """Return the folder of compiled libraries."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rlite"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written by other users")
    return folder


def _machine() -> str:
    """Return what the compiler's code depends on: a home directory may be shared by different processors."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{platform.machine()} {platform.system()} {flags}"
