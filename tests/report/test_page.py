"""The HTML page: whole without a network, right in a browser, deaf to names that are code."""

from __future__ import annotations

import dataclasses
import html.parser
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.analysis.trade_off.answers import Answers
from planner.analysis.trade_off.curve import CurveSweep
from planner.common.options import Search
from planner.common.units import format_bytes
from planner.plans.plan import ComparisonRow, Plan
from planner.report.page import to_html
from planner.report.page.what_if import what_if_page
from tests.example_graphs import transformer
from tests.planned import study_of
from tests.report.test_report import bare, example_plan

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">{{7*7}}"
VOID = ("meta", "input", "br", "img", "link")
"""Elements that never end."""

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


plan = pytest.fixture(scope="module")(example_plan)


def hostile(plan: Plan) -> Plan:
    """Return a plan in which every name is an attempt to run code."""
    assert plan.details is not None
    bad = {"operation": HOSTILE, "module": HOSTILE}
    lines = {
        name: dataclasses.replace(line, points=tuple(dataclasses.replace(p, **bad) for p in line.points))
        for name, line in (("before", plan.details.before), ("after", plan.details.after))
    }
    return dataclasses.replace(
        plan,
        model=HOSTILE,
        device=HOSTILE,
        peak_at=dataclasses.replace(plan.peak_at, source=HOSTILE, **bad),
        anatomy={HOSTILE: plan.peak_bytes},
        placement=tuple(dataclasses.replace(x, module=HOSTILE, targets={HOSTILE: 1}) for x in plan.placement),
        baselines=(dataclasses.replace(plan.baselines[0], name=HOSTILE, peak_bytes=None, reason=HOSTILE),),
        details=dataclasses.replace(
            plan.details,
            modules=tuple(dataclasses.replace(x, module=HOSTILE, targets={HOSTILE: 1}) for x in plan.details.modules),
            alive=tuple(dataclasses.replace(row, source=HOSTILE, kind=HOSTILE, **bad) for row in plan.details.alive),
            **lines,
        ),
    )


