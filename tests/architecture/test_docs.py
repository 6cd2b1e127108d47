"""Everything that the documents name exists: links, imports of programs, algorithms with their options."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlite.algorithms import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from rlite.registry import options_of

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "recipes")
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(page for at in FOLDERS for page in at.rglob("*.md"))]
OPTIONAL = {"rlite.evaluation.lm_eval": "lm_eval"}
"""modules whose package only `make test-harness` installs, which reads their page, too"""
NOT_IN_TRAINERS = {"remax"}


def programs(path: Path) -> list[ast.Module]:
    """Return the page's Python blocks, without blocks that only show the form of a call."""
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    return [ast.parse(block) for block in blocks if " -> (" not in block]


LINK = re.compile(r"\]\((?P<target>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
MADE = {
    "install.md": ROOT / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}
"""pages that only the site has, and the files that they are made from"""
MAX_WORDS = 2500
GENERATED = {"architectures.md", "gpu_rehearsal.md", "interfaces.md"}


def prose(path: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    dead = []
    for link in LINK.finditer(prose(path)):
        target, anchor = link["target"], link["anchor"]
        if ":" in target:
            if not re.fullmatch(r"https?://[\w.-]+(?::\d+)?(?:/\S*)?|mailto:\S+", target):
                dead.append(target)
            continue
        file = MADE.get(target, path.parent / target) if target else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{target}#{anchor}")
    assert dead == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_no_page_is_too_long_to_read(path: Path) -> None:
    assert path.name in GENERATED or len(path.read_text().split()) <= MAX_WORDS


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_documented_programs_exist(path: Path) -> None:
    for program in programs(path):
        for node in ast.walk(program):
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("rlite"):
                if node.module in OPTIONAL and importlib.util.find_spec(OPTIONAL[node.module]) is None:
                    continue
                module = importlib.import_module(node.module)
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize(
    ("table", "given"), [(POLICY_LOSSES, ()), (ADVANTAGES, ("lengths",)), (PREFERENCE_LOSSES, ("beta",))]
)
def test_every_algorithm_is_documented_with_its_options(table: Mapping[str, Any], given: Collection[str]) -> None:
    paragraphs = re.split(r"\n(?=\||\n)", (ROOT / "docs" / "algorithms.md").read_text())
    for name in table.keys() - NOT_IN_TRAINERS:
        told = next(paragraph for paragraph in paragraphs if f"`{name}`" in paragraph)
        options = options_of(table[name]).keys() - set(given)
        assert [option for option in options if f"`{option}" not in told] == [], name


STORY = ROOT / "docs" / "life-of-a-token.md"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_library_that_a_page_names_exist(path: Path) -> None:
    named = re.findall(r"`(rlite/[\w./*]+)`", path.read_text())
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_functions_in_the_life_of_a_token_stand_in_the_files_that_it_names() -> None:
    """A name that follows a file, `NAME` (`rlite/FILE.py`), is defined or used there."""
    told = re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`\s+\(`(rlite/[\w/]+\.py)`", STORY.read_text())
    assert len(told) >= 8, "each phase names its function"
    missing = [(name, file) for name, file in told if name.split(".")[-1] not in defined(ROOT / file)]
    assert missing == []


def defined(file: Path) -> set[str]:
    """Names of the functions and classes of a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)}
