"""Pictures show every op, where and when it runs, and nothing that is not so."""

import gzip
import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import page_data, page_ops
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from rich.style import Style
from rich.text import Text

from zbpipe import generate
from zbpipe.costs.model import CostModel
from zbpipe.schedule import registry
from zbpipe.schedule.ir import OFFLOADS, RELOADS, Op, OpKind, Schedule, count_noun
from zbpipe.simulator.simulation import simulate
from zbpipe.simulator.timeline import Timeline
from zbpipe.views import style
from zbpipe.views.grid import IDLE, grid
from zbpipe.views.html import html
from zbpipe.views.perfetto import perfetto, write_perfetto
from zbpipe.views.report import ComparedSchedule
from zbpipe.views.svg import svg

pytestmark = pytest.mark.usefixtures("short_search")

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """<b>&"'</script>{{data}}"""


def timeline(
    name: str, ranks: int = 4, microbatches: int = 8, f: float = 1, i: float = 1, w: float = 1, comm: float = 0
) -> Timeline:
    schedule = generate(name, ranks, microbatches)
    return simulate(schedule, CostModel.uniform(schedule.placement, f, i, w, comm=comm))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    time = st.sampled_from([1.0, 0.001, 0.7, 3.0])
    name, ranks, microbatches = sorted(registry.schedules()), st.integers(1, 4), st.integers(1, 6)
    times = (time, time, st.just(0.0) | time, st.sampled_from([0.0, 0.3]))
    return timeline(draw(st.sampled_from(name)), draw(ranks), draw(microbatches), *map(draw, times))


def rows_of(picture: Text, ranks: int) -> list[str]:
    rows = [""] * ranks
    for line in picture.plain.splitlines():
        if match := re.match(r"rank (\d+) +(.*)", line):
            label = len(f"rank {ranks - 1} ")
            rows[int(match[1])] += line[label:]
    return rows


def test_the_grid_of_a_small_schedule() -> None:
    assert grid(timeline("1F1B", 2, 2), 80).plain.splitlines() == [
        "rank 0 F0 F1 ······B0    ···B1    ",
        "rank 1 ···F0 B0    F1 B1    ······",
        "       0              5",
        " F  forward    B  full backward   · idle   number: microbatch",
    ]


def test_the_legend_tells_the_kinds_without_colours() -> None:
    assert grid(timeline("ZBV", 2, 2), 80, colours=False).plain.splitlines()[-2:] == [
        "F forward   I backward for the input   W backward for the weights   · idle",
        "number: microbatch",
    ]
    low = grid(timeline("ZBV", 2, 12), 160, 6).plain
    assert "F9" in low
    assert "F10" not in low
    assert "number: microbatch, where there is room" in " ".join(low.split())
    assert grid(simulate(generate("GPipe", 80, 1), (0, 0, 0)), 80).plain.count("\nrank") == 79, "nothing takes time"
    # The grid owns up to boxes that it cannot show: W of 2 stages of 2 ranks for 4 microbatches.
    for w, words in ((1, ""), (0.0001, "16 ops are too short for a column")):
        picture = grid(timeline("ZBV", 2, 4, w=w), 80).plain
        assert ("too short" in picture) == bool(words)
        assert words in picture


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 50), (60, 10)])
@pytest.mark.parametrize("name", ["ZBV", "1F1B"])
def test_each_column_of_the_grid_shows_what_runs_then(name: str, width: int, height: int) -> None:
    shown = timeline(name, 3, 5)
    rows = rows_of(grid(shown, width, height), 3)
    columns = len(rows[0])
    assert {len(row) for row in rows} == {columns}
    for row, ran in zip(rows, shown.spans, strict=True):
        expected = [IDLE] * columns
        for span in ran:
            begin, end = (round(time / shown.makespan * columns) for time in (span.start, span.end))
            expected[begin:end] = [" "] * (end - begin)
            label = f"{span.op.kind}{span.op.microbatch}"
            label = label if len(label) <= end - begin else str(span.op.kind)
            expected[begin : begin + len(label)] = label
        assert row == "".join(expected)