class Reader(html.parser.HTMLParser):
    """Collects tags, addresses of anything outside, and what stands open."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Reader:
    """Read a page, which must be whole and name nothing outside."""
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == reader.outside == [] and not re.search(r"https?://|url\(", text)
    return reader


def test_the_page_is_whole_and_names_nothing_outside(plan: Plan) -> None:
    text = to_html(plan)
    reader = parsed(text)
    assert reader.tags.count("script") == 2 and "default-src 'none'" in text


def test_the_page_of_a_saved_plan_is_the_same(plan: Plan) -> None:
    assert to_html(Plan.from_json(plan.to_json())) == to_html(plan)


def test_a_plan_without_parts_has_a_page(plan: Plan) -> None:
    assert "FITS" in to_html(bare(plan))
    parsed(to_html(bare(plan)))


def test_hostile_names_stay_names(plan: Plan) -> None:
    text = to_html(hostile(plan))
    reader = parsed(text)
    assert reader.tags.count("script") == 2 and "img" not in reader.tags
    assert "&lt;/script&gt;" in text and "{{7*7}}" in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; the page is parsed only")
    from playwright.sync_api import sync_playwright

    arguments = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
                 "--disable-sync", "--no-first-run")  # fmt: skip
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(arguments))
        yield started
        started.close()


def opened(browser: Any, text: str, folder: Path, width: int = 1200) -> Any:
    """Open a page, and fail on whatever it complains of or asks a network for."""
    (folder / "page.html").write_text(text, encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: page.wrong.append(message.text))
    page.on("request", lambda request: request.url.startswith("file:") or page.wrong.append(request.url))
    page.goto((folder / "page.html").as_uri())
    return page


def test_a_browser_shows_the_figures_and_a_click_chooses_a_layer(browser: Any, plan: Plan, tmp_path: Path) -> None:
    page = opened(browser, to_html(plan), tmp_path)
    assert page.inner_text("#verdict").startswith("FITS 170.1 of 170.6 MiB")
    sizes = [int(cell.get_attribute("data-bytes")) for cell in page.query_selector_all("#anatomy td[data-bytes]")]
    assert sum(sizes) == plan.peak_bytes == int(page.get_attribute("#peak", "data-bytes"))
    rows = page.query_selector_all("#placement tr[data-row]")
    again = [int(row.query_selector_all("td")[3].inner_text()) for row in rows]
    assert sum(again) == int(page.query_selector_all("#placement tr.sum td")[3].inner_text())

    where = next(i for i, layer in enumerate(plan.placement) if layer.module == "transformer.h.2")
    page.click(f"button[data-layer='{where}']")
    assert re.match(r"transformer.h.2\s*saves 6.2 MiB, frees 10.0 MiB; 4 operations rec", page.inner_text("#layer"))
    (hot,) = page.query_selector_all("tr.hot")
    assert hot.inner_text().startswith("transformer.h.2")

    page.hover("#timeline-chart", position={"x": 300, "y": 20})
    assert "as planned:" in page.inner_text(".tip") and "without recompute:" in page.inner_text(".tip")
    page.uncheck("#show-before")
    page.hover("#timeline-chart", position={"x": 400, "y": 20})
    assert "without recompute" not in page.inner_text(".tip")
    assert page.evaluate("getComputedStyle(document.querySelector('path.before')).visibility") == "hidden"
    assert page.wrong == []


@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_zooms_over_time_and_finds_names(browser: Any, plan: Plan, tmp_path: Path, width: int) -> None:
    page = opened(browser, to_html(plan), tmp_path, width)
    page.locator("#timeline-chart").scroll_into_view_if_needed()
    box = page.locator("#timeline-chart").bounding_box()
    ends = "[...document.querySelectorAll('#timeline .axis > span')].map((one) => one.textContent)"
    whole = page.evaluate(ends)
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    page.mouse.up()
    view = "document.querySelector('#timeline-chart svg').viewBox.baseVal"
    assert page.evaluate(f"[{view}.x, {view}.width]") == pytest.approx([250, 250], abs=2)
    assert page.evaluate(ends) != whole
    page.click(".whole")
    assert page.evaluate(ends) == whole and not page.is_visible(".whole")
    page.focus("#timeline-chart")
    page.keyboard.press("+")
    assert page.evaluate(f"[{view}.x, {view}.width]") == pytest.approx([250, 500])

    page.fill("#find", "H.2")
    assert re.match(r"\d+ moments of the step, up to .* in use; 1 layer$", page.inner_text("#found"))
    assert page.get_attribute("#found-times", "d").count("M") > 1
    page.keyboard.press("Enter")
    assert page.inner_text("#layer").startswith("transformer.h.2")
    assert page.inner_text("#module").startswith("transformer.h.2")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.wrong == []


def test_a_browser_runs_no_names_and_nothing_sticks_out(browser: Any, plan: Plan, tmp_path: Path) -> None:
    page = opened(browser, to_html(hostile(plan)), tmp_path, width=400)
    page.click("button[data-layer='0']")
    assert HOSTILE in page.inner_text("#layer") and page.title() != "taken"
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.wrong == []


# The page of a what-if.


@pytest.fixture(scope="module")
def answers() -> Answers:
    search = Search(time_limit_seconds=0.2, deterministic=True)
    sweep = CurveSweep(study_of(*transformer(3)), search, points=4, asked="80%")
    sweep.run()
    return Answers(curve=sweep.curve(), plans=tuple(sweep.plans()))


def test_the_page_of_a_what_if_holds_the_plan_of_every_point(answers: Answers) -> None:
    text = what_if_page(answers)
    parsed(text)
    points = answers.curve.with_asked
    assert [plan.budget_bytes for plan in answers.plans] == [point.budget_bytes for point in points]
    assert len(points) == 5
    for point, plan in zip(points, answers.plans, strict=True):
        assert (point.predicted_peak_bytes, point.overhead) == (plan.peak_bytes, pytest.approx(plan.overhead))
        assert plan.details is not None and plan.details.after.peak_bytes == plan.peak_bytes
        assert f"planner.auto_wrap(model, budget={plan.budget_bytes})" in text
    assert text.count(">your budget<") == 3  # a card, the legend, the row
    parsed(what_if_page(dataclasses.replace(answers, plans=())))


def test_names_in_the_page_of_a_what_if_stay_names(answers: Answers) -> None:
    curve = dataclasses.replace(answers.curve, model=HOSTILE, device=HOSTILE)
    plans = tuple(hostile(dataclasses.replace(plan, baselines=(ComparisonRow(name="x"),))) for plan in answers.plans)
    reader = parsed(what_if_page(dataclasses.replace(answers, curve=curve, plans=plans)))
    assert reader.tags.count("script") == 2 and "img" not in reader.tags


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_goes_from_plan_to_plan(browser: Any, answers: Answers, tmp_path: Path, width: int) -> None:
    page = opened(browser, what_if_page(answers), tmp_path, width)
    first, last = answers.plans[0], answers.plans[-1]

    def assert_shows(plan: Plan) -> None:
        assert page.inner_text("#code") == f"planner.auto_wrap(model, budget={plan.budget_bytes})"
        assert page.inner_text("#peak") == format_bytes(plan.peak_bytes)
        assert page.query_selector_all("#strip button")[0].get_attribute("title").startswith(plan.placement[0].module)

    page.focus("#slider")
    page.keyboard.press("Home")
    assert_shows(first)
    outline = page.get_attribute("#line-after", "d")
    page.click("#pin")
    page.keyboard.press("Tab")
    page.focus("#slider")
    page.keyboard.press("End")
    assert_shows(last)
    assert page.get_attribute("#line-pinned", "d") == outline != page.get_attribute("#line-after", "d")
    page.click("#points tr[data-row='1']")
    assert_shows(answers.plans[1])
    assert "hot" in page.get_attribute("#points tr[data-row='1']", "class")
    page.hover("#timeline-chart", position={"x": 100, "y": 50})
    assert "compared plan:" in page.inner_text(".tip")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.wrong == []
