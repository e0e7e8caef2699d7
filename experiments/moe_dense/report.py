"""Table and picture of dense models beside mixtures of experts, from the run folders of the sweep.

    python experiments/moe_dense/report.py multirun/moe_dense [OUT]

Writes into OUT (default: beside this file) table.md and loss.png. Losses come from the runs; the speed of a training step is measured here,
variant after variant in rounds, so that a busy moment meets all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "dense_active": "dense, as large as the active part",
    "dense_total": "dense, as large as all of it",
    "coarse": "8 experts, 2 a token",
    "fine": "32 experts, 8 a token",
}
ROWS, LENGTH, ROUNDS = 8, 256, 7


def variant(model: Mapping[str, Any]) -> str:
    """Which of the four a run trained, from its resolved model."""
    ffns = model["ffns"]
    if "experts" in ffns:
        return "fine" if ffns["experts"]["top_k"] > 2 else "coarse"
    return "dense_total" if ffns["dense"]["d_ff"] > 4 * model["d_model"] else "dense_active"


def read(sweep: Path) -> dict[str, list[dict[str, Any]]]:
    """{variant: its finished runs}, each with config, result and metrics."""
    import yaml

    from jaxllm.measure.jsonl import read_metrics

    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for folder in sorted(p for p in sweep.iterdir() if (p / "result.json").is_file()):
        result = json.loads((folder / "result.json").read_text())
        if result.get("val_loss") is None:
            print(f"{folder}: left out, it has no validation loss")
            continue
        config = yaml.safe_load((folder / "config.yaml").read_text())
        runs[variant(config["model"])].append({"config": config, "rows": read_metrics(folder), **result})
    return {name: runs[name] for name in NAMES if name in runs}


def measured(configs: Mapping[str, Mapping[str, Any]], vocab: int) -> dict[str, dict[str, Any]]:
    """For each variant: parameters held and used by a token, and tokens per second of a train step, by round."""
    made = {name: _step(config, vocab) for name, config in configs.items()}
    for name, (step, facts) in made.items():
        step()
        facts["tokens_per_s"] = []
        print(f"{name}: compiled")
    for _ in range(ROUNDS):
        for step, facts in made.values():
            start = time.perf_counter()
            step(), step()
            facts["tokens_per_s"].append(2 * ROWS * LENGTH / (time.perf_counter() - start))
    return {name: facts for name, (_, facts) in made.items()}


def _step(config: Mapping[str, Any], vocab: int) -> tuple[Callable[[], None], dict[str, Any]]:
    """A train step of a run's model that runs and waits, and the model's sizes."""
    import jax

    from jaxllm.config import Config
    from jaxllm.training.state import new_state
    from jaxllm.training.step import compile_step, make_train_step

    cfg = Config(dict(config))
    model, optimiser = cfg.build("model", vocab_size=vocab), cfg.build("optim")
    state = new_state(model, optimiser, 0)
    ids = np.random.default_rng(0).integers(0, vocab, (ROWS, LENGTH + 1), dtype=np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
    batch["positions"] = np.cumsum(ones, axis=1, dtype=np.int32) - 1
    compiled, _ = compile_step(make_train_step(model, cfg.build("objective"), optimiser), state, batch)
    held = {"state": state}

    def run() -> None:
        held["state"], metrics = compiled(held["state"], batch, np.int32(10**6))
        jax.block_until_ready(metrics)

    total, cost = sum(leaf.size for leaf in jax.tree.leaves(state.params)), model.cost()
    return run, {"total": total, "active": total - cost.params + cost.params_active}


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]], facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: one row a variant, mean and standard deviation over seeds."""
    heads = (
        "model | parameters | used by a token | seeds | validation loss | bits per byte | tokens/s of a step (range)"
    )
    lines = [f"| {heads} |", "| " + " | ".join(["---"] * 7) + " |"]
    for name, got in runs.items():
        speed = facts[name]["tokens_per_s"]
        cells = [NAMES[name], f"{facts[name]['total']:,}", f"{facts[name]['active']:,}", str(len(got))]
        cells += [spread([r[key] for r in got], 4) for key in ("val_loss", "val_bpb")]
        cells.append(f"{statistics.median(speed):,.0f} ({min(speed):,.0f} to {max(speed):,.0f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def draw(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    from jaxllm.measure import plots

    colours = dict(zip(NAMES, (plots.GREY, plots.INK, plots.BLUE, plots.ORANGE), strict=True))
    figure, axes = plots.canvas("Dense models and mixtures, all seeds", "", "step", "cross-entropy (nats per token)")
    lows = []
    for name, got in runs.items():
        for i, run in enumerate(got):
            steps, values = plots.smoothed(*plots.series(run["rows"], "train/next_token"))
            axes.plot(steps, values, color=colours[name], linewidth=1.2, label=NAMES[name] if i == 0 else None)
            lows += [values.min(), values[len(values) // 5]]
    axes.set_ylim(min(lows) - 0.05, max(lows) + 0.3)
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.config import Common

    prepare(Common())
    runs = read(args.sweep)
    if not runs:
        raise SystemExit(f"error: {args.sweep}: no finished run of the study in it")
    args.out.mkdir(parents=True, exist_ok=True)
    configs = {name: got[0]["config"] for name, got in runs.items()}
    vocab = next(iter(configs.values()))["data"]["tokenizer"]["vocab_size"]
    text = table(runs, measured(configs, vocab))
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, args.out / "loss.png")
    print(text)


if __name__ == "__main__":
    main()
