"""A browser for tests of pages. Without Playwright or Chromium they are skipped, but fail in continuous integration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.chromium import Browser

IS_NEEDED = bool(os.environ.get("RLITE_NEEDS_BROWSER"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for each module: while it is there, this thread has an event loop, which other tests cannot have."""
    if find_spec("playwright") is None and not IS_NEEDED:
        pytest.skip("needs Playwright: `make test` installs it")
    from tests.browser import chromium

    if chromium.executable() is None and not IS_NEEDED:
        pytest.skip(f"needs Chromium: {chromium.INSTALL}")
    with chromium.browser() as found:
        yield found
