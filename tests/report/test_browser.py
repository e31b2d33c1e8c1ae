"""The page in a real browser: charts that can be seen, no error, nothing wider than the window."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duotone_lab.report import write_report

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists(), reason="needs Debian's Chromium at /usr/bin/chromium: apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page that is open, with every message and every request that it caused."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def overflow(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def broken(result: dict[str, Any], unstarted: dict[str, Any]) -> dict[str, Any]:
    """`result` as it is when a recipe diverged, another was not begun, and names are long."""
    result["partial"] = True
    run = result["runs"][4]
    run["train_loss"] = [[step, loss if step < 50 else math.inf] for step, loss in run["train_loss"]]
    run["name"] = "a_recipe_file_with_a_very_long_name_and_no_space_in_it_at_all.toml"
    run["statistics"][0]["module"] = "model.decoder." + "very_long_name_" * 8 + "projection"
    result["settings"]["command"] = "duotone compare --data " + "/a/long/path" * 30
    result["runs"][5] = unstarted
    return result


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_charts_are_there_with_real_points(
    browser: Any, result: dict[str, Any], tmp_path: Path, width: int, scheme: str
) -> None:
    path = tmp_path / "report.html"
    write_report(result, path)
    visit = Visit(browser, path, width, scheme)
    page = visit.page
    charts = {
        "Loss over steps": ("path.line", 6),
        "Gap to bf16 over steps": ("path.line", 6),
        "Gap and speed on an NVIDIA H200": (".mark", 5),
        "Gap and peak memory": (".mark", 5),
    }
    for name, (selector, count) in charts.items():
        chart = page.get_by_role("img", name=name)
        assert chart.count() == 1, name
        box = chart.bounding_box()
        assert box["width"] > 240 and box["height"] > 60, (name, box)
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, (name, box)
        marks = chart.locator(selector)
        assert marks.count() == count, name
        sizes = marks.evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
        assert min(sizes) > 5, (name, sizes)
    line = page.get_by_role("img", name="Loss over steps").locator("path.line.s2")
    assert line.get_attribute("d").count("L") == 119
    assert line.evaluate("one => getComputedStyle(one).stroke") != "none"
    assert visit.overflow() <= 0
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert visit.overflow() <= 0
    assert visit.messages == []
    assert visit.requests == [path.as_uri()]
    page.close()


SMALLEST = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), sizes = [];
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, svg = element.closest('svg');
    if (!texts.currentNode.textContent.trim() || !element.getClientRects().length || element.closest('title')) continue;
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    sizes.push(scale * parseFloat(getComputedStyle(element).fontSize));
  }
  return Math.min(...sizes);
}"""
"""The smallest text that is seen, in pixels of the screen."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_on_a_phone(
    browser: Any, result: dict[str, Any], observe: Any, tmp_path: Path, scheme: str
) -> None:
    for run in result["runs"][2:]:
        observe(run, ["layers.0.up", "layers.1.up"])
    path = tmp_path / "report.html"
    write_report(result, path)
    visit = Visit(browser, path, 390, scheme)
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert visit.page.evaluate(SMALLEST) >= 11.5
    assert visit.overflow() <= 0 and visit.messages == []
    card = visit.page.locator("figure.card").first
    assert card.locator("svg").count() == 3
    assert all(box["width"] > 250 for box in (card.locator("svg").nth(at).bounding_box() for at in range(3)))
    rows = visit.page.locator("table.worst tbody tr")  # their sentences scroll, they do not fold letter by letter
    assert max(rows.nth(at).bounding_box()["height"] for at in range(rows.count())) < 120
    visit.page.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_a_broken_result_is_a_whole_page(
    browser: Any, result: dict[str, Any], unstarted: dict[str, Any], tmp_path: Path, width: int
) -> None:
    path = tmp_path / "report.html"
    write_report(broken(result, unstarted), path)
    visit = Visit(browser, path, width, "light")
    assert visit.page.get_by_text("Partial report.").is_visible()
    assert visit.page.get_by_text("diverged: its loss is not a finite number from step 50").is_visible()
    visit.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert visit.overflow() <= 0
    assert visit.messages == []
    visit.page.close()


def test_a_choice_of_quantity_and_of_layers_needs_no_script(
    browser: Any, result: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(result, path)
    page = Visit(browser, path, 1280, "light").page
    table = page.get_by_role("region", name="Planes of nvfp4")
    assert table.locator("i.m0:visible").count() == 4 * 6 and table.locator("i.m1:visible").count() == 0
    page.get_by_label("underflow").focus()
    page.keyboard.press("Space")
    assert table.locator("i.m0:visible").count() == 0 and table.locator("i.m1:visible").count() == 4 * 6
    table.get_by_label("layers.*.mlp.down (4)").check()
    assert table.locator("i.m1:visible").count() == (4 + 4) * 6
    colours = "all => all.map(one => getComputedStyle(one).backgroundColor)"
    page.get_by_role("radio", name="signal-to-noise").check()
    assert "rgba(0, 0, 0, 0)" not in table.locator("i.m0:visible").evaluate_all(colours)
    page.close()


def test_dark_mode_has_dark_ground_and_print_is_whole_and_on_white(
    browser: Any, result: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(result, path)
    visit = Visit(browser, path, 1280, "dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert visit.page.evaluate(ground) == "rgb(18, 21, 28)"
    visit.page.emulate_media(media="print", color_scheme="dark")
    assert visit.page.evaluate(ground) == "rgb(255, 255, 255)"
    assert visit.page.evaluate("getComputedStyle(document.body).color") == "rgb(27, 31, 42)"
    visit.page.set_viewport_size({"width": 718, "height": 1000})  # A4 less its margins
    assert visit.overflow() <= 0
    closed = visit.page.get_by_role("region", name="Plan of nvfp4", include_hidden=True)
    assert closed.bounding_box()["height"] > 100
    visit.page.close()
