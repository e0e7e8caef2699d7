"""Tables and pictures of the linear-attention study, from the run folders of its two sweeps.

    python experiments/linear_attention/report.py TEXT_SWEEP [RECALL_SWEEP] [OUT] [--times 8] [--windows 16]

Writes into OUT (default: beside this file) table.md, loss_by_position.png (models read `times` the length they were trained at) and
decays.png: alpha, the share of each channel that a token keeps, and beta, how much of it is written, over the first tokens of a text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

NAMES = {
    "softmax": "softmax, RoPE",
    "softmax_local": "softmax, RoPE, first layer: window of 2",
    "gdn": "Gated DeltaNet",
    "kda": "KDA",
    "hybrid": "KDA and MLA, 3:1",
}
TOKENS = 96  # of a text in the heat maps


def other_study(name: str) -> ModuleType:
    """The report of another study, which may import its neighbours: windows of long documents, a reader of their losses."""
    folder = Path(__file__).resolve().parents[1] / name
    spec = importlib.util.spec_from_file_location(f"{name}_report", folder / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def variant(model: dict[str, Any]) -> str:
    """Which of the models a run trained, from its resolved node."""
    mixers = model["mixers"]
    if "linear" not in mixers:
        return "softmax_local" if "local" in mixers else "softmax"
    if "global" in mixers:
        return "hybrid"
    return "gdn" if "num_v_heads" in mixers["linear"] else "kda"


def read(sweep: Path) -> dict[str, list[dict[str, Any]]]:
    """{variant: its finished runs}, with folder, model and result."""
    import yaml

    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for folder in sorted(p for p in sweep.iterdir() if (p / "result.json").is_file()):
        model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        runs[variant(model)].append({"folder": folder, **json.loads((folder / "result.json").read_text())})
    return {name: runs[name] for name in NAMES if name in runs}


def spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):,.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):,.{digits}f}"


def by_position(
    runs: dict[str, list[dict[str, Any]]], times: int, most: int, log: Callable[..., None]
) -> tuple[dict[str, Any], int]:
    """{variant: a curve for each run} of nats over `times` the trained length, and that length."""
    from jaxllm.tasks.source import open_source
    from jaxllm.tasks.texts import Fixed

    study, curves, length = other_study("long_context"), {}, 0
    for name, group in runs.items():
        curves[name] = []
        for run in group:
            source = open_source(run["folder"], overrides={"model.max_seq_len": None})
            length = source.config.section("train").seq_len * times
            text = source.config.build("data")
            text.tokenizer = Fixed(source.tokenizer)
            tokens = study.windows(text.prepare(log).val, length, most)
            nats = study.reader(source.model)
            rows = np.concatenate([nats(source.params, tokens[i : i + 1]) for i in range(len(tokens))])
            curves[name].append(study.curve(rows))
    return curves, length


def decays(run: Path, log: Callable[..., None]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(alpha `[t h (k)]`, beta `[t h]`) of every linear layer over a held-out text, in order."""
    from jaxllm.layers.base import Context
    from jaxllm.tasks.source import open_source
    from jaxllm.tasks.texts import Fixed

    source = open_source(run)
    text = source.config.build("data")
    text.tokenizer = Fixed(source.tokenizer)
    store = text.prepare(log).val
    longest = int(np.argmax(store.lengths))
    tokens = np.asarray(store.document(longest)[:TOKENS], np.int32)[None]
    capture = source.model.apply({"params": source.params}, Context.whole(tokens, capture=("decay",)))[1].capture
    found = []
    for key in sorted(k for k in capture if k.endswith("/decay")):
        alpha, beta = np.asarray(capture[key]), np.asarray(capture[key.removesuffix("decay") + "beta"])
        found += [(a[0], b[0]) for a, b in zip(alpha, beta, strict=True)]  # the leading axis is the group's repeats
    return found


def draw_decays(layers: list[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """A column a layer: alpha of every channel above, beta of every head below."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(layers), figsize=(4 * len(layers), 6), squeeze=False, height_ratios=(3, 1))
    for i, (alpha, beta) in enumerate(layers):
        shown = axes[0][i].imshow(alpha.reshape(len(alpha), -1).T, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axes[0][i].set(title=f"layer {i}: alpha", xlabel="token", ylabel="channel of the heads")
        axes[1][i].imshow(beta.T, aspect="auto", vmin=0, vmax=1, cmap="viridis")
        axes[1][i].set(title="beta", xlabel="token", ylabel="head")
    figure.tight_layout()
    figure.colorbar(shown, ax=axes, shrink=0.6)
    figure.savefig(path, dpi=120)


def draw_positions(curves: dict[str, Any], trained: int, length: int, path: Path) -> None:
    from jaxllm.measure import plots

    seeds = max(len(runs) for runs in curves.values())
    figure, axes = plots.canvas(
        f"Trained on {trained:,} tokens, read on {length:,}", f"{seeds} seeds", "position", "nats per token"
    )
    colours = (plots.GREY, plots.GREEN, plots.BLUE, plots.ORANGE, plots.INK)
    for (name, runs), colour in zip(curves.items(), colours, strict=False):
        values = np.array(runs)
        places = (np.arange(values.shape[1]) + 0.5) * length / values.shape[1]
        axes.plot(places, values.mean(axis=0), color=colour, linewidth=2, label=NAMES[name])
        axes.fill_between(places, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
    axes.axvline(trained, color=plots.INK, linewidth=1)
    plots.legend(axes, "upper left")
    figure.savefig(path, dpi=150)


def table(text: dict[str, Any], recall: dict[str, Any], curves: dict[str, Any], times: int) -> str:
    """Markdown, a line a variant; losses in nats, mean and deviation over seeds."""
    heads = (
        "model",
        "seeds",
        "loss on text",
        "training, tokens/s",
        "loss in the trained length",
        "in the last eighth of the long one",
        "loss of recall",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name in (n for n in NAMES if n in text or n in recall):
        runs, answers = text.get(name, []), [r["val_loss"] for r in recall.get(name, [])]
        near = [statistics.mean(c[: max(1, len(c) // times)]) for c in curves.get(name, [])]
        far = [statistics.mean(c[-len(c) // 8 :]) for c in curves.get(name, [])]
        columns = (
            ([r["val_loss"] for r in runs], 4),
            ([r["tokens_per_s"] for r in runs], 0),
            (near, 3),
            (far, 3),
            (answers, 4),
        )
        cells = (NAMES[name], str(max(len(runs), len(answers))), *(spread(v, n) if v else "-" for v, n in columns))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the sweep on text")
    parser.add_argument("recall", type=Path, nargs="?", help="the sweep on recall")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--times", type=int, default=8, help="how much longer than the trained length")
    parser.add_argument("--windows", type=int, default=16, help="at most so many pieces of held-out text")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.compose import compose

    prepare(compose(["+experiment=linear_attention"]).common)
    text, recall = read(args.text), read(args.recall) if args.recall is not None else {}
    if not text:
        raise SystemExit(f"error: {args.text}: no finished run in it")

    def log(line: str, level: str = "info") -> None:
        del level
        print(line, flush=True)

    curves, length = by_position(text, args.times, args.windows, log)
    written = table(text, recall, curves, args.times)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(written, encoding="utf-8")
    draw_positions(curves, length // args.times, length, args.out / "loss_by_position.png")
    if "kda" in text:
        draw_decays(decays(text["kda"][0]["folder"], log), args.out / "decays.png")
    print(written)


if __name__ == "__main__":
    main()
