"""One self-contained HTML page: no link to anywhere, readable on a phone, in the dark and by a screen reader; all text is escaped.

Pieces are strings of HTML made by the functions here and in `charts`. Colours are variables of the style sheet, so that the same
picture is right on white and on black. A page has no script unless it is given one, and its policy refuses whatever is not inside it.
"""

from __future__ import annotations

import base64
import colorsys
import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

# Okabe-Ito, told apart by colour-blind readers; lighter on black where the colour is dark. The last two are for what is in the background.
LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A6D00", "#2F7FA8", "#6A4C93", "#444444")
DARK = ("#56B4E9", "#FF8C42", "#34D399", "#F0A6CA", "#F0E442", "#8FD3F4", "#B8A1E3", "#CCCCCC")


def _colours(values: Sequence[str]) -> str:
    return "".join(f"--c{i}:{value};" for i, value in enumerate(values))


STYLE = f"""
:root{{color-scheme:light dark;--ink:#1d1d1f;--paper:#fff;--soft:#6b6b70;--line:#d9d9de;--wash:#f4f4f6;{_colours(LIGHT)}}}
@media(prefers-color-scheme:dark){{:root{{--ink:#ececf0;--paper:#141416;--soft:#9d9da4;--line:#3a3a40;--wash:#1f1f23;{_colours(DARK)}}}}}
*{{box-sizing:border-box}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:76rem;margin:0 auto;padding:1rem;color:var(--ink);background:var(--paper)}}
h1{{font-size:1.6rem;line-height:1.2;overflow-wrap:anywhere}}h2{{font-size:1.2rem;margin:2rem 0 .5rem}}a{{color:var(--c0)}}
.grid{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,27rem),1fr));gap:1.25rem;align-items:start}}
figure{{margin:0;min-width:0}}figcaption{{font-size:.85rem;color:var(--soft);overflow-wrap:anywhere}}
figure>svg,img{{max-width:100%;height:auto;display:block}}figure>svg{{width:100%}}svg text{{fill:var(--ink);font:12px system-ui,sans-serif}}
svg .soft{{fill:var(--soft)}}svg .small{{font-size:10px}}svg .pixels{{width:auto}}
img{{background:#fff}}.pixels{{image-rendering:pixelated;width:100%}}
.scroll{{overflow:auto;max-height:34rem}}table{{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}}
td,th{{border-bottom:1px solid var(--line);padding:.25rem .6rem;text-align:right;vertical-align:top;white-space:nowrap}}
th{{background:var(--wash);position:sticky;top:0}}th:first-child,td:first-child{{text-align:left}}
ul.legend{{list-style:none;margin:.3rem 0;padding:0;font-size:.8rem;display:flex;flex-wrap:wrap;gap:.1rem .9rem;overflow-wrap:anywhere}}
.key{{display:inline-block;width:1.1em;height:.25em;border-radius:.2em;vertical-align:middle;margin-right:.35em}}
details{{font-size:.85rem;margin:.3rem 0}}summary{{cursor:pointer;color:var(--soft)}}
.text{{font:.9rem/1.9 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:.2em 0 1em}}
.text span{{padding:.15em 0;border-radius:.2em;color:#1d1d1f}}.text .token{{color:inherit}}.token:nth-child(odd){{background:var(--wash)}}
.cell{{display:block;padding:0 .2em;border-radius:.2em;text-align:left}}.note{{color:var(--soft);font-size:.9rem}}
"""


def escape(text: object) -> str:
    return html.escape(str(text))


def page(title: str, parts: Mapping[str, str], *, intro: str = "", script: str | None = None) -> str:
    """The whole document. parts: `{heading: HTML of the pieces}`; intro: HTML before them; script: JavaScript, allowed by its hash."""
    body = "".join(f"<h2>{escape(name)}</h2>{part}" for name, part in parts.items())
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    tail = ""
    if script is not None:
        digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        policy += f"; script-src 'sha256-{digest}'"
        tail = f"<script>{script}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head>'
        f"<body><main><h1>{escape(title)}</h1>{intro}{body}</main>{tail}</body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """The first row is the head, the first cell of each other row names it. A cell that is `Raw` is HTML already."""
    head, *body = rows
    first = "".join(f'<th scope="col">{_cell(cell)}</th>' for cell in head)
    rest = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in body)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll" tabindex="0"><table>{title}<tr>{first}</tr>{rest}</table></div>'


class Raw(str):
    """HTML that was made by these functions, to stand in a table's cell as it is."""


def _cell(cell: object) -> str:
    return cell if isinstance(cell, Raw) else escape(cell)


def shaded(text: str, strength: float, title: str = "") -> Raw:
    """A cell's text on a colour of that strength, 0 to 1; a pointer shows the title."""
    share = round(100 * min(1.0, max(0.0, strength)) * 0.6)
    colour = f"color-mix(in srgb, var(--c0) {share}%, transparent)"
    return Raw(f'<span class="cell" style="background:{colour}" title="{escape(title)}">{escape(text)}</span>')


def link(text: str, href: str) -> Raw:
    return Raw(f'<a href="{escape(href)}">{escape(text)}</a>')


def details(summary: str, inside: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def grid(figures: Sequence[str]) -> str:
    """Figures side by side where there is room, one below the other on a phone."""
    return f'<div class="grid">{"".join(figures)}</div>'


def figure(picture: str, caption: str, *, legend: Sequence[tuple[int, str]] = (), data: str = "") -> str:
    """A picture, its keys (number of a colour, name), what it says in words, and its numbers as a table behind a click."""
    keys = "".join(
        f'<li><span class="key" style="background:var(--c{i})"></span>{escape(name)}</li>' for i, name in legend
    )
    keys = f'<ul class="legend">{keys}</ul>' if keys else ""
    more = details("The numbers", data) if data else ""
    return f"<figure>{picture}{keys}<figcaption>{escape(caption)}</figcaption>{more}</figure>"


def picture(path: Path, alt: str = "") -> str:
    """A PNG file, carried inside the page."""
    return png(path.read_bytes(), alt or path.stem)


def png(data: bytes, alt: str, *, pixels: bool = False) -> str:
    """A PNG; pixels: one of few and large cells, which are not to be smoothed."""
    kind = ' class="pixels"' if pixels else ""
    return f'<img{kind} alt="{escape(alt)}" src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}">'


def colour(expert: int, number: int) -> str:
    """A light colour of its own for each of `number` things."""
    r, g, b = colorsys.hls_to_rgb(expert / number, 0.82, 0.7)
    return f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}"


def tokens(texts: Sequence[str], experts: np.ndarray, weights: np.ndarray, number: int) -> str:
    """The text, each token on the colour of its first expert; what a pointer shows names all of them. experts, weights `[n k]`."""
    out = []
    for text, e, w in zip(texts, experts, weights, strict=True):
        title = ", ".join(f"expert {i} ({p:.2f})" for i, p in zip(e, w, strict=True))
        shown = escape(text.replace("\n", "↵\n"))
        out.append(f'<span style="background:{colour(int(e[0]), number)}" title="{escape(title)}">{shown}</span>')
    return f'<div class="text">{"".join(out)}</div>'


def tokens_plain(texts: Sequence[str]) -> str:
    """The text, every second token on grey, so that their edges show; what a pointer shows is the place."""
    out = []
    for i, text in enumerate(texts):
        shown = escape(text.replace("\n", "↵\n"))
        out.append(f'<span class="token" title="{i}">{shown}</span>')
    return f'<div class="text">{"".join(out)}</div>'
