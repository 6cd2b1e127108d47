"""A browser for tests of pages. Without Playwright or Chromium they are skipped, but fail in continuous integration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.chromium import Browser

IS_NEEDED = bool(os.environ.get("RLITE_NEEDS_BROWSER"))
TIMEOUT = 60
"""seconds of a test, which takes one or two: these tests take at most four minutes together"""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


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
