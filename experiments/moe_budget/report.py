"""Loss of trained mixtures of experts when experts are taken away at inference: fewer a token, narrower ones, fewer of them.

    python experiments/moe_budget/report.py multirun/moe_budget [OUT] [--batches 40]

Every run of the sweep is read with its own weights under every budget, on its held-out text. Writes into OUT (default: beside this file)
results.json, table.md and budget.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROLE = "experts"  # of the model's ffns
MATRICES = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Budget:
    """kind: of the three ways to save; size: what is left of it; fields: of the layer that is left."""

    kind: str
    size: int
    fields: Mapping[str, int]


def budgets(top_k: int, width: int, experts: int) -> list[Budget]:
    """Halves of each in turn; the first of a kind is the whole model."""

    def halves(n: int, least: int) -> list[int]:
        sizes = [n]
        while sizes[-1] // 2 >= least:
            sizes.append(sizes[-1] // 2)
        return sizes

    return [
        *(Budget("experts a token", k, {"top_k": k}) for k in halves(top_k, 1)),
        *(Budget("width of experts", f, {"d_expert": f}) for f in halves(width, max(1, width // 8))),
        *(Budget("experts held", e, {"num_experts": e}) for e in halves(experts, top_k)),
    ]


def units_of(layer: Mapping[str, np.ndarray], keep: int) -> np.ndarray:
    """The `keep` hidden units of each expert whose three weight vectors have the largest product of norms: int `[.. e keep]`."""
    weight = np.linalg.norm(layer["gate_proj"], axis=-2) * np.linalg.norm(layer["up_proj"], axis=-2)
    weight = weight * np.linalg.norm(layer["down_proj"], axis=-1)
    return np.sort(np.argsort(-weight, axis=-1, kind="stable")[..., :keep], axis=-1)


def narrowed(layer: Mapping[str, Any], keep: int) -> dict[str, Any]:
    """The layer (stacked or not) with `keep` hidden units left in every expert."""
    units = units_of(layer, keep)
    columns = {name: np.take_along_axis(layer[name], units[..., None, :], axis=-1) for name in MATRICES[:2]}
    return {**layer, **columns, "down_proj": np.take_along_axis(layer["down_proj"], units[..., :, None], axis=-2)}


def reduced(layer: Mapping[str, Any], used: np.ndarray, keep: int) -> dict[str, Any]:
    """The layer, stacked, with the `keep` experts left that were used most: `used [repeats e]`."""
    kept = np.sort(np.argsort(-used, axis=-1, kind="stable")[:, :keep], axis=-1)
    out = {name: np.stack([w[i] for w, i in zip(layer[name], kept, strict=True)]) for name in MATRICES}
    router = {name: np.stack([w[..., i] for w, i in zip(a, kept, strict=True)]) for name, a in layer["router"].items()}
    return {**layer, **out, "router": router}


def each_layer(
    params: Mapping[str, Any], change: Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
) -> dict[str, Any]:
    """`params` with every layer of experts changed; `change` gets its path, `g0/b0`, and the layer."""
    out = dict(params)
    for group in (name for name in params if name[0] == "g"):
        out[group] = dict(params[group])
        for block, parts in params[group].items():
            if "router" in parts.get("ffn", {}):
                out[group][block] = {**parts, "ffn": change(f"{group}/{block}", parts["ffn"])}
    return out


def shrink(params: Mapping[str, Any], budget: Budget, used: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """The weights that are left under a budget. used: `{g0/b0: how often each expert was chosen [repeats e]}`."""
    if "d_expert" in budget.fields:
        return each_layer(params, lambda _, layer: narrowed(layer, budget.size))
    if "num_experts" in budget.fields:
        return each_layer(params, lambda path, layer: reduced(layer, used[path], budget.size))
    return params


def usage(model: Any, params: Any, batches: Iterable[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`{g0/b0: [repeats e]}`: each expert's share of the choices, in times an even share, over some text."""
    import jax

    from jaxllm.layers.base import Context
    from jaxllm.training.losses import backbone

    @jax.jit
    def loads(params: Any, batch: Any) -> Any:
        aux = backbone(model, params, Context.whole(batch["tokens"], batch["segments"], batch["positions"])).aux
        return {key.split("metric/")[1].removesuffix("/ffn/load"): v for key, v in aux.items() if key.endswith("/load")}

    total: dict[str, np.ndarray] = {}
    for batch in batches:
        for path, load in loads(params, dict(batch)).items():
            total[path] = total.get(path, 0) + np.asarray(load)
    return total


