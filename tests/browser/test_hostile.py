"""Texts of models and authors stay text on every page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import yaml

from rlite.services.record.files import ROWS, TOKENS
from rlite.services.record.writer import write_table
from rlite.viewer.export import export
from rlite.viewer.run import open_runs
from tests.view_server import serving

if TYPE_CHECKING:
    from tests.browser.chromium import Browser

SCRIPT = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
RIGHT_TO_LEFT = "שלום עולם \u202e reversed"
LINE = "x" * 1_000_000
PLACES = [
    *("overview", "rollouts", "rollouts?text=script", "sample", "sample?sample=1", "sample?tab=tokens"),
    *("sample?tab=siblings", "compare", "timeline", "ledger"),
]


def row(sample: int, text: str, **changes: Any) -> dict[str, Any]:
    return {
        "step": 1,
        "group": 0,
        "sample": sample,
        "item": SCRIPT,
        "status": "failed",
        "reason": SCRIPT,
        "reward": float(sample),
        "reward_parts": {SCRIPT: 1.0},
        "answer": SCRIPT,
        "events": [{"name": SCRIPT, "start": 0.0, "end": 1.0}],
        "segments": [
            {"role": "prompt", "text": RIGHT_TO_LEFT},
            {"role": "model", "text": text},
            {"role": SCRIPT, "text": ""},
        ],
        **changes,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    made.mkdir()
    rows = [row(0, SCRIPT), row(1, LINE), row(2, "plain", status=SCRIPT), row(3, "a\u0000b\u2028\ufffd\U0001f9ea")]
    table = pa.Table.from_pylist(rows, schema=ROWS)
    invalid = pa.array([b"\xff\xfe\xed\xa0\x80" + SCRIPT.encode()] * len(rows), pa.binary()).view(pa.string())
    write_table(
        made, "train", 1, "rows", table.set_column(ROWS.get_field_index("answer"), ROWS.field("answer"), invalid)
    )
    pieces = [SCRIPT, RIGHT_TO_LEFT, "", "\U0001f9ea"]
    tokens = {
        "step": 1,
        "group": 0,
        "sample": 0,
        "sequence": 0,
        "text": "".join(pieces),
        "ids": [1, 2, 3, 4],
        "offsets": [sum(map(len, pieces[:at])) for at in range(4)],
        "mask": [True] * 4,
        "logprobs": [-1.0, float("nan"), float("-inf"), -2.0],
    }
    write_table(made, "train", 1, "tokens", pa.Table.from_pylist([tokens], schema=TOKENS))
    metrics = {"step": 1, f"reward/{SCRIPT}": 1.0, "lone \ud800 surrogate": 2.0, "reward": "nan"}
    (made / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (made / "config.yaml").write_text(yaml.safe_dump({SCRIPT: SCRIPT}))
    link = {"kind": "start", "trainer": SCRIPT, "command": SCRIPT, "commit": SCRIPT, "set": [SCRIPT], "at": 1e300}
    (made / "chain.jsonl").write_text(f"{json.dumps(link)}\n{json.dumps({'kind': 'end', 'error': SCRIPT})}\n")
    span = {"ph": "X", "name": SCRIPT, "pid": 1, "tid": 1, "ts": 0, "dur": 5e6}
    (made / "trace.json").write_text(f"[\n{json.dumps(span)},\n")
    return made


def look(chromium: Browser, address: str) -> Iterator[tuple[str, Any]]:
    """Every place, after it was drawn, from one page."""
    page = chromium.page()
    page.goto(address)
    chromium.wait_until_shown(page, "")
    for place in PLACES:
        page.evaluate("place => { location.hash = place; }", f"#/{place}")
        chromium.wait_until_shown(page, f"#/{place}")
        yield place, page
        assert page.evaluate("window.hacked") is None, place
        assert page.locator("main img, main script, header img").count() == 0, place
        assert chromium.errors == [], place
    assert chromium.strangers == []
    page.context.close()


def test_texts_are_no_markup(chromium: Browser, folder: Path) -> None:
    with serving([str(folder)]) as url:
        seen = {place: page.locator("body").inner_text() for place, page in look(chromium, url)}
    for place in ("sample", "rollouts", "compare", "ledger", "timeline", "overview"):
        assert "<img src=x" in seen[place], place
    assert "<script>window.hacked" in seen["sample"]


def test_texts_are_no_markup_in_an_exported_file(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    export(open_runs([str(folder)]), path, [], 30)
    seen = {place: page.locator("body").inner_text() for place, page in look(chromium, path.as_uri())}
    assert "<script>window.hacked" in seen["sample"]


def test_a_line_of_a_megabyte_is_cut_with_a_button(chromium: Browser, folder: Path) -> None:
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample?step=1&group=0&sample=1")
        page.wait_for_selector(".turn.model .more")
        text = page.locator(".turn.model .text")
        assert len(text.inner_text()) < 30_000
        page.get_by_role("button", name="Show all 1,000,000 characters").click()
        assert len(text.inner_text()) == len(LINE)
        page.context.close()


def test_right_to_left_text_keeps_its_direction(chromium: Browser, folder: Path) -> None:
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample?step=1&group=0&sample=0")
        prompt = page.locator(".turn.prompt .text")
        prompt.wait_for()
        assert prompt.inner_text() == RIGHT_TO_LEFT
        assert prompt.evaluate("each => getComputedStyle(each).unicodeBidi") == "plaintext"
        page.context.close()
