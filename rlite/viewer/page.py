"""The page: one HTML file, style sheets and modules. It is served in parts, or written as one file.

Modules import each other by the bare names of an import map (`viewer/dom`), so that the same files work at an address
and, as `data:` URLs, in a file that is opened from disk.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

STATIC = Path(__file__).parent / "static"
STYLES = ("vendor/uplot.css", "style.css")
CHARTS = "vendor/uplot.js"
MAIN = 'import "viewer/main";'
TYPES = {".js": "text/javascript", ".css": "text/css"}
_ALWAYS = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"


def assets() -> dict[str, bytes]:
    """Return the files that the page loads, by their names."""
    files = [path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in files}


def served_page() -> tuple[str, str]:
    """Return the page for a server, and its Content-Security-Policy."""
    modules = _import_map({name: f"/static/{name}.js" for name in _modules()})
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = f'<script type="importmap">{modules}</script><script src="/static/{CHARTS}"></script>'
    scripts += f'<script type="module">{MAIN}</script>'
    policy = (
        f"default-src 'none'; script-src 'self' {_hashes(modules, MAIN)}; style-src 'self'; img-src 'self' data:; "
        f"connect-src 'self'; frame-ancestors 'none'; {_ALWAYS}"
    )
    return _filled(styles, scripts), policy


def single_page(packed: bytes) -> str:
    """Return the page as one file that needs no server.

    Args:
        packed: the answers to all questions of the page, as gzipped JSON.
    """
    code = {name: base64.b64encode(text.encode()).decode() for name, text in _modules().items()}
    modules = _import_map({name: f"data:text/javascript;base64,{text}" for name, text in code.items()})
    charts, style = _read(CHARTS), "\n".join(map(_read, STYLES))
    policy = (
        f"default-src 'none'; script-src data: {_hashes(modules, charts, MAIN)}; style-src {_hashes(style)}; "
        f"img-src data:; {_ALWAYS}"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    data = f'<script type="text/plain" id="answers">{base64.b64encode(packed).decode()}</script>'
    scripts = f'{data}<script type="importmap">{modules}</script><script>{charts}</script>'
    return _filled(head, f'{scripts}<script type="module">{MAIN}</script>')


def _filled(head: str, scripts: str) -> str:
    page = _read("index.html")
    return page.replace("<!-- head -->", head).replace("<!-- scripts -->", scripts)


def _modules() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}


def _import_map(addresses: Mapping[str, str]) -> str:
    return json.dumps({"imports": {f"viewer/{name}": address for name, address in addresses.items()}})


def _hashes(*texts: str) -> str:
    """Return the sources of a policy that allow inline texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
