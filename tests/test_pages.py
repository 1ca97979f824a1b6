"""HTML pages in a browser without a window: what they draw, and how they answer mouse, fingers and keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, running_browser
from data import text_of

from zbpipe import generate, simulate
from zbpipe.costs.model import CostModel, Link
from zbpipe.simulator import offload
from zbpipe.simulator.timeline import Timeline
from zbpipe.views import style
from zbpipe.views.html import html
from zbpipe.views.svg import svg

PHONE, DESKTOP = (390, 844), (1280, 800)
MIDDLE, COLOURS = text_of("pages.txt", "middle"), text_of("pages.txt", "colours")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as started:
        yield started


def timeline(ranks: int, microbatches: int) -> Timeline:
    schedule = generate("ZBV", ranks, microbatches)
    return simulate(schedule, CostModel.uniform(schedule.placement, 1, 1.2, 0.8))


@pytest.fixture(scope="module")
def shown() -> Timeline:
    return timeline(4, 8)


def opened(browser: Browser, folder: Path, timeline: Timeline, size: tuple[int, int] = DESKTOP, **how: Any) -> None:
    file = folder / "page.html"
    file.write_text(html(timeline), encoding="utf-8")
    browser.show(file, *size, **how)
    browser.until("picture.timeline && picture.image")


def tip(browser: Browser) -> str:
    return str(browser.run('const tip = part("tip"); return tip.style.display === "block" ? tip.textContent : ""'))


def settled(browser: Browser) -> list[float]:
    browser.until("!picture.asked")
    begin, end = browser.run("return [picture.view.begin, picture.view.end]")
    return [begin, end]


@pytest.mark.parametrize(
    ("size", "dark"), [pytest.param(PHONE, True, id="phone, dark"), pytest.param(DESKTOP, False, id="desktop, light")]
)
def test_a_page_draws_each_op_in_its_colour(
    browser: Browser, tmp_path: Path, shown: Timeline, size: tuple[int, int], dark: bool
) -> None:
    opened(browser, tmp_path, shown, size, dark=dark, phone=size == PHONE)
    colours, theme = style.paints(shown), style.DARK if dark else style.LIGHT
    boxes = [(rank, n, span) for rank in range(4) for n, span in enumerate(shown.spans[rank][:8])]
    points = [browser.run(MIDDLE, rank, n) for rank, n, _ in boxes]
    left = browser.run("return picture.canvas.getBoundingClientRect().left + picture.left")
    idle = [(left + n, points[-1][1]) for n in range(12)]
    drawn = browser.run(COLOURS, [*((x, y - 9) for x, y in points), *idle])
    assert drawn[: len(boxes)] == [colours[span.op.stage, span.op.kind].fill for _, _, span in boxes]
    assert set(drawn[len(boxes) :]) == {theme.idle, theme.stripe}, "the last rank begins with a bubble"
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the window"
    assert browser.console() == []


def test_a_page_knows_the_memory_over_time(browser: Browser, tmp_path: Path, shown: Timeline) -> None:
    schedule = generate("ZBV", 2, 4)
    costs = CostModel.uniform(schedule.placement, 1, 1, 1, host=Link(bandwidth=2))
    for timeline in (shown, simulate(offload(schedule, costs, what="activations"), costs)):
        opened(browser, tmp_path, timeline)
        for rank in range(timeline.schedule.num_ranks):
            times, held = browser.run(
                "const {times, held} = picture.timeline.ranks[arguments[0]].memory; return [times, held]", rank
            )
            profile = style.memory_profile(timeline, rank)
            assert times == pytest.approx([time for time, _ in profile], abs=1e-6)
            assert held == pytest.approx([level for _, level in profile], abs=1e-9)


def test_mouse_and_keys(browser: Browser, tmp_path: Path, shown: Timeline) -> None:
    opened(browser, tmp_path, shown, (1280, 400))
    everything = settled(browser)
    x, y = browser.run(MIDDLE, 2, 4)
    browser.point(x, y)
    span = shown.spans[2][4]
    words = f"{span.op}  forward\nrank 2, stage {span.op.stage}, microbatch {span.op.microbatch}"
    assert tip(browser).startswith(words)
    browser.wheel(x, y, 60)
    browser.until("window.scrollY > 0")
    assert settled(browser) == everything, "the wheel alone scrolls"
    assert tip(browser) == ""
    browser.run("window.scrollTo(0, 0)")
    browser.wheel(x, y, -60, control=True)
    browser.until("picture.view.end < picture.until")
    begin, end = settled(browser)
    assert begin < span.start < span.end < end
    assert "Ctrl + wheel: zoom" in browser.run('return part("how").innerText')
    browser.run("picture.canvas.focus()")
    browser.press("0")
    assert settled(browser) == everything
    browser.press("ArrowRight", "ArrowRight", "ArrowDown")
    assert tip(browser).startswith("0F1  forward\nrank 0") is False
    chosen = browser.run("return picture.chosen")
    assert chosen["rank"] == 1
    assert tip(browser).startswith(f"{shown.spans[1][chosen['n']].op}  ")
    assert browser.run('return part("said").textContent') == tip(browser).replace("\n", ", ")
    browser.press("Escape")
    assert tip(browser) == ""
    browser.press("+")
    browser.until("picture.view.end < picture.until")
    assert browser.console() == []


def test_fingers(browser: Browser, tmp_path: Path, shown: Timeline) -> None:
    opened(browser, tmp_path, shown, PHONE, phone=True)
    begin, end = settled(browser)
    x, y = browser.run(MIDDLE, 1, 3)
    browser.touch([(x, y)])
    assert tip(browser).startswith(f"{shown.spans[1][3].op}  ")
    browser.touch([(150, y), (200, y)], [(125, y), (225, y)], [(100, y), (300, y)])
    zoomed = settled(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx((end - begin) / 4, rel=0.02)
    assert tip(browser) == ""
    browser.touch([(200, y)], [(180, y)], [(150, y)])
    moved = settled(browser)
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert "two fingers: zoom" in browser.run('return part("how").innerText')


def test_tables_tell_what_the_picture_shows(browser: Browser, tmp_path: Path, shown: Timeline) -> None:
    opened(browser, tmp_path, shown)
    browser.run('part("tables").open = true; part("rank").value = 2; part("rank").dispatchEvent(new Event("change"))')
    rows = browser.run('return [...part("ops").rows].map((row) => [...row.cells].map((cell) => cell.textContent))')
    assert rows == [
        [span.op.kind, str(span.op.stage), str(span.op.microbatch), style.number(span.start), style.number(span.end)]
        for span in shown.spans[2]
    ]


@pytest.mark.long
def test_a_large_page_is_small_and_draws_what_is_in_view(browser: Browser, tmp_path: Path) -> None:
    big = timeline(64, 512)
    opened(browser, tmp_path, big)
    assert (tmp_path / "page.html").stat().st_size < 2e6
    assert len(svg(big)) < 2e6
    assert browser.run("return picture.canvas.getBoundingClientRect().bottom <= innerHeight"), "the axis is in sight"
    x, y = browser.run(MIDDLE, 5, 1500)
    shares = set(browser.run(COLOURS, [(x, y + below) for below in range(-6, 6)]))
    fills = {paint.fill for paint in style.paints(big).values()}
    assert len(shares & fills) == 6, "F, I and W of two stages, one above the other"
    browser.run("window.scrollTo(0, 1400)")
    browser.until("picture.top > 1000 && !picture.asked")
    legend = browser.run('const {top, bottom} = part("legend").getBoundingClientRect(); return [top, bottom]')
    assert 0 <= legend[0] < legend[1] < 100, "the legend is always in sight"
    assert browser.run("return picture.canvas.height") < 800
    assert browser.console() == []
