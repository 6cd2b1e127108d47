"""Count the library's source lines: no blank line, no comment, no docstring.

python -m benchmarks.sloc               one line per package, and the total; `make sloc`
python -m benchmarks.sloc OTHER_CHECKOUT        the same beside another checkout, such as the last release
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WHOLE = ("PpoConfig", "GrpoConfig", "SupervisedConfig", "SftConfig", "RmConfig", "DpoConfig", "KtoConfig", "EvalConfig")
"""classes of the options of a whole run"""
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Shape:
    """Sizes of one checkout of the library."""

    lines: Counter[str] = field(default_factory=Counter)
    """source lines, here by package"""
    files: Counter[str] = field(default_factory=Counter)
    modules: dict[str, int] = field(default_factory=dict)
    num_raises: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=dict)
    whole: list[str] = field(default_factory=list)
    """functions that receive the options of a whole run"""


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the numbers of lines that hold a bare string: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def source_lines(text: str) -> set[int]:
    """Return the numbers of the lines of a module that hold code."""
    covered: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            covered.update(range(token.start[0], token.end[0] + 1))
    return covered - set(docstring_lines(ast.parse(text)))


def takes_whole(node: ast.AST) -> bool:
    """Return whether a function has a parameter with the options of a whole run; `self` does not count."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return any(each.annotation is not None and ast.unparse(each.annotation) in WHOLE for each in given)


def shape_of(root: Path) -> Shape:
    """Measure every module of the package `root/rlite`."""
    shape = Shape()
    for path in sorted((root / "rlite").rglob("*.py")):
        text, relative = path.read_text(encoding="utf-8"), path.relative_to(root / "rlite")
        package = str(relative.parent)
        code = source_lines(text)
        shape.modules[str(relative)] = len(code)
        shape.lines[package] += shape.modules[str(relative)]
        shape.files[package] += 1
        for node in ast.walk(ast.parse(text)):
            shape.num_raises += isinstance(node, ast.Raise)
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                sizes = shape.classes if isinstance(node, ast.ClassDef) else shape.functions
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                shape.whole += [f"{relative}:{node.name}"] if takes_whole(node) else []
                sizes[f"{relative}:{node.name}"] = len(code.intersection(lines))
    return shape


def main(others: list[str]) -> None:
    """Print the table."""
    shapes = [*(shape_of(Path(other)) for other in others), shape_of(Path(__file__).parents[1])]
    for package in sorted({package for shape in shapes for package in shape.lines}):
        print(f"{package:28}", *(f"{shape.lines[package]:7} in {shape.files[package]:3}" for shape in shapes))
    print(f"{'source lines':28}", *(f"{shape.lines.total():7} in {shape.files.total():3}" for shape in shapes))
    print(f"{'raise statements':28}", *(f"{shape.num_raises:14}" for shape in shapes))
    print(f"{'take the whole config':28}", *(f"{len(shape.whole):14}" for shape in shapes))
    for what in ("classes", "functions"):
        largest = [sorted(getattr(shape, what).items(), key=lambda item: -item[1])[:3] for shape in shapes]
        for each in largest:
            print(f"largest {what}:", ", ".join(f"{name} {length}" for name, length in each))


if __name__ == "__main__":
    main(sys.argv[1:])
