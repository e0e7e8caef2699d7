"""PNG curves of a run from its `metrics.jsonl`: loss and throughput. The pieces are there for further figures to use.

Each figure is one function `rows -> Figure | None` (None: the run has nothing to show), with no global state: no
pyplot, no style sheet, so that it also works in a thread or beside a notebook's own figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxllm.measure.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

# Okabe-Ito colours: told apart by colour-blind readers and in print.
BLUE, ORANGE, GREEN, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#8A8A8A", "#222222"
MOST_POINTS = 4000  # a PNG shows no more; longer raw series are thinned, smoothed ones are computed before that


def curves(run_dir: str | Path) -> list[Path]:
    """Write plots/loss.png and plots/throughput.png of a run folder; returns those that could be drawn."""
    run_dir = Path(run_dir)
    rows = read_metrics(run_dir)
    figures: dict[str, Callable[[Sequence[Row], str], Figure | None]] = {"loss": loss, "throughput": throughput}
    written = []
    for name, draw in figures.items():
        figure = draw(rows, run_dir.resolve().name)
        if figure is not None:
            path = run_dir / "plots" / f"{name}.png"
            path.parent.mkdir(exist_ok=True)
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def loss(rows: Sequence[Row], run: str = "") -> Figure | None:
    """Training loss (every logged step, and smoothed) and validation loss, in nats per token, over steps."""
    steps, values = series(rows, "train/loss")
    val_steps, val = series(rows, "val/loss")
    if not len(steps) and not len(val_steps):
        return None
    figure, axes = canvas("Loss", run, "step", "cross-entropy (nats per token)")
    shown = [val]
    if len(steps):
        smooth_steps, smooth = smoothed(steps, values)
        axes.plot(*thin(steps, values), color=BLUE, alpha=0.25, linewidth=0.8, label="train, each logged step")
        axes.plot(smooth_steps, smooth, color=BLUE, linewidth=2, label=f"train, smoothed ({smooth[-1]:.3f} at the end)")
        shown.append(smooth)
    if len(val):
        last = f"validation ({val[-1]:.3f} at the end{_bits(rows)})"
        axes.plot(val_steps, val, color=ORANGE, linewidth=1.5, marker="o", markersize=5, label=last)
    stage_lines(axes, rows)
    # One exploding step must not flatten the rest, so the raw curve may leave the picture at the top.
    low, high = _limits(np.concatenate(shown), values)
    axes.set_ylim(low, high)
    broken = sum(isinstance(row.get("train/loss"), float) and not math.isfinite(row["train/loss"]) for row in rows)
    if broken:
        note(axes, f"steps without a finite loss, not drawn: {broken}")
    legend(axes)
    return figure


def throughput(rows: Sequence[Row], run: str = "") -> Figure | None:
    """Tokens per second in the steady state. Steps that compiled are left out and their seconds written beside."""
    compiled = compile_seconds(rows)
    steady = [row for row in rows if row["step"] not in compiled]
    steps, speed = series(steady, "train/tokens_per_s")
    if not len(steps):
        return None
    figure, axes = canvas("Training throughput", run, "step", "tokens per second")
    median = float(np.median(speed))
    axes.plot(*thin(steps, speed), color=GREEN, alpha=0.35, linewidth=0.8, label="each logged step")
    axes.plot(*smoothed(steps, speed), color=GREEN, linewidth=2, label="smoothed")
    axes.axhline(median, color=INK, linestyle="--", linewidth=1, label=f"median {median:,.0f}")
    stage_lines(axes, rows)
    axes.set_ylim(0, 1.15 * float(speed.max()))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if compiled:
        note(axes, f"compilation: {sum(compiled.values()):.1f} s, not part of the curve")
    legend(axes, "lower right")
    return figure


def compile_seconds(rows: Sequence[Row]) -> dict[int, float]:
    """{step: seconds} of the steps that compiled: those where `train/compile_s` appears with a new value above 0."""
    found: dict[int, float] = {}
    previous = 0.0
    for row in rows:
        seconds = row.get("train/compile_s")
        if isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds != previous:
            previous = float(seconds)
            if seconds > 0:
                found[row["step"]] = previous
    return found


# --- pieces -------------------------------------------------------------------------------------------------------


def series(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps int [n], values float [n]) of one key, without text and non-finite values."""
    pairs = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), (int, float))]
    pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
    return np.array([s for s, _ in pairs], int), np.array([v for _, v in pairs], float)


def smoothed(steps: np.ndarray, values: np.ndarray, most: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a curve for the eye: without single outliers, without noise, and without lag.

    Medians of blocks (down to `most` points), a running median of 5, then a centred Gaussian over 1/60 of the run.
    """
    if len(values) < 8:
        return steps, values
    k = -(-len(values) // most)
    whole = len(values) // k * k

    def medians(a: np.ndarray) -> np.ndarray:
        return np.append(np.median(a[:whole].reshape(-1, k), axis=1), [np.median(a[whole:])] if whole < len(a) else [])

    steps, values = medians(steps), medians(values)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, 2, mode="edge"), 5)
    values = np.median(windows, axis=1)
    sigma = max(1.0, len(values) / 60)
    reach = min(int(3 * sigma), (len(values) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = np.convolve(np.ones_like(values), kernel, mode="same")  # less than the whole kernel at both ends
    return steps, np.convolve(values, kernel, mode="same") / weights


def stage_starts(steps: Sequence[float] | np.ndarray, stages: Sequence[float] | np.ndarray) -> list[tuple[int, int]]:
    """(step, stage) wherever `train/stage` changes: how many steps the run had made. The first step of every stage is logged, as it
    compiles."""
    pairs = list(zip(steps, stages, strict=True))
    return [(int(at) - 1, int(now)) for (_, old), (at, now) in itertools.pairwise(pairs) if now != old]


def stage_lines(axes: Axes, rows: Sequence[Row]) -> None:
    """A thin line where each further stage of the run begins, with its number."""
    for step, stage in stage_starts(*series(rows, "train/stage")):
        axes.axvline(step, color=GREY, linestyle=":", linewidth=1)
        place = axes.get_xaxis_transform()
        axes.text(step, 0.99, f" stage {stage}", transform=place, fontsize=8, color=GREY, va="top", rotation=90)


def thin(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Every k-th point, so that at most `most` remain."""
    k = -(-len(steps) // most) if len(steps) else 1
    return steps[::k], values[::k]


def canvas(title: str, run: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty figure with title, axis labels and the shared look."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK)
    axes.set_title(run if len(run) <= 60 else run[:57] + "...", loc="right", fontsize=9, color=GREY, parse_math=False)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    return figure, axes


def legend(axes: Axes, where: Literal["upper right", "lower right", "upper left"] = "upper right") -> None:
    axes.legend(loc=where, frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)


def note(axes: Axes, text: str) -> None:
    """A remark in the lower left corner of the picture."""
    axes.text(0.01, 0.02, text, transform=axes.transAxes, fontsize=9, color=GREY, parse_math=False)


def _bits(rows: Sequence[Row]) -> str:
    _, bits = series(rows, "val/bpb")
    return f", {bits[-1]:.3f} bits per byte" if len(bits) else ""


def _limits(trusted: np.ndarray, raw: np.ndarray) -> tuple[float, float]:
    """Limits that hold every trusted value and the bulk (2nd to 98th percentile) of the raw ones."""
    bulk = [np.percentile(raw, 2, method="higher"), np.percentile(raw, 98, method="lower")] if len(raw) else []
    edges = np.concatenate([trusted, bulk])
    low, high = float(edges.min()), float(edges.max())
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad
