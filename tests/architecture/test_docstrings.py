"""Rules for docstrings that ruff does not check: arguments, and a first word that says something."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from docs import generate_interfaces

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


def public_functions() -> Iterator[tuple[str, Function, str]]:
    """Yield the place, the tree and the docstring of every function and method that docs/interfaces.md lists."""
    public = set()
    for module in generate_interfaces.MODULES:
        for name, value in generate_interfaces.public_names(module):
            members = list(generate_interfaces.members(value)) if inspect.isclass(value) else [(name, value)]
            functions = [inspect.unwrap(member) for _, member in members if inspect.isfunction(member)]
            public |= {(function.__code__.co_filename, function.__code__.co_firstlineno) for function in functions}
    for path in checked_files():
        for node, text in documented(path):
            first = min(each.lineno for each in [node, *node.decorator_list]) if isinstance(node, Function) else 0
            if (str(path), first) in public:
                assert isinstance(node, Function)
                yield place(path, node), node, text


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without the functions inside of it."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        yield (node := pending.pop())
        pending += [
            child for child in ast.iter_child_nodes(node) if not isinstance(child, Function | ast.ClassDef | ast.Lambda)
        ]


def missing_sections(function: Function, text: str) -> list[str]:
    """Return the sections of Google's style that a docstring lacks, and the exceptions that it does not name."""
    given = function.args
    parameters = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    nodes = list(own_nodes(function))
    raised = [
        node.exc.func.id
        for node in nodes
        if isinstance(node, ast.Raise)
        if isinstance(node.exc, ast.Call)
        if isinstance(node.exc.func, ast.Name) and node.exc.func.id[0].isupper()
    ]
    result = ast.unparse(function.returns) if function.returns else "None"
    has_result = result not in ("None", "Iterator[None]") and not result.endswith(
        "Builder"
    )  # whose methods are chained
    is_told = any(word in text for word in ("Return ", "Yield ", "Returns:", "Yields:"))
    missing = ["Args"] if len({*parameters} - {"self", "cls"}) >= MIN_PARAMETERS and "Args:" not in text else []
    missing += ["Returns"] if has_result and not is_told else []
    return missing + [name for name in dict.fromkeys(raised) if name not in text]


def test_public_names_have_sections_in_googles_style() -> None:
    """Inner names have a sentence, and shapes and units if the code does not say them."""
    missing = {place: found for place, tree, text in public_functions() if (found := missing_sections(tree, text))}
    assert missing == {}


def test_a_violation_would_be_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('def total(a, b, c):\n    """What they are together."""\n')
    [(node, text)] = documented(module)
    assert isinstance(node, Function)
    assert is_vague(text)
    assert missing_sections(node, text) == ["Args"]
    module.write_text('class Wait:\n    seconds: float = 1.0\n    """how long to wait"""\n')
    [(assignment, text)] = described(module)
    assert assignment.lineno == 2
    assert is_vague(text)
