"""The machine: versions, devices, memory and disk."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from huggingface_hub.constants import HF_HUB_CACHE

import rlite
from rlite.doctor.finding import Finding

GIB = 2**30
LITTLE_DISK, NO_DISK = 10 * GIB, GIB // 10
LITTLE_SHARED = GIB
SHARED = Path("/dev/shm")


def check_versions() -> Iterator[Finding]:
    """Yield the versions of rlite, Python and the system."""
    yield Finding("rlite", f"{rlite.__version__}, {Path(rlite.__file__).parent}")
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")


def check_devices() -> Iterator[Finding]:
    """Yield the processors and GPUs, and whether torch can use them."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    yield Finding("processor", f"{num_cores} cores, {_size(memory.available)} of {_size(memory.total)} memory free")
    if shutil.which(os.environ.get("CC", "cc")) is None:
        yield Finding("compiler", "no C compiler (cc): generation on a processor is slower without it", "note")
    torch = importlib.import_module("torch")  # which a broken installation cannot import
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{about.name}, {_size(about.total_memory)}, CUDA {torch.version.cuda} of torch")
    if not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        build = "is built without CUDA" if torch.version.cuda is None else f"is built for CUDA {torch.version.cuda}"
        reason = f"torch {torch.__version__} {build}: install a build of torch that fits the driver (nvidia-smi)"
        yield Finding("GPU", f"there is a GPU, and torch cannot use it. {reason}", "FAILED")
    elif not torch.cuda.is_available():
        yield Finding("GPU", "none: rlite runs on the processor")


def check_space() -> Iterator[Finding]:
    """Yield the free space for runs, temporary files, downloaded models and shared memory."""
    places = {"runs": Path.cwd(), "temporary": Path(tempfile.gettempdir()), "models": Path(HF_HUB_CACHE)}
    for name, place in places.items():
        yield space_of(f"disk ({name})", place, shutil.disk_usage(_existing(place)).free)
    if not SHARED.is_dir():
        return
    free = shutil.disk_usage(SHARED).free
    is_little = free < LITTLE_SHARED
    advice = ": weights move between processes there; in a container, start it with --shm-size=8g" if is_little else ""
    yield Finding("shared memory", f"{_size(free)} free in {SHARED}{advice}", "note" if is_little else "ok")


def space_of(topic: str, place: Path, free: int) -> Finding:
    """Return whether a disk has room for checkpoints.

    Args:
        topic: name of the check.
        place: a folder on the disk.
        free: free bytes.
    """
    if free >= LITTLE_DISK:
        return Finding(topic, f"{_size(free)} free in {place}")
    advice = "a checkpoint takes about 12 bytes for each trained parameter"
    return Finding(topic, f"only {_size(free)} free in {place}: {advice}", "FAILED" if free < NO_DISK else "note")


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
