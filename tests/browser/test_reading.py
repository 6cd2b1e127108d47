"""The pages as readers use them: what a run is, texts, charts that they arrange, keyboard, screen reader and phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlite.trainer.run.folder import lock
from tests.recorded import recorded
from tests.recorded_run import Shape, write_chain, write_evaluation, write_run
from tests.view_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.chromium import Browser

SHAPE = Shape(steps=12, groups=6, samples=4, thoughts=5)
PLACES = [
    *("overview", "rollouts?step=3", "sample?step=2&group=6&sample=0", "sample?step=2&group=6&sample=0&tab=tokens"),
    *("sample?step=2&group=6&sample=0&tab=siblings", "compare", "timeline", "ledger"),
]
CHECK = """async () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  await new Promise((done) => setTimeout(done, 100));
  const found = await axe.run(document, { resultTypes: ["violations"] });
  const place = (node) => `${node.html.slice(0, 200)} ${node.any[0]?.message ?? ""}`;
  const told = ({ id, impact, nodes }) => `${impact} ${id}: ${nodes.slice(0, 3).map(place).join(" | ")}`;
  return found.violations.filter(({ impact }) => ["serious", "critical"].includes(impact)).map(told);
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_run(tmp_path_factory.mktemp("runs") / "first", SHAPE)
    write_chain(made, SHAPE, ended=12)
    return made


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with serving([str(folder)]) as address:
        yield address


@pytest.fixture(autouse=True)
def nothing_goes_wrong(chromium: Browser) -> Iterator[None]:
    yield
    errors, strangers = list(chromium.errors), list(chromium.strangers)
    chromium.errors.clear()
    chromium.strangers.clear()
    assert (errors, strangers) == ([], [])


def opened(chromium: Browser, url: str, place: str, **options: Any) -> Page:
    page = chromium.page(**options)
    page.goto(f"{url}#/{place}")
    chromium.wait_until_shown(page, f"#/{place}")
    return page


def violations(chromium: Browser, url: str, theme: str, places: list[str]) -> dict[str, list[str]]:
    """Return the serious violations of each place by axe-core."""
    page = opened(chromium, url, places[0], color_scheme=theme)
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = {}
    for place in places:
        page.evaluate("place => { location.hash = place; }", f"#/{place}")
        chromium.wait_until_shown(page, f"#/{place}")
        found[place] = page.evaluate(CHECK)
    page.context.close()
    return {place: own for place, own in found.items() if own}


def test_the_overview_says_what_the_run_is_and_keeps_what_a_reader_chooses(chromium: Browser, url: str) -> None:
    page = opened(chromium, url, "overview")
    head = page.locator(".masthead").inner_text()
    for text in ("first", "finished", "step 12 of 12", "Qwen/Qwen3-0.6B", "countdown.jsonl", "4f1d2c9a7b30-dirty"):
        assert text in head
    assert "rlite grpo actor.model_name=" in head
    reward = page.locator(".tile", has=page.get_by_text("reward", exact=True))
    assert "last 6 steps vs the 6 before" in reward.inner_text()
    assert reward.locator(".change").inner_text().startswith("▲")
    page.get_by_label("smoothing").select_option("0.85")
    page.get_by_label("over").select_option("tokens")
    for title, choice in (("KL", "logarithmic or linear"), ("Drift", "hide"), ("Entropy", "move to the front")):
        page.locator(f'[data-chart="{title}"] .menu summary').click()
        page.locator(f'[data-chart="{title}"]').get_by_role("button", name=choice).click()
    page.reload()
    page.wait_for_selector(".charts canvas")
    titles = page.locator(".charts h2").all_inner_texts()
    assert "Drift" not in titles
    assert titles.index("Entropy") < titles.index("KL")
    plot = "uPlot.sync('tokens trained ons').plots.find((each) => each.root.closest('section').dataset.chart === 'KL')"
    page.wait_for_function(f"() => {plot}?.scales.y.distr === 3")
    assert page.evaluate(f"{plot}.data[0].at(-1)") > 12
    page.get_by_role("button", name="show Drift").click()
    page.wait_for_selector('[data-chart="Drift"] canvas')
    page.locator('[data-chart="Entropy"] .values summary').press("Enter")
    page.wait_for_selector('[data-chart="Entropy"] .values tbody tr')
    assert page.locator('[data-chart="Entropy"] .values tbody tr').count() == 12
    page.context.close()


