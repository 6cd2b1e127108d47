"""Files for who publishes, cites or reports: they repeat pyproject.toml, call the targets of CI, and invent nothing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from rlite import __version__
from tools.release_files import release_files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORGE = ROOT / ".github"


def test_files_are_as_pyproject_says() -> None:
    """`make release-files` writes them."""
    for name, text in release_files(PROJECT).items():
        assert (ROOT / name).read_text() == text, f"{name}: make release-files"
    assert PROJECT["version"] == __version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version"} <= citation.keys()
    assert citation["version"] == __version__


def test_a_link_that_is_not_known_is_left_out_and_a_known_one_is_written_everywhere() -> None:
    bare = release_files(PROJECT | {"urls": {}})
    assert [name for name, text in bare.items() if "://" in text] == []
    urls = {name: f"https://forge.example/{name}" for name in ("Repository", "Documentation", "Security")}
    full = release_files(PROJECT | {"urls": urls})
    citation = yaml.safe_load(full["CITATION.cff"])
    assert (citation["repository-code"], citation["url"]) == (urls["Repository"], urls["Documentation"])
    assert f"<{urls['Security']}>" in full["SECURITY.md"]
    links = yaml.safe_load(full[".github/ISSUE_TEMPLATE/config.yml"])["contact_links"]
    assert [link["url"] for link in links] == [urls["Security"], urls["Documentation"]]


def test_workflows_of_the_forge_run_the_targets_of_ci() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (FORGE / "workflows").glob("*.yml")}
    targets = re.findall(r"^run ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert workflows["ci"]["jobs"]["make"]["strategy"]["matrix"]["target"] == targets
    known = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    steps = [step for each in workflows.values() for job in each["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert {command.removeprefix("make ") for command in commands} <= {*known, "${{ matrix.target }}"}
    assert all(each["permissions"] == {"contents": "read"} for each in workflows.values())


def test_issue_templates_ask_for_what_a_report_needs() -> None:
    for path in (FORGE / "ISSUE_TEMPLATE").glob("*_*.yml"):
        template = yaml.safe_load(path.read_text())
        assert template["name"]
        assert template["description"]
        fields = [field for field in template["body"] if field["type"] != "markdown"]
        assert any(field.get("validations", {}).get("required") for field in fields)
