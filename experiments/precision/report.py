"""Table and picture of the study of precision, from the run folders of its sweeps.

    python experiments/precision/report.py multirun/precision/float32 [MORE SWEEPS ...] [--out OUT]

Losses and norms come from the runs. Bytes are those of the state and of what one step needs beside it as the compiler plans it, here and
for a model of `--width` times the width. Writes into OUT (default: beside this file) table.md and norms.png.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.report.study import Finished, beside, finished, grouped, spread, table

NAMES = {
    "float32": "float32",
    "compute": "bfloat16 compute, float32 parameters",
    "master": "bfloat16 parameters, float32 copies",
    "none": "bfloat16 parameters alone",
}
LAST = 0.2  # of a run: what norms are averaged over


def kind(run: Finished) -> str:
    model = run.config["model"]
    if model["param_dtype"] == "bfloat16":
        return "master" if run.config["optim"]["master"] else "none"
    return "compute" if model["dtype"] == "bfloat16" else "float32"


def key(run: Finished) -> str:
    """Kind and peak learning rate, `none 0.004`."""
    return f"{kind(run)} {run.config['optim']['lr']:g}"


def kept(run: Finished) -> float:
    """Share of the updates' norm that parameters really moved by, over the end of the run."""
    moved, meant = (dict(run.curve(f"train/{name}")) for name in ("moved_norm", "update_norm"))
    steps = sorted(moved)
    return statistics.mean(moved[s] / meant[s] for s in steps[-max(1, round(LAST * len(steps))) :])


def memory(run: Finished, width: int) -> dict[str, int]:
    """Bytes a training step holds: parameters, moments and copies, and scratch space. Nothing is allocated."""
    import jax
    import jax.numpy as jnp

    from jaxllm.config import Config
    from jaxllm.measure.memory import tree_bytes
    from jaxllm.training.state import abstract_state
    from jaxllm.training.step import make_train_step

    vocab, train = run.config["data"]["tokenizer"]["vocab_size"], run.config["train"]
    wider = widened(run.config, width)
    cfg = Config(wider)
    model, optimiser = cfg.build("model", vocab_size=vocab), cfg.build("optim")
    state = abstract_state(model, optimiser)
    shape = (train["batch_size"], train["seq_len"])
    names = ("tokens", "labels", "segments", "positions", "weights")
    batch = {n: jax.ShapeDtypeStruct(shape, jnp.float32 if n == "weights" else jnp.int32) for n in names}
    step = make_train_step(model, cfg.build("objective"), optimiser)
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    plan = compiled.memory_analysis()
    return {
        "params": tree_bytes(state.params),
        "optimiser": tree_bytes((state.opt_state, state.master)),
        "scratch": int(plan.temp_size_in_bytes) if plan is not None else 0,
    }


def widened(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """The configuration with `width` times the channels of stream, heads and ffn."""
    model = dict(config["model"])
    model["d_model"] *= width
    mixer, ffn = dict(model["mixers"]["global"]), dict(model["ffns"]["dense"])
    mixer["num_heads"], mixer["num_kv_heads"] = mixer["num_heads"] * width, mixer["num_kv_heads"] * width
    ffn["d_ff"] *= width
    return {**config, "model": model | {"mixers": {"global": mixer}, "ffns": {"dense": ffn}}}


HEADS = (
    "numbers",
    "peak rate",
    "seeds",
    "validation loss",
    "beside float32",
    "gradient norm",
    "update norm",
    "share of it that arrives",
    "parameters, MB",
    "moments and copies, MB",
    "scratch, MB",
)


def rows(runs: Mapping[str, Sequence[Finished]], bytes_of: Mapping[str, Mapping[str, int]]) -> list[list[str]]:
    found = []
    for name, group in runs.items():
        word, rate = name.split()
        base = runs.get(f"float32 {rate}", [])

        def loss(run: Finished) -> float:
            return float(run.result["val_loss"])

        ends = [[statistics.mean(v for _, v in run.curve(f"train/{n}")[-10:]) for run in group] for n in NORMS]
        cells = [NAMES[word], rate, str(len(group)), spread([loss(run) for run in group], 4)]
        cells += [spread(beside(group, base, loss), 4, sign=True), *(spread(values, 4) for values in ends)]
        cells.append(spread([kept(run) for run in group], 3))
        cells += [f"{bytes_of[word][n] / 1e6:.1f}" for n in ("params", "optimiser", "scratch")]
        found.append(cells)
    return found


NORMS = ("grad_norm", "update_norm")


def draw(runs: Mapping[str, Sequence[Finished]], path: Path) -> None:
    from jaxllm.measure import plots

    colours = dict(zip(NAMES, (plots.INK, plots.BLUE, plots.GREEN, plots.ORANGE), strict=True))
    figure, axes = plots.canvas("What arrives of an update", "all seeds", "step", "moved / meant")
    for name, group in runs.items():
        word, rate = name.split()
        style = "-" if rate == max((n.split()[1] for n in runs), key=float) else ":"
        for i, run in enumerate(group):
            meant = dict(run.curve("train/update_norm"))
            points = [(step, moved / meant[step]) for step, moved in run.curve("train/moved_norm") if meant.get(step)]
            steps, values = plots.smoothed(*(np.array(column) for column in zip(*points, strict=True)))
            label = f"{NAMES[word]}, rate {rate}" if i == 0 else None
            axes.plot(steps, values, style, color=colours[word], linewidth=1.5, label=label)
    axes.set_ylim(bottom=0.0)
    plots.legend(axes, "lower right")
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps: one numbered folder a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--width", type=int, default=4, help="of the model whose bytes are counted, times the runs'")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.config import Common

    prepare(Common())
    try:
        found = finished(args.sweeps)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    rates = sorted({f"{run.config['optim']['lr']:g}" for run in found}, key=float, reverse=True)
    runs = grouped(found, key, [f"{word} {rate}" for rate in rates for word in NAMES])
    examples = {kind(run): run for run in found}
    text = table(HEADS, rows(runs, {word: memory(run, args.width) for word, run in examples.items()}))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, args.out / "norms.png")
    print(text)


if __name__ == "__main__":
    main()
