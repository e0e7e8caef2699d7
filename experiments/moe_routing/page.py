"""One self-contained HTML page of the routing study: pictures inside it, no script, no link to anywhere, all text escaped."""

from __future__ import annotations

import base64
import colorsys
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

STYLE = """body{font:15px/1.5 sans-serif;max-width:62em;margin:2em auto;padding:0 1em;color:#222}
img{max-width:100%}table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}
th:first-child,td:first-child{text-align:left}.text{font:14px/1.9 monospace;white-space:pre-wrap;margin:.2em 0 1em}
.text span{padding:.15em 0;border-radius:.2em}"""


def colour(expert: int, number: int) -> str:
    r, g, b = colorsys.hls_to_rgb(expert / number, 0.82, 0.7)
    return f"#{round(255 * r):02x}{round(255 * g):02x}{round(255 * b):02x}"


def tokens(texts: Sequence[str], experts: np.ndarray, weights: np.ndarray, number: int) -> str:
    """The text, each token on the colour of its first expert; what a pointer shows names all of them. experts, weights `[n k]`."""
    out = []
    for text, e, w in zip(texts, experts, weights, strict=True):
        title = ", ".join(f"expert {i} ({p:.2f})" for i, p in zip(e, w, strict=True))
        shown = html.escape(text.replace("\n", "↵\n"))
        out.append(f'<span style="background:{colour(int(e[0]), number)}" title="{html.escape(title)}">{shown}</span>')
    return f'<div class="text">{"".join(out)}</div>'


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""
    head, *body = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
        for row, tag in zip(rows, ["th"] + ["td"] * len(rows), strict=False)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'


def page(title: str, parts: Mapping[str, str]) -> str:
    """parts: `{heading: HTML made by the functions above}`."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{part}" for name, part in parts.items())
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{STYLE}</style></head>'
        f"<body><h1>{html.escape(title)}</h1>{body}</body></html>\n"
    )
