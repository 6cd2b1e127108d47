"""Headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, Request, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install chromium-headless-shell"
WAIT_MS = 20_000


def executable() -> str | None:
    """Path of Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser whose pages report what goes wrong in them, and what they ask for."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self.errors: list[str] = []
        self.strangers: list[str] = []
        """addresses of other machines that a page asked for"""

    def page(self, **options: Any) -> Page:
        """A new page in a context of its own."""
        context = self._chromium.new_context(viewport={"width": 1400, "height": 900}, **options)
        context.set_default_timeout(WAIT_MS)
        page: Page = context.new_page()
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._look_at)
        return page

    def wait_until_shown(self, page: Page, place: str) -> None:
        """Wait until a place is drawn."""
        page.wait_for_function("place => document.getElementById('main')?.dataset.shown === place", arg=place)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def _look_at(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.hostname not in (None, "127.0.0.1") and address.scheme not in ("data", "blob", "file"):
            self.strangers.append(request.url)


@contextmanager
def browser() -> Iterator[Browser]:
    path = executable()
    assert path, f"Chromium is missing: {INSTALL}"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield Browser(chromium)
        finally:
            chromium.close()
