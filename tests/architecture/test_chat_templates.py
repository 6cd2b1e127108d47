"""Chat templates are read in `rlite/data/chat` alone."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "rlite"
READER = ROOT / "data/chat"
INTERPRETING = {"STAND_IN", "QUESTION", "ANSWER", "Ending", "num_shared"}
"""names of the reader with which rendered text is taken apart"""


def reads_template(node: ast.AST) -> bool:
    """Return whether this calls `apply_chat_template`, reads a tokenizer's template, or takes rendered text apart."""
    match node:
        case ast.Call(func=ast.Attribute(attr="apply_chat_template" | "get_chat_template")):
            return True
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value="chat_template"), *_]):
            return True
        case ast.Attribute(attr="chat_template", ctx=ast.Load()):
            return True
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("rlite.data.chat"):
            return any(name.name in INTERPRETING for name in names)
    return False


def test_no_other_module_reads_a_chat_template() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"  # type: ignore[attr-defined]
        for path in ROOT.rglob("*.py")
        if READER not in path.parents
        for node in ast.walk(ast.parse(path.read_text()))
        if reads_template(node)
    ]
    assert found == []
