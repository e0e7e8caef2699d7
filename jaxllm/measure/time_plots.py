"""Pictures of timings: time against context with crossovers, beside the least that the chip would need; and the hardware's page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.measure.chips import Chip
from jaxllm.measure.plots import GREY, INK, canvas, legend, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
TITLES = {
    "forward": "Forward pass",
    "backward": "Forward and backward pass",
    "train": "Training step",
    "prefill": "Prefill of a prompt",
    "decode": "One decoded token",
}


def draw(run_dir: Path, rows: Sequence[Row], chip: Chip) -> list[Path]:
    """`plots/time_<what>.png` for every phase among the rows, and `plots/time_hardware.png`; returns those that were written."""
    written = []
    for what, title in TITLES.items():
        chosen = [row for row in rows if row["what"] == what]
        if chosen:
            written.append(_save(by_context(chosen, title, chip), run_dir / "plots" / f"time_{what}.png"))
    machine = [row for row in rows if row["what"] in ("matmul", "branch")]
    if machine:
        written.append(_save(hardware(machine), run_dir / "plots" / "time_hardware.png"))
    return written


def draw_sweep(folder: Path, rows_file: str, chip: Chip) -> list[Path]:
    """One picture a phase of all numbered runs of a sweep, so that what was timed run by run stands side by side.

    A line is a kind of layer (`gqa`, `kda`); of a kind that several runs timed, such as an ffn that stayed, the first run's counts.
    """
    lines: dict[tuple[Any, ...], Row] = {}
    for run in sorted((p for p in folder.iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
        file = run / rows_file
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.is_file() else ()):
            if row["what"] in TITLES and row["layer"] != "model":
                key = tuple(row[name] for name in ("what", "kind", "context", "batch", "dtype"))
                lines.setdefault(key, row | {"layer": row["kind"]})
    return draw(folder, list(lines.values()), chip)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def by_context(rows: Sequence[Row], title: str, chip: Chip) -> Figure:
    """Median time over context (both logarithmic), a line each layer, batch and dtype; dashed, the least that the chip needs."""
    from matplotlib import colormaps

    contexts = sorted({row["context"] for row in rows})
    figure, axes = canvas(title, chip.name, "context (tokens)", "median time (ms)")
    axes.set_yscale("log")
    if len(contexts) > 1:
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{n:,}" for n in contexts])
        axes.minorticks_off()
    else:
        axes.set_xticks(contexts, [f"{contexts[0]:,}"])
    lines = series(rows)
    for i, (name, points) in enumerate(lines.items()):
        colour = colormaps["tab10"](i % 10)
        x, y = [p["context"] for p in points], [p["median_ms"] for p in points]
        spread = [p["spread_ms"] / 2 for p in points]
        axes.errorbar(x, y, yerr=spread, color=colour, marker="o", capsize=3, label=name)
        least = [(p["context"], p["predicted_ms"]) for p in points if p["predicted_ms"] != "n/a"]
        if least:
            axes.plot(*zip(*least, strict=True), color=colour, linestyle="--", marker="_", linewidth=1, alpha=0.6)
    met = crossovers(lines)
    for at, (_, second) in met:
        axes.axvline(at, color=GREY, linewidth=0.8, linestyle=":")
        axes.text(
            at,
            0.98,
            f" {second} wins",
            transform=axes.get_xaxis_transform(),
            rotation=90,
            va="top",
            fontsize=7,
            color=GREY,
        )
    if len(lines) <= 12:
        legend(axes)
    note(axes, "dashed: the least this chip needs")
    return figure


def series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """{line: its rows in order of context}; batch and dtype are named only where they differ."""
    several = {key: len({row[key] for row in rows}) > 1 for key in ("batch", "dtype")}
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["context"]):
        name = (
            row["layer"]
            if row["layer"] in ("model", row.get("kind")) or not row.get("kind")
            else f"{row['layer']} ({row['kind']})"
        )
        name += f", batch {row['batch']}" if several["batch"] else ""
        name += f", {row['dtype']}" if several["dtype"] else ""
        lines.setdefault(name, []).append(row)
    return lines


def crossovers(lines: Mapping[str, Sequence[Row]]) -> list[tuple[float, tuple[str, str]]]:
    """Contexts where one layer overtakes another for good, straight lines in log-log between the points: (context, (slower, faster)).

    The whole model and lines of one point do not compete.
    """
    import numpy as np

    found = []
    names = [name for name, points in lines.items() if len(points) > 1 and points[0]["layer"] != "model"]
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            x = sorted({p["context"] for p in lines[a]} & {p["context"] for p in lines[b]})
            at = {n: {p["context"]: np.log(p["median_ms"]) for p in lines[n]} for n in (a, b)}
            gap = np.array([at[a][c] - at[b][c] for c in x])
            turns = [k for k in range(len(x) - 1) if gap[k] * gap[k + 1] < 0]
            if turns:
                k = turns[-1]
                share = gap[k] / (gap[k] - gap[k + 1])
                context = float(np.exp(np.log(x[k]) + share * (np.log(x[k + 1]) - np.log(x[k]))))
                found.append((context, (a, b) if gap[-1] > 0 else (b, a)))
    return sorted(found)


def hardware(rows: Sequence[Row]) -> Figure:
    """One page: speed of products by size, by rows and by dtype; the cost of branches; the processor beside the accelerator."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained", facecolor="white")
    grid = figure.subplots(2, 2)
    products = [row for row in rows if row["what"] == "matmul"]
    _lines(
        grid[0][0], products, "Square products", "size n of [n, n] x [n, n]", "size", lambda r: r["batch"] == r["size"]
    )
    largest = max((row["size"] for row in products), default=0)
    _lines(
        grid[0][1],
        products,
        f"Rows that share one matrix of {largest:,}",
        "rows",
        "batch",
        lambda r: r["size"] == largest,
    )
    _bars(grid[1][0], [row for row in rows if row["what"] == "branch"])
    _worth(grid[1][1], products)
    figure.suptitle("What this machine does with plain work", x=0.01, ha="left", fontweight="bold", color=INK)
    return figure


