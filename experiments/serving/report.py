"""Two pictures of the JSON lines that the other files print: the frontier over rows, and a decode step against context.

python batching.py --study rows > rows.jsonl;  python decode.py --contexts 64 128 256 512 > context.jsonl;  python report.py
"""

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

HERE = Path(__file__).parent


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def frontier(rows: list[dict[str, Any]], out: Path) -> None:
    """Throughput against the time to the first token and between tokens, one point for each number of rows."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, key, label in zip(
        axes, ("ttft_p50", "itl_p50"), ("median TTFT, ms", "median time between tokens, ms"), strict=True
    ):
        axis.plot([1e3 * row[key] for row in rows], [row["throughput"] for row in rows], "o-")
        for row in rows:
            axis.annotate(
                row["variant"].removeprefix("rows_"),
                (1e3 * row[key], row["throughput"]),
                xytext=(4, 4),
                textcoords="offset points",
            )
        axis.set_xlabel(label)
    axes[0].set_ylabel("output tokens/s")
    figure.suptitle("Maximum rows: throughput against latency, a new request where one has ended")
    figure.savefig(out, dpi=110)
    plt.close(figure)


def context(rows: list[dict[str, Any]], out: Path) -> None:
    """Milliseconds of a decode step at the end of a context."""
    figure, axis = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for name in ("contiguous", "paged"):
        axis.plot([row["context"] for row in rows], [row[name]["median_ms"] for row in rows], "o-", label=name)
    axis.set_xlabel("tokens in the cache of each row")
    axis.set_ylabel("ms a step")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main(folder: Path = HERE) -> None:
    plt.switch_backend("Agg")
    frontier(lines(folder / "rows.jsonl"), folder / "frontier.png")
    context(lines(folder / "context.jsonl"), folder / "context.png")


if __name__ == "__main__":
    main()
