"""Compare the packages that rlite's own metadata asks for with the packages that are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from rlite.doctor.finding import Finding

PACKAGE = "rlite"
VersionOf = Callable[[str], str | None]


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


def needed(requirements: Iterable[Requirement], extra: str = "") -> list[Requirement]:
    """Return the requirements of the package itself, or those that an extra adds, with the extras that it names.

    Args:
        requirements: all requirements of the package.
        extra: name of the extra; "" is the package itself.
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


def state_of(topic: str, requirements: Iterable[Requirement], version_of: VersionOf, extra: str = "") -> Finding:
    """Return which versions are installed, and which packages are missing or have another version.

    Args:
        topic: name of the check.
        requirements: the packages, with their versions.
        version_of: returns the installed version of a package; None if it is not installed.
        extra: the extra that adds the packages. Missing packages are not failures.
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