def test_a_run_under_way_tells_what_remains_and_a_killed_one_that_it_crashed(chromium: Browser, tmp_path: Path) -> None:
    lines = [{"step": step, "seconds": 5.0, "loss": 1.0 / step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"kind": "start", "trainer": "sft", "command": "rlite sft", "total_steps": 11}
    (tmp_path / "chain.jsonl").write_text(json.dumps(start) + "\n")
    with serving([str(tmp_path)]) as url:
        page = opened(chromium, url, "overview")
        head = page.locator(".masthead")
        told = head.inner_text()
        assert "step 3 of 11" in told
        assert page.locator(".state").inner_text() == "live"
        assert "about 40.0 s, at 5.00 s a step" in told
        lock(tmp_path).close()
        page.locator(".state.crashed").wait_for()
        assert "its process has ended without a word" in head.inner_text()
        page.context.close()


def test_rollouts_are_read_as_texts(chromium: Browser, url: str) -> None:
    page = opened(chromium, url, "rollouts?step=3")
    page.wait_for_selector(".stories:not([aria-busy])")
    stories = page.locator(".story")
    assert stories.count() == SHAPE.groups
    first = stories.first.inner_text()
    assert "Use each of the numbers" in first
    assert "target" in first
    assert "</answer>" in first
    assert stories.first.locator("li").count() == SHAPE.samples
    filtered = page.locator(".story", has=page.locator(".status", has_text="filtered"))
    marks = filtered.locator(".mark").all_inner_texts()
    uniform = filtered.locator(".reward").all_inner_texts()
    assert marks == (["no signal: equal rewards"] if len(set(uniform)) == 1 else [])
    assert page.locator(".mark", has_text="texts not recorded").count() == 1, "5 of 6 groups have texts"
    page.context.close()


def test_a_lost_group_says_why(chromium: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "run", SHAPE)
    reasons = {row["reason"] for row in recorded(tmp_path / "run") if row["status"] not in ("trained", "filtered")}
    with serving([str(tmp_path / "run")]) as url:
        page = opened(chromium, url, "rollouts")
        told = set()
        for step in range(1, SHAPE.steps + 1):
            page.evaluate("place => { location.hash = place; }", f"#/rollouts?step={step}")
            chromium.wait_until_shown(page, f"#/rollouts?step={step}")
            told |= set(page.locator(".story .why").all_inner_texts())
        page.context.close()
    assert reasons
    assert told == reasons


def test_the_pages_that_are_read_most_have_no_serious_barrier(chromium: Browser, url: str) -> None:
    """The others are checked by night, in both themes."""
    assert violations(chromium, url, "light", PLACES[:3]) == {}


def test_pages_fit_a_phone(chromium: Browser, url: str) -> None:
    page = opened(chromium, url, "overview")
    page.set_viewport_size({"width": 400, "height": 800})
    wide = {}
    for place in PLACES:
        page.evaluate("place => { location.hash = place; }", f"#/{place}")
        chromium.wait_until_shown(page, f"#/{place}")
        wide[place] = page.evaluate("document.documentElement.scrollWidth")
        tables = page.locator("table.options, table.times")
        wide[f"tables of {place}"] = max([0, *tables.evaluate_all("all => all.map((each) => each.scrollWidth)")])
    page.context.close()
    assert {place: width for place, width in wide.items() if width > 400} == {}


def test_a_finger_chooses_both_answers_and_learns_what_a_span_is(chromium: Browser, url: str) -> None:
    page = opened(chromium, url, "compare", has_touch=True, is_mobile=True)
    page.get_by_label("a cell chooses").select_option("b")
    page.wait_for_function("() => document.getElementById('main').dataset.shown.includes('pick=b')")
    page.locator("tr .cell").nth(1).tap()
    page.wait_for_function("() => document.querySelectorAll('tr .cell')[1]?.textContent === 'B'")
    assert page.locator("tr .cell").nth(0).inner_text() == "A"
    size = page.locator("tr .cell").nth(1).bounding_box()
    assert size
    assert min(size["width"], size["height"]) >= 24
    page.evaluate("location.hash = '#/timeline'")
    chromium.wait_until_shown(page, "#/timeline")
    page.locator("canvas.timeline").tap(position={"x": 230, "y": 10})
    assert "driver" in page.locator(".told").inner_text()
    page.context.close()


def test_tokens_are_walked_by_keys(chromium: Browser, url: str) -> None:
    page = opened(chromium, url, PLACES[3])
    page.locator("div.tokens").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "2 of " in page.locator(".told").inner_text()
    assert page.evaluate("location.hash") == f"#/{PLACES[3]}", "the arrows stay at this rollout"
    page.context.close()


def test_runs_of_different_trainers_have_panels_of_their_own(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, "loss": 1.0, "entropy": 2.0}) + "\n")
    (tmp_path / "chain.jsonl").write_text(json.dumps({"kind": "start", "trainer": "sft"}) + "\n")
    with serving([str(folder), str(tmp_path)]) as url:
        page = opened(chromium, url, "overview")
        titles = page.locator(".charts h2").all_inner_texts()
        page.context.close()
    assert {"Loss · grpo", "Loss · sft", "Training reward · grpo"} <= set(titles)
    assert "Loss" not in titles


@pytest.mark.nightly
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_of_any_folder_has_a_serious_barrier(
    chromium: Browser, folder: Path, tmp_path: Path, theme: str
) -> None:
    second = write_run(tmp_path / "second", Shape(steps=5, groups=4, samples=4, seed=1), 3e-6)
    write_chain(second, SHAPE, 3e-6, ended=5, error="WorkerDied")
    with serving([str(folder), str(second)]) as url:
        assert violations(chromium, url, theme, [*PLACES, "overview?smooth=0.85&x=time&log=KL&hidden=Drift"]) == {}
    write_evaluation(tmp_path, 0, SHAPE)
    models = {name: {"metrics": {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 0.75}} for name in ("a", "b")}
    counts = {"num_items": 9, "better": 8, "worse": 1, "p_value": 0.04, "confidence": 0.95}
    comparison = {"first": "a", "second": "b", "difference": 0.5, "low": 0.3, "high": 0.7, **counts}
    (tmp_path / "results.json").write_text(json.dumps({"models": models, "comparison": comparison}))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text("")
    for made in (tmp_path, bare):
        with serving([str(made)]) as url:
            assert violations(chromium, url, theme, ["overview", "rollouts", "compare", "timeline", "ledger"]) == {}
