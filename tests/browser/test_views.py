"""Pages in a real browser: tokens, searches, windows of the timeline, and what a file lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rlite.services.record.files import ROWS, TOKENS
from rlite.services.record.writer import write_table
from rlite.viewer.export import export
from rlite.viewer.run import open_runs
from tests.recorded_run import Shape, write_run
from tests.view_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.chromium import Browser

SHAPE = Shape(steps=4, groups=4, samples=2)


def test_a_token_that_is_a_part_of_a_character_has_its_colour(chromium: Browser, tmp_path: Path) -> None:
    row = {"step": 1, "group": 0, "sample": 0, "item": "", "status": "trained", "reason": ""}
    segments = [{"role": "model", "text": "ab"}]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([{**row, "segments": segments}], schema=ROWS))
    tokens = {"step": 1, "group": 0, "sample": 0, "sequence": 0, "text": "ab", "ids": [1, 2, 3], "offsets": [0, 1, 1]}
    tokens |= {"mask": [True] * 3, "logprobs": [-1.0, -2.0, -0.5]}
    write_table(tmp_path, "train", 1, "tokens", pa.Table.from_pylist([tokens], schema=TOKENS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample?tab=tokens")
        token = page.locator("div.tokens .part")
        token.hover()
        assert token.evaluate("each => getComputedStyle(each).display") == "inline"
        assert "1 of 3" in page.locator(".told").inner_text()
        page.context.close()


def test_typing_asks_the_server_once_and_filters_the_list_at_once(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SHAPE)
    with serving([str(folder)]) as url:
        page = chromium.page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "text=" in request.url else None)
        page.goto(f"{url}#/compare")
        chromium.wait_until_shown(page, "#/compare")
        asked.clear()
        with page.expect_response(lambda response: "text=countdown-2" in response.url):
            page.get_by_label("Find a prompt by id or text").press_sequentially("countdown-2", delay=20)
            assert page.locator(".items a").count() < SHAPE.steps * SHAPE.groups
            assert not asked
        assert len(asked) == 1
        page.context.close()


def test_a_page_says_when_older_texts_were_not_searched(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlite.viewer.prompts.MAX_SEARCHED", 1)
    folder = write_run(tmp_path / "run", SHAPE)
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/compare")
        page.get_by_label("Find a prompt by id or text").fill("no prompt has this")
        page.get_by_text("only the texts of its newest part were searched").wait_for()
        assert "No such prompt" in page.locator(".items").inner_text()
        page.context.close()


def test_a_search_that_fails_says_so(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", SHAPE)
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/compare")
        chromium.wait_until_shown(page, "#/compare")
        page.route("**/api/items?*", lambda route: route.fulfill(status=500, json={"error": "the disk is gone"}))
        page.get_by_label("Find a prompt by id or text").fill("countdown")
        page.get_by_text("The recorded prompts cannot be searched: the disk is gone").wait_for()
        assert page.locator(".items a").count() > 0
        page.context.close()
        chromium.errors.clear()  # the browser reports the 500


def told_at(page: Page, x: float, y: float) -> str:
    """Return what the timeline tells of a point."""
    page.wait_for_function("() => document.querySelector('canvas.timeline').style.height !== ''")  # it is drawn
    box = page.locator("canvas.timeline").bounding_box()
    assert box
    page.mouse.move(box["x"] + x, box["y"] + y)
    return page.locator(".told").inner_text()


def test_a_timeline_that_is_drawn_again_shows_the_whole_trace(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    export(open_runs([str(write_run(tmp_path / "run", SHAPE))]), path, [], 30)
    page = chromium.page()
    page.goto(f"{path.as_uri()}#/timeline")
    chromium.wait_until_shown(page, "#/timeline")
    before = told_at(page, 400, 10)
    for _ in range(2):
        page.keyboard.press("+")
    assert told_at(page, 401, 10) != before
    page.keyboard.press("d")
    page.wait_for_function("() => document.querySelector('.told').innerText.startsWith('Point at')")
    assert told_at(page, 400, 10) == before
    page.context.close()


def test_work_in_flight_stays_at_its_time_when_a_file_is_zoomed(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    export(open_runs([str(write_run(tmp_path / "run", SHAPE))]), path, [], 30)
    page = chromium.page()
    page.goto(f"{path.as_uri()}#/timeline")
    chromium.wait_until_shown(page, "#/timeline")
    height = page.evaluate("document.querySelector('canvas.timeline').clientHeight") - 40
    before = told_at(page, 500, height)
    assert "at a time, on average" in before
    page.keyboard.down("Control")
    for _ in range(3):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    told_at(page, 700, 10)
    assert told_at(page, 500, height) == before
    assert "Where the time of the whole trace went" in page.locator("main").inner_text()
    assert "of the whole trace" in page.locator("thead").inner_text()
    page.context.close()


def test_a_file_names_the_answers_that_it_does_not_carry(chromium: Browser, tmp_path: Path) -> None:
    base: dict[str, Any] = {"step": 1, "sample": 0, "status": "failed", "reason": "x" * 1000}
    rows = [{**base, "group": group, "item": f"item-{group}"} for group in range(1000)]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    path = tmp_path / "out.html"
    export(open_runs([str(tmp_path)]), path, [], 1)
    page = chromium.page()
    page.goto(f"{path.as_uri()}#/compare?set=train&item=item-499")
    card = page.locator(".card", has_text="Answers to")
    assert "This file does not carry it" in card.inner_text()
    assert "No recorded rollout" not in card.inner_text()
    page.context.close()


def test_the_page_of_a_tinker_server_shows_its_models_and_follows_them(chromium: Browser, tmp_path: Path) -> None:
    model = {"model": "s1:train:0", "tenant": "ann", "rank": 4, "state": "in memory", "waiting": 2, "steps": 3}
    points = [{"step": step, "loss_per_token": 1 / step, "grad_norm": 0.5} for step in (1, 2, 3)]
    state = {"base": "tiny", "samples": 1, "num_models": 1, "models": [{**model, "problem": None, "points": points}]}
    (tmp_path / "tinker.json").write_text(json.dumps(state))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/tinker")
        page.get_by_text("tiny: 1 tenants, 2 requests wait, 1 samples under way").wait_for()
        assert page.locator("tbody tr td").all_inner_texts()[:6] == ["ann", "s1:train:0", "4", "in memory", "2", "3"]
        assert page.locator(".charts section h2").all_inner_texts() == ["Loss", "Gradient norm"]
        state["models"][0] |= {"waiting": 0, "problem": "the loss is inf"}  # type: ignore[index]
        (tmp_path / "tinker.json").write_text(json.dumps(state))
        page.get_by_text("the loss is inf").wait_for()
        page.context.close()
