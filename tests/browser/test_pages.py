"""The pages of `rlite view` in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from rlite.services.record.files import ROWS, TOKENS
from rlite.services.record.writer import write_table
from rlite.viewer import load
from rlite.viewer.export import export
from rlite.viewer.run import open_runs
from tests.recorded_run import Shape, write_evaluation, write_run, write_step
from tests.view_server import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.chromium import Browser

SHAPE = Shape(steps=6, groups=6, samples=4, thoughts=5)
MIXTURE_CHARTS = ("Load of experts", "Experts without tokens", "Auxiliary loss", "Load per expert")
KINDS = (".masked", "span:not(.masked)")
"""tokens that were not trained on, and others"""
PAGES = ["overview", "rollouts", "sample", "sample?tab=tokens", "sample?tab=siblings", "compare", "timeline", "ledger"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    runs = tmp_path_factory.mktemp("runs")
    second = Shape(steps=5, groups=4, samples=4, thoughts=5, seed=1)
    return [write_run(runs / "first", SHAPE), write_run(runs / "second", second, 3e-6)]


@pytest.fixture(scope="module")
def url(folders: list[Path]) -> Iterator[str]:
    with serving([str(folder) for folder in folders]) as address:
        yield address


@pytest.fixture(scope="module")
def window(chromium: Browser, url: str) -> Page:
    page = chromium.page()
    page.goto(url)
    chromium.wait_until_shown(page, "")
    return page


@pytest.fixture(scope="module")
def show(chromium: Browser, window: Page) -> Any:
    """show(place): the page after it was drawn."""

    def go(place: str) -> Page:
        window.evaluate("place => { location.hash = place; }", f"#/{place}")
        chromium.wait_until_shown(window, f"#/{place}")
        return window

    return go


@pytest.fixture(autouse=True)
def nothing_goes_wrong(chromium: Browser) -> Iterator[None]:
    """No test leaves an error on the console or asks another machine for anything."""
    yield
    errors, strangers = list(chromium.errors), list(chromium.strangers)
    chromium.errors.clear()
    chromium.strangers.clear()
    assert errors == []
    assert strangers == []


def at(page: Page, part: str) -> None:
    """Wait until the address has a part and is drawn."""
    script = "part => location.hash.includes(part) && document.getElementById('main').dataset.shown === location.hash"
    page.wait_for_function(script, arg=part)


@pytest.mark.parametrize("place", PAGES)
def test_every_page_has_content(show: Any, place: str) -> None:
    page = show(place)
    assert page.locator("main .card, main .turn, main .tokens").count() > 0
    assert page.locator("main .empty").count() == 0
    assert page.locator("#nav [aria-current]").inner_text().lower() == place.split("?")[0]


def test_the_overview_begins_with_advice_and_draws_both_runs(show: Any) -> None:
    page = show("overview")
    assert page.evaluate("[...document.querySelector('.page').childNodes].every((part) => part.nodeType === 1)")
    assert "A phase stalled: sync" in page.locator(".advices").inner_text()
    titles = page.locator(".charts h2").all_inner_texts()
    assert titles[:3] == ["Training reward", "Parts of the reward", "Held out"]
    assert {"Truncated answers", "Groups without signal", "Drift", "Staleness", "Tokens per second"} <= set(titles)
    assert page.locator(".charts canvas").count() == len(titles)
    legend = page.locator('[data-chart="Training reward"] .u-legend').inner_text()
    assert "first" in legend
    assert "±" in legend
    newest = page.locator('[data-chart="Entropy"] .u-series td').all_inner_texts()
    assert [value.partition(" at ")[2] for value in newest] == ["", "", "5"], "the second run has made fewer steps"


def test_any_metric_can_be_drawn(show: Any) -> None:
    page = show("overview")
    page.get_by_label("Find a metric").fill("grad_n")
    page.locator(".chip", has_text="grad_norm").click()
    at(page, "more=grad_norm")
    page.wait_for_selector('[data-chart="grad_norm"] canvas')


def test_the_grid_has_a_cell_for_each_rollout(show: Any) -> None:
    page = show("rollouts?step=3")
    assert page.locator(".grid .line").count() == SHAPE.groups
    assert page.locator("a.cell").count() == SHAPE.groups * SHAPE.samples
    page.get_by_label("status", exact=True).select_option("filtered")
    assert page.locator(".grid .line").count() == 1
    assert page.locator(".count").inner_text() == "4 of 24 rollouts"
    assert page.locator("tbody tr").count() == 4


def test_a_bar_of_the_histogram_chooses_its_rollouts(show: Any) -> None:
    page = show("rollouts?step=2")
    bar = page.locator(".histogram .bar[tabindex]").first
    number = int(bar.get_attribute("aria-label").rpartition(" ")[2])
    bar.focus()
    page.keyboard.press("Enter")
    assert page.locator(".count").inner_text() == f"{number} of 24 rollouts"
    assert page.locator("a.cell:not(.dim)").count() == number


def test_a_reward_range_chooses_rollouts_in_any_colour(show: Any, folders: list[Path]) -> None:
    rewards = load(folders[0]).rows.query("source == 'train' and step == 2")["reward"]
    number = int(rewards.between(0.05, 0.9).sum())
    assert 0 < number < 24
    page = show("rollouts?step=2&color=response_tokens")
    page.get_by_label("min reward").fill("0.05")
    page.get_by_label("max reward").fill("0.9")
    assert page.locator(".count").inner_text() == f"{number} of 24 rollouts"
    assert "min=0.05&max=0.9" in page.evaluate("location.hash")
    page.get_by_label("next step (])").click()
    at(page, "step=3")
    assert page.get_by_label("min reward").input_value() == "0.05"


def test_a_filter_that_no_rollout_of_the_step_passes_is_shown_and_can_be_cleared(show: Any) -> None:
    page = show("rollouts?step=2&status=aborted&reason=gone&text=Goal")
    assert page.get_by_label("status", exact=True).input_value() == "aborted"
    assert page.get_by_label("reason", exact=True).input_value() == "gone"
    page.get_by_role("button", name="clear filters").click()
    page.wait_for_function("() => document.querySelector('.count').textContent === '24 rollouts'")
    assert page.get_by_role("button", name="clear filters").count() == 0
    assert "aborted" not in page.evaluate("location.hash")


def test_texts_are_searched(show: Any) -> None:
    page = show("rollouts?step=4")
    page.get_by_label("Search the texts").fill("the tool SAYS")
    page.keyboard.press("Enter")
    page.wait_for_selector(".hits mark")
    assert page.locator(".hits mark").first.inner_text() == "The tool says"
    page.locator(".hits a").first.click()
    at(page, "#/sample")


def test_a_late_search_changes_no_other_page(show: Any) -> None:
    page = show("rollouts?step=4")
    held: list[Any] = []
    page.route("**/api/search*", lambda route: held.append(route))
    page.get_by_label("Search the texts").fill("no page has asked this")
    page.keyboard.press("Enter")
    show("ledger")
    assert len(held) == 1
    with page.expect_response("**/api/search*"):
        held[0].continue_()
    page.unroute("**/api/search*")
    page.evaluate("() => new Promise((done) => setTimeout(done, 50))")
    assert page.evaluate("location.hash") == "#/ledger"
    assert page.locator("main .shares").count() == 1


def test_columns_sort_the_table(show: Any) -> None:
    page = show("rollouts?step=5")
    page.locator("summary", has_text="All columns").click()
    column = page.locator("thead th").all_inner_texts().index("response tokens")
    page.locator("thead button", has_text="response tokens").click()
    values = [int(text) for text in page.locator(f"tbody td:nth-child({column + 1})").all_inner_texts()]
    assert values == sorted(values)


def test_a_step_is_walked_by_keys_alone(show: Any) -> None:
    page = show("rollouts?step=3")
    page.keyboard.press("]")
    at(page, "step=4")
    page.locator("a.cell").first.focus()
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    at(page, "#/sample")
    assert page.locator(".crumbs").inner_text().endswith("sample 1")
    page.keyboard.press("ArrowRight")
    at(page, "sample=2")
    page.keyboard.press("ArrowUp")
    at(page, "group=18")
    page.keyboard.press("t")
    at(page, "tab=tokens")
    page.keyboard.press("6")
    at(page, "#/ledger")
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")


def test_tokens_are_coloured_by_any_column(show: Any) -> None:
    page = show("sample?step=2&group=6&sample=0&tab=tokens")
    colours = {}
    choices = page.get_by_label("colour by").locator("option").evaluate_all("all => all.map(each => each.value)")
    for name in choices:
        page.get_by_label("colour by").select_option(name)
        at(page, f"by={name}") if name != "logprobs" else None
        colours[name] = page.locator("div.tokens span:not(.masked)").evaluate_all(
            "all => new Set(all.map(each => each.style.backgroundColor)).size"
        )
    assert set(choices) >= {"logprobs", "trainer_logprobs", "difference", "entropy", "versions"}
    assert colours["logprobs"] > 20
    assert 1 <= colours["versions"] <= 2
    token = page.locator("div.tokens span:not(.masked)").nth(5)
    token.hover()
    assert "log-prob (engine)" in page.locator(".told").inner_text()
    colours = [
        page.locator(f"div.tokens {each}").first.evaluate("each => getComputedStyle(each).color") for each in KINDS
    ]
    assert colours[0] != colours[1]


def test_the_colours_of_tokens_measure_what_the_model_wrote(chromium: Browser, tmp_path: Path) -> None:
    place = {"step": 1, "group": 0, "sample": 0}
    row = {**place, "item": "", "status": "trained", "reason": ""}
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([row], schema=ROWS))
    text = {"text": "abcd", "ids": [1, 2, 3, 4], "offsets": [0, 1, 2, 3], "versions": [-1, 0, 0, 0]}
    engine = {"mask": [False, True, True, False], "logprobs": [0.0, -0.5, -1.0, -8.0], "entropy": [9.0, 0.5, 0.1, 0.2]}
    trained = [[-12.0, -0.48, -1.01, -8.0], [-15.0, -0.48, -1.04, -8.0]]  # the trainer reads the prompt, too
    sequences = [
        {**place, "sequence": number, **text, **engine, "trainer_logprobs": own} for number, own in enumerate(trained)
    ]
    write_table(tmp_path, "train", 1, "tokens", pa.Table.from_pylist(sequences, schema=TOKENS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample?tab=tokens&by=difference")
        page.wait_for_selector("div.tokens")
        ends = page.locator("p.legend", has=page.locator(".ramp")).evaluate(
            "each => [...each.childNodes].filter(part => part.nodeType === 3).map(part => part.data)"
        )
        assert ends == ["-0.02", "0.02"], "98 % of what was trained on, of both sequences"
        colours = page.locator("div.tokens span[data-at='1']").evaluate_all(
            "all => all.map(e => e.style.backgroundColor)"
        )
        assert colours[0] == colours[1] != "transparent"
        told = {}
        for at in (0, 1, 3):
            page.locator(f"div.tokens span[data-at='{at}']").first.hover()
            told[at] = page.locator(".told").inner_text()
        page.context.close()
    assert "read, not written by the model" in told[0]
    assert not any(name in told[0] for name in ("log-prob", "entropy", "policy version", "probability"))
    assert "log-prob (engine) -0.5" in told[1]
    assert "log-prob (engine) -8" in told[3]
    assert "not trained on" in told[3]


def test_metrics_of_many_sets_are_asked_for_in_portions(chromium: Browser, tmp_path: Path) -> None:
    names = [f"mmlu_college_computer_science_{number}" for number in range(200)]
    metrics = {f"{name}/{key}": 0.5 for name in names for key in ("accuracy", "num_errors", "standard_error")}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, **metrics}) + "\n")
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(url)
        chromium.wait_until_shown(page, "")
        assert page.locator(".tile", has_text="held out:").count() == len(names)
        page.context.close()


def test_siblings_stand_side_by_side(show: Any) -> None:
    page = show("sample?step=2&group=6&sample=1&tab=siblings")
    assert page.locator(".beside > section").count() == SHAPE.samples
    assert page.locator(".beside > section.current > h3").inner_text().startswith("sample 1")


def test_tokens_that_were_not_recorded_are_missed_in_words(show: Any) -> None:
    page = show("sample?step=2&group=11&sample=0&tab=tokens")
    assert "is not recorded" in page.locator(".empty").inner_text()


def test_two_answers_to_one_prompt_are_compared(show: Any) -> None:
    page = show("compare?item=countdown-0")
    assert page.locator("tr .cell").count() > 2 * SHAPE.samples
    page.locator("tr .cell").nth(1).click()
    at(page, "a=0%2Ftrain%2F1%2F0%2F1")
    page.locator("tr .cell").nth(6).click(modifiers=["Shift"])
    at(page, "b=0%2Ftrain%2F2")
    page.wait_for_selector(".diff ins")
    assert "Use each of the numbers" in page.locator(".prompt").inner_text()
    first, second = (page.locator(".diff .text").nth(side) for side in (0, 1))
    kept = [
        side.evaluate(
            "each => [...each.childNodes].filter(part => part.nodeType === 3).map(part => part.data).join('')"
        )
        for side in (first, second)
    ]
    assert kept[0] == kept[1]
    texts = [side.inner_text() for side in (first, second)]
    assert all(text.startswith("<think>") and text.endswith("</answer>") for text in texts)


def test_a_difference_that_is_cut_or_rough_says_so(chromium: Browser, tmp_path: Path) -> None:
    base = {"step": 1, "group": 0, "item": "a", "status": "trained", "reason": ""}
    texts = ["".join(f"{letter}{number} " for number in range(size)) for letter, size in (("a", 40_000), ("b", 3_000))]
    rows = [{**base, "sample": n, "segments": [{"role": "model", "text": text}]} for n, text in enumerate(texts)]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/compare")
        page.wait_for_selector(".diff ins")
        notes = page.locator(".diff .note").all_inner_texts()
        page.context.close()
    assert "too little in common to compare them word by word" in notes[0]
    assert notes[1:] == [f"The first 200,000 of {len(texts[0]):,} characters are compared. The page Sample shows all."]


def test_options_that_differ_are_listed(show: Any) -> None:
    page = show("compare")
    rows = page.locator("table.options tbody th").all_inner_texts()
    assert "actor.lr" in rows
    assert "actor.clip" not in rows
    rates = page.locator("table.options tr", has=page.get_by_text("actor.lr", exact=True))
    assert rates.locator("td").all_inner_texts() == ["1e-6", "3e-6"]


def test_an_address_of_what_is_not_recorded_says_so(chromium: Browser, show: Any) -> None:
    page = show("rollouts?step=77")
    assert "Step 77 has no rollouts. This is step 6." in page.locator("main").inner_text()
    page = show("sample?step=2&group=999&sample=0")
    assert "Step 2 has no sample 0 of group 999." in page.locator("main").inner_text()
    assert len(chromium.errors) == 1  # the browser reports the 404
    chromium.errors.clear()


def test_the_timeline_zooms_by_keys(show: Any) -> None:
    page = show("timeline")
    before = page.locator("tbody tr").first.inner_text()
    page.keyboard.press("+")
    page.wait_for_function("before => document.querySelector('tbody tr').innerText !== before", arg=before)
    page.keyboard.press("0")
    page.wait_for_function("before => document.querySelector('tbody tr').innerText === before", arg=before)
    box = page.locator("canvas.timeline").bounding_box()
    page.mouse.move(box["x"] + 230, box["y"] + 10)
    assert "driver" in page.locator(".told").inner_text()
    colours = page.locator("table.times .swatch").evaluate_all("all => all.map((each) => each.style.backgroundColor)")
    assert len(set(colours)) > 3, "the table is the key of the picture's colours"


def test_prompts_are_found_by_their_text(show: Any) -> None:
    page = show("compare")
    wanted = page.locator(".items a span").nth(8).inner_text()
    page.get_by_label("Find a prompt by id or text").fill(wanted)
    page.wait_for_function("() => document.querySelectorAll('.items a').length === 1")
    page.keyboard.press("Enter")
    at(page, "find=")
    assert page.locator(".items [aria-current] span").inner_text() == wanted
    assert wanted in page.locator(".prompt").inner_text()


def test_a_sample_shows_its_data_row_and_what_was_judged(show: Any) -> None:
    page = show("sample?step=2&group=6&sample=0")
    assert "target" in page.locator(".card", has_text="Data row").inner_text()
    assert "judged answer" in page.locator(".card", has_text="Facts").inner_text()
    assert page.locator(".headline .judged small").all_inner_texts() == ["judged answer", "target"]


def test_a_sample_is_opened_at_a_rollout_that_was_trained_on(chromium: Browser, tmp_path: Path) -> None:
    base = {"step": 1, "sample": 0, "item": "", "reason": "", "turns": 1}
    base["events"] = [{"name": "environment", "start": 0.0, "end": 1.0}]
    rows = [{**base, "group": group, "status": status} for group, status in enumerate(["filtered", "trained"])]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample")
        assert page.locator(".headline .status").inner_text() == "trained"
        assert "other" in page.locator("p.legend").inner_text(), "there is no environment"
        page.goto(f"{url}#/ledger")
        page.wait_for_selector(".reasons")
        assert "Lost" not in page.locator("main").inner_text(), "filtered groups are no loss"
        page.context.close()


def test_a_supervised_run_shows_its_held_out_loss(chromium: Browser, tmp_path: Path) -> None:
    metrics = {"loss": 1.0, "accuracy": 0.5, "easy/test_loss": 2.0, "easy/test_accuracy": 0.75}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, **metrics}) + "\n")
    (tmp_path / "config.yaml").write_text("trainer: {total_steps: 5}\n")
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(url)
        chromium.wait_until_shown(page, "")
        assert page.locator(".charts h2").all_inner_texts() == [
            "Held out",
            "Held-out loss",
            "Training accuracy",
            "Loss",
        ]
        tiles = page.locator(".tiles").inner_text()
        assert "held-out loss: easy\n2\nstep 5" in tiles
        assert "held out: easy\n0.75" in tiles
        page.goto(f"{url}#/rollouts")
        chromium.wait_until_shown(page, "#/rollouts")
        assert "trainer.record" not in page.locator("main").inner_text()
        page.context.close()


@pytest.mark.parametrize(("num_experts", "shown"), [(8, range(8)), (40, [*range(8), *range(32, 40)])])
def test_a_mixture_shows_load_per_expert_dropped_experts_and_auxiliary_loss(
    chromium: Browser, tmp_path: Path, num_experts: int, shown: Any
) -> None:
    metrics = {"load_max": 3.5, "load_min": 0.0, "auxiliary_loss": 1.25, "idle_share": 0.5, "dropped_share": 0.25}
    metrics |= {f"load/{number:03d}": 2.0 - number / 40 for number in range(num_experts)}
    lines = [
        {"step": step, "loss": 1.0, **{f"moe/{name}": value for name, value in metrics.items()}} for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(url)
        chromium.wait_until_shown(page, "")
        legend = {title: page.locator(f'[data-chart="{title}"] .u-legend').inner_text() for title in MIXTURE_CHARTS}
        assert "3.5" in legend["Load of experts"]
        assert "0.25" in legend["Experts without tokens"]
        assert "1.25" in legend["Auxiliary loss"]
        labels = page.locator('[data-chart="Load per expert"] .u-label').all_inner_texts()
        assert [label for label in labels if "expert" in label] == [f"expert {number}" for number in shown]
        page.context.close()


def test_an_evaluation_shows_its_results_and_no_steps(chromium: Browser, tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, SHAPE)
    metrics = {"accuracy": 0.5, "standard_error": 0.1, "pass@1": 0.5, "pass@2": 0.75}
    (tmp_path / "results.json").write_text(json.dumps({"models": {"countdown": {"metrics": metrics}}}))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(url)
        chromium.wait_until_shown(page, "")
        assert page.locator("main .card h2").all_inner_texts() == ["Accuracy", "pass@k", "Metrics"]
        ticks = page.evaluate("uPlot.sync('ks').plots[0].axes[0]._values")
        assert [tick for tick in ticks if tick] == ["1", "2"]
        assert '"models"' not in page.locator("main").inner_text(), "no page shows an answer as it came"
        assert "0.5 ± 0.1" in page.locator(".bars").inner_text()
        page.goto(f"{url}#/rollouts")
        chromium.wait_until_shown(page, "#/rollouts")
        assert page.locator(".stepper").count() == 0
        page.context.close()


def test_a_comparison_of_one_prompt_has_no_interval(chromium: Browser, tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, SHAPE)
    models = {name: {"metrics": {"accuracy": 0.5}} for name in ("a", "b")}
    counts = {"num_items": 1, "better": 1, "worse": 0, "p_value": 1.0, "confidence": 0.95}
    comparison = {"first": "a", "second": "b", "difference": 0.5, "low": None, "high": None, **counts}
    (tmp_path / "results.json").write_text(json.dumps({"models": models, "comparison": comparison}))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(url)
        chromium.wait_until_shown(page, "")
        told = page.locator(".card", has_text="Difference").inner_text()
        assert "A comparison of one prompt has no interval. Of 1 prompt, 1 went better" in told
        assert page.locator("svg.interval").count() == 0
        page.context.close()


def test_a_lower_score_is_better_if_the_tasks_say_so_and_a_missing_comparison_has_its_reason(
    chromium: Browser, tmp_path: Path
) -> None:
    write_evaluation(tmp_path, 0, SHAPE)
    models = {name: {"metrics": {"wiki/ppl": 9.0}} for name in ("a", "b")}
    counts = {"num_items": 9, "better": 8, "worse": 1, "p_value": 0.04, "confidence": 0.95, "lower_is_better": True}
    comparison = {"first": "a", "second": "b", "difference": -0.5, "low": -0.7, "high": -0.3, **counts}
    for results, expected in (
        ({"comparison": comparison}, "b is better."),
        ({"comparison": None, "no_comparison": "lower is better in wiki"}, "lower is better in wiki"),
    ):
        (tmp_path / "results.json").write_text(json.dumps({"models": models, **results}))
        with serving([str(tmp_path)]) as url:
            page = chromium.page()
            page.goto(url)
            chromium.wait_until_shown(page, "")
            assert expected in page.locator(".card", has_text="Difference").inner_text()
            page.context.close()


def test_calls_of_tools_are_marked_in_every_format_that_has_marks(chromium: Browser, tmp_path: Path) -> None:
    calls = [
        '<tool_call>{"name": "a"}</tool_call>',
        '<tool_call>{"name": "cut off"}',
        '[TOOL_CALLS] [{"name": "b", "arguments": {}}]',
        '<|python_tag|>{"name": "c", "parameters": {}}',
    ]
    base = {"step": 1, "group": 0, "item": "", "status": "trained", "reason": ""}
    texts = [
        [{"role": "prompt", "text": "use [TOOL_CALLS]"}, {"role": "model", "text": f"so {call}"}] for call in calls
    ]
    rows = [{**base, "sample": sample, "segments": own} for sample, own in enumerate([*texts, []])]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        for sample, call in enumerate(calls):
            page.goto(f"{url}#/sample?step=1&group=0&sample={sample}")
            chromium.wait_until_shown(page, f"#/sample?step=1&group=0&sample={sample}")
            assert page.locator("code.call").all_inner_texts() == [call]
        for tab in ("conversation", "tokens"):
            place = f"#/sample?step=1&group=0&sample={len(calls)}&tab={tab}"
            page.goto(f"{url}{place}")
            chromium.wait_until_shown(page, place)
            assert "ended before its first request to the model" in page.locator(".empty").inner_text()
        page.context.close()


def test_the_ledger_leads_to_each_lost_rollout(show: Any) -> None:
    page = show("ledger")
    page.locator("summary", has_text="filtered").click()
    page.wait_for_selector("details .chip")
    assert page.locator("details[open] .chip").count() == SHAPE.steps * SHAPE.samples
    page.locator("details[open] .chip").first.click()
    at(page, "#/sample")
    assert "filtered" in page.locator(".headline").inner_text()


def test_reasons_of_one_kind_lie_below_each_other(chromium: Browser, tmp_path: Path) -> None:
    base = {"step": 1, "sample": 0, "item": "", "status": "failed"}
    rows = [{**base, "group": group, "reason": f"ValueError: line {group}"} for group in range(205)]
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist(rows, schema=ROWS))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/ledger")
        page.locator("summary", has_text="ValueError (205 reasons)").click()
        page.get_by_role("button", name="Show more of 205").click()
        page.locator("summary", has_text="ValueError: line 204").click()
        assert page.locator("details[open] .chip").inner_text() == "step 1 · group 204 · sample 0"
        page.context.close()


def test_the_ledger_shows_what_an_audit_has_found(chromium: Browser, tmp_path: Path) -> None:
    row = {"step": 1, "sample": 0, "group": 0, "item": "", "status": "trained", "reason": ""}
    write_table(tmp_path, "train", 1, "rows", pa.Table.from_pylist([row], schema=ROWS))
    found = {"place": "record, step 1", "problem": "<b>reward</b> 2, and the batch has 1"}
    content = {"found": [found], "checked": {"rows of rollouts": 12}, "not_checked": ["no chain"]}
    (tmp_path / "audit.json").write_text(json.dumps(content))
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/ledger")
        card = page.locator("section", has_text="Audit").last
        text = card.inner_text()
        page.context.close()
    assert "1 contradictions" in text
    assert "record, step 1 <b>reward</b> 2, and the batch has 1" in text
    assert "checked: 12 rows of rollouts" in text
    assert "not checked: no chain" in text


def test_pages_are_light_or_dark(chromium: Browser, url: str) -> None:
    def is_dark() -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour[4:-1].split(", "))) < 200

    page = chromium.page(color_scheme="dark")
    page.goto(url)
    chromium.wait_until_shown(page, "")
    assert is_dark()
    page.keyboard.press("d")
    assert not is_dark()
    page.reload()
    chromium.wait_until_shown(page, "")
    assert not is_dark(), "the choice is remembered"
    page.context.close()


def test_a_page_without_the_token_gets_401(chromium: Browser, url: str) -> None:
    page = chromium.page()
    for address in (url.split("?")[0], f"{url}x"):
        response = page.goto(address)
        assert response is not None
        assert response.status == 401
    page.context.close()
    chromium.errors.clear()  # the browser reports the 401


def test_the_page_follows_a_run(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "live", Shape(steps=2, groups=2, samples=2))
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/rollouts")
        chromium.wait_until_shown(page, "#/rollouts")
        assert page.locator("#runs .live").inner_text() == "live"
        write_step(folder, 3, Shape(steps=3, groups=2, samples=2))
        page.locator("main a", has_text="Step 3 has been recorded").click()
        at(page, "step=3")
        page.keyboard.press("1")
        at(page, "#/overview")
        legend = page.locator('[data-chart="Training reward"] .u-legend')
        assert legend.locator(".u-value").first.inner_text() == "3"
        page.context.close()


def test_hidden_page_holds_no_connection(chromium: Browser, url: str) -> None:
    page = chromium.page()
    page.add_init_script(
        "window.streams = [];"
        "window.EventSource = class extends EventSource { constructor(a) { super(a); window.streams.push(this); } };"
    )
    page.goto(url)
    page.wait_for_function("() => window.streams.length === 1")
    for is_hidden, states in ((True, "2"), (False, "2,1")):
        page.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange')); }",
            is_hidden,
        )
        page.wait_for_function(
            "states => window.streams.map((stream) => stream.readyState).join() === states", arg=states
        )
    page.context.close()


def test_a_run_without_changes_stops_being_live(chromium: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quiet", Shape(steps=1, groups=1, samples=1))
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.clock.install()
        page.goto(url)
        page.wait_for_selector("#runs .live")
        page.clock.fast_forward("02:00")
        page.wait_for_selector("#runs .live", state="detached")
        assert page.locator("#runs small").inner_text() == "finished"
        assert "its last change was 2 min ago" in page.locator(".masthead").inner_text()
        page.context.close()


def test_a_finished_run_opens_at_its_last_step_and_not_at_what_was_under_way(chromium: Browser, tmp_path: Path) -> None:
    shape = Shape(steps=2, groups=2, samples=2)
    folder = write_run(tmp_path / "ended", shape)
    write_step(folder, 3, shape)
    with serving([str(folder)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/rollouts")
        chromium.wait_until_shown(page, "#/rollouts")
        assert page.get_by_label("step", exact=True).input_value() == "2"
        page.goto(f"{url}#/sample")
        chromium.wait_until_shown(page, "#/sample")
        assert "training · step 2" in page.locator(".crumbs").inner_text()
        page.context.close()


def test_an_episode_of_many_stages_tells_its_whole_seconds(chromium: Browser, tmp_path: Path) -> None:
    events = [{"name": "generate", "start": 0.1 * index, "end": 0.1 * index + 0.1} for index in range(256)]
    row = {"step": 1, "group": 0, "sample": 0, "item": "a", "status": "trained", "reason": "", "events": events}
    rows = pa.Table.from_pylist([row | {"seconds_generate": 600.0}], schema=ROWS)
    write_table(tmp_path, "train", 1, "rows", rows)
    with serving([str(tmp_path)]) as url:
        page = chromium.page()
        page.goto(f"{url}#/sample")
        assert page.locator("p.legend").inner_text().strip() == "generate 10.0 min"
        assert "the first 256 stages" in page.locator(".note").inner_text()
        page.context.close()


def test_the_export_opens_from_a_file(chromium: Browser, folders: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    export(open_runs([str(folder) for folder in folders]), path, [], 30)
    page = chromium.page()
    page.goto(path.as_uri())
    chromium.wait_until_shown(page, "")
    for place in PAGES:
        page.evaluate("place => { location.hash = place; }", f"#/{place}")
        chromium.wait_until_shown(page, f"#/{place}")
        assert page.locator("main .empty").count() == 0, place
    page.evaluate("location.hash = '#/rollouts?step=4&text=the tool says'")
    page.wait_for_selector(".hits mark")
    page.evaluate("location.hash = '#/timeline'")
    at(page, "#/timeline")
    page.keyboard.press("+")
    assert {urlsplit(address).scheme for address in page.evaluate("performance.getEntries().map(e => e.name)")} <= {
        *("file", "data", "", "blob"),
    }
    page.context.close()
