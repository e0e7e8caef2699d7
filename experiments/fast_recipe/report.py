"""Table and picture of the study of the fast recipe, from the run folders of its sweeps.

    python experiments/fast_recipe/report.py multirun/fast_recipe/next multirun/fast_recipe/ahead [--out OUT] [--context 2048]

Losses come from the runs, FLOPs from the models; the times of a training step and of a decoded token are measured here, variant after
variant in rounds, so that a busy moment meets all. Writes into OUT (default: beside this file) table.md and recipe.png.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.report.study import Finished, beside, finished, grouped, in_turn, other, ratios, spread, table

NAMES = {
    "plain": "dense, all keys",
    "experts": "8 experts, 2 a token",
    "windows": "window 64, 3:1",
    "ahead": "MTP, depth 1",
    "together": "all three",
}
ROUNDS = 7


def variant(run: Finished) -> str:
    model = run.config["model"]
    parts = {"experts": "experts" in model["ffns"], "windows": "local" in model["mixers"], "ahead": model.get("mtp")}
    has = [name for name, there in parts.items() if there]
    return "plain" if not has else has[0] if len(has) == 1 else "together"


def facts(run: Finished, context: int) -> dict[str, float]:
    """FLOPs of a trained and of a decoded token, parameters held and used, bytes of a cache of `context` tokens."""
    from jaxllm.config import Config

    cfg = Config(dict(run.config))
    model = cfg.build("model", vocab_size=run.config["data"]["tokenizer"]["vocab_size"])
    cost = model.cost(1, 1, context)
    tokens = run.config["train"]["batch_size"] * run.config["train"]["seq_len"]
    return {
        "train_flops": other(__file__, "mtp").step_flops(run) / tokens,
        "decode_flops": cost.flops,
        "params": cost.params,
        "active": cost.params_active,
        "cache": cost.cache_per_token * context + cost.cache_constant,
    }


def times(runs: Mapping[str, Finished], context: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{step or decode: {variant: seconds by round}}."""
    from jaxllm.config import Config

    family = other(__file__, "attention_family")
    made = {}
    for name, run in runs.items():
        model = {**run.config["model"], "vocab_size": run.config["data"]["tokenizer"]["vocab_size"]}
        made[name] = family.programs(Config({**run.config, "model": model}), context)
        print(f"{name}: compiled", flush=True)
    return {
        "step": in_turn({name: step for name, (step, _, _) in made.items()}, rounds, 2),
        "decode": in_turn({name: decode for name, (_, decode, _) in made.items()}, rounds, 40),
    }


def rows(
    runs: Mapping[str, Sequence[Finished]],
    known: Mapping[str, Mapping[str, float]],
    taken: Mapping[str, Mapping[str, Sequence[float]]],
) -> list[list[str]]:
    found = []
    for name, group in runs.items():

        def loss(run: Finished) -> float:
            return float(run.result["val_loss"])

        mine, agreed = known[name], [v for run in group for _, v in run.curve("val/mtp_1/agreement")[-1:]]
        cells = [NAMES[name], f"{mine['params']:,.0f}", f"{mine['active']:,.0f}", str(len(group))]
        cells += [spread([loss(r) for r in group], 4), spread(beside(group, runs["plain"], loss), 4, sign=True)]
        cells += [f"{mine[key] / 1e3:,.0f}" for key in ("train_flops", "decode_flops", "cache")]
        for kind in ("step", "decode"):
            if kind not in taken:
                cells += ["-", "-"]
                continue
            values = [1e3 * t for t in taken[kind][name]]
            middle = statistics.median(ratios(taken[kind], name, "plain"))
            cells.append(f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")
            cells.append(f"{middle:.2f}")
        found.append([*cells, spread([1 + a for a in agreed], 2)])
    return found


def heads(context: int) -> tuple[str, ...]:
    return (
        "model",
        "parameters",
        "used by a token",
        "seeds",
        "validation loss",
        "beside dense",
        "training, kFLOPs a token",
        f"decoding at {context:,}, kFLOPs",
        "cache, kB",
        "train step, ms",
        "to dense",
        "decoded token, ms",
        "to dense",
        "tokens a pass with its own drafts",
    )


def draw(
    runs: Mapping[str, Sequence[Finished]], known: Mapping[str, Mapping[str, float]], context: int, out: Path
) -> None:
    from jaxllm.measure import plots

    title = "What each part of the recipe costs and gives"
    x_label, y_label = "cache, kB (area: FLOPs of a decoded token)", "validation loss (nats per token)"
    figure, axes = plots.canvas(title, f"decoding at {context:,}", x_label, y_label)
    colours = dict(zip(NAMES, (plots.INK, plots.BLUE, plots.GREEN, plots.ORANGE, "#CC79A7"), strict=True))
    most = max(known[name]["cache"] for name in runs)
    for name, group in runs.items():
        x, size = known[name]["cache"] / 1e3, known[name]["decode_flops"] / 1e4
        losses = [run.result["val_loss"] for run in group]
        axes.scatter([x] * len(group), losses, s=size, color=colours[name])
        left = known[name]["cache"] > most / 2  # names stand on the side that has room
        axes.annotate(
            NAMES[name],
            (x, statistics.mean(losses)),
            xytext=(-14 if left else 14, 0),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=colours[name],
        )
    axes.margins(x=0.1, y=0.1)
    figure.savefig(out / "recipe.png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps: one numbered folder a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--context", type=int, default=2048, help="tokens before the decoded one")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of timing; 0 = times are left out")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.config import Common

    prepare(Common())
    try:
        runs = grouped(finished(args.sweeps), variant, NAMES)
        if "plain" not in runs:
            raise UserError(f"{args.sweeps[0]}: the sweeps hold no run of fast_recipe/plain to compare with")
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    first: dict[str, Any] = {name: group[0] for name, group in runs.items()}
    known = {name: facts(run, args.context) for name, run in first.items()}
    taken = times(first, args.context, args.rounds) if args.rounds else {}
    text = table(heads(args.context), rows(runs, known, taken))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, known, args.context, args.out)
    print(text)


if __name__ == "__main__":
    main()
