"""Check the built site: python -m tools.site.check

Pages load nothing from the network and nothing that is missing, links within the site lead to pages and anchors,
every public name of docs/interfaces.md has an entry, and search finds every page. Exit status 1 if something is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tools.site.hooks import public_modules

SITE = Path(__file__).parents[2] / "site"
LOADED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}
"""elements that load what an attribute names; a link alone does not"""
NOT_LOADED = {"canonical", "next", "prev"}
"""kinds of <link> that load nothing"""


class Reader(HTMLParser):
    """Collect what a page loads, its links, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given["id"]} if "id" in given else set()
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in LOADED and given.get("rel") not in NOT_LOADED and given.get(LOADED[tag]):
            self.loaded.append(given[LOADED[tag]])


def is_remote(address: str) -> bool:
    """Return whether an address is on another machine."""
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def problems() -> Iterator[str]:
    """Yield a sentence for each thing that is wrong."""
    pages = {}
    for path in sorted(SITE.rglob("*.html")):
        pages[path] = Reader()
        pages[path].feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        name = path.relative_to(SITE)
        yield from (f"{name} loads {address} from the network" for address in page.loaded if is_remote(address))
        yield from (f"{name} loads {each}: {why}" for each in page.loaded if (why := dead(path, each, pages)))
        yield from (f"{name} links to {link}: {why}" for link in page.links if (why := dead(path, link, pages)))
    for path in SITE.rglob("*.css"):
        found = re.findall(r"url\([\"']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", path.read_text(encoding="utf-8"))
        yield from (f"{path.relative_to(SITE)} loads {each}" for each in found)
    for module, _, names in public_modules():
        page = pages.get(SITE / "reference" / module / "index.html")
        missing = [name for name in names if page is None or f"{module}.{name}" not in page.anchors]
        yield from (f"reference/{module} has no entry {name}" for name in missing)
    index = json.loads((SITE / "search" / "search_index.json").read_text(encoding="utf-8"))
    found_pages = {entry["location"].partition("#")[0] for entry in index["docs"]}
    for path in pages.keys() - {SITE / "404.html"}:
        if (place := path.relative_to(SITE).as_posix().removesuffix("index.html")) not in found_pages:
            yield f"search does not find {place}"


def dead(path: Path, link: str, pages: dict[Path, Reader]) -> str:
    """Return why a link within the site leads nowhere, or an empty text."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    base = SITE if parts.path.startswith("/") else path.parent
    target = (base / unquote(parts.path.lstrip("/"))).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        return "no such page"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors | {"__top"}:
        return "no such anchor"
    return ""


def main() -> int:
    """Print what is wrong, and return the exit status."""
    found = list(problems())
    print("\n".join(found) or f"site: {len(list(SITE.rglob('*.html')))} pages, nothing wrong", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