def test_a_grid_too_long_for_a_line_goes_on_below() -> None:
    shown = timeline("1F1B", 2, 16)
    assert grid(shown, 400, 24).plain.count("rank 0 ") == 1
    narrow = grid(shown, 60, 24)
    assert narrow.plain.count("rank 0 ") > 1
    assert rows_of(narrow, 2)[0].startswith("F0 F1"), "with room below, boxes keep their microbatch"
    assert rows_of(grid(shown, 60, 8), 2)[0].startswith("FF"), "without, only their letter"


@given(timelines(), st.sampled_from([40, 80, 200]))
def test_no_line_of_the_grid_is_wider_than_the_terminal(shown: Timeline, width: int) -> None:
    lines = grid(shown, width).plain.splitlines()
    assert max(map(len, lines)) <= max(width, len("ops are too short for a column; --html has them all") + 5)


@pytest.mark.parametrize(("name", "microbatches"), [("GPipe", 300), ("ZBV", 200)])
def test_what_would_fill_screens_is_a_line_per_rank_as_high_as_it_is_busy(name: str, microbatches: int) -> None:
    shown = timeline(name, 6, microbatches)
    picture = grid(shown, 100, 24)
    assert max(map(len, picture.plain.splitlines())) <= 100
    rows = rows_of(picture, 6)
    columns = len(rows[0])
    assert len(picture.plain.splitlines()) <= 6 + 5
    for row, spans in zip(rows, shown.spans, strict=True):
        times = np.array([(span.start, span.end) for span in spans]).T * columns / shown.makespan
        for column, cell in enumerate(row):
            busy = (np.minimum(times[1], column + 1) - np.maximum(times[0], column)).clip(0).sum()
            assert (IDLE + "▁▂▃▄▅▆▇█").index(cell) / 8 == pytest.approx(busy, abs=0.5 / 8 + 1e-9)
    middle = grid(shown, 100, 24).split("\n")[0].get_style_at_offset(Console(), 20)
    forward = Style.parse(style.paint(OpKind.F, 0, 1).fill)
    assert middle == (forward if name == "GPipe" else Style.null()), "ZBV has mixtures there"


def test_kinds_and_stages_of_a_rank_have_colours_of_their_own() -> None:
    colours = [style.paint(kind, nth, 2).fill for kind in OpKind for nth in (0, 1)]
    assert len(set(colours)) == len(colours)
    assert style.paint(OpKind.F, 0, 1) == style.paint(OpKind.F, 0, 2), "the first stage looks the same everywhere"
    shown = timeline("ZBV", 2, 2)
    used = [str(span.style) for span in grid(shown, 80).spans]
    assert any(str(style.paint(OpKind.F, 0, 2).fill) in each for each in used[:2])
    paints = style.paints(shown).items()
    assert {f"{text} on {fill}" for (_, kind), (fill, text) in paints if kind != OpKind.B} <= set(used)