def _lines(axes: Axes, rows: Sequence[Row], title: str, label: str, key: str, keep: Any) -> None:
    chosen = [row for row in rows if keep(row)]
    for device, dtype in sorted({(row["device"], row["dtype"]) for row in chosen}):
        points = sorted(
            (r[key], r["flops_per_s"] / 1e9) for r in chosen if (r["device"], r["dtype"]) == (device, dtype)
        )
        axes.loglog(*zip(*points, strict=True), marker="o", label=f"{device}, {dtype}")
    axes.set(title=title, xlabel=label, ylabel="GFLOP/s")
    axes.grid(color="#E5E5E5")
    if chosen:
        axes.legend(fontsize=8)


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    devices = sorted({row["device"] for row in rows})
    names = list(dict.fromkeys(row["layer"] for row in rows))
    width = 0.8 / max(1, 2 * len(devices))
    for i, (device, share) in enumerate((d, s) for d in devices for s in (0, 1)):
        times = {r["layer"]: r["median_ms"] * 1e3 for r in rows if r["device"] == device and r["share"] == share}
        label = f"{device}: {'every row' if share else 'no row'} needs it"
        axes.bar([k + i * width for k in range(len(names))], [times[n] for n in names], width, label=label)
    axes.set_xticks([k + 0.4 - width / 2 for k in range(len(names))], names)
    axes.set(title="A branch decided by data", ylabel="microseconds", yscale="log")
    if rows:
        axes.legend(fontsize=8)


def _worth(axes: Axes, rows: Sequence[Row]) -> None:
    """How many times faster the accelerator is, by size; on a machine without one, how far float32 is ahead of bfloat16."""
    squares = {(r["device"], r["dtype"], r["size"]): r["median_ms"] for r in rows if r["batch"] == r["size"]}
    devices, sizes = list(dict.fromkeys(r["device"] for r in rows)), sorted({r["size"] for r in rows})
    dtypes = sorted({r["dtype"] for r in rows})
    if len(devices) > 1:
        for dtype in dtypes:
            ratio = [squares[devices[1], dtype, n] / squares[devices[0], dtype, n] for n in sizes]
            axes.loglog(sizes, ratio, marker="o", label=dtype)
        axes.set(title=f"{devices[0]} beside {devices[1]}", xlabel="size n", ylabel="times faster")
    elif len(dtypes) > 1:
        ratio = [squares[devices[0], dtypes[0], n] / squares[devices[0], dtypes[1], n] for n in sizes]
        axes.semilogx(sizes, ratio, marker="o", label=f"{dtypes[1]} against {dtypes[0]}")
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set(title="No accelerator here: one dtype beside the other", xlabel="size n", ylabel="times faster")
    axes.grid(color="#E5E5E5")
    if axes.get_lines():
        axes.legend(fontsize=8)
