"""Loss by position of models trained on short rows and read on long ones, without any further training.

    python experiments/long_positions/report.py multirun/long_positions [OUT] [--times 8] [--windows 32]

Every run of the sweep is read with its own weights and, in turn, with each way to stretch its rotary embedding. Writes into OUT
(default: beside this file) results.json, table.md and loss_by_position.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

METHODS = ("none", "linear", "ntk", "yarn")
NAMES = {
    "none": "none",
    "linear": "position interpolation",
    "ntk": "NTK-aware",
    "yarn": "YaRN",
    "cut": "none, read in pieces of the trained length",
}
KINDS = {"none": "RoPE", "linear": "LinearRoPE", "ntk": "NTKRoPE", "yarn": "YaRN"}
ROPE = "model.mixers.global.rope"
BUCKETS = 32  # points of a curve

Losses = dict[str, list[list[float]]]  # {method: a curve for each run}


def stretched(rope: Mapping[str, Any], method: str, factor: float, trained: int) -> dict[str, Any]:
    """The node of a run's rotary embedding, stretched by `factor` beyond the `trained` length."""
    node = {"_target_": f"jaxllm.layers.rope.{KINDS[method]}"}
    node |= {key: rope[key] for key in ("theta", "partial", "interleaved") if key in rope}
    if method != "none":
        node["factor"] = factor
    if method == "yarn":
        node["original_max_position"] = trained
    return node


def windows(store: Any, length: int, most: int) -> np.ndarray:
    """Up to `most` pieces of `length + 1` tokens, int32 `[n, length + 1]`, end to end from each document long enough.

    Documents take turns, so that one giant does not make up the whole.
    """
    pieces = [
        (turn, document, start)
        for document, size in enumerate(store.lengths)
        for turn, start in enumerate(range(0, int(size) - length, length))
    ]
    chosen = sorted(pieces)[:most]
    if not chosen:
        raise SystemExit(f"error: no held-out document has {length + 1} tokens; the longest has {max(store.lengths)}")
    return np.stack([store.document(d)[s : s + length + 1] for _, d, s in chosen]).astype(np.int32)


def reader(model: Any) -> Callable[[Any, np.ndarray], np.ndarray]:
    """`(params, tokens [b n+1]) -> nats of each prediction [b n]`, compiled once for each shape."""
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context
    from jaxllm.training.losses import backbone, next_token

    @jax.jit
    def read(params: Any, tokens: Any) -> Any:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        out = backbone(model, params, Context.whole(inputs))
        batch = {"labels": labels, "weights": jnp.ones(labels.shape, jnp.float32)}
        return next_token(model, params, out.hidden, batch)[1].nll_tokens

    return lambda params, tokens: np.asarray(read(params, tokens))


def cut(tokens: np.ndarray, piece: int) -> np.ndarray:
    """`[n, L + 1]` as rows of `piece + 1` tokens: every label once, each piece begins anew at position 0."""
    starts = range(0, tokens.shape[1] - 1, piece)
    return np.concatenate([tokens[:, s : s + piece + 1] for s in starts])


def curve(nats: np.ndarray) -> list[float]:
    """Mean loss of `BUCKETS` equal stretches of position, from `[n L]`."""
    return [float(part.mean()) for part in np.array_split(nats, BUCKETS, axis=1)]


def measure(run: Path, times: int, most: int, log: Callable[[str], None]) -> dict[str, list[float]]:
    """The curve of every method, and of reading in pieces, for one run."""
    from jaxllm.tasks.source import open_source
    from jaxllm.tasks.train import Fixed

    source = open_source(run)
    config = source.config
    trained = config.section("train").seq_len
    text = config.build("data")
    text.tokenizer = Fixed(source.tokenizer)
    tokens = windows(text.prepare(log).val, trained * times, most)
    log(f"{run.name}: {len(tokens)} windows of {trained * times:,} tokens")
    out = {}
    for method in METHODS:
        node = stretched(config[ROPE], method, float(times), trained)
        model = open_source(run, overrides={ROPE: node, "model.max_seq_len": None}).model
        read = reader(model)
        rows = [read(source.params, tokens[i : i + 1]) for i in range(len(tokens))]
        out[method] = curve(np.concatenate(rows))
        if method == "none":
            pieces = cut(tokens, trained)
            size = len(pieces) // len(tokens)
            short = [read(source.params, pieces[i : i + size]) for i in range(0, len(pieces), size)]
            out["cut"] = [float(np.concatenate(short).mean())] * BUCKETS
        log(f"  {NAMES[method]}: {out[method][0]:.3f} at the start, {out[method][-1]:.3f} at the end")
    return out