def measure(folder: Path, batches: int) -> list[dict[str, Any]]:
    """One row a budget: loss and bits per byte of the run in `folder`, FLOPs a token and parameters held."""
    import jax

    from jaxllm.data.loader import Loader
    from jaxllm.tasks.source import build_model, open_source
    from jaxllm.tasks.texts import Fixed
    from jaxllm.training.evaluation import Evaluator
    from jaxllm.training.settings import TrainSettings

    source = open_source(folder)
    settings: TrainSettings = source.config.section("train")
    assert source.tokenizer is not None
    corpus = dataclasses.replace(source.config.build("data"), tokenizer=Fixed(source.tokenizer)).prepare()

    def text(store: Any) -> Iterable[Mapping[str, np.ndarray]]:
        loader = Loader(store, settings.batch_size, settings.seq_len, seed=0)
        return (batch for _, batch in zip(range(batches), loader.epoch(), strict=False))

    params = jax.tree.map(np.asarray, source.params)
    used = usage(source.model, params, text(corpus.train))
    node, rows = source.config.get(f"model.ffns.{ROLE}"), []
    for budget in budgets(node["top_k"], node["d_expert"], node["num_experts"]):
        config = source.config.replace({f"model.ffns.{ROLE}.{key}": size for key, size in budget.fields.items()})
        model = build_model(config, source.tokenizer)
        found = Evaluator(model, source.tokenizer.token_bytes())(shrink(params, budget, used), text(corpus.val))
        cost = model.cost(1, 1, settings.seq_len)
        rows.append(
            {
                "kind": budget.kind,
                "size": budget.size,
                "loss": found["loss"],
                "bpb": found["bpb"],
                "flops": cost.flops,
                "params": cost.params,
            }
        )
        print(f"{folder.name}: {budget.size} {budget.kind}: loss {found['loss']:.4f}", flush=True)
    return rows


def summary(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Means and deviations over runs, and each budget's loss beside the whole model of its own run."""
    out = []
    for rows in zip(*runs, strict=True):
        whole = [next(r for r in run if r["kind"] == rows[0]["kind"])["loss"] for run in runs]
        worse = [row["loss"] - w for row, w in zip(rows, whole, strict=True)]
        losses = [row["loss"] for row in rows]
        deviation = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in (losses, worse)]
        found = {"loss": statistics.mean(losses), "loss_sd": deviation[0]}
        out.append({**rows[0], **found, "worse": statistics.mean(worse), "worse_sd": deviation[1]})
    return out


def table(rows: Sequence[Mapping[str, Any]], runs: int) -> str:
    heads = "what is left | | MFLOP a token | parameters held | validation loss | worse by"
    lines = [f"{runs} runs, mean ± standard deviation.\n", f"| {heads} |", "| " + " | ".join(["---"] * 6) + " |"]
    for r in rows:
        cells = [r["kind"], str(r["size"]), f"{r['flops'] / 1e6:.3f}", f"{r['params']:,}"]
        cells += [f"{r['loss']:.4f} ± {r['loss_sd']:.4f}", f"{r['worse']:+.4f} ± {r['worse_sd']:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from jaxllm.measure import plots

    figure, axes = plots.canvas(
        "Experts taken away after training", "", "share that is left", "worse by (nats per token)"
    )
    kinds = list(dict.fromkeys(r["kind"] for r in rows))
    for kind, colour in zip(kinds, (plots.BLUE, plots.ORANGE, plots.GREEN), strict=True):
        mine = [r for r in rows if r["kind"] == kind]
        share = [r["size"] / mine[0]["size"] for r in mine]
        axes.errorbar(
            share, [r["worse"] for r in mine], [r["worse_sd"] for r in mine],
            color=colour, marker="o", markersize=5, linewidth=1.5, capsize=3, label=f"{kind} (of {mine[0]['size']})",
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"1/{1 / x:.0f}" if x < 0.9 else "all")
    axes.axhline(0, color=plots.INK, linewidth=0.8)
    plots.legend(axes)
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the sweep's folder: one numbered folder a run")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--batches", type=int, default=40, help="batches of held-out text a budget is read on")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.config import Common

    prepare(Common())
    folders = sorted(p.parent for p in args.sweep.glob("*/result.json"))
    if not folders:
        raise SystemExit(f"error: {args.sweep}: no finished run of the study in it")
    runs = [measure(folder, args.batches) for folder in folders]
    rows = summary(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    text = table(rows, len(runs))
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(rows, args.out / "budget.png")
    print(text)


if __name__ == "__main__":
    main()
