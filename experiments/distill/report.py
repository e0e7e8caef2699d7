"""Students with and without a teacher, from the run folders of the sweep.

    python experiments/distill/report.py multirun/distill [MORE SWEEPS ...] [--out OUT]

Writes into OUT (default: beside this file) results.json, table.md and loss.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.report.study import Finished, finished, table


def read(run: Finished) -> dict[str, Any]:
    """How a run was taught, its seed, its last validation loss, and the loss at every validation."""
    distill = run.config["objective"]["distill"]
    curve = [list(point) for point in run.curve("val/loss")]
    taught = "text alone" if not distill["weight"] else f"{distill['direction']} KL, weight {distill['weight']:g}"
    return {"taught": taught, "seed": run.seed, "loss": curve[-1][1], "curve": curve}


def summary(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and deviation of each way over its seeds, and its loss beside the text alone with the same seed."""
    ways: dict[str, dict[int, float]] = {}
    for run in runs:
        ways.setdefault(run["taught"], {})[run["seed"]] = run["loss"]
    alone = ways.get("text alone", {})
    out = []
    for way, losses in ways.items():
        gains = [losses[seed] - alone[seed] for seed in losses if seed in alone]
        out.append(
            {
                "taught": way,
                "runs": len(losses),
                "loss": statistics.mean(losses.values()),
                "loss_sd": statistics.stdev(losses.values()) if len(losses) > 1 else None,
                "gain": statistics.mean(gains) if gains else None,
                "gain_sd": statistics.stdev(gains) if len(gains) > 1 else None,
            }
        )
    return sorted(out, key=lambda row: row["loss"])


def cells(row: Mapping[str, Any]) -> list[str]:
    def cell(mean: float, deviation: float | None, sign: str = "") -> str:
        return f"{mean:{sign}.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")

    gain = "-" if row["gain"] is None else cell(row["gain"], row["gain_sd"], "+")
    return [row["taught"], str(row["runs"]), cell(row["loss"], row["loss_sd"]), gain]


HEADS = ("taught by", "runs", "validation loss", "beside text alone, same seed")


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Validation loss by step, a line a run, a colour a way."""
    from jaxllm.measure import plots

    figure, axes = plots.canvas("A student with and without a teacher", "", "step", "validation loss (nats a token)")
    ways = list(dict.fromkeys(run["taught"] for run in runs))
    colours = dict(zip(ways, [plots.BLUE, plots.ORANGE, plots.GREEN, plots.GREY, plots.INK] * len(ways), strict=False))
    for run in runs:
        label = run["taught"] if run is next(r for r in runs if r["taught"] == run["taught"]) else None
        steps, losses = zip(*run["curve"], strict=True)
        axes.plot(steps, losses, color=colours[run["taught"]], linewidth=1.2, marker="o", markersize=3, label=label)
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps: one numbered folder a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(arguments)
    try:
        runs = [read(run) for run in finished(args.sweeps)]
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    text = table(HEADS, [cells(row) for row in summary(runs)])
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, args.out / "loss.png")
    print(text)


if __name__ == "__main__":
    main()
