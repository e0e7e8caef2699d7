"""Charts as inline SVG: lines, points and bars. Every one is an image with a name and a description for who cannot see it.

Pure functions of numbers. The colours `var(--c0)` .. `var(--c7)` belong to the page's style sheet; a line or point shows its name
when a pointer rests on it (SVG's `<title>`), so no script is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from jaxllm.report.page import escape

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 26, 44
MOST = 240  # points of a line: more than a page shows
GREY = -1  # the colour of what is in the background


@dataclasses.dataclass(frozen=True)
class Line:
    """x, y float [n]; not finite values are gaps. colour: 0..7, or GREY."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    colour: int = 0
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Point:
    """size: area, relative to the largest; hollow: no fill (of a point that another one beats)."""

    name: str
    x: float
    y: float
    colour: int = 0
    size: float = 1.0
    hollow: bool = False


@dataclasses.dataclass(frozen=True)
class Axis:
    """From values to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the axis: 1, 2 or 5 times a power of ten; on a log axis whole powers, and their 2 and 5 where few."""
        if not self.log:
            step = 10 ** math.floor(math.log10((self.high - self.low) / most))
            step *= next(m for m in (1, 2, 5, 10, 20) if (self.high - self.low) / (step * m) <= most)
            first = math.ceil(self.low / step - 1e-9)
            return [step * i for i in range(first, math.floor(self.high / step + 1e-9) + 1)]
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for marks in ((1,), (1, 3), (1, 2, 5)):
            found = [
                m * 10.0**d
                for d in decades
                for m in marks
                if self.low <= m * 10.0**d * (1 + 1e-9) <= self.high * (1 + 2e-9)
            ]
            if len(found) >= 3:
                return found[:: -(-len(found) // most)]
        return found if len(found) > 1 else dataclasses.replace(self, log=False).ticks(most)  # less than a decade


def axis(values: Sequence[float] | np.ndarray, start: float, end: float, log: bool = False) -> Axis:
    """An axis with a little air around the finite values; log only where all are positive."""
    array = np.asarray(values, float)
    array = array[np.isfinite(array)]
    if not array.size:
        return Axis(0.0, 1.0, start, end)
    low, high = float(array.min()), float(array.max())
    log = log and low > 0
    if log:
        pad = max((high / low) ** 0.05, 1.05)
        return Axis(low / pad, high * pad, start, end, True)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low - pad, high + pad, start, end)


def short(value: float) -> str:
    """1,234,567 as `1.23M`: a number for a tick or a narrow cell."""
    if not math.isfinite(value):
        return "n/a"
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def lines(
    series: Sequence[Line], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False,
    bounds: tuple[float, float] | None = None, words: str = "", marks: Sequence[tuple[float, str]] = (),
) -> str:  # fmt: skip
    """bounds: limits of y, null = of the values. words: the description; null = names, first and last values. marks: (x, name) of events,
    as vertical lines."""
    series = [Line(s.name, *_points(s.x, s.y), s.colour, s.dashed) for s in series]
    ax = axis(np.concatenate([np.asarray(s.x) for s in series] or [np.zeros(0)]), LEFT, WIDTH - RIGHT, log_x)
    limits = bounds or [v for s in series for v in s.y]
    ay = axis(np.asarray(limits, float), HEIGHT - BOTTOM, TOP, log_y)
    if bounds is not None:
        ay = dataclasses.replace(ay, low=bounds[0], high=bounds[1])
    body = [
        f'<line x1="{ax(at):.1f}" x2="{ax(at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--soft)"'
        f' stroke-dasharray="2 3"><title>{escape(name)}</title></line>'
        for at, name in marks
    ]
    for s in sorted(series, key=lambda s: s.colour != GREY):  # what matters lies on top
        path = _path(s, ax, ay)
        style = f'stroke="{_colour(s.colour)}" stroke-width="{1 if s.colour == GREY else 2}"'
        dash = ' stroke-dasharray="5 4"' if s.dashed else ""
        body.append(f'<path d="{path}" fill="none" {style}{dash}><title>{escape(s.name)}</title></path>')
    said = words or "; ".join(f"{s.name}: from {short(s.y[0])} to {short(s.y[-1])}" for s in series if len(s.y))
    return _chart(title, x, y, ax, ay, _inside("".join(body)), said)


def points(
    marks: Sequence[Point], *, title: str, x: str, y: str, log_x: bool = False, log_y: bool = False, front: bool = False, words: str = "",
) -> str:  # fmt: skip
    """front: join the points that are not hollow by a line, in order of x."""
    ax = axis([m.x for m in marks], LEFT, WIDTH - RIGHT, log_x)
    ay = axis([m.y for m in marks], HEIGHT - BOTTOM, TOP, log_y)
    largest = max((m.size for m in marks), default=1.0) or 1.0
    body = []
    best = sorted((m for m in marks if not m.hollow), key=lambda m: m.x)
    if front and len(best) > 1:
        path = "M" + "L".join(f"{ax(m.x):.1f} {ay(m.y):.1f}" for m in best)
        body.append(f'<path d="{path}" fill="none" stroke="var(--soft)" stroke-dasharray="3 3"/>')
    for m in sorted(marks, key=lambda m: -m.size):
        radius = 3.5 + 7 * math.sqrt(max(m.size, 0.0) / largest)
        fill = "none" if m.hollow else _colour(m.colour)
        body.append(
            f'<circle cx="{ax(m.x):.1f}" cy="{ay(m.y):.1f}" r="{radius:.1f}" fill="{fill}" fill-opacity=".75"'
            f' stroke="{_colour(m.colour)}" stroke-width="1.5"><title>{escape(m.name)}: {short(m.x)}, {short(m.y)}</title></circle>'
        )
    said = words or "; ".join(f"{m.name}: {short(m.x)}, {short(m.y)}" for m in marks)
    return _chart(title, x, y, ax, ay, "".join(body), said)


def bars(
    values: Sequence[tuple[str, float]], *, title: str, x: str, colours: Sequence[int] = (), words: str = ""
) -> str:
    """Horizontal bars from 0, one a name, each with its value beside it; as high as they need."""
    row, named = 20, 150
    height = TOP + row * len(values) + 8
    most = max((v for _, v in values if math.isfinite(v)), default=1.0) or 1.0
    body = [f'<text x="2" y="{TOP - 10}" font-weight="600">{escape(_cut(title, 60))}</text>']
    for i, (name, value) in enumerate(values):
        width = max(0.0, (WIDTH - named - 60) * value / most) if math.isfinite(value) else 0.0
        top = TOP + i * row
        colour = _colour(colours[i] if i < len(colours) else 0)
        body.append(
            f'<text x="{named - 6}" y="{top + 14}" text-anchor="end">{escape(_cut(name, 22))}</text>'
            f'<rect x="{named}" y="{top + 3}" width="{width:.1f}" height="{row - 6}" fill="{colour}"/>'
            f'<text x="{named + width + 5:.1f}" y="{top + 14}">{escape(short(value))}</text>'
        )
    said = words or "; ".join(f"{name}: {short(value)}" for name, value in values)
    return _image(title, f"{x}. {said}", height, "".join(body))


# --- pieces -----------------------------------------------------------------------------------------------------------


def _points(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most about MOST of them; the last always stays."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) <= MOST:
        return xs, ys
    at = np.unique(np.linspace(0, len(xs) - 1, MOST).round().astype(int))
    return xs[at], ys[at]


def _path(s: Line, ax: Axis, ay: Axis) -> str:
    parts = []
    good = [
        bool(math.isfinite(a) and math.isfinite(b) and (not ax.log or a > 0) and (not ay.log or b > 0))
        for a, b in zip(s.x, s.y, strict=True)
    ]
    for ok, run in itertools.groupby(zip(s.x, s.y, good, strict=True), key=lambda p: p[2]):
        if ok:
            parts.append("M" + "L".join(f"{ax(a):.1f} {ay(b):.1f}" for a, b, _ in run))
    return "".join(parts)


def _chart(title: str, x: str, y: str, ax: Axis, ay: Axis, body: str, words: str) -> str:
    marks = []
    for value in ax.ticks():
        at = f"{ax(value):.1f}"
        marks.append(f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--line)"/>')
        marks.append(
            f'<text class="soft" x="{at}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{short(value)}</text>'
        )
    for value in ay.ticks():
        at = f"{ay(value):.1f}"
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="var(--line)"/>')
        marks.append(
            f'<text class="soft" x="{LEFT - 5}" y="{float(at) + 4:.1f}" text-anchor="end">{short(value)}</text>'
        )
    labels = (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x)}</text>'
        f'<text x="2" y="{TOP - 10}"><tspan font-weight="600">{escape(title)}</tspan>'
        f' <tspan fill="var(--soft)">{escape(_cut(y, 44))}</tspan></text>'
    )
    return _image(title, f"{y} over {x}. {words}", HEIGHT, "".join(marks) + body + labels)


def _inside(body: str) -> str:
    """Cut off what leaves the plot. A picture in the picture does that without an id, of which a page may have only one each."""
    place = f"{LEFT} {TOP} {WIDTH - LEFT - RIGHT} {HEIGHT - TOP - BOTTOM}"
    x, y, width, height = place.split()
    return f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{place}">{body}</svg>'


def _image(title: str, words: str, height: float, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}. {escape(_cut(words, 1500))}"'
        f' xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def _colour(number: int) -> str:
    return "var(--soft)" if number == GREY else f"var(--c{number % 8})"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
