"""Look at the machine, and try rlite on it.

    rlite doctor [self_test=false executor=vllm] [--json]

Prints a line for each check as it is done. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import psutil
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement
from packaging.version import Version

import rlite
from rlite import config
from rlite.config import Options
from rlite.output import Result, columns


class Finding(NamedTuple):
    """The result of a check."""

    topic: str
    text: str
    level: Literal["ok", "note", "FAILED"] = "ok"

    def __str__(self) -> str:
        """Return one readable line."""
        return f"{self.level:<6}  {self.topic:<18}  {self.text}"


LAYOUT: dict[str, Any] = {
    "subsequent_indent": " " * 8,
    "break_on_hyphens": False,
    "break_long_words": False,
    "replace_whitespace": False,
}
"""lines below the first one of a finding, on a narrow terminal"""
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
        existing = next(each for each in (place, *place.absolute().parents) if each.exists())
        yield space_of(f"disk ({name})", place, shutil.disk_usage(existing).free)
    if not SHARED.is_dir():
        return
    free = shutil.disk_usage(SHARED).free
    is_little = free < LITTLE_SHARED
    advice = ": weights move between processes there; in a container, start it with --shm-size=8g" if is_little else ""
    yield Finding("shared memory", f"{_size(free)} free in {SHARED}{advice}", "note" if is_little else "ok")


def space_of(topic: str, place: Path, free: int) -> Finding:
    """Return whether a disk has room for checkpoints.

    `free`: free bytes.
    """
    if free >= LITTLE_DISK:
        return Finding(topic, f"{_size(free)} free in {place}")
    advice = "a checkpoint takes about 12 bytes for each trained parameter"
    return Finding(topic, f"only {_size(free)} free in {place}: {advice}", "FAILED" if free < NO_DISK else "note")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


class DoctorConfig(Options):
    """Options of `rlite doctor`."""

    help_example: ClassVar[str] = "executor=vllm"
    prints_json: ClassVar[bool] = True

    self_test: bool = True
    """train and generate with a tiny model"""
    executor: str = "torch"
    """inference executor of the self-test"""


PACKAGE = "rlite"


def check_packages() -> Iterator[Finding]:
    """Yield the state of the required packages, and of each extra."""
    try:
        found = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        yield Finding("packages", f"{PACKAGE} runs from its source and is not installed: pip install .", "note")
        return
    requirements = [Requirement(line) for line in found.requires or ()]
    yield state_of("required packages", needed(requirements), installed_version)
    for extra in found.metadata.get_all("Provides-Extra") or ():
        yield state_of(f"extra {extra}", needed(requirements, extra), installed_version, extra)


NEEDS = {"5.22": "expert parallelism (ep_size)"}
"""features that an older release of transformers lacks, by the release that brought them"""
NEWEST = "5.24"
"""newest release of transformers that rlite is tested with"""


def check_transformers() -> Iterator[Finding]:
    """Yield what the installed release of transformers lacks."""
    if (version := installed_version("transformers")) is not None:
        yield state_of_transformers(version)


def state_of_transformers(version: str) -> Finding:
    """Return what a release of transformers lacks."""
    lacking = [f"{what} needs {release}" for release, what in NEEDS.items() if Version(version) < Version(release)]
    if lacking:
        advice = f"pip install 'transformers>={[*NEEDS][-1]}'"
        return Finding("transformers", f"{version}: {', '.join(lacking)}: {advice}", "note")
    if Version(version).release[:2] > Version(NEWEST).release:
        return Finding("transformers", f"{version}: rlite is tested with releases up to {NEWEST}", "note")
    return Finding("transformers", f"{version} has all that rlite can use")


def needed(requirements: Iterable[Requirement], extra: str = "") -> list[Requirement]:
    """Return the requirements of the package itself, or those that an extra adds, with the extras that it names.

    `extra`: name of the extra; "" is the package itself.
    """
    requirements = list(requirements)
    chosen: list[Requirement] = []
    for each in requirements:
        is_base = each.marker is None or each.marker.evaluate({"extra": ""})
        if is_base != (not extra) or (each.marker is not None and not each.marker.evaluate({"extra": extra})):
            continue
        if each.name == PACKAGE:
            chosen += [one for other in sorted(each.extras) for one in needed(requirements, other)]
        else:
            chosen.append(each)
    return chosen


def state_of(
    topic: str, requirements: Iterable[Requirement], version_of: Callable[[str], str | None], extra: str = ""
) -> Finding:
    """Return which versions are installed, and which packages are missing or have another version.

    `version_of`: returns the installed version of a package; None if it is not installed. `extra`: the extra that adds
    the packages. Missing packages are not failures.
    """
    versions = {each: version_of(each.name) for each in requirements}
    wrong = [
        f"{each.name}{each.specifier} (found {version or 'none'})"
        for each, version in versions.items()
        if version is None or not each.specifier.contains(version, prereleases=True)
    ]
    if not wrong:
        return Finding(topic, ", ".join(f"{each.name} {version}" for each, version in versions.items()))
    if extra:
        return Finding(topic, f"lacks {', '.join(wrong)}: pip install '{PACKAGE}[{extra}]'", "note")
    return Finding(topic, f"expected {', '.join(wrong)}: pip install {PACKAGE}", "FAILED")


def installed_version(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str]) -> Result:
    """Print the findings of the checks.

    Returns the findings; the exit status is 1 if a check failed.
    """
    options = config.load(DoctorConfig, argv)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {"versions": check_versions, "packages": check_packages}
    checks |= {"transformers": check_transformers}
    checks |= {"devices": check_devices, "space": check_space}
    if options.self_test:
        module = "rlite.assembly.commands.self_test"  # it imports torch, which a broken installation cannot
        checks["self-test"] = lambda: importlib.import_module(module).check_engines(options.executor)
    return tell((finding for name, check in checks.items() for finding in attempt(name, check)), "all checks passed")


def tell(findings: Iterable[Finding], passed: str) -> Result:
    """Print findings as they are made.

    Returns the findings and the topics of the failed ones; the exit status is 1 if there are any.
    """
    told = []
    for finding in findings:
        print(*textwrap.wrap(str(finding), columns(sys.maxsize), **LAYOUT), sep="\n", flush=True)
        told.append(finding)
    failed = [finding.topic for finding in told if finding.level == "FAILED"]
    print(f"\n{len(failed)} of the checks failed: {', '.join(failed)}" if failed else f"\n{passed}")
    return Result({"findings": [finding._asdict() for finding in told], "failed": failed}, status=1 if failed else 0)


def attempt(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. An exception is a failed check."""
    try:
        yield from check()
    except Exception as error:  # the doctor reports anything that is broken on this machine
        yield Finding(name, f"{type(error).__name__}: {error}", "FAILED")
