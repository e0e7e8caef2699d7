"""What the routers of trained mixtures choose, in pictures and numbers, from the run folders of the sweep.

    python experiments/moe_routing/report.py multirun/moe_routing CORPUS [OUT] [--prompt TEXT] [--track wandb|none]

CORPUS is the folder that corpus.py wrote. Writes into OUT (default: beside this file) domains.png, kinds.png, together.png, load.png,
prompt.png, table.md and routing.html; pictures and tables also go to the tracker. The pictures show one run, the numbers all.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import draw
import numpy as np
import routing

from jaxllm.report import page

PROMPT = 'def mean(values):\n    """Return the mean of some numbers."""\n    return sum(values) / len(values)\n'
DOMAINS = ("code", "prose")
CHARACTERS = 120_000  # of each domain that are read


def group_of(config: Mapping[str, Any]) -> str:
    """Corpus and balancing of a run, in words."""
    corpus = "code" if config["data"]["path"] is None else "text and code"
    return f"{corpus}, {'balanced' if config['model']['ffns']['experts']['switch_loss'] else 'no balancing'}"


def load_curves(rows: Sequence[Mapping[str, Any]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, load of the busiest expert) of every layer of a run."""
    from jaxllm.measure.plots import series

    keys = sorted({key for row in rows for key in row if "/ffn/load_max" in key})
    return [series(rows, key) for key in keys]


def look(folder: Path, texts: Mapping[str, str]) -> dict[str, Any]:
    """One run: config, curves and, for each domain, routing by layer and by kind of token."""
    from jaxllm.measure.jsonl import read_metrics
    from jaxllm.tasks.source import open_source

    source = open_source(folder)
    assert source.tokenizer is not None
    node = source.config.get("model.ffns.experts")
    number, length = node["num_experts"], source.config.get("train.seq_len")
    read = routing.reader(source.model, length)
    ids = {name: source.tokenizer.encode(text) for name, text in texts.items()}
    choices = {name: read(source.params, got) for name, got in ids.items()}
    pieces = [piece for name in DOMAINS for piece in routing.pieces(source.tokenizer, ids[name])]
    everything = np.concatenate([choices[name][0] for name in DOMAINS], axis=1)
    return {
        "group": group_of({"data": {"path": source.config.get("data.path")}, "model": {"ffns": {"experts": node}}}),
        "number": number,
        "curves": load_curves(read_metrics(folder)),
        "domains": {name: routing.shares(choices[name][0], number) for name in DOMAINS},
        "kinds": routing.by_kind(pieces, everything, number),
        "together": [routing.together(layer, number) for layer in everything],
        "prompt": (routing.pieces(source.tokenizer, ids["prompt"]), *choices["prompt"]),
    }


def numbers(run: Mapping[str, Any]) -> dict[str, float]:
    """Of one run: how far routing differs between domains and between kinds of tokens, and the load at the end."""
    kinds = list(run["kinds"].values())
    pairs = [routing.difference(a, b).mean() for i, a in enumerate(kinds) for b in kinds[i + 1 :]]
    return {
        "code against prose": float(routing.difference(*run["domains"].values()).mean()),
        "between kinds of tokens": float(np.mean(pairs)) if pairs else float("nan"),
        "busiest expert at the end": float(
            np.mean([np.median(values[-10:]) for _, values in run["curves"] if len(values)])
        ),
    }


def table(groups: Mapping[str, Sequence[Mapping[str, float]]]) -> list[list[str]]:
    """A head and one row a group: mean and standard deviation over its runs."""
    heads = list(next(iter(groups.values()))[0])

    def cell(values: Sequence[float]) -> str:
        return f"{statistics.mean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")

    rows = [
        [name, str(len(runs)), *(cell([run[head] for run in runs]) for head in heads)] for name, runs in groups.items()
    ]
    return [["trained on", "runs", *heads], *rows]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]]) + "\n"


def pictures(run: Mapping[str, Any], curves: Mapping[str, Any], out: Path) -> list[Path]:
    number = run["number"]
    names = ("domains", "kinds", "together", "load", "prompt")
    paths = {name: out / f"{name}.png" for name in names}
    share = {"x": "expert", "most": 3.0}
    draw.panels(
        run["domains"], paths["domains"], title="Choices by kind of text, in times an even share", y="layer", **share
    )
    kinds = list(run["kinds"])
    layers = {f"layer {i}": np.stack([run["kinds"][k][i] for k in kinds]) for i in range(len(run["together"]))}
    draw.panels(
        layers, paths["kinds"], title="Choices by kind of token, in times an even share", y="", rows=kinds, **share
    )
    both = {f"layer {i}": both for i, both in enumerate(run["together"])}
    draw.panels(
        both,
        paths["together"],
        title="Share of an expert's tokens that also chose another",
        x="other expert",
        y="expert",
        most=1.0,
    )
    draw.loads(curves, paths["load"])
    draw.prompt(*run["prompt"], number, paths["prompt"])
    return list(paths.values())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("corpus", type=Path, help="the folder that corpus.py wrote")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--prompt", default=PROMPT, help="the text whose tokens are shown one by one")
    parser.add_argument("--track", choices=("wandb", "none"), default="wandb")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.config import Common
    from jaxllm.measure.trackers import make_tracker

    prepare(Common())
    folders = sorted(p.parent for p in args.sweep.rglob("result.json"))
    if not folders:
        raise SystemExit(f"error: {args.sweep}: no finished run of the study in it")
    texts = {
        name: (args.corpus / "heldout" / f"{name}.txt").read_text(encoding="utf-8")[:CHARACTERS] for name in DOMAINS
    }
    groups, curves = defaultdict(list), defaultdict(list)
    shown: dict[str, Any] = {}
    for folder in folders:
        run = look(folder, texts | {"prompt": args.prompt})
        groups[run["group"]].append(numbers(run))
        curves[run["group"]] += run["curves"]
        if (
            not shown
            or run["group"].startswith("text and code, b")
            and not shown["group"].startswith("text and code, b")
        ):
            shown = run
        print(f"{folder.name}: {run['group']}: {groups[run['group']][-1]}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    files, rows = pictures(shown, curves, args.out), table(groups)
    (args.out / "table.md").write_text(markdown(rows), encoding="utf-8")
    pieces, experts, weights = shown["prompt"]
    parts = {"In numbers": page.table(rows)}
    parts |= {
        f"The prompt, layer {i}": page.tokens(pieces, e, w, shown["number"])
        for i, (e, w) in enumerate(zip(experts, weights, strict=True))
    }
    parts |= {file.stem.capitalize(): page.picture(file) for file in files}
    (args.out / "routing.html").write_text(page.page(f"Routing: {shown['group']}", parts), encoding="utf-8")
    tracker = make_tracker(
        args.track, args.sweep / "report", {"study": "moe_routing", "prompt": args.prompt}, name="moe_routing"
    )
    for file in files:
        tracker.image(0, f"routing/{file.stem}", file)
    tracker.table(0, "routing/numbers", rows[0], rows[1:])
    choices = [
        [i, layer, piece, *map(int, e)]
        for layer in range(len(experts))
        for i, (piece, e) in enumerate(zip(pieces, experts[layer], strict=True))
    ]
    tracker.table(
        0, "routing/prompt", ["token", "layer", "text", *(f"choice {j}" for j in range(experts.shape[-1]))], choices
    )
    tracker.close()
    print(markdown(rows))


if __name__ == "__main__":
    main()
