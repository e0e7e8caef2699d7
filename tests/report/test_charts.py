"""Charts and pieces of pages: numbers land where they belong, and what is said of a picture is what it shows."""

import math
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from pages import Page

from jaxllm.report import charts, page
from jaxllm.report.charts import Line, Point, axis, short


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


@pytest.mark.parametrize(
    "values, log, want",
    [
        ([0, 10], False, [0, 2, 4, 6, 8, 10]),
        ([1, 1e4], True, [1, 10, 100, 1000, 10000]),
        ([2.0, 2.0], False, None),
        ([], False, None),
    ],
)
def test_ticks_are_round_and_within(values, log, want):
    a = axis(values, 0, 100, log)
    ticks = a.ticks()
    assert 2 <= len(ticks) <= 7 and all(-1e-6 <= a(t) <= 100 + 1e-6 for t in ticks)
    assert want is None or ticks == pytest.approx(want)
    for tick in ticks:
        if tick:
            lead = abs(tick) / 10 ** math.floor(math.log10(abs(tick)) + 1e-9)
            assert lead == pytest.approx(round(lead, 2))


def test_a_log_axis_of_less_than_a_decade_still_has_ticks():
    assert len(axis([3.0, 7.0], 0, 100, True).ticks()) >= 2


def test_points_land_where_the_axes_say():
    root = drawn(charts.points([Point("a", 0, 0), Point("b", 10, 1, hollow=True)], title="t", x="x", y="y"))
    a, b = root.findall(".//circle")
    if a.find("title").text.startswith("b"):
        a, b = b, a
    ax, ay = (
        axis([0, 10], charts.LEFT, charts.WIDTH - charts.RIGHT),
        axis([0, 1], charts.HEIGHT - charts.BOTTOM, charts.TOP),
    )
    assert (float(a.get("cx")), float(a.get("cy"))) == pytest.approx((ax(0), ay(0)), abs=0.06)
    assert (float(b.get("cx")), float(b.get("cy"))) == pytest.approx((ax(10), ay(1)), abs=0.06)
    assert float(a.get("cy")) > float(b.get("cy"))  # more is higher
    assert b.get("fill") == "none" and a.get("fill") != "none"


def test_a_line_breaks_where_numbers_are_not_finite_and_keeps_its_end():
    y = np.ones(1000)
    y[300:400] = np.nan
    path = drawn(charts.lines([Line("l", np.arange(1000), y)], title="t", x="x", y="y")).find(".//path").get("d")
    assert path.count("M") == 2 and "nan" not in path
    assert len(re.findall(r"[ML]", path)) <= charts.MOST
    ax = axis([0, 999], charts.LEFT, charts.WIDTH - charts.RIGHT)
    assert float(path.rsplit("L", 1)[1].split()[0]) == pytest.approx(ax(999), abs=0.06)


def test_bars_are_as_long_as_their_values():
    rects = drawn(charts.bars([("a", 4.0), ("b", 1.0), ("c", math.nan)], title="t", x="x")).findall(".//rect")
    a, b, c = (float(r.get("width")) for r in rects)
    assert a == pytest.approx(4 * b, rel=0.02) and c == 0


def test_names_are_text_and_words_tell_the_numbers():
    evil = "<script>alert(1)</script>\"'&"
    for svg in (
        charts.lines([Line(evil, [1, 2], [3.0, 5.0])], title=evil, x=evil, y=evil),
        charts.points([Point(evil, 3, 5)], title=evil, x=evil, y=evil),
        charts.bars([(evil, 5.0)], title=evil, x=evil),
    ):
        root = drawn(svg)  # well formed
        assert "<script" not in svg
        assert evil in root.get("aria-label") and "5" in root.get("aria-label")
    parts = [
        page.table([[evil], [evil]]),
        page.figure("", evil, legend=[(0, evil)]),
        page.link(evil, evil),
        page.details(evil, ""),
        page.png(b"", evil),
    ]
    assert "<script" not in page.page(evil, {evil: "".join(parts)})
    assert evil in Page(page.page(evil, {evil: "".join(parts)})).shown


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (1234567, "1.23M"),
        (9999.96, "10k"),
        (0.00012, "1.2e-04"),
        (-2.5, "-2.5"),
        (math.nan, "n/a"),
        (141e9, "141G"),
        (2e15, "2P"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_a_script_is_allowed_by_its_hash_alone():
    without, with_script = page.page("t", {}), page.page("t", {}, script="let a = 1")
    assert "script" not in without
    policy = Page(with_script).all("meta")[2]["content"]
    assert re.search(r"script-src 'sha256-[\w+/]{43}='$", policy)
