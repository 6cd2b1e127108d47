"""Calls of a program checked against the source of a library that cannot be imported here.

Both are parsed, nothing runs. A call is checked if its function, class or object is known: from an import, a
constructor, a classmethod, an annotation, or an attribute of `self` that was set so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition in the library: a module without a node, a function, a class, or an object of a class."""

    module: str
    node: ast.AST | None = None
    is_object: bool = False


@dataclass(frozen=True)
class Library:
    """Source of installed packages."""

    folder: Path
    packages: tuple[str, ...]

    @cache  # noqa: B019 the library lives as long as the test
    def tree(self, module: str) -> ast.Module | None:
        path = self.folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def find(self, module: str, name: str) -> Found | None:
        """Return a module's definition of a name, also if the module imports it."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | Function) and node.name == name and node.col_offset == 0:
                return Found(module, node)
        for node in ast.walk(tree):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                if name == (alias.asname or alias.name) or alias.name == "*":
                    source = self._absolute(module, node)
                    if source.split(".")[0] in self.packages and (found := self.find(source, alias.asname or name)):
                        return found
        return Found(f"{module}.{name}") if self.tree(f"{module}.{name}") else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self.folder.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def method(self, cls: Found, name: str) -> Function | None:
        """Return a method of a class or of its bases within the library."""
        assert isinstance(cls.node, ast.ClassDef)
        for node in cls.node.body:
            if isinstance(node, Function) and node.name == name:
                return node
        for base in self._bases(cls):
            if (found := self.method(base, name)) is not None:
                return found
        return None

    def fields(self, cls: Found) -> list[tuple[str, bool]]:
        """Return the names of a dataclass's fields, and whether each has to be given."""
        assert isinstance(cls.node, ast.ClassDef)
        inherited = [field for base in self._bases(cls) for field in self.fields(base)]
        own = [node for node in cls.node.body if isinstance(node, ast.AnnAssign)]
        return inherited + [(node.target.id, node.value is None) for node in own if isinstance(node.target, ast.Name)]

    def _bases(self, cls: Found) -> Iterator[Found]:
        assert isinstance(cls.node, ast.ClassDef)
        for base in cls.node.bases:
            found = self.find(cls.module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found


def mistakes(call: ast.Call, function: Function, is_bound: bool) -> list[str]:
    """Return how a call does not fit a function."""
    given = function.args
    positional = [each.arg for each in (*given.posonlyargs, *given.args)]
    positional = positional[1:] if is_bound else positional
    required = positional[: len(positional) - len(given.defaults)]
    required += [each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is None]
    known = {*positional, *(each.arg for each in given.kwonlyargs)}
    return _misfits(call, positional, required, known, given.vararg is not None, given.kwarg is not None)


def _misfits(
    call: ast.Call, positional: list[str], required: list[str], known: set[str], has_more: bool, has_others: bool
) -> list[str]:
    is_open = any(isinstance(each, ast.Starred) for each in call.args) or any(not each.arg for each in call.keywords)
    names = [each.arg for each in call.keywords if each.arg]
    wrong = [] if has_others else [f"no parameter {name!r}" for name in names if name not in known]
    if len(call.args) > len(positional) and not has_more:
        wrong.append(f"{len(call.args)} positional arguments for {len(positional)} parameters")
    taken = {*positional[: len(call.args)], *names}
    return wrong if is_open else wrong + [f"{name!r} is not given" for name in required if name not in taken]


class Program:
    """A program whose calls into a library are checked. `checked` and `wrong` are what was found."""

    def __init__(self, source: str, library: Library) -> None:
        self.library = library
        self.checked: set[str] = set()
        self.wrong: list[str] = []
        tree = ast.parse(source)
        self._names = dict(self._imports(tree))
        self._classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._check_class(node)
            elif isinstance(node, Function):
                self._check_function(node, {})

    def _imports(self, tree: ast.Module) -> Iterator[tuple[str, Found]]:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in self.library.packages:
                for alias in node.names:
                    found = self.library.find(node.module, alias.name)
                    if found is None:
                        self.wrong.append(f"{node.module} has no {alias.name}")
                    else:
                        yield alias.asname or alias.name, found

    def _check_class(self, cls: ast.ClassDef) -> None:
        body = self._body(cls)
        attributes: dict[str, Found] = {}
        for node in body:
            if isinstance(node, ast.Assign) and (found := self._type(node.value, {}, {})):
                attributes |= {target.id: found for target in node.targets if isinstance(target, ast.Name)}
        functions = [node for node in body if isinstance(node, Function)]
        for function in functions:
            for node in ast.walk(function):
                target = node.targets[0] if isinstance(node, ast.Assign) else None
                if isinstance(target, ast.Attribute) and isinstance(node, ast.Assign):
                    found = self._type(node.value, self._locals(function, attributes), attributes)
                    attributes |= {target.attr: found} if found else {}
        for function in functions:
            self._check_function(function, attributes)

    def _body(self, cls: ast.ClassDef) -> list[ast.stmt]:
        """Return the class's statements and those of its bases in the program that it does not override."""
        body = list(cls.body)
        own = {node.name for node in body if isinstance(node, Function)}
        for base in cls.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                inherited = self._body(self._classes[base.id])
                body += [node for node in inherited if getattr(node, "name", None) not in own]
        return body

    def _locals(self, function: Function, attributes: dict[str, Found]) -> dict[str, Found]:
        names = {}
        for each in function.args.args:
            found = self._names.get(each.annotation.id) if isinstance(each.annotation, ast.Name) else None
            names |= {each.arg: Found(found.module, found.node, True)} if found else {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Tuple):
                found = self._type(node.value, names, attributes)
                if found and isinstance(node.targets[0], ast.Name):
                    names[node.targets[0].id] = found
        return names

    def _check_function(self, function: Function, attributes: dict[str, Found]) -> None:
        names = self._locals(function, attributes)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                self._check_call(node, names, attributes)

    def _check_call(self, call: ast.Call, names: dict[str, Found], attributes: dict[str, Found]) -> None:
        if isinstance(call.func, ast.Attribute):
            owner = self._type(call.func.value, names, attributes)
            if owner is not None:
                self._check_attribute(call, owner, call.func.attr)
                return
        found = self._type(call.func, names, attributes)
        if found is not None and isinstance(found.node, Function):
            self._note(call, found.node.name, mistakes(call, found.node, is_bound=False))
        elif found is not None and isinstance(found.node, ast.ClassDef) and not found.is_object:
            self._check_constructor(call, found, found.node)

    def _check_attribute(self, call: ast.Call, owner: Found, name: str) -> None:
        if owner.node is None:
            found = self.library.find(owner.module, name)
            fits = found is not None and isinstance(found.node, Function)
            wrong = mistakes(call, found.node, False) if fits else ["does not exist"]  # type: ignore[union-attr, arg-type]
            self._note(call, f"{owner.module}.{name}", wrong)
        elif isinstance(owner.node, ast.ClassDef):
            method = self.library.method(owner, name)
            is_bound = method is None or "staticmethod" not in map(ast.unparse, method.decorator_list)
            self._note(call, f"{owner.node.name}.{name}", mistakes(call, method, is_bound) if method else ["no method"])

    def _check_constructor(self, call: ast.Call, cls: Found, node: ast.ClassDef) -> None:
        if (method := self.library.method(cls, "__init__")) is not None:
            self._note(call, node.name, mistakes(call, method, is_bound=True))
        elif any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            fields = self.library.fields(cls)
            names, required = [name for name, _ in fields], [name for name, is_required in fields if is_required]
            self._note(call, node.name, _misfits(call, names, required, set(names), False, False))

    def _note(self, call: ast.Call, name: str, wrong: list[str]) -> None:
        self.checked.add(name)
        self.wrong += [f"line {call.lineno}: {name}: {each}" for each in wrong]

    def _type(self, node: ast.expr, names: dict[str, Found], attributes: dict[str, Found]) -> Found | None:
        if isinstance(node, ast.Name):
            return names.get(node.id) or self._names.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return attributes.get(node.attr)
        if not isinstance(node, ast.Call):
            return None
        text = ast.unparse(node.func)
        if text in ("plain", "object.__new__"):  # the class itself, and an object of it
            found = self._type(node.args[0], names, attributes)
            return found and Found(found.module, found.node, text != "plain")
        made = self._type(node.func, names, attributes)
        if made is None and isinstance(node.func, ast.Attribute):
            owner = self._type(node.func.value, names, attributes)
            return owner and self._returned(owner, node.func.attr)
        is_class = made is not None and isinstance(made.node, ast.ClassDef) and not made.is_object
        return Found(made.module, made.node, True) if is_class and made else None

    def _returned(self, owner: Found, name: str) -> Found | None:
        method = self.library.method(owner, name) if isinstance(owner.node, ast.ClassDef) else None
        if method is None:
            return None
        if "classmethod" in map(ast.unparse, method.decorator_list):
            return Found(owner.module, owner.node, True)
        named = ast.unparse(method.returns).strip("'\"") if method.returns else ""
        found = self.library.find(owner.module, named) if named.isidentifier() else None
        return Found(found.module, found.node, True) if found and isinstance(found.node, ast.ClassDef) else None
