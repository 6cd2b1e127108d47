"""Look at the machine, and try rlite on it.

    rlite doctor [self_test=false executor=vllm]

Prints a line for each check as it is done. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from rlite import config
from rlite.doctor.finding import Finding
from rlite.doctor.machine import check_devices, check_space, check_versions
from rlite.doctor.options import DoctorConfig
from rlite.doctor.packages import check_packages


def main(argv: Sequence[str]) -> None:
    """Print the findings of the checks; exit with 1 if a check failed."""
    options = config.load(DoctorConfig, argv)
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "versions": check_versions,
        "packages": check_packages,
        "devices": check_devices,
        "space": check_space,
    }
    if options.self_test:
        # imports torch and transformers, which a broken installation cannot
        checks["self-test"] = lambda: importlib.import_module("rlite.doctor.self_test").check_engines(options.executor)
    failed = []
    for name, check in checks.items():
        for finding in attempt(name, check):
            print(finding, flush=True)
            failed += [finding.topic] if finding.level == "FAILED" else []
    if failed:
        print(f"\n{len(failed)} of the checks failed: {', '.join(failed)}")
        sys.exit(1)
    print("\nall checks passed")


def attempt(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. An exception is a failed check.

    Args:
        name: name of the check.
        check: the check.
    """
    try:
        yield from check()
    except Exception as error:  # the doctor reports anything that is broken on this machine
        yield Finding(name, f"{type(error).__name__}: {error}", "FAILED")
