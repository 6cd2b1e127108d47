"""Write the files of a release that repeat pyproject.toml: python -m tools.release_files

CITATION.cff, SECURITY.md and the links beside the issue templates come from the name, version, authors and urls there.
What the table of urls lacks is left out.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SECURITY = """\
# Security policy

Fixes are made for the newest release, and listed under Security in CHANGELOG.md.

## Report a vulnerability

{where}

Say which version (`rlite --version`) and which command or function, what an attacker controls, what happens, and how to
repeat it. Leave tokens, keys and other people's data out.

## What counts

- Code that runs because of a model folder, a data file, a recorded run or a server's answer. Python files that you name
  (rewards, environments, `--import`) run by design.
- A reward, environment or tool that leaves its sandbox process, or that reads or changes another one's results.
- Requests that `rlite serve`, the endpoint of agents or `rlite view` answer without the token that they ask for.
- Secrets (tokens, keys, values of the environment) in logs, records, checkpoints or exports.

`rlite serve` and `rlite view` encrypt nothing: a proxy does so for other machines. The sandbox of rewards is for faults
and for models that look for gaps, not for programs of an attacker; run those in a container.
"""
PRIVATELY = "Report it at <{security}>. Open no public issue for it."
UNKNOWN = "Report it in private to whoever you have this copy of rlite from. Open no public issue for it."


def citation(project: dict[str, Any]) -> str:
    """Return CITATION.cff."""
    urls = project.get("urls", {})
    links = {"repository-code": urls.get("Repository"), "url": urls.get("Documentation")}
    return "\n".join(
        [
            "cff-version: 1.2.0",
            "message: If you use rlite in your work, cite it with these data.",
            "type: software",
            f"title: {project['name']}",
            f"abstract: {project['description']}",
            f"version: {project['version']}",
            f"license: {project['license']}",
            "authors:",
            *(f"  - name: {author['name']}" for author in project["authors"]),
            *(f"{key}: {url}" for key, url in links.items() if url),
            "",
        ]
    )


def security(project: dict[str, Any]) -> str:
    """Return SECURITY.md."""
    url = project.get("urls", {}).get("Security")
    return SECURITY.format(where=PRIVATELY.format(security=url) if url else UNKNOWN)


def issue_links(project: dict[str, Any]) -> str:
    """Return the configuration of the page on which a visitor chooses an issue template."""
    urls = project.get("urls", {})
    shown = {"Security": "A vulnerability, in private", "Documentation": "The documentation, with answers to questions"}
    links = [(name, about, urls[name]) for name, about in shown.items() if urls.get(name)]
    lines = [f"  - name: {name}\n    about: {about}\n    url: {url}" for name, about, url in links]
    return "\n".join(["blank_issues_enabled: true", *(["contact_links:", *lines] if lines else []), ""])


def release_files(project: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file, by its path in the repository."""
    return {
        "CITATION.cff": citation(project),
        "SECURITY.md": security(project),
        ".github/ISSUE_TEMPLATE/config.yml": issue_links(project),
    }


def main() -> None:
    """Write the files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, text in release_files(project).items():
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
