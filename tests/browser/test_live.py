"""Pages of a run that goes on, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from rlite.services.record.files import ROWS
from rlite.services.record.writer import write_table
from rlite.viewer.trace import TRACE
from tests.recorded_run import Shape, metrics_of, write_evaluation, write_run, write_step, write_trace
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
    script = "step => document.querySelector('[data-step]')?.dataset.step === step"
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


def test_a_page_without_rollouts_shows_them_when_they_come(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with opened(chromium, tmp_path, "#/rollouts") as page:
        assert "No rollouts are recorded" in page.locator(".empty").inner_text()
        write_evaluation(tmp_path, 0, SHAPE)
        page.wait_for_selector("a.cell")
        write_step(tmp_path, 1, SHAPE)
        page.locator("main a", has_text="Rollouts of training have been recorded").click()
        page.wait_for_function("() => document.querySelectorAll('a.cell').length === 8")
        assert "source=train" in page.evaluate("location.hash")


def test_an_unknown_source_is_named_with_links_to_those_that_exist(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=4, groups=4, samples=2))
    with opened(chromium, folder, "#/ledger?source=eval.typo") as page:
        for name in ("rollouts", "sample", "ledger"):
            page.evaluate("place => { location.hash = place; }", f"#/{name}?source=eval.typo")
            chromium.wait_until_shown(page, f"#/{name}?source=eval.typo")
            assert "No such source" in page.locator(".empty").inner_text()
        page.locator(".empty a", has_text="countdown").click()
        page.wait_for_selector("main .card")
        assert "source=eval.countdown" in page.evaluate("location.hash")


def test_the_ledger_of_a_live_run_grows_and_keeps_what_is_open(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=6, groups=4, samples=2))
    with opened(chromium, folder, "#/ledger") as page:
        summary = page.locator("summary", has_text="filtered")
        for _ in range(3):  # open, close, open
            summary.click()
        page.wait_for_selector("details[open] .chip")
        assert page.locator("details[open] .chip").count() == 12
        add_step(folder, 7)
        page.get_by_role("button", name="2 more were recorded: list them").click()
        page.wait_for_function("() => document.querySelectorAll('details[open] .chip').length === 14")
        assert summary.locator("b.times").inner_text() == "14"
        assert "of 56 rollouts" in page.locator(".toolbar strong").inner_text()


def test_a_sample_and_a_comparison_of_a_live_run_say_that_there_is_more(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=6, groups=4, samples=2))
    with opened(chromium, folder, "#/sample?step=2") as page:
        add_step(folder, 7)
        page.locator("main a", has_text="Step 7 has been recorded").wait_for()
        page.evaluate("location.hash = '#/compare'")
        chromium.wait_until_shown(page, "#/compare")
        add_step(folder, 8)
        page.get_by_role("button", name="More rollouts are recorded: show them").click()
        page.wait_for_function(
            "() => [...document.querySelectorAll('tr')].some((row) => row.innerText.includes('step 8'))"
        )


def test_the_timeline_of_a_live_run_grows_and_a_chosen_part_stays(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlite.viewer.server.TRACE_EVERY_S", 0.0)
    folder = write_run(tmp_path / "run", Shape(steps=2, groups=2, samples=2))
    (folder / TRACE).unlink()
    with opened(chromium, folder, "#/timeline") as page:
        assert "has no trace" in page.locator(".empty").inner_text()
        write_trace(folder / TRACE, 2)
        page.wait_for_selector("canvas.timeline")
        count = "() => Number(document.querySelector('tbody td:last-child').innerText)"
        before = page.evaluate(count)
        write_trace(folder / TRACE, 4)
        page.wait_for_function(f"before => ({count})() > before", arg=before)
        page.keyboard.press("+")
        part = page.evaluate("() => document.querySelector('tbody').innerText")
        page.wait_for_function("part => document.querySelector('tbody').innerText !== part", arg=part)
        part = page.evaluate("() => document.querySelector('tbody').innerText")
        write_trace(folder / TRACE, 8)
        with page.expect_response(lambda response: "/api/timeline" in response.url):
            pass
        page.evaluate("() => new Promise((done) => setTimeout(done, 100))")
        assert page.evaluate("() => document.querySelector('tbody').innerText") == part


def test_a_page_whose_stream_is_refused_says_so(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=1, groups=2, samples=2))
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.route("**/events", lambda route: route.fulfill(status=503))
        page.goto(url)
        page.locator("#connection", has_text="no longer follows the run: too many pages are open").wait_for()
        page.unroute("**/events")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        page.wait_for_function("() => document.getElementById('connection').textContent === ''")
        page.context.close()
        chromium.errors.clear()  # the browser reports the 503


TURNS_OF_THE_WHEEL = """canvas => {
  const { left, top } = canvas.getBoundingClientRect();
  const turn = { deltaY: -100, ctrlKey: true, clientX: left + 600, clientY: top + 10, bubbles: true, cancelable: true };
  for (let i = 0; i < 10; i++) canvas.dispatchEvent(new WheelEvent("wheel", turn));
}"""


def test_many_turns_of_the_wheel_ask_the_server_once(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=2, groups=2, samples=2))
    with opened(chromium, folder, "#/timeline") as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "start=" in request.url else None)
        with page.expect_response(lambda response: "start=" in response.url):
            page.locator("canvas.timeline").evaluate(TURNS_OF_THE_WHEEL)  # in one task, however slow the machine is
        assert len(asked) == 1


def test_a_wait_names_who_was_busy_meanwhile(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=1, groups=2, samples=2))
    with opened(chromium, folder, "#/timeline") as page:
        box = page.locator("canvas.timeline").bounding_box()
        assert box
        page.mouse.move(box["x"] + 500, box["y"] + 26)
        told = page.locator(".told").inner_text()
        assert "wait for rollouts" in told
        assert "Busy meanwhile: rollout-0, calls (advance) 8" in told
        assert "actor-0" not in told


def test_steps_whose_record_is_gone_are_drawn_from_the_metrics(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=8, groups=4, samples=2))
    for path in (folder / "record").iterdir():
        if int(path.name.split("-")[1].split(".")[0]) < 7:
            path.unlink()
    with opened(chromium, folder) as page:
        page.wait_for_selector('[data-chart="Held out"] canvas')
        plot = f"{PLOTS}.find((each) => each.root.closest('section').dataset.chart === 'NAME')"
        steps, values = page.evaluate(f"{plot.replace('NAME', 'Training reward')}.data")
        assert steps == list(range(1, 9))
        assert values[0] == pytest.approx(metrics_of(1, SHAPE)["reward"])
        steps, values = page.evaluate(f"{plot.replace('NAME', 'Held out')}.data")
        assert steps == [4, 8]
        assert values[0] == pytest.approx(metrics_of(4, SHAPE)["accuracy"])


def test_more_rollouts_of_a_step_are_offered_and_shown(chromium: Browser, tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, Shape(steps=1, groups=2, samples=2))
    with opened(chromium, tmp_path, "#/rollouts") as page:
        assert page.locator("a.cell").count() == 4
        write_evaluation(tmp_path, 0, Shape(steps=1, groups=3, samples=2))
        page.get_by_text("More rollouts are recorded: show them").click()
        page.wait_for_function("() => document.querySelectorAll('a.cell').length === 6")
        assert page.locator(".news").inner_text() == ""


def test_news_links_keep_the_filters_and_the_tab(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=2, groups=4, samples=2))
    with opened(chromium, folder, "#/rollouts") as page:
        add_step(folder, 3)
        link = page.locator(".news a", has_text="Step 3 has been recorded")
        link.wait_for()
        page.get_by_label("status", exact=True).select_option("filtered")
        assert "status=filtered" in (link.get_attribute("href") or "")
        page.evaluate("location.hash = '#/sample?tab=tokens&step=2'")
        chromium.wait_until_shown(page, "#/sample?tab=tokens&step=2")
        add_step(folder, 4)
        link = page.locator(".news a", has_text="Step 4 has been recorded")
        assert "tab=tokens" in (link.get_attribute("href") or "")


def test_news_leaves_the_focus_where_it_is(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=4, groups=4, samples=2))
    with opened(chromium, folder) as page:
        wait_for_step(page, 4)
        for step, place in ((5, "nav a:nth-child(3)"), (6, "a.tile")):
            page.locator(place).focus()
            add_step(folder, step)
            wait_for_step(page, step)
            assert page.evaluate("place => document.activeElement === document.querySelector(place)", place)


def test_a_list_that_is_opened_later_has_bars_of_the_newest_numbers(chromium: Browser, tmp_path: Path) -> None:
    base = {"step": 1, "sample": 0, "item": "", "status": "failed"}

    def write(number: int) -> None:
        rows = [{**base, "group": group, "reason": f"ValueError: line {group % 2}"} for group in range(number)]
        write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))

    write(2)
    with opened(chromium, tmp_path, "#/ledger") as page:
        write(40)
        page.locator("summary b", has_text="40").wait_for()
        page.locator("summary").click()
        page.locator(".kind summary").first.wait_for()
        widths = page.locator(".kind i.bar").evaluate_all("bars => bars.map((bar) => bar.style.width)")
        assert widths == ["50%", "50%"]
        page.locator("summary").first.click()
        write(41)
        page.locator("summary b", has_text="41").wait_for()
        assert page.locator(".again").count() == 0


def test_an_unfinished_evaluation_is_no_training(chromium: Browser, tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, SHAPE)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "countdown.jsonl").touch()
    with opened(chromium, tmp_path) as page:
        told = page.locator(".advice.information").inner_text()
        assert "an evaluation that has not ended" in told
        shown = page.locator("main").inner_text()
        for text in ("not everything can be shown", "not trained on", "metrics.jsonl"):
            assert text not in shown
        assert "not counted" in page.locator(".tiles").inner_text()
        assert "No results yet" in page.locator(".empty").inner_text()
        page.evaluate("location.hash = '#/compare'")
        chromium.wait_until_shown(page, "#/compare")
        assert "config.yaml" not in page.locator("main").inner_text()


def test_the_reward_tile_is_the_mean_of_the_last_steps_with_or_without_a_record(
    chromium: Browser, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=6, groups=4, samples=2))
    for step in (4, 5, 6):
        for path in (folder / "record").glob(f"train-{step:08}.*"):
            path.unlink()
    with opened(chromium, folder) as page:
        shown = page.locator(".tile", has=page.get_by_text("reward", exact=True)).locator("strong").inner_text()
        rewards = [metrics_of(step, Shape(steps=6, groups=4, samples=2))["reward"] for step in (4, 5, 6)]
        assert float(shown) == pytest.approx(sum(rewards) / 3, abs=1e-3)


def test_a_zoom_that_is_wider_than_a_sparse_chart_stays(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=12, groups=2, samples=2))
    with opened(chromium, folder) as page:
        wait_for_step(page, 12)
        page.wait_for_selector('[data-chart="Held out"] canvas')
        plot = f"{PLOTS}.find((each) => each.root.closest('section').dataset.chart === 'Held out')"
        page.evaluate(f"{plot}.setScale('x', {{ min: 2, max: 12.5 }})")
        add_step(folder, 13)
        wait_for_step(page, 13)
        assert page.evaluate(f"[{plot}.scales.x.min, {plot}.scales.x.max]") == [2, 12.5]


def test_a_note_that_a_chart_gets_later_is_shown(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=1, groups=2, samples=2))
    with opened(chromium, folder) as page:
        script = """async () => {
            const [{ lineChart, renewCharts }, { h }] = [await import("viewer/charts"), await import("viewer/dom")];
            const grid = document.body.appendChild(h("div", { id: "own" }));
            const line = { label: "a", steps: [1], values: [1] };
            const draw = (note) => renewCharts(grid, [lineChart("Own", [line], { note })]);
            draw("");
            draw("means of 2 steps each");
        }"""
        page.evaluate(script)
        assert page.locator("#own .note").inner_text() == "means of 2 steps each"


def test_a_step_without_rollouts_shows_them_when_they_come(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Shape(steps=2, groups=2, samples=2))
    with opened(chromium, folder, "#/sample?step=3") as page:
        assert "Step 3 has no rollouts" in page.locator(".empty").inner_text()
        add_step(folder, 3)
        page.locator(".crumbs", has_text="training · step 3").wait_for()
