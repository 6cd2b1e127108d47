"""The mock GPU from Python: its counters, where the program waits, and what has to differ because kernels do nothing.

Import it before anything else that uses CUDA. Values on the device are those that the host copied there, and zeros.
"""

from __future__ import annotations

import atexit
import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rlite

# rlite before torch: it sets how idle threads wait, which torch reads once
import torch  # isort: skip

ROOT = Path(rlite.__file__).parents[1]
TORCH, HIDDEN = "/site-packages/torch/", "/tools/mock_gpu/mock.py"
"""files whose lines are not where a program waits"""
LIBRARY: Any = ctypes.CDLL(None)
LIBRARY.mock_counter_names.restype = ctypes.c_char_p
NAMES = LIBRARY.mock_counter_names().decode().split()

_places: Counter[str] = Counter()
_violations: Counter[str] = Counter()


@dataclass(frozen=True)
class Usage:
    """Calls of CUDA in a block of code."""

    counts: Counter[str] = field(default_factory=Counter)
    """by the names of `stubs/mock.h`"""
    places: Counter[str] = field(default_factory=Counter)
    """waits by the line of rlite that waited, as "file:line call" """

    def __getitem__(self, name: str) -> int:
        return self.counts[name]


def _read() -> Counter[str]:
    values = (ctypes.c_long * len(NAMES))()
    LIBRARY.mock_read(values)
    return Counter(dict(zip(NAMES, values, strict=True)))


@contextmanager
def counting() -> Iterator[Usage]:
    """Count the calls of CUDA in the block, of all threads.

    Yields:
        The calls, complete when the block has ended.
    """
    usage, before, places = Usage(), _read(), _places.copy()
    yield usage
    usage.counts.update({name: count - before[name] for name, count in _read().items()})
    usage.places.update(_places - places)


def _place(call: bytes) -> str:
    """Return the innermost line of rlite, or of the program, that runs."""
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(HIDDEN) and TORCH not in f.filename]
    own = next((f for f in reversed(frames) if f.filename.startswith(f"{ROOT}/rlite/")), None)
    shown = [f for f in (own, *frames[-1:]) if f is not None]
    texts = [f"{f.filename.removeprefix(f'{ROOT}/').rpartition('/site-packages/')[2]}:{f.lineno}" for f in shown]
    return f"{' < '.join(dict.fromkeys(reversed(texts)))} {call.decode()}"


def _watcher(into: Counter[str]) -> Any:
    def watch(call: bytes) -> None:
        into[_place(call)] += 1

    return ctypes.CFUNCTYPE(None, ctypes.c_char_p)(watch)


_watchers = _watcher(_places), _watcher(_violations)
LIBRARY.mock_watch(*_watchers)
atexit.register(LIBRARY.mock_watch, None, None)  # Python's code must not run after Python


def total(name: str) -> int:
    """Return a counter since the start."""
    return _read()[name]


def print_places(what: str, places: Counter[str], num: int) -> None:
    """Print the lines that wait for the device, with their waits in one of `num` equal blocks."""
    for place, count in places.most_common(20):
        print(f"waits in {what}: {count / num:6.2f}  {place}")


def violations() -> list[str]:
    """Return where calls were made that a capture forbids."""
    return sorted(_violations)


def write_kernels(path: Path) -> None:
    """Write the names of all kernels so far, with their launches."""
    LIBRARY.mock_write_kernels(str(path).encode())


def write(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Write a value to a tensor without a call of CUDA: the memory of the mock GPU is the host's."""
    if tensor.is_cuda and not tensor.is_meta:
        made = torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
        ctypes.memmove(tensor.data_ptr(), made.data_ptr(), made.nbytes)
    return tensor


def _replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


def _over_ranks(runner: Any, values: list[float]) -> list[float]:
    """Return sums over ranks, each of which has what this rank has."""
    return [value * runner._mesh.dims.num_data_ranks for value in values]


class _Everything(set[str]):
    def __contains__(self, item: object) -> bool:
        return True


def stand_in_for_values() -> None:
    """Let checks of values pass: weights are finite, sums of ranks are those of this rank, and no text is decoded."""
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    from rlite.algorithms import reduce
    from rlite.backends.fsdp2.batch_runner import BatchRunner

    _replace(torch.Tensor, "all", lambda own: lambda self, *a, **k: write(own(self, *a, **k), 1))
    _replace(torch, "allclose", lambda own: lambda *a, **k: (own(*a, **k), True)[1])
    _replace(BatchRunner, "_sum", lambda own: lambda self, values: (own(self, values), _over_ranks(self, values))[1])
    reduce._checked = _Everything()  # else each result would be checked: no token counts on the device
    _replace(TokenizersBackend, "_decode", lambda own: lambda self, *a, **k: "")
    torch.backends.cuda.enable_cudnn_sdp(False)  # the real cuDNN, which finds no device


assert torch.cuda.is_available(), "run this by tools.mock_gpu.rehearse, which loads the mock GPU"
