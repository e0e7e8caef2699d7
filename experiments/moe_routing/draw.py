"""The pictures of the routing study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def panels(
    pictures: Mapping[str, np.ndarray], path: Path, *, title: str, x: str, y: str, most: float, rows: Sequence[str] = ()
) -> None:
    """Heat maps `{name: [y x]}` side by side on one colour scale from 0 to `most`. rows: names of the y axis, where it has some."""
    from matplotlib.figure import Figure

    columns = min(2, len(pictures))
    lines = math.ceil(len(pictures) / columns)
    figure = Figure(figsize=(4.6 * columns + 0.8, 1.3 + 3.0 * lines), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    shown = None
    for place, (name, values) in zip(axes, pictures.items(), strict=False):
        shown = place.imshow(values, vmin=0, vmax=most, cmap="cividis", aspect="auto", interpolation="nearest")
        place.set_title(name, loc="left", fontsize=10, parse_math=False)
        place.set_xlabel(x, fontsize=9)
        place.set_ylabel(y, fontsize=9)
        place.set_yticks(range(len(values)), rows or [str(i) for i in range(len(values))], fontsize=8)
    for place in axes[len(pictures) :]:
        place.set_visible(False)
    figure.colorbar(shown, ax=list(axes), shrink=0.8)
    figure.savefig(path, dpi=150)


def loads(curves: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], path: Path) -> None:
    """The busiest expert's load over training: `{name: curves of (steps, times an even share)}`, one a run and layer."""
    from jaxllm.measure import plots

    figure, axes = plots.canvas("Load of the busiest expert", "every layer and seed", "step", "times an even share")
    for (name, got), colour in zip(curves.items(), (plots.BLUE, plots.ORANGE, plots.GREEN, plots.GREY), strict=False):
        for i, (steps, values) in enumerate(got):
            axes.plot(
                *plots.smoothed(steps, values), color=colour, linewidth=1, alpha=0.7, label=name if i == 0 else None
            )
    axes.axhline(1, color=plots.INK, linewidth=0.8)
    axes.set_ylim(bottom=0.9)
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def prompt(texts: Sequence[str], experts: np.ndarray, weights: np.ndarray, number: int, path: Path) -> None:
    """The weight of each expert (down) for each token (across) of a typed text, one panel a layer."""
    pictures: dict[str, Any] = {}
    for layer, (e, w) in enumerate(zip(experts, weights, strict=True)):
        picture = np.zeros((number, len(texts)))
        np.put_along_axis(picture.T, e, w, axis=-1)
        pictures[f"layer {layer}"] = picture
    panels(pictures, path, title="Experts of each token of the prompt", x="token", y="expert", most=1.0)
