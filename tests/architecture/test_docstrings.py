"""Rules for docstrings that ruff does not check: arguments, and a first word that says something."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
VAGUE = ("As", "How", "Its", "Of", "That", "Those", "What", "Where", "Whether", "Which")
MIN_PARAMETERS = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module
Assignment = ast.Assign | ast.AnnAssign


def checked_files() -> list[Path]:
    """Modules whose docstrings ruff checks, too."""
    ignored = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    pending = {path for pattern, rules in ignored.items() if "D" in rules for path in ROOT.glob(f"{pattern}/*.py")}
    pending |= {ROOT / pattern for pattern, rules in ignored.items() if "D" in rules and pattern.endswith(".py")}
    return [path for path in sorted((ROOT / "rlite").rglob("*.py")) if path not in pending]


def documented(path: Path) -> Iterator[tuple[Documented, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
            yield node, text


def described(path: Path) -> Iterator[tuple[Assignment, str]]:
    """Yield the assignments that a string describes, and the string."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", ())
        for assignment, text in pairwise(body if isinstance(body, list) else ()):
            constant = text.value if isinstance(text, ast.Expr) else None
            if isinstance(assignment, Assignment) and isinstance(constant, ast.Constant):
                yield assignment, str(constant.value)


def is_vague(text: str) -> bool:
    words = text.split(maxsplit=1)
    return bool(words) and words[0].rstrip(".,:;").capitalize() in VAGUE


def place(path: Path, node: ast.stmt | ast.Module) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    vague = [place(path, node) for path in checked_files() for node, text in documented(path) if is_vague(text)]
    assert vague == []


def test_descriptions_of_constants_and_fields_begin_with_a_noun() -> None:
    """`--help` and docs/interfaces.md show them."""
    vague = [
        f"{place(path, node)}: {text}" for path in checked_files() for node, text in described(path) if is_vague(text)
    ]
    assert vague == []


def test_public_functions_of_several_parameters_say_what_their_arguments_are() -> None:
    def parameters(function: Function) -> list[str]:
        given = function.args
        named = [argument.arg for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
        return [name for name in named if name not in ("self", "cls")]

    silent = [
        place(path, node)
        for path in checked_files()
        for node, text in documented(path)
        if isinstance(node, Function) and not node.name.startswith("_")
        if len(parameters(node)) >= MIN_PARAMETERS and "Args:" not in text
        if not any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)  # a sentence gives the shapes
    ]
    assert silent == []


def test_a_violation_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('def total(a, b, c):\n    """What they are together."""\n')
    [(node, text)] = documented(module)
    assert isinstance(node, Function)
    assert is_vague(text)
    assert "Args:" not in text
    module.write_text('class Wait:\n    seconds: float = 1.0\n    """how long to wait"""\n')
    [(assignment, text)] = described(module)
    assert assignment.lineno == 2
    assert is_vague(text)
