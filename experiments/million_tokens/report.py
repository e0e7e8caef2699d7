"""Table and picture of the million-token demonstration, from the run folders of its sweeps.

    python experiments/million_tokens/report.py multirun/million_tokens [OUT]

Writes table.md and curves.png into OUT (default: beside this file): what was measured, and projections to a million tokens of the rest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

MILLION = 1 << 20
NAMES = {"linear": "KDA", "linear global": "KDA and MLA, 3:1", "global": "softmax attention"}


def read(sweep: Path) -> list[dict[str, Any]]:
    """Finished runs anywhere below, by name and then length."""
    runs = []
    for file in sorted(sweep.rglob("result.json")):
        config = yaml.safe_load((file.parent / "config.yaml").read_text())
        runs.append(
            {
                "name": NAMES[" ".join(sorted(config["model"]["mixers"], reverse=True))],
                "config": config,
                **json.loads(file.read_text()),
            }
        )
    return sorted(runs, key=lambda r: (list(NAMES.values()).index(r["name"]), r["tokens"]))


def fit(marks: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds a token: `a + b n` at length n, by least squares on the marks after the first, each weighed by its tokens."""
    ends = np.array([m["tokens"] for m in marks], float)
    starts = np.concatenate([[0.0], ends[:-1]])
    rate = np.array([m["seconds"] for m in marks]) / (ends - starts)
    keep, weight = slice(1, None), np.sqrt(ends - starts)
    design = np.stack([np.ones_like(ends), (starts + ends) / 2], axis=1) * weight[:, None]
    (a, b), *_ = np.linalg.lstsq(design[keep], (rate * weight)[keep], rcond=None)
    return max(float(a), 0.0), max(float(b), 0.0)


def seconds(marks: list[dict[str, Any]], tokens: int) -> float:
    """To read so many: the sum of what was measured and, beyond it, the fitted line."""
    done, a_b = marks[-1]["tokens"], fit(marks)
    measured = sum(m["seconds"] for m in marks)
    return measured + a_b[0] * (tokens - done) + a_b[1] * (tokens**2 - done**2) / 2


def cache_bytes(run: dict[str, Any], tokens: int) -> float:
    """By the model's own formula."""
    from jaxllm.nodes import Nodes

    model = Nodes(build=True).node(run["config"]["model"], "model", {})
    cost = model.cost(1, 1, tokens, "float32")
    return float(cost.cache_per_token * tokens + cost.cache_constant)


def row(run: dict[str, Any]) -> str:
    marks, n = run["marks"], run["tokens"]
    last = [m for m in marks if m["tokens"] > n // 8]
    rates = [m["tokens_per_s"] for m in last]
    cells = (
        run["name"],
        f"{n:,}",
        f"{run['tokens_per_s']:,.0f}",
        f"{max(rates) / min(rates) - 1:.0%}",
        f"{run['peak_rss_bytes'] / 2**20:,.0f}",
        f"{run['cache_bytes']:,}",
        f"{run['decode_ms']:.2f}",
        f"{seconds(marks, MILLION):,.0f}" + ("" if n >= MILLION else " (projected)"),
        f"{cache_bytes(run, MILLION):,.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def table(runs: list[dict[str, Any]]) -> str:
    names = (
        "stack",
        "tokens",
        "read, tokens/s",
        "spread of the last doublings",
        "peak RSS, MiB",
        "cache, bytes",
        "decode, ms",
    )
    head = "| " + " | ".join((*names, "a million: seconds", "a million: cache, bytes")) + " |"
    lines = [head, "|" + " --- |" * head.count(" | ") + " --- |", *map(row, runs)]
    peaks = {r["tokens"]: r["peak_rss_bytes"] for r in runs if r["name"] == "KDA"}
    if {65536, MILLION} <= set(peaks):
        lines += ["", f"Peak memory of a million tokens over that of 65,536: {peaks[MILLION] / peaks[65536]:.3f}."]
    return "\n".join(lines) + "\n"


def curves(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for run in {r["name"]: r for r in runs}.values():  # the longest of each
        n = [m["tokens"] for m in run["marks"]]
        line = left.loglog(n, [1e6 / m["tokens_per_s"] for m in run["marks"]], marker="o", label=run["name"])[0]
        a, b = fit(run["marks"])
        ahead = np.geomspace(n[-1], MILLION, 20) if n[-1] < MILLION else np.array([])
        left.loglog(ahead, 1e6 * (a + b * ahead), linestyle=":", color=line.get_color())
        sizes = np.geomspace(2048, MILLION, 40)
        right.loglog(sizes, [cache_bytes(run, int(s)) / 2**20 for s in sizes], label=run["name"])
    left.set(xlabel="tokens read", ylabel="microseconds a token (dotted: projected)")
    right.set(xlabel="tokens read", ylabel="cache of a row, MiB")
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    args = parser.parse_args()
    runs = read(args.sweep)
    text = table(runs)
    (args.out / "table.md").write_text(text)
    curves(runs, args.out / "curves.png")
    print(text)


if __name__ == "__main__":
    main()
