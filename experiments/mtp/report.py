"""Tables and pictures of the MTP study, from the run folders of its sweeps.

    python experiments/mtp/report.py multirun/mtp/plain multirun/mtp/one multirun/mtp/two multirun/mtp/parallel [--out OUT]

Writes into OUT (default: beside this file) table.md, loss.png (validation loss by FLOPs) and agreement.png (by depth, over training).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxllm.errors import UserError
from jaxllm.report.study import Finished, beside, finished, grouped, spread, table

NAMES = {
    "plain": "next token alone",
    "chained_1": "chained, depth 1",
    "chained_2": "chained, depth 2",
    "parallel_1": "parallel, depth 1",
}


def variant(run: Finished) -> str:
    mtp = run.config["model"].get("mtp")
    if mtp is None:
        return "plain"
    kind = "parallel" if "Parallel" in mtp["_target_"] else "chained"
    return f"{kind}_{mtp['depth']}"


def step_flops(run: Finished) -> float:
    """Matmul FLOPs of a step, forward and backward: the model's, and of each module its join, block and use of the head."""
    from jaxllm.config import Config
    from jaxllm.training.speed import step_flops as of_trunk

    cfg = Config(dict(run.config))
    batch, length = run.config["train"]["batch_size"], run.config["train"]["seq_len"]
    model = cfg.build("model", vocab_size=run.config["data"]["tokenizer"]["vocab_size"])
    flops = of_trunk(model, batch, length)
    if (heads := model.mtp_heads()) is not None:
        keys = (length + 1) / 2
        layers = (model.mixer(heads.mixer), model.ffn(heads.ffn))
        block = sum(layer.cost(batch, length, keys, model.compute_dtype).flops for layer in layers)
        head = 2 * batch * length * model.d_model * model.padded_vocab
        flops += 3 * (heads.depth * (block + head) + 2 * batch * length * heads.extra_params())
    return flops


def last(run: Finished) -> int:
    return run.curve("val/loss")[-1][0]


def rows(runs: Mapping[str, Sequence[Finished]]) -> list[list[str]]:
    """A row a variant. At equal steps: the loss where the modules' runs end. At equal compute: beside the run without modules after as
    many FLOPs as those runs have used. Differences are taken within a seed."""
    plain = runs["plain"]
    end = min(last(run) for group in runs.values() for run in group)
    base = step_flops(plain[0])
    found = []
    for name, group in runs.items():
        cost = step_flops(group[0]) / base

        def here(run: Finished) -> float:
            return run.at("val/loss", end)

        def as_dear(run: Finished, cost: float = cost) -> float:
            return run.at("val/loss", cost * end)

        cells = [NAMES[name], str(len(group)), f"{cost:.2f}", spread([here(run) for run in group], 4)]
        cells += [spread(beside(group, plain, here, other), 4, sign=True) for other in (here, as_dear)]
        for key in ("mtp_1/agreement", "mtp_2/agreement", "mtp_2/accepted"):
            cells.append(spread([run.at(f"val/{key}", end) for run in group if run.curve(f"val/{key}")], 3))
        found.append(cells)
    return found


HEADS = (
    "trained on",
    "seeds",
    "FLOPs of a step",
    "validation loss, equal steps",
    "beside next token alone, equal steps",
    "the same, equal FLOPs",
    "module 1 agrees",
    "module 2 agrees",
    "both agree",
)


def draw(runs: Mapping[str, Sequence[Finished]], out: Path) -> None:
    from jaxllm.measure import plots

    colours = dict(zip(NAMES, (plots.INK, plots.BLUE, plots.ORANGE, plots.GREEN), strict=True))
    figure, axes = plots.canvas("Validation loss by compute, all seeds", "", "GFLOPs", "cross-entropy (nats per token)")
    for name, group in runs.items():
        for i, run in enumerate(group):
            flops = step_flops(run) / 1e9
            points = [(step * flops, loss) for step, loss in run.curve("val/loss")]
            label = NAMES[name] if i == 0 else None
            axes.plot(*zip(*points, strict=True), color=colours[name], linewidth=1.2, marker=".", label=label)
    plots.legend(axes)
    figure.savefig(out / "loss.png", dpi=150)

    title = "How often a module chooses what the trunk will"
    figure, axes = plots.canvas(title, "all seeds, held-out text", "step", "share of tokens")
    lines = [
        ("mtp_1/agreement", "-", "module 1"),
        ("mtp_2/agreement", "--", "module 2"),
        ("mtp_2/accepted", ":", "both"),
    ]
    for name, group in runs.items():
        for i, run in enumerate(group):
            for key, style, word in lines:
                if points := run.curve(f"val/{key}"):
                    label = f"{NAMES[name]}: {word}" if i == 0 else None
                    axes.plot(*zip(*points, strict=True), style, color=colours[name], linewidth=1.2, label=label)
    if axes.lines:
        plots.legend(axes, "lower right")
    figure.savefig(out / "agreement.png", dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="folders of sweeps: one numbered folder a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args(arguments)
    try:
        runs = grouped(finished(args.sweeps), variant, NAMES)
        if "plain" not in runs:
            raise UserError(f"{args.sweeps[0]}: the sweeps hold no run without MTP to compare with")
        text = table(HEADS, rows(runs))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    draw(runs, args.out)
    print(text)


if __name__ == "__main__":
    main()