VISIONS = {
    "all colours": "1 0 0 0 1 0 0 0 1",
    "protan": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "deutan": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.011820 0.042940 0.968881",
    "tritan": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.303900",
    "none": 3 * "0.2126 0.7152 0.0722 ",
}
"""What is left of linear RGB: Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color
Vision Deficiency", 2009, severity 1.0; without any colours the luminance of WCAG."""
D65 = np.array([0.9505, 1.0, 1.089])
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: str) -> NDArray[np.float64]:
    """CIE L*a*b* of #rrggbb, as somebody with this vision sees it."""
    parts = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    ratios = TO_XYZ @ np.clip(np.array(VISIONS[vision].split(), float).reshape(3, 3) @ linear, 0, 1) / D65
    x, y, z = np.where(ratios > 216 / 24389, np.cbrt(ratios), (24389 / 27 * ratios + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one: str, other: str, vision: str) -> float:
    """The distance of two colours (CIE76, where 2.3 can just be seen)."""
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


@pytest.mark.parametrize("vision", VISIONS)
def test_colours_stay_apart_with_every_kind_of_colour_blindness(vision: str) -> None:
    boxes = [style.paint(kind, nth, 2).fill for kind in (OpKind.F, OpKind.I, OpKind.W, OpKind.B) for nth in (0, 1)]
    least = 5 if vision == "none" else 18
    assert min(apart(one, other, vision) for one, other in combinations(boxes, 2)) > least
    for lane in (OFFLOADS, RELOADS):
        one, other = (style.paint(kind, 0, 2).fill for kind in sorted(lane))
        assert apart(one, other, vision) > least


@pytest.mark.parametrize("theme", [style.LIGHT, style.DARK], ids=["light", "dark"])
def test_texts_and_the_bubble_can_be_seen(theme: style.Theme) -> None:
    """4.5 for texts and 3 for other marks are what WCAG 2.2 asks for."""
    for kind in OpKind:
        for of in range(1, 9):
            for nth in range(of):
                assert style.contrast(*style.paint(kind, nth, of)) > 4.5
    for text in (theme.ink, theme.faint, theme.path):
        assert style.contrast(text, theme.paper) > 4.5
    assert style.contrast(theme.ink, theme.panel) > 4.5
    assert style.contrast(theme.stripe, theme.paper) > 3
    assert style.contrast(theme.stripe, theme.idle) > 3


def boxes(row: ElementTree.Element) -> list[tuple[str, float, float]]:
    rects = row.findall(f"{SVG}rect")
    names = [(rect.findtext(f"{SVG}title") or "").split(":")[0] for rect in rects]
    places = [(float(rect.attrib["x"]), float(rect.attrib["width"])) for rect in rects]
    return [(name, x, x + width) for name, (x, width) in zip(names, places, strict=True)]


def rank_rows(picture: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{SVG}g[@class='ops']")


@given(timelines())
def test_an_svg_has_one_box_per_op_where_it_belongs(shown: Timeline) -> None:
    picture = ElementTree.fromstring(svg(shown))
    rows = rank_rows(svg(shown))
    assert len(rows) == len(shown.spans)
    left = min(begin for row in rows for _, begin, _ in boxes(row))
    scale = (max(end for row in rows for _, _, end in boxes(row)) - left) / shown.makespan
    for row, ran in zip(rows, shown.spans, strict=True):
        drawn = boxes(row)
        assert [op for op, _, _ in drawn] == [str(span.op) for span in ran]
        for (_, begin, end), span in zip(drawn, ran, strict=True):
            assert begin == pytest.approx(left + span.start * scale, abs=0.02)
            assert end == pytest.approx(left + span.end * scale, abs=0.02)
        assert all(end <= begin + 0.02 for (_, _, end), (_, begin, _) in pairwise(drawn))
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for rect in picture.iter(f"{SVG}rect"):
        assert float(rect.get("x", "0")) + float(rect.attrib["width"]) <= width + 0.02
        assert float(rect.get("y", "0")) + float(rect.attrib["height"]) <= height + 0.02


def test_timelines_below_each_other_have_one_time_scale_and_can_be_dark() -> None:
    """A box of 1F1B's forward, which runs twice as long as one of ZBV's, is twice as wide. The bubble is hatched."""
    picture = svg(timeline("1F1B"), timeline("ZBV"))
    tree = ElementTree.fromstring(picture)
    pictures = tree.findall(f"{SVG}svg")
    assert [each.findtext(f"{SVG}text") for each in pictures] == ["1F1B", "ZBV"]
    rects = [[box for box in each.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None] for each in pictures]
    first, second = (next(box for box in each if box.get("class") == "F0") for each in rects)
    assert float(first.get("width", 0)) == 2 * float(second.get("width", 0))
    assert float(pictures[1].get("y", 0)) == float(pictures[0].get("height", 0))
    for text in [styles.text or "" for styles in tree.iter(f"{SVG}style")]:
        light, dark = text.split("@media (prefers-color-scheme:dark)")
        assert f".paper{{fill:{style.LIGHT.paper}}}" in light
        assert f".paper{{fill:{style.DARK.paper}}}" in dark
        assert f".stripe{{fill:{style.DARK.stripe}}}" in dark
        selectors = re.findall(r"(?:^|[{},])\s*([^{},@\s][^{},@]*)(?=[,{])", re.sub(r"{[^{}]*}", "{}", text))
        assert all(selector.startswith(".zbp ") for selector in selectors), "no rule is for what stands around it"
    [used] = set(re.findall(r"\.idle{fill:url\(#(.+?)\)}", picture))
    assert {pattern.get("id") for pattern in tree.iter(f"{SVG}pattern")} == {used}


def strokes(path: ElementTree.Element) -> list[tuple[float, float]]:
    place = re.fullmatch(r"translate\((\S+) \S+\) scale\((\S+) 1\)", path.attrib["transform"])
    assert place is not None
    left, scale = map(float, place.groups())
    here, drawn = 0, []
    for skipped, stroke in re.findall(r"m(-?\d+) 0h(\d+)", path.attrib["d"]):
        here += int(skipped) + int(stroke)
        drawn.append((left + (here - int(stroke)) * scale, left + here * scale))
    return drawn


def test_of_thousands_of_ops_a_row_is_a_few_paths() -> None:
    shown = timeline("ZBV", 4, 200, w=0.7)
    picture = svg(shown)
    assert len(picture) < 14 * sum(map(len, shown.spans))
    scale = (6_000 if shown.makespan > 300 else 0) / shown.makespan
    for row, ran in zip(rank_rows(picture), shown.spans, strict=True):
        assert row.findall(f"{SVG}rect") == []
        paths = row.findall(f"{SVG}path")
        drawn = sorted((*stroke, path.attrib["class"]) for path in paths for stroke in strokes(path))
        for (left, right, name), span in zip(drawn, ran, strict=True):
            assert name == f"{span.op.kind}{span.op.stage // 4}"
            assert left == pytest.approx(64 + span.start * scale, abs=0.06)
            assert right == pytest.approx(64 + span.end * scale, abs=1.06)


def test_names_are_text_not_markup() -> None:
    shown = timeline("ZBV", 2, 2)
    shown = replace(shown, schedule=replace(shown.schedule, name=HOSTILE))
    assert ElementTree.fromstring(svg(shown)).findtext(f"{SVG}text") == HOSTILE
    page = html(shown)
    assert "<b>" not in page
    assert page.count("</script>") == 3
    assert len(page_data(page)["ranks"]) == 2


@given(timelines())
def test_the_page_has_every_op_and_the_critical_path(shown: Timeline) -> None:
    data = page_data(html(shown))
    assert data["makespan"] == shown.makespan
    for rank, ran in enumerate(shown.spans):
        drawn = page_ops(data, data["ranks"][rank]["ops"])
        assert [op for op, *_ in drawn] == [str(span.op) for span in ran]
        for (_, start, end), span in zip(drawn, ran, strict=True):
            assert (start, end) == pytest.approx((span.start, span.end), abs=1e-9 * shown.makespan)
        assert data["ranks"][rank]["peak"] == shown.peak_activations[rank]
        for span in ran:
            kind = [letter for letter, _ in data["kinds"]].index(span.op.kind)
            colours = data["paints"][kind][data["nthStage"][span.op.stage]]
            assert colours == list(style.paints(shown)[span.op.stage, span.op.kind])
        times = [time for time, _ in style.memory_profile(shown, rank)]
        assert times == sorted(set(times)), "one level per moment"
    path = [str(shown.spans[rank][n].op) for rank, n in data["criticalPath"]]
    assert path == [str(span.op) for span in shown.critical_path]


def test_the_page_needs_nothing_else_and_says_the_same_in_a_table() -> None:
    page = html(timeline("1F1B", 2, 4))
    assert not re.search(r"https?:|\bsrc\s*=|\bhref\s*=|@import|url\(|\bfetch\(|\bimport\(", page)
    assert "{{" not in page
    rows = re.findall(
        r'<tr><th scope="row">(\d)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', page
    )
    assert rows == [("0", "12", "3", "20.0%", "2"), ("1", "12", "3", "20.0%", "1")]


def test_memory_is_in_shares_of_a_rank_whatever_the_unit_of_the_costs() -> None:
    schedule = generate("ZBV", 2, 3)
    uniform = CostModel.uniform(schedule.placement)
    in_bytes = replace(uniform, activations=tuple(2.0**30 * share for share in uniform.activations))
    profiles = [style.memory_profile(simulate(schedule, costs), 0) for costs in (uniform, in_bytes)]
    assert profiles[0] == profiles[1]


@given(timelines())
def test_a_trace_has_one_complete_event_per_op_in_microseconds(shown: Timeline) -> None:
    events = json.loads(perfetto(shown))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    spans = [(rank, span) for rank, row in enumerate(shown.spans) for span in row]
    for event, (rank, span) in zip(complete, spans, strict=True):
        assert (event["pid"], event["name"]) == (rank, str(span.op))
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
        stage, kind, microbatch = span.op
        assert event["args"] == {"stage": stage, "kind": str(kind), "microbatch": microbatch}
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(len(shown.spans))}
    for rank, peak in enumerate(shown.peak_activations):
        held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["pid"] == rank]
        assert max(held) == pytest.approx(peak)


