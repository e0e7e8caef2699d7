"""Tables and pictures of the needle study, from the run folders of its two sweeps.

    python experiments/needle/report.py multirun/needle [OUT] [--count 64]

Every run is asked for one needle among eight, at nine depths, as it was trained and, without being built or trained anew, with other
budgets k and in shorter haystacks. Writes into OUT (default: beside this file) table.md, modes.md, depth.png, budget.png, selected.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NAMES = {
    "full": "all keys",
    "window": "window",
    "window_global": "window and 4 global tokens",
    "dsa": "DSA",
    "csa": "CSA",
}
BUDGETS = (4, 8, 16, 32, 64)
DEPTHS = tuple(i / 8 for i in range(9))  # 0: at the start of the haystack, farthest from the question
PARTS = (1.0, 0.5, 0.25)  # of the trained haystack
ROUNDS = 7

Ask = Callable[[Any, np.ndarray], np.ndarray]


class Answers(NamedTuple):
    """What a model says to `[n]` questions: nats of the right answer, and whether it is the likeliest."""

    nats: np.ndarray
    right: np.ndarray


def variant(model: Mapping[str, Any]) -> str:
    """Which of the five a run trained, from its resolved model."""
    mixer = model["mixers"]["global"]
    if "compress_rate" in mixer:
        return "csa"
    if "top_k" in mixer:
        return "dsa"
    if mixer.get("window") is None:
        return "full"
    return "window_global" if mixer.get("global_tokens") else "window"


def mode(name: str, mixer: Any, k: int) -> dict[str, int]:
    """Fields of a built model in which a query meets k keys: CSA half of them in its window, half as entries."""
    if name == "full":
        return {}
    if name == "csa":
        return {"mixers.global.window": k // 2, "mixers.global.top_k": k // 2}
    if name == "dsa":
        return {"mixers.global.top_k": k}
    return {"mixers.global.window": max(k - (mixer.global_tokens or 0), 1)}


def budget(name: str, mixer: Any) -> int:
    """The keys of a query that a run was trained with; 0 = all."""
    if name == "full":
        return 0
    if name == "csa":
        return mixer.window + mixer.top_k
    return mixer.top_k if name == "dsa" else mixer.window + (mixer.global_tokens or 0)


def with_budget(model: Any, name: str, k: int) -> Any:
    from jaxllm.training.stages import override

    return override(model, mode(name, model.mixer("global"), k), "needle")


def questions(
    tokenizer: Any, needles: int, filler: int, depth: float, count: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """`count` haystacks, one needle of each at `depth` and asked for: tokens `[n t]`, answers `[n]`, and the place of its value."""
    from jaxllm.data.synthetic import KEYS, VALUES, haystack

    rng, rows, answers = np.random.default_rng([filler, round(1000 * depth)]), [], []
    at = round(depth * filler)
    for _ in range(count):
        keys = [KEYS[i] for i in rng.permutation(len(KEYS))[:needles]]
        values = [VALUES[i] for i in rng.integers(len(VALUES), size=needles)]
        gaps = np.sort(rng.integers(filler + 1, size=needles - 1))
        asked = int(np.searchsorted(gaps, at)) if depth < 0.5 else int(np.searchsorted(gaps, at, side="right"))
        pairs = [k + v for k, v in zip(keys, values, strict=True)]
        text = haystack(rng, pairs, np.insert(gaps, asked, at), filler) + "?" + keys[asked]
        rows.append(tokenizer.prompt(text))
        answers.append(tokenizer.encode(values[asked])[-1])
    begin = len(rows[-1]) - len(text)
    return np.array(rows, np.int32), np.array(answers), begin + at + 2 * asked + 1


def reader(model: Any) -> Ask:
    """`(params, tokens [n t]) -> log-probabilities of the next token [n v]`, compiled once a shape."""
    import jax

    from jaxllm.layers.base import Context

    @jax.jit
    def read(params: Any, tokens: Any) -> Any:
        return jax.nn.log_softmax(model.apply({"params": params}, Context.whole(tokens))[1].logits[:, -1])

    return lambda params, tokens: np.asarray(read(params, tokens))


def ask(read: Ask, source: Any, facts: Mapping[str, int], depth: float, count: int) -> Answers:
    tokens, answers, _ = questions(source.tokenizer, facts["needles"], facts["filler"], depth, count)
    logs = read(source.params, tokens)
    return Answers(-logs[np.arange(count), answers], logs.argmax(-1) == answers)


def measure(folder: Path, count: int, budgets: Sequence[int], depths: Sequence[float]) -> dict[str, Any]:
    """Of one run: accuracy by depth as trained; loss and accuracy for each k; accuracy for each part of the haystack and k."""
    from jaxllm.tasks.source import open_source

    source = open_source(folder)
    data = source.config["data"]
    facts = {"needles": int(data["length"]), "filler": int(data["filler"])}
    name = variant(source.config["model"])
    own = reader(source.model)
    found = [ask(own, source, facts, depth, count) for depth in depths]
    out: dict[str, Any] = {"name": name, "k": budget(name, source.model.mixer("global"))}
    out["depth"] = [float(answers.right.mean()) for answers in found]
    out["mean"] = [float(np.mean([answers.nats.mean() for answers in found])), statistics.mean(out["depth"])]
    out["budget"], out["parts"] = {}, {}
    for k in budgets if name != "full" else ():
        read = reader(with_budget(source.model, name, k))
        for part in PARTS:
            short = facts | {"filler": round(part * facts["filler"])}
            answers = [ask(read, source, short, depth, count) for depth in depths]
            right = float(np.mean([a.right.mean() for a in answers]))
            out["parts"][part, k] = right
            if part == 1:
                out["budget"][k] = (float(np.mean([a.nats.mean() for a in answers])), right)
    return out


def times(folders: Mapping[str, Path], budgets: Sequence[int], context: int) -> dict[tuple[str, int], dict[str, float]]:
    """{(variant, k): median ms of reading `context` tokens at once, and of one token more}, all in turn; k = 0: all keys."""
    import jax

    from jaxllm.tasks.source import open_source

    programs: dict[tuple[str, int], dict[str, Callable[[], None]]] = {}
    for name, folder in folders.items():
        source = open_source(folder)
        for k in budgets if name != "full" else (0,):
            programs[name, k] = _programs(with_budget(source.model, name, k), source.params, context)
    taken: dict[tuple[str, int], dict[str, list[float]]] = {key: defaultdict(list) for key in programs}
    for _ in range(ROUNDS):
        for key, calls in programs.items():
            for kind, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                taken[key][kind].append(1e3 * (time.perf_counter() - start))
    return {key: {kind: statistics.median(v) for kind, v in kinds.items()} for key, kinds in taken.items()}


def _programs(model: Any, params: Any, context: int) -> dict[str, Callable[[], Any]]:
    """Calls on random tokens: `read`, a whole sequence, and `decode`, the token behind it; both have run once."""
    import jax
    import jax.numpy as jnp

    from jaxllm.layers.base import Context
    from jaxllm.params import unstack

    decoder = model.unrolled()
    flat = decoder.prepare(unstack(model, jax.tree.map(jnp.copy, params)))
    tokens = np.random.default_rng(0).integers(0, 100, (1, context + 1)).astype(np.int32)
    step = jax.jit(lambda p, c, ctx: decoder.apply({"params": p}, ctx, c), donate_argnums=1)
    whole = jax.jit(lambda p, ctx: model.apply({"params": p}, ctx)[1].logits[:, -1])
    first = decoder.init_cache(1, context + 8)
    held = {"cache": step(flat, first, Context.step(tokens[:, :-1], np.zeros(1)))[0]}

    def decode() -> Any:  # each time the token behind the same context: it writes over the last one
        held["cache"], out = step(flat, held["cache"], Context.step(tokens[:, -1:], np.full(1, context)))
        return out.logits

    def read() -> Any:
        return whole(params, Context.whole(tokens[:, :-1]))

    jax.block_until_ready((decode(), read()))
    return {"read": read, "decode": decode}


def selected(model: Any, params: Any, tokens: np.ndarray) -> list[np.ndarray]:
    """bool `[t t]` of each layer behind the first: which tokens a query (row) of `tokens [1 t]` met, an entry of CSA as all its tokens."""
    import jax

    from jaxllm.layers.base import Context
    from jaxllm.measure.masks import pattern
    from jaxllm.ops.mask import Mask

    t, mixer = tokens.shape[1], model.mixer("global")
    roles = [role for group in model.groups for role, _ in group.period for _ in range(group.repeats)]
    if not hasattr(mixer, "top_k"):
        return [pattern(mixer.mask, t)] * roles.count("global")
    ctx = Context.whole(tokens, capture=("selected",))
    capture = jax.jit(lambda p: model.apply({"params": p}, ctx)[1].capture)(params)
    m, span = getattr(mixer, "compress_rate", 1), 1
    near = np.zeros((t, t), bool)
    if m > 1:
        span, near = (2 * m if mixer.overlap else m), pattern(Mask(window=mixer.window), t)
    layers = []
    for index in np.concatenate([np.asarray(capture[key]) for key in sorted(capture) if key.endswith("/selected")]):
        last = index[0].astype(np.int64)[..., None] * m + m - 1
        places = np.where(index[0][..., None] < t // m, last - np.arange(span), -1)
        seen = near.copy()
        rows = np.broadcast_to(np.arange(t)[:, None, None], places.shape)
        seen[rows[places >= 0], places[places >= 0]] = True
        layers.append(seen)
    return layers


def draw_selected(folders: Mapping[str, Path], path: Path) -> None:
    """A row a variant, a column a layer behind the first: the keys of every query; crosses: the needle, and the question's last token."""
    from matplotlib.figure import Figure

    from jaxllm.tasks.source import open_source

    grids = {}
    for name, folder in folders.items():
        source = open_source(folder)
        data = source.config["data"]
        tokens, _, place = questions(source.tokenizer, int(data["length"]), int(data["filler"]), 0.25, 1)
        grids[name] = (selected(source.model, source.params, tokens), place)
    wide = max(len(layers) for layers, _ in grids.values())
    figure = Figure(figsize=(3 * wide, 3 * len(grids)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(grids), wide, squeeze=False)
    for row, (name, (layers, place)) in zip(axes, grids.items(), strict=True):
        for i, (cell, seen) in enumerate(zip(row, layers, strict=False)):
            cell.imshow(seen, cmap="Greys", vmin=0, vmax=1, interpolation="nearest")
            cell.plot([place], [len(seen) - 1], "x", color="#D55E00", markersize=8, clip_on=False)
            cell.set_title(f"{NAMES[name]}, layer {i + 1}", fontsize=9)
        for cell in row[len(layers) :]:
            cell.axis("off")
    figure.savefig(path, dpi=120)


def draw(runs: Mapping[str, list[dict[str, Any]]], depths: Sequence[float], out: Path) -> None:
    from jaxllm.measure import plots

    colours = dict(zip(NAMES, (plots.INK, plots.GREY, plots.GREEN, plots.BLUE, plots.ORANGE), strict=True))
    figure, axes = plots.canvas(
        "Where is a needle found?", "as trained", "depth: 0 = at the start, 1 = at the question", "share found"
    )
    for name, group in runs.items():
        values = np.array([run["depth"] for run in group])
        axes.plot(depths, values.mean(axis=0), color=colours[name], linewidth=2, label=NAMES[name])
        axes.fill_between(depths, values.min(axis=0), values.max(axis=0), color=colours[name], alpha=0.15, linewidth=0)
    axes.set_ylim(-0.03, 1.03)
    plots.legend(axes, "lower right")
    figure.savefig(out / "depth.png", dpi=150)

    figure, axes = plots.canvas(
        "What does a budget buy?", "k set anew on trained models", "keys of a query", "share found"
    )
    for name, group in runs.items():
        if name == "full":
            axes.axhline(
                statistics.mean(r["mean"][1] for r in group), color=colours[name], linestyle="--", label=NAMES[name]
            )
            continue
        budgets = list(group[0]["budget"])
        values = np.array([[run["budget"][k][1] for k in budgets] for run in group])
        axes.plot(budgets, values.mean(axis=0), color=colours[name], linewidth=2, marker="o", label=NAMES[name])
        axes.fill_between(budgets, values.min(axis=0), values.max(axis=0), color=colours[name], alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.03, 1.03)
    plots.legend(axes, "lower right")
    figure.savefig(out / "budget.png", dpi=150)


def spread(values: Sequence[float], digits: int) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def table(runs: Mapping[str, list[dict[str, Any]]], took: Mapping[tuple[str, int], Mapping[str, float]]) -> str:
    """Markdown, a line a variant and k: nats and share of the answers, mean and deviation over seeds; ms of reading and of a token."""
    heads = ("attention", "k", "seeds", "loss of the answer", "found", "reading, ms", "a token, ms")
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, group in runs.items():
        rows = {0: [run["mean"] for run in group]} if name == "full" else {}
        rows |= {k: [run["budget"][k] for run in group] for k in group[0]["budget"]}
        for k, values in rows.items():
            mark = "all" if k == 0 else f"{k}, as trained" if k == group[0]["k"] else str(k)
            cells = (NAMES[name], mark, str(len(group)), *(spread([v[i] for v in values], 3) for i in (0, 1)))
            ms = took[name, k]
            lines.append("| " + " | ".join((*cells, f"{ms['read']:.2f}", f"{ms['decode']:.2f}")) + " |")
    return "\n".join(lines) + "\n"


def modes(runs: Mapping[str, list[dict[str, Any]]], filler: int) -> str:
    """Markdown, a line a variant that chooses and length of the haystack: the share found for each k, and the least k that is enough.

    Enough: within 0.02 of the largest k, where that finds at least nine in ten. What a service would choose by the length of the context.
    """
    chosen = {name: group for name, group in runs.items() if name in ("dsa", "csa")}
    lines: list[str] = []
    for name, group in chosen.items():
        budgets = list(group[0]["budget"])
        if not lines:
            heads = ["attention", "symbols of haystack", *(f"k = {k}" for k in budgets), "enough"]
            lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for part in PARTS:
            means = [statistics.mean(run["parts"][part, k] for run in group) for k in budgets]
            least = next(k for k, mean in zip(budgets, means, strict=True) if mean >= means[-1] - 0.02)
            enough = str(least) if means[-1] >= 0.9 else "none"
            cells = [NAMES[name], str(round(part * filler)), *(f"{mean:.3f}" for mean in means), enough]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(folders: Iterable[Path], out: Path, count: int, budgets: Sequence[int], depths: Sequence[float]) -> str:
    """Measure all runs, write the five files, return the table."""
    from jaxllm.tasks.source import open_source

    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    first: dict[str, Path] = {}
    for folder in folders:
        run = measure(folder, count, budgets, depths)
        runs[run["name"]].append(run)
        first.setdefault(run["name"], folder)
        print(f"{folder.name}: {NAMES[run['name']]}, {run['mean'][1]:.3f} found", flush=True)
    runs = {name: runs[name] for name in NAMES if name in runs}
    first = {name: first[name] for name in runs}
    config = open_source(next(iter(first.values()))).config
    took = times(first, budgets, config.section("train").seq_len)
    out.mkdir(parents=True, exist_ok=True)
    text = table(runs, took)
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "modes.md").write_text(modes(runs, int(config["data"]["filler"])), encoding="utf-8")
    draw(runs, depths, out)
    draw_selected(first, out / "selected.png")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="the folder of both sweeps: run folders lie in it or one level deeper")
    parser.add_argument("out", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--count", type=int, default=64, help="questions at each depth")
    args = parser.parse_args(arguments)
    from jaxllm.backend import prepare
    from jaxllm.compose import compose

    prepare(compose(["+experiment=needle"]).common)
    found = sorted(p.parent for depth in ("*", "*/*") for p in args.sweep.glob(f"{depth}/result.json"))
    folders = [folder for folder in found if json.loads((folder / "result.json").read_text()).get("loss") is not None]
    if not folders:
        raise SystemExit(f"error: {args.sweep}: no finished run in it")
    print(report(folders, args.out, args.count, BUDGETS, DEPTHS))


if __name__ == "__main__":
    main()
