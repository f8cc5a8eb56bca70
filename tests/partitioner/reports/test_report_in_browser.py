"""The HTML report in headless Chromium: it renders without errors, and search, zoom, sorting and themes work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.browser import CHROMIUM, Page, open_browser
from tests.helpers.sample_programs import llama, plan_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian package chromium)")

FRAMES = "[...document.querySelectorAll('.frame')]"
GRAPH = "document.querySelector('.frame[data-view=graph]')"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = plan_of(llama(pp=4, dp=2, tp=2, layers=16, tied=True, skip=True))
    hostile = plan.model_copy(update={"notes": ("</script><script>hacked=1</script><img src=x onerror=hacked=2>",)})
    return hostile.to_html(tmp_path_factory.mktemp("report") / "plan.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def shown(browser: Page, report: Path) -> Iterator[Page]:
    """The report in a window of a desktop. Fails afterwards if the console has errors, or something was loaded."""
    browser.problems.clear()
    browser.requests.clear()
    browser.show(report)
    yield browser
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith("file:")] == []


def read_zoom(page: Page, view: str = "graph") -> float:
    return float(page.evaluate(f"document.querySelector('.frame[data-view={view}]').dataset.zoom"))


def read_view(page: Page) -> list[float]:
    box = page.evaluate(f"{GRAPH}.querySelector('svg').getAttribute('viewBox')")
    return [float(part) for part in box.split()]


def test_everything_is_rendered(shown: Page):
    assert shown.evaluate(f"{FRAMES}.length") == 4
    sizes = shown.evaluate(f"{FRAMES}.map(f => f.querySelector('svg').getBoundingClientRect().height)")
    assert all(height > 50 for height in sizes)
    blank = "getComputedStyle(document.querySelector('.frame .f-panel')).fill"
    assert shown.evaluate(blank) == "rgb(244, 246, 248)"
    assert shown.evaluate("typeof hacked") == "undefined"


def test_the_policy_stops_other_scripts(browser: Page, report: Path):
    browser.show(report)
    browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=1\">')")
    browser.evaluate("new Promise(done => setTimeout(done, 100))")
    assert browser.evaluate("typeof window.hacked") == "undefined"


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_sideways_scrolling(shown: Page, report: Path, dark: bool):
    shown.show(report, 390, 844, dark=dark, phone=True)
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert shown.evaluate(f"{FRAMES}.every(f => f.getBoundingClientRect().width <= 390)")
    assert read_zoom(shown) >= 0.5  # texts can be read
    ground = shown.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")


def test_the_theme_changes(shown: Page):
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.frame text.f-ink')).fill"
    before = shown.evaluate(ground), shown.evaluate(ink)
    shown.evaluate("document.getElementById('theme').click()")
    assert shown.evaluate(ground) == "rgb(13, 17, 23)"
    assert shown.evaluate(ink) != before[1]
    assert shown.evaluate("document.getElementById('theme').textContent") == "Light theme"
    shown.evaluate("document.getElementById('theme').click()")
    assert (shown.evaluate(ground), shown.evaluate(ink)) == before


def test_search_finds_parts_of_the_graph(shown: Page):
    shown.evaluate("document.querySelector('#graph .search').focus()")
    shown.send("Input.insertText", text="DecoderLayer")
    status = "document.querySelector('#graph .found').textContent"
    found = shown.evaluate(f"{GRAPH}.querySelectorAll('.match').length")
    assert found >= 4
    assert shown.evaluate(status) == f"1 of {found}"
    first = shown.evaluate("document.querySelector('#graph .details').textContent")
    assert "DecoderLayer" in first
    shown.press("Enter")
    assert shown.evaluate(status) == f"2 of {found}"
    inside = (
        "(() => { const a = document.querySelector('#graph .current').getBoundingClientRect(),"
        f" b = {GRAPH}.getBoundingClientRect(); return a.left >= b.left - 1 && a.right <= b.right + 1; }})()"
    )
    assert shown.evaluate(inside)
    shown.send("Input.insertText", text="zzz")
    assert shown.evaluate(status) == "nothing found"
    assert shown.evaluate(f"{GRAPH}.querySelectorAll('.match').length") == 0


def test_pictures_zoom_and_move_by_keyboard(shown: Page):
    shown.evaluate(f"{GRAPH}.focus()")
    start = read_zoom(shown)
    shown.press("+", "+")
    shown.press("+", "+")
    assert read_zoom(shown) == pytest.approx(start * 1.4**2, rel=0.01)
    before = read_view(shown)
    shown.press("ArrowRight")
    assert read_view(shown)[0] > before[0]
    shown.press("0", "0")
    assert read_zoom(shown) < start * 1.4
    fitted = read_view(shown)
    shown.press("ArrowLeft")
    assert read_view(shown) == fitted  # all of it is visible: it does not move


def test_pictures_move_by_mouse_and_buttons(shown: Page):
    shown.evaluate("document.getElementById('graph').scrollIntoView({behavior: 'instant'})")
    for _ in range(3):
        shown.evaluate("document.querySelector('#graph [data-do=in]').click()")
    left, top = shown.evaluate(f"(r => [r.left, r.top])({GRAPH}.getBoundingClientRect())")
    before = read_view(shown)
    shown.drag((left + 200, top + 150), (left + 120, top + 150))
    moved = read_view(shown)
    assert moved[0] - before[0] == pytest.approx(80 / read_zoom(shown), rel=0.05)
    assert moved[1] == pytest.approx(before[1])
    shown.evaluate("document.querySelector('#graph [data-do=fit]').click()")
    assert read_view(shown)[2] > moved[2]


def test_a_click_shows_details(shown: Page):
    shown.evaluate("document.getElementById('topology').scrollIntoView({behavior: 'instant'})")
    box = "document.querySelector('.frame[data-view=topology] g > title').parentElement.getBoundingClientRect()"
    x, y = shown.evaluate(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({box})")
    shown.drag((x, y), (x, y))
    details = shown.evaluate("document.querySelector('#topology .details').textContent")
    assert details and "Point at" not in details


def test_tables_sort_and_filter(shown: Page):
    head = "document.querySelectorAll('#candidate-table thead th')[3]"
    times = (
        "[...document.querySelectorAll('#candidate-table tbody tr')].map(r => r.cells[3].dataset.key)"
        ".filter(k => k !== 'inf').map(Number)"
    )
    shown.evaluate(f"{head}.firstElementChild.click()")
    assert shown.evaluate(f"{head}.getAttribute('aria-sort')") == "ascending"
    up = shown.evaluate(times)
    assert up == sorted(up) and len(up) > 1
    shown.evaluate(f"{head}.firstElementChild.click()")
    assert shown.evaluate(f"{head}.getAttribute('aria-sort')") == "descending"
    assert shown.evaluate(times) == sorted(up, reverse=True)
    last = "[...document.querySelectorAll('#candidate-table tbody tr')].at(-1).cells[3].dataset.key"
    assert shown.evaluate(last) == "inf"  # what has no time stays behind
    shown.evaluate("document.querySelector('.filter').focus()")
    shown.send("Input.insertText", text="chosen")
    rows = "[...document.querySelectorAll('#candidate-table tbody tr')].filter(r => !r.hidden).length"
    assert shown.evaluate(rows) == 1


def test_rows_that_a_filter_finds_are_unfolded(browser: Page, tmp_path: Path):
    plan = plan_of(llama(pp=4, dp=2, tp=2, layers=16))
    slow = plan.certificate.candidates[2]
    more = tuple(slow.model_copy(update={"mesh": {**slow.mesh, "dp": n}}) for n in range(100, 140))
    certificate = plan.certificate.model_copy(update={"candidates": (*plan.certificate.candidates, *more)})
    browser.show(plan.model_copy(update={"certificate": certificate}).to_html(tmp_path / "many.html"))
    folded = "document.getElementById('more-candidates-table').closest('details').open"
    assert browser.evaluate(folded) is False
    browser.evaluate("document.querySelector('.filter').focus()")
    browser.send("Input.insertText", text="dp 139")
    assert browser.evaluate(folded) is True
    shown = "document.querySelector('#candidates .found').textContent"
    assert browser.evaluate(shown) == "1 of 44 rows"


def test_lines_of_text_are_readable_and_tables_use_the_width(shown: Page, report: Path):
    """A line of text has about 90 characters; tables and pictures are as wide as the page."""
    shown.show(report, 1600, 900)
    letter = "a letter of the page, of which a line has about as many as readers find easy to follow. "
    shown.evaluate(
        "const probe = document.createElement('p'); probe.id = 'probe';"
        f"probe.textContent = {letter!r}.repeat(5); document.querySelector('main').append(probe); true"
    )
    style = "getComputedStyle(document.getElementById('probe')).lineHeight"
    lines = shown.evaluate(f"document.getElementById('probe').clientHeight / parseFloat({style})")
    assert 75 < 5 * len(letter) / lines < 110
    for part in ("figure .frame", "#candidate-table"):
        assert shown.evaluate(f"document.querySelector('{part}').getBoundingClientRect().width") > 1450


def test_everything_is_reached_by_tab(shown: Page):
    shown.evaluate("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(90):
        shown.press("Tab")
        reached.add(shown.evaluate("(e => e.id || e.className || e.dataset.do || e.tagName)(document.activeElement)"))
    assert {"theme", "search", "frame live", "in", "out", "fit", "filter", "scroll"} <= reached


def test_problems_are_noticed(browser: Page, report: Path):
    browser.show(report)
    browser.problems.clear()
    browser.evaluate("console.error('a word'), setTimeout(() => { throw new Error('late') }, 0), 1")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    assert "a word" in browser.problems[0]
    assert "late" in browser.problems[1]
