"""Option classes: each has a name of its own."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "rlite"


def test_no_two_option_classes_have_the_same_name() -> None:
    trees = [ast.parse(path.read_text()) for path in ROOT.rglob("*.py")]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, num in Counter(names).items() if num > 1 and name.endswith(("Options", "Config"))] == []
