"""Hooks of MkDocs: pages of the site that are made from other files, and links that leave the folder `docs`.

Made are: one page for each public module of docs/interfaces.md, with the docstrings that mkdocstrings reads from the
source; the part "Install" of the README; the programs in examples; CONTRIBUTING.md, CHANGELOG.md and the recipes.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAX_EXAMPLES = 4
"""pages with examples that the reference names for each public name"""
BOOST = {"reference/": 0.4, "interfaces": 0.2, "changelog": 0.2, "contributing": 0.3, "recipes": 0.5, "learning": 0.3}
"""weight in search of pages, by the beginning of their names; others have 1"""
BOOST |= {"environments-learning": 0.3, "architectures": 0.3, "gpu_rehearsal": 0.3, "coming-from": 0.5, "examples": 0.3}
RECIPES = {path.parent.name: f"recipes/{path.parent.name}.md" for path in sorted(ROOT.glob("recipes/*/README.md"))}
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "recipes/README.md": "recipes.md"}
"""files outside of docs that are pages of the site"""
PAGES |= {f"recipes/{name}/README.md": page for name, page in RECIPES.items()}
EXAMPLES = {
    path.relative_to(ROOT).as_posix(): f"examples.md#{path.relative_to(ROOT / 'examples').as_posix().replace('/', '-')}"
    for folder in (".", "environments", "contracts", "callbacks", "control")
    for path in sorted((ROOT / "examples" / folder).glob("*.py"))
}
"""programs that the page of examples shows, each with its place"""
PROGRAM = re.compile(r"(?<!\[)`(examples/[\w/]+\.py)`")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from other files."""
    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    made = {page: mended(text, source, page) for (page, text), source in zip(made.items(), PAGES, strict=True)}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    install = "# Install\n" + readme.partition("\n## Install\n")[2].partition("\n## ")[0]
    made["install.md"] = mended(install, "README.md", "install.md")
    made["examples.md"] = programs()
    for picture in sorted(ROOT.glob("recipes/*/*.png")):
        files.append(File.generated(config, f"recipes/{picture.name}", abs_src_path=str(picture)))
    for page, text in {**made, **reference()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Weigh the page for search; return its text with nested lists, and without links to files that are no pages."""
    weight = next((weight for begin, weight in BOOST.items() if page.file.src_uri.startswith(begin)), 1.0)
    page.meta.setdefault("search", {"boost": weight})
    nested = re.sub(r"^  (?=[-*] )", "    ", markdown, flags=re.MULTILINE)
    source = page.file.src_uri
    return mended(nested, f"docs/{source}", source) if source not in PAGES.values() else nested


def mended(text: str, source: str, page: str) -> str:
    """Return a text of the repository's file `source` with the links that it needs as the site's page `page`."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = ((ROOT / source).parent / target).resolve()
        name = path.relative_to(ROOT).as_posix()
        if path.is_relative_to(DOCS) and source.startswith("docs/"):
            return match[0]
        inside = name.removeprefix("docs/") if path.is_relative_to(DOCS) else PAGES.get(name, EXAMPLES.get(name))
        if inside is not None:
            return f"[{words}]({'../' * page.count('/')}{inside}{anchor})"
        return f"[{words}]({repository()}/blob/main/{name})" if repository() else f"{words} (`{name}`)"

    def program(match: re.Match[str]) -> str:
        place = EXAMPLES.get(match[1])
        return f"[{match[0]}]({'../' * page.count('/')}{place})" if place else match[0]

    fences = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    fences[::2] = [PROGRAM.sub(program, LINK.sub(link, part)) for part in fences[::2]]
    return "".join(fences)


def programs() -> str:
    """Return the page of the examples: what each program says of itself, and the program."""
    parts = ["# Examples\n\nPrograms to copy. The package does not hold them; each is whole as it stands here.\n"]
    for name, place in EXAMPLES.items():
        told, source = "", (ROOT / name).read_text(encoding="utf-8")
        if (docstring := ast.get_docstring(ast.parse(source))) is not None:
            told = docstring.partition("\n")[0]
            source = source[source.index('"""', 3) + 3 :].lstrip("\n") if source.startswith('"""') else source
        parts.append(f"## {name} {{#{place.partition('#')[2]}}}\n\n{told}\n\n```python\n{source.rstrip()}\n```\n")
    return "\n".join(parts)


def repository() -> str:
    """Return the address of the repository, or an empty text while pyproject.toml names none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/")


def reference() -> Mapping[str, str]:
    """Return one page of mkdocstrings' directives for each module of docs/interfaces.md."""
    examples = examples_of_names()
    pages = {}
    for module, what, names in public_modules():
        parts = [f"# {module}\n\n{what}\n"]
        for name in names:
            found = examples.get(name, [])[:MAX_EXAMPLES]
            shown = ", ".join(f"[{title}](../{page})" for title, page in found)
            parts += [f"::: {module}.{name}\n", f"Examples: {shown}\n" if shown else ""]
        pages[f"reference/{module}.md"] = "\n".join(parts)
    return pages


def public_modules() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each module of docs/interfaces.md with its sentence and its public names."""
    text = (DOCS / "interfaces.md").read_text(encoding="utf-8")
    for part in text.split("\n## ")[1:]:
        module, _, rest = part.partition("\n")
        if module.startswith("rlite"):
            yield module, rest.strip().partition("\n")[0], re.findall(r"^- (?:class )?`(\w+)", rest, re.MULTILINE)


def examples_of_names() -> Mapping[str, list[tuple[str, str]]]:
    """Return the title and the file of the pages whose Python programs use a name, by name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        programs = " ".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
        for name in set(re.findall(r"\w+", programs)):
            found.setdefault(name, []).append((text.partition("\n")[0].removeprefix("# "), path.name))
    return found