def test_arrows_of_a_trace_are_the_transfers_between_ranks() -> None:
    events = json.loads(perfetto(timeline("ZBV", 2, 1)))["traceEvents"]
    boxes = {(event["pid"], event["ts"]): event["name"] for event in events if event["ph"] == "X"}
    ends: dict[str, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(boxes[event["pid"], event["ts"]])
    assert sorted(map(tuple, ends.values())) == [("0F0", "1F0"), ("1I0", "0I0"), ("2F0", "3F0"), ("3I0", "2I0")]


def test_a_trace_whose_name_ends_in_gz_is_gzipped(tmp_path: Path) -> None:
    shown = timeline("ZBV", 2, 2)
    for name in ("a.json", "a.json.gz"):
        write_perfetto(tmp_path / name, shown)
    plain, packed = ((tmp_path / name).read_bytes() for name in ("a.json", "a.json.gz"))
    assert gzip.decompress(packed) == plain == perfetto(shown).encode()
    assert len(packed) < len(plain) / 4
    write_perfetto(tmp_path / "b.gz", shown)
    assert (tmp_path / "b.gz").read_bytes() == packed, "the same timeline gives the same file"


def test_a_schedule_is_recommended_within_its_limits_or_slightly_above_the_memory_of_1f1b() -> None:
    shown = timeline("1F1B", 2, 4)
    peak = max(shown.peak_memory)

    def is_within(share: float | None, limits: tuple[float, ...] | None = None, runs: bool = True) -> bool:
        return replace(ComparedSchedule.of(shown, limits, share and peak / share), runs=runs).is_within

    assert [is_within(share) for share in (0.5, 1.02, 1.02 + 1e-6, None)] == [True, True, False, False]
    assert [is_within(9.0, (limit, peak)) for limit in (peak, peak - 1e-6)] == [True, False]
    assert not is_within(0.5, runs=False)


@given(st.floats(1e-6, 1e6), st.integers(1, 50))
def test_ticks_are_few_and_round_and_numbers_have_no_noise(until: float, most: int) -> None:
    times = style.ticks(until, most)
    assert 1 <= len(times) <= most + 1
    assert times[0] == 0
    assert times[-1] <= until * (1 + 1e-6)
    assert style.ticks(25.5, 5) == pytest.approx((0, 10, 20))
    assert style.ticks(0.3, 3) == pytest.approx((0, 0.1, 0.2, 0.3))
    assert (style.ticks(0, 3), style.ticks(7, 0)) == ((0,), (0,))
    assert (style.number(25.500000000000004), style.percent(-2e-16)) == ("25.5", "0.0%")
    assert [count_noun(n, "microbatch") for n in (1, 2)] == ["1 microbatch", "2 microbatches"]


def test_a_schedule_with_unequal_numbers_of_stages_has_pictures() -> None:
    rows = [[Op.parse(text) for text in row.split()] for row in ("0F0 2F0 2B0 0B0", "1F0 1I0 1W0")]
    schedule = Schedule.from_rows(rows, "odd")
    shown = simulate(schedule, CostModel.uniform(schedule.placement))
    assert len(rank_rows(svg(shown))) == 2
    assert rows_of(grid(shown), 2)[1].strip(IDLE).startswith("F0")
    data = page_data(html(shown))
    assert data["stagesPerRank"] == 2
    paints = [data["paints"][0][nth] for nth in data["nthStage"]]
    assert paints == [list(style.paint(OpKind.F, n, 2)) for n in (0, 0, 1)]


ZBV = generate("ZBV", 2, 4)


def test_a_timeline_writes_files_and_shows_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = simulate(ZBV)
    assert shown.makespan == simulate(ZBV, (1, 1, 1)).makespan == 12.5
    shown.svg(tmp_path / "a.svg")
    shown.html(str(tmp_path / "a.html"))
    assert (tmp_path / "a.svg").read_text() == svg(shown)
    assert (tmp_path / "a.html").read_text() == html(shown)
    shown.show()
    assert capsys.readouterr().out.startswith("rank 0 F0F1")