def ranges(times: int) -> list[tuple[int, int]]:
    """Doublings of the trained length, in buckets: [0, 1), [1, 2), [2, 4) ... times the trained length."""
    edges = [0, *(2**i for i in range(times.bit_length()) if 2**i <= times)]
    edges = edges if edges[-1] == times else [*edges, times]
    return [(a * BUCKETS // times, b * BUCKETS // times) for a, b in zip(edges, edges[1:], strict=False)]


def table(losses: Losses, trained: int, times: int) -> str:
    """Markdown: nats per token in each range of positions, mean and standard deviation over runs."""
    spans = ranges(times)
    places = [f"{a * trained * times // BUCKETS:,} to {b * trained * times // BUCKETS - 1:,}" for a, b in spans]
    lines = [f"| stretched by | {' | '.join(places)} |", f"| --- |{' --- |' * len(spans)}"]
    for method in (*METHODS, "cut"):
        cells = []
        for a, b in spans:
            values = [statistics.mean(run[a:b]) for run in losses[method]]
            deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{deviation}")
        lines.append(f"| {NAMES[method]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(losses: Losses, trained: int, times: int, path: Path) -> None:
    """Mean curve of every method with a band from the lowest to the highest run."""
    from jaxllm.measure import plots

    length = trained * times
    title = f"Trained on {trained:,} tokens, read on {length:,}"
    figure, axes = plots.canvas(title, f"{len(losses['none'])} seeds", "position", "cross-entropy (nats per token)")
    places = (np.arange(BUCKETS) + 0.5) * length / BUCKETS
    colours = dict(zip(METHODS, (plots.ORANGE, plots.GREEN, plots.BLUE, "#CC79A7"), strict=True))
    for method, colour in colours.items():
        runs = np.array(losses[method])
        axes.plot(places, runs.mean(axis=0), color=colour, linewidth=2, label=NAMES[method])
        axes.fill_between(places, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    level = float(np.mean(losses["cut"]))
    axes.axhline(level, color=plots.INK, linestyle="--", linewidth=1, label=NAMES["cut"])
    axes.axvline(trained, color=plots.GREY, linewidth=1)
    plots.note(axes, f"grey line: the trained length, {trained:,}")
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def report(runs: Iterable[Path], out: Path, times: int, most: int, log: Callable[[str], None]) -> str:
    """Measure all runs, write the three files, return the table."""
    from jaxllm.tasks.source import open_source

    losses: Losses = {}
    trained = 0
    for run in runs:
        trained = open_source(run).config.section("train").seq_len
        for method, values in measure(run, times, most, log).items():
            losses.setdefault(method, []).append(values)
    out.mkdir(parents=True, exist_ok=True)
    facts = {"trained": trained, "length": trained * times, "buckets": BUCKETS, "nats": losses}
    (out / "results.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    text = table(losses, trained, times)
    (out / "table.md").write_text(text, encoding="utf-8")
    draw(losses, trained, times, out / "loss_by_position.png")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--times", type=int, default=8, help="how much longer than the trained length")
    parser.add_argument("--windows", type=int, default=32, help="at most so many pieces of held-out text")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.compose import compose

    prepare(compose(["+experiment=long_positions"]).common)
    runs = sorted(p for p in args.sweep.iterdir() if (p / "result.json").is_file())
    if not runs:
        raise SystemExit(f"error: {args.sweep}: no finished run in it")
    print(report(runs, args.out, args.times, args.windows, lambda text, level="info": print(text, flush=True)))


if __name__ == "__main__":
    main()
