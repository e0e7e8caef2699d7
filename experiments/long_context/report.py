"""Loss by position, and needles found, of models trained on short rows and read on long ones.

    python experiments/long_context/report.py SHORT [OUT] [--staged SWEEP] [--needles SWEEP] [--needles-staged SWEEP]

SHORT: the sweep on text at the short length. Every run of it is read with its own weights and, in turn, with each way to stretch its
rotary embedding; those of `--staged` were trained on after such a stretch. The same for needles. Writes into OUT (default: beside this
file) results.json, table.md, loss_by_position.png and, where there are needles, needles.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import recall

from jaxllm.errors import UserError
from jaxllm.report.study import finished, spread
from jaxllm.report.study import table as as_table

METHODS = ("none", "linear", "ntk", "yarn")
NAMES = {
    "none": "none",
    "linear": "position interpolation",
    "ntk": "NTK-aware",
    "yarn": "YaRN",
    "cut": "none, read in pieces of the trained length",
}
NAMES |= {f"after_{method}": f"{NAMES[method]}, then the long stage" for method in METHODS}
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


def method_of(config: Any) -> str:
    """How the rotary embedding of a run's model is stretched."""
    kind = str(config[ROPE]["_target_"]).rpartition(".")[2]
    return next(method for method, name in KINDS.items() if name == kind)


def read_run(run: Path, overrides: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Nats `[n L]` of a run's newest weights on windows of text."""
    from jaxllm.tasks.source import open_source

    source = open_source(run, overrides={**overrides, "model.max_seq_len": None})
    read = reader(source.model)
    return np.concatenate([read(source.params, tokens[i : i + 1]) for i in range(len(tokens))])


def text_of(run: Path, length: int, most: int, log: Callable[[str], None]) -> np.ndarray:
    """Windows of the run's held-out text."""
    from jaxllm.tasks.source import open_source
    from jaxllm.tasks.texts import Fixed

    source = open_source(run)
    text = source.config.build("data")
    text.tokenizer = Fixed(source.tokenizer)
    return windows(text.prepare(log).val, length, most)


def ways(run: Path, factor: float, trained: int) -> dict[str, dict[str, Any]]:
    """{method: what to override in a run's configuration}."""
    from jaxllm.tasks.source import open_source

    rope = open_source(run).config[ROPE]
    return {method: {ROPE: stretched(rope, method, factor, trained)} for method in METHODS}


def measure(run: Path, tokens: np.ndarray, trained: int, log: Callable[[str], None]) -> dict[str, list[float]]:
    """The curve of every method, and of reading in pieces, for one run, without further training."""
    times = (tokens.shape[1] - 1) // trained
    log(f"{run.name}: {len(tokens)} windows of {trained * times:,} tokens")
    out = {}
    for method, overrides in ways(run, float(times), trained).items():
        out[method] = curve(read_run(run, overrides, tokens))
        log(f"  {NAMES[method]}: {out[method][0]:.3f} at the start, {out[method][-1]:.3f} at the end")
    pieces = cut(tokens, trained)
    size = len(pieces) // len(tokens)
    short = [read_run(run, {}, pieces[i : i + size]) for i in range(0, len(pieces), size)]
    out["cut"] = [float(np.concatenate(short).mean())] * BUCKETS
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
    for method in (m for m in NAMES if m in losses):
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
        if after := losses.get(f"after_{method}"):
            label = NAMES[f"after_{method}"]
            axes.plot(places, np.mean(after, axis=0), color=colour, linewidth=1.5, linestyle=":", label=label)
    level = float(np.mean(losses["cut"]))
    axes.axhline(level, color=plots.INK, linestyle="--", linewidth=1, label=NAMES["cut"])
    axes.axvline(trained, color=plots.GREY, linewidth=1)
    plots.note(axes, f"grey line: the trained length, {trained:,}")
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def needle_table(found: Mapping[str, Sequence[Mapping[str, Any]]], lengths: Sequence[int]) -> str:
    """Markdown: share of needles found within the trained length, at the long one, and there by part of the haystack."""
    heads = ["stretched by", "runs", *(f"found at {n:,}" for n in lengths)]
    heads += [f"{name} quarter" for name in ("farthest", "third", "second", "nearest")]
    rows = []
    for name in (m for m in NAMES if m in found):
        runs = found[name]
        shares = [[run["found"][i] for run in runs] for i in range(len(lengths))]
        parts = [float(np.nanmean([run["parts"][i] for run in runs])) for i in range(recall.PARTS)]
        rows.append([NAMES[name], str(len(runs)), *(spread(s, 2) for s in shares), *(f"{p:.2f}" for p in parts)])
    return as_table(heads, rows)


def merged(into: dict[str, list[Any]], found: Mapping[str, Any], prefix: str = "") -> None:
    for name, value in found.items():
        into.setdefault(prefix + name, []).append(value)


def report(
    runs: Sequence[Path],
    out: Path,
    times: int,
    most: int,
    log: Callable[[str], None],
    staged: Sequence[Path] = (),
    hay: Sequence[Path] = (),
    hay_staged: Sequence[Path] = (),
    count: int = 16,
) -> str:
    """Measure all runs, write the files, return the tables."""
    from jaxllm.tasks.source import open_source

    losses: Losses = {}
    trained = int(open_source(runs[0]).config["train"]["seq_len"])
    tokens = text_of(runs[0], trained * times, most, log)
    for run in runs:
        merged(losses, measure(run, tokens, trained, log))
    for run in staged:
        merged(losses, {method_of(open_source(run).config): curve(read_run(run, {}, tokens))}, "after_")
    found: dict[str, list[Any]] = {}
    lengths = (trained, trained * times)
    for run in hay:
        merged(found, recall.asks(run, ways(run, float(times), trained), lengths, count))
    for run in hay_staged:
        merged(found, recall.asks(run, {method_of(open_source(run).config): {}}, lengths, count), "after_")
    out.mkdir(parents=True, exist_ok=True)
    facts = {"trained": trained, "length": trained * times, "buckets": BUCKETS, "nats": losses, "needles": found}
    (out / "results.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    texts = {"table.md": table(losses, trained, times)}
    if found:
        texts["needles.md"] = needle_table(found, lengths)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    draw(losses, trained, times, out / "loss_by_position.png")
    return "\n".join(texts.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--staged", type=Path, help="the sweep of the long stage on text")
    parser.add_argument("--needles", type=Path, help="the sweep on needles")
    parser.add_argument("--needles-staged", type=Path, help="the sweep of the long stage on needles")
    parser.add_argument("--times", type=int, default=8, help="how much longer than the trained length")
    parser.add_argument("--windows", type=int, default=32, help="at most so many pieces of held-out text")
    parser.add_argument("--count", type=int, default=16, help="haystacks of each length")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.compose import compose

    prepare(compose(["+experiment=long_context"]).common)

    def folders(sweep: Path | None) -> list[Path]:
        try:
            return [] if sweep is None else [run.folder for run in finished([sweep])]
        except UserError as error:
            raise SystemExit(f"error: {error}") from None

    def log(text: str, level: str = "info") -> None:
        del level
        print(text, flush=True)

    sweeps = [folders(sweep) for sweep in (args.sweep, args.staged, args.needles, args.needles_staged)]
    runs, staged, hay, hay_staged = sweeps
    print(report(runs, args.out, args.times, args.windows, log, staged, hay, hay_staged, args.count))


if __name__ == "__main__":
    main()
