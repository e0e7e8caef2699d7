"""Heat maps: a grid of numbers as an image, with the names of rows and columns around it."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np

from jaxllm.report.page import escape

COLOURS = "cividis"  # even steps look even, to colour-blind readers too
NAMED = 40  # rows or columns that all get their names; of more, some do
WIDTH = 480


def png_bytes(values: np.ndarray, low: float, high: float, *, least: int = 1) -> bytes:
    """A PNG of `[rows columns]`, dark at low and bright at high; not finite is grey. least: pixels of the longer side, by repetition."""
    from matplotlib import colormaps
    from matplotlib.image import imsave

    scale = max(1, least // max(values.shape))
    shown = np.kron(values, np.ones((scale, scale)))
    colours = colormaps[COLOURS](np.clip((shown - low) / ((high - low) or 1.0), 0, 1))
    colours[~np.isfinite(shown)] = (0.6, 0.6, 0.6, 1.0)
    file = io.BytesIO()
    imsave(file, colours, format="png")
    return file.getvalue()


def tiles(panels: np.ndarray, columns: int | None = None) -> np.ndarray:
    """`[n r c]` as one picture of panels side by side, a gap of one (not a number) between them."""
    n, r, c = panels.shape
    columns = columns or max(1, math.ceil(math.sqrt(n * r / c)))
    lines = -(-n // columns)
    out = np.full((lines * (r + 1) - 1, columns * (c + 1) - 1), np.nan)
    for i, panel in enumerate(panels):
        y, x = divmod(i, columns)
        out[y * (r + 1) : y * (r + 1) + r, x * (c + 1) : x * (c + 1) + c] = panel
    return out


def heat(
    values: np.ndarray, rows: Sequence[str], columns: Sequence[str], *, title: str, low: float = 0.0, high: float | None = None,
    words: str = "",
) -> str:  # fmt: skip
    """An SVG of `values [rows columns]`; high: null = the largest value. words: what a reader who cannot see it is told."""
    values = np.asarray(values, float)
    finite = values[np.isfinite(values)]
    high = (float(finite.max()) if finite.size else 1.0) if high is None else high
    left, top, bottom = 82, 24, 62
    width = WIDTH - left - 6
    height = min(width, max(40, width * len(rows) / max(1, len(columns))))
    height = max(height, min(14.0 * len(rows), width))
    data = base64.b64encode(png_bytes(values, low, high)).decode("ascii")
    parts = [
        f'<text x="2" y="14" font-weight="600">{escape(title)}</text>',
        f'<image x="{left}" y="{top}" width="{width}" height="{height:.1f}" preserveAspectRatio="none" class="pixels"'
        f' href="data:image/png;base64,{data}"/>',
    ]
    for i, name in _some(rows, height / 13):
        y = top + height * (i + 0.5) / len(rows)
        parts.append(
            f'<text class="soft small" x="{left - 4}" y="{y + 3:.1f}" text-anchor="end">{escape(_short(name))}</text>'
        )
    for i, name in _some(columns, width / 12):
        x, y = left + width * (i + 0.5) / len(columns) + 3, top + height + 6
        turn = f'transform="rotate(-60 {x:.1f} {y:.1f})"'
        parts.append(
            f'<text class="soft small" x="{x:.1f}" y="{y:.1f}" text-anchor="end" {turn}>{escape(_short(name))}</text>'
        )
    said = words or f"{len(rows)} by {len(columns)} values from {low:.3g} (dark) to {high:.3g} (bright)"
    return (
        f'<svg viewBox="0 0 {WIDTH} {top + height + bottom:.0f}" role="img" aria-label="{escape(title)}. {escape(said)}"'
        f' xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _some(names: Sequence[str], room: float) -> list[tuple[int, str]]:
    """As many of the names as there is room for, evenly."""
    step = max(1, math.ceil(len(names) / max(1.0, min(room, NAMED))))
    return [(i, names[i]) for i in range(0, len(names), step)]


def _short(text: str) -> str:
    text = text.replace("\n", "↵").replace(" ", "·") if text.strip() != text or not text.strip() else text
    return text if len(text) <= 11 else text[:10] + "…"
