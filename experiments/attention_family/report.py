"""Table and pictures of the attention study, from the run folders of its sweep.

    python experiments/attention_family/report.py multirun/attention_family [OUT]

Writes into OUT (default: beside this file) table.md, loss.png, cache.png, masks.png and receptive_field.png. Losses come
from the runs; step and decode times are measured here, variant after variant in rounds, so that a busy moment meets all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

VARIANTS = ("mha", "gqa", "mqa", "swa", "mla")
NAMES = {"mha": "MHA", "gqa": "GQA, 4 to 1", "mqa": "MQA", "swa": "window 64, 3:1", "mla": "MLA"}
CONTEXT, ROUNDS = 1024, 7


def variant(model: dict[str, Any]) -> str:
    """Which of the five a run trained, from its resolved model."""
    mixers = model["mixers"]
    if "local" in mixers:
        return "swa"
    if "kv_lora_rank" in mixers["global"]:
        return "mla"
    return {None: "mha", 1: "mqa"}.get(mixers["global"]["num_kv_heads"], "gqa")


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
    return {name: runs[name] for name in VARIANTS if name in runs}


def times(names: Sequence[str], scale: int) -> dict[str, dict[str, float]]:
    """Median ms of a train step (8 x 256) and of one decoded token behind `CONTEXT`, batch 1; what the cache holds; how they spread."""
    from jaxllm.compose import compose

    base = ["+experiment=attention_family", f"scale={scale}", "model.vocab_size=1024"]
    made = {name: programs(compose([*base, f"model=attention_family/{name}"]), CONTEXT) for name in names}
    taken: dict[str, dict[str, list[float]]] = {name: {"step": [], "decode": []} for name in names}
    for _ in range(ROUNDS):
        for name, (step, decode, _) in made.items():
            for kind, call, calls in (("step", step, 2), ("decode", decode, 50)):
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                taken[name][kind].append(1e3 * (time.perf_counter() - start) / calls)
    out = {}
    for name, kinds in taken.items():
        out[name] = dict(made[name][2])
        for kind, values in kinds.items():
            out[name][kind] = statistics.median(values)
            out[name][f"{kind}_spread"] = max(values) - min(values)
    return out


def programs(cfg: Any, context: int) -> tuple[Any, Any, dict[str, float]]:
    """A train step of 8 x 256 tokens and a decode step behind `context` that run and wait, and the facts of the model."""
    import jax
    import jax.numpy as jnp

    from jaxllm.cache import cache_bytes
    from jaxllm.layers.base import Context
    from jaxllm.params import unstack
    from jaxllm.training.state import new_state
    from jaxllm.training.step import compile_step, make_train_step

    model, optimiser = cfg.build("model"), cfg.build("optim")
    state = new_state(model, optimiser, 0)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.vocab_size, (8, 257), dtype=np.int32)
    ones = np.ones((8, 256), np.int32)
    batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
    batch["positions"] = np.cumsum(ones, axis=1, dtype=np.int32) - 1
    decoder = model.unrolled()
    params = decoder.prepare(unstack(model, jax.tree.map(jnp.copy, state.params)))
    held = {"train": state, "cache": decoder.init_cache(1, context + 8)}
    size = cache_bytes(held["cache"])
    compiled, _ = compile_step(make_train_step(model, cfg.build("objective"), optimiser), state, batch)

    @jax.jit
    def fill(params: Any, cache: Any, tokens: Any) -> Any:
        return decoder.apply({"params": params}, Context.step(tokens, jnp.zeros(1, jnp.int32)), cache)[0]

    def decode(params: Any, cache: Any, token: Any) -> tuple[Any, Any]:
        cache, out = decoder.apply({"params": params}, Context.step(token, jnp.full(1, context, jnp.int32)), cache)
        return cache, jnp.argmax(out.logits[:, -1:], axis=-1).astype(jnp.int32)

    held["cache"] = fill(params, held["cache"], jnp.asarray(rng.integers(0, model.vocab_size, (1, context)), jnp.int32))
    held["token"] = jnp.zeros((1, 1), jnp.int32)
    one = jax.jit(decode, donate_argnums=1).lower(params, held["cache"], held["token"]).compile()

    def run_step() -> None:
        held["train"], metrics = compiled(held["train"], batch, np.int32(10**6))
        jax.block_until_ready(metrics)

    def run_decode() -> None:  # each time the token behind the same context: it writes over the last one
        held["cache"], held["token"] = one(params, held["cache"], held["token"])
        jax.block_until_ready(held["token"])

    run_step(), run_decode()
    params_total = sum(leaf.size for leaf in jax.tree.leaves(held["train"].params))
    return run_step, run_decode, {"params": params_total, "cache_bytes": size}


def table(runs: dict[str, list[dict[str, Any]]], measured: dict[str, dict[str, float]]) -> str:
    """Markdown: one row a variant, mean and standard deviation over seeds."""
    heads = "attention | parameters | seeds | validation loss | bits per byte | train step, ms"
    heads += f" | decode at {CONTEXT:,}, ms a token | cache, bytes a row"
    lines = [f"| {heads} |", "| " + " | ".join(["---"] * 8) + " |"]
    for name, facts in measured.items():
        got = runs.get(name, [])
        cells = [NAMES[name], f"{facts['params']:,}", str(len(got))]
        cells += [spread([r[key] for r in got], 4) for key in ("val_loss", "val_bpb")]
        cells += [
            f"{facts['step']:.1f} ({facts['step_spread']:.1f})",
            f"{facts['decode']:.3f} ({facts['decode_spread']:.3f})",
        ]
        lines.append("| " + " | ".join([*cells, f"{facts['cache_bytes']:,.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def draw(runs: dict[str, list[dict[str, Any]]], measured: dict[str, dict[str, float]], out: Path) -> None:
    from jaxllm.measure import plots

    colours = dict(zip(VARIANTS, (plots.BLUE, plots.ORANGE, plots.GREEN, "#CC79A7", plots.INK), strict=True))
    figure, axes = plots.canvas(
        "Training loss, all seeds", "equal parameters", "step", "cross-entropy (nats per token)"
    )
    lows = []
    for name, got in runs.items():
        for i, run in enumerate(got):
            steps, values = plots.smoothed(*plots.series(run["rows"], "train/loss"))
            axes.plot(steps, values, color=colours[name], linewidth=1.2, label=NAMES[name] if i == 0 else None)
            lows += [values.min(), values[len(values) // 5]]
    if lows:
        axes.set_ylim(min(lows) - 0.05, max(lows) + 0.3)
    plots.legend(axes)
    figure.savefig(out / "loss.png", dpi=150)

    figure, axes = plots.canvas(
        "What a smaller cache costs", f"context {CONTEXT:,}", "cache, KiB a row", "validation loss (nats per token)"
    )
    for name, got in runs.items():
        for i, run in enumerate(got):
            label = NAMES[name] if i == 0 else None
            axes.scatter(measured[name]["cache_bytes"] / 1024, run["val_loss"], color=colours[name], s=40, label=label)
    axes.set_xscale("log")
    plots.legend(axes)
    figure.savefig(out / "cache.png", dpi=150)


def fields() -> dict[str, np.ndarray]:
    """What an output depends on, by gradients, in stacks of windows of 8 and in the study's mix of windows and one global layer."""
    from jaxllm.compose import compose
    from jaxllm.measure.masks import influence

    small = ["model=attention_family/swa", "model.vocab_size=64", "model.mixers.local.window=8"]
    stacks = {
        "1 window layer": "1* local/dense",
        "2 window layers": "2* local/dense",
        "4 window layers": "4* local/dense",
        "3 windows, 1 global": "1* local/dense*3 global/dense",
    }
    return {
        name: influence(compose([*small, f"model.layers={layers}"]).build("model"), 48)
        for name, layers in stacks.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    args = parser.parse_args()
    from jaxllm.backend import prepare
    from jaxllm.compose import compose
    from jaxllm.measure.masks import pictures

    prepare(compose(["+experiment=attention_family"]).common)
    runs = read(args.sweep)
    if not runs:
        raise SystemExit(f"error: {args.sweep}: no finished run of the study in it")
    scale = next(iter(runs.values()))[0]["config"].get("scale", 1)
    args.out.mkdir(parents=True, exist_ok=True)
    measured = times(list(runs), scale)
    text = table(runs, measured)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, measured, args.out)
    pictures(args.out, fields())
    print(text)


if __name__ == "__main__":
    main()
