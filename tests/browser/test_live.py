"""Pages of a run that goes on, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.recorded_run import Shape, metrics_of, write_run, write_step
from tests.view_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.chromium import Browser

SHAPE = Shape(steps=8, groups=4, samples=2)
PLOTS = "uPlot.sync('steps').plots"


@contextmanager
def opened(chromium: Browser, folder: Path, place: str = "") -> Iterator[Page]:
    """A page of a run. It is closed before its server, and reports no errors."""
    with serving([str(folder)]) as url:
        page = chromium.page()
        try:
            page.goto(f"{url}{place}")
            chromium.wait_until_shown(page, place)
            yield page
        finally:
            page.context.close()
            errors = list(chromium.errors)
            chromium.errors.clear()
    assert errors == []


def add_step(folder: Path, step: int) -> None:
    """Write the next step of a run."""
    write_step(folder, step, SHAPE)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(step, SHAPE)) + "\n")


def wait_for_step(page: Page, step: int) -> None:
    """Wait until the overview has drawn a step."""
    script = "step => document.querySelector('.tile strong')?.textContent === step"
    page.wait_for_function(script, arg=str(step))


def test_new_steps_keep_the_charts_with_what_the_reader_chose(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "live", Shape(steps=6, groups=4, samples=2))
    with opened(chromium, folder) as page:
        wait_for_step(page, 6)
        page.wait_for_function(f"() => {PLOTS}.length === document.querySelectorAll('.charts .card').length")
        number = page.evaluate(f"{PLOTS}.length")
        page.get_by_label("Find a metric").fill("grad")
        page.locator('[data-chart="Response length"] .u-series', has_text="p95").click()
        page.locator('[data-chart="Training reward"]').scroll_into_view_if_needed()
        box = page.locator('[data-chart="Training reward"] .u-over').bounding_box()
        assert box
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 50)
        page.mouse.up()
        zoom = page.evaluate(f"[{PLOTS}[0].scales.x.min, {PLOTS}[0].scales.x.max]")
        assert 1 < zoom[0] < zoom[1] < 6
        page.get_by_label("Find a metric").focus()
        for step in (7, 8):
            add_step(folder, step)
            wait_for_step(page, step)
        assert page.evaluate(f"{PLOTS}.length") == number
        assert page.evaluate(f"{PLOTS}[0].data[0].at(-1)") == 8
        assert page.evaluate(f"[{PLOTS}[0].scales.x.min, {PLOTS}[0].scales.x.max]") == pytest.approx(zoom)
        assert page.locator('[data-chart="Response length"] .u-series.u-off').count() == 1
        assert page.get_by_label("Find a metric").input_value() == "grad"
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Find a metric"
        page.keyboard.press("Escape")
        page.keyboard.press("2")
        chromium.wait_until_shown(page, "#/rollouts")
        assert page.evaluate(f"{PLOTS}.length") == 0, "a page that is left destroys its charts"
