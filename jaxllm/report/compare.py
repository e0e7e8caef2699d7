"""The page that compares runs: a table, curves, pareto pictures, sweeps, seeds, what differs in the configurations, files."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxllm.measure.plots import stage_starts
from jaxllm.report import charts, page
from jaxllm.report.charts import GREY, Line, Point, short
from jaxllm.report.runs import Run, differing, pareto, seeds

SHOWN = 7  # runs that get a colour of their own
COLUMNS = (
    "val_loss",
    "val_bpb",
    "loss",
    "steps",
    "tokens",
    "tokens_per_s",
    "params_total",
    "cache_bytes_per_token",
    "cache_bytes_constant",
    "seconds",
)
WORDS = {
    "val_loss": "validation loss (nats per token)",
    "val_bpb": "validation, bits per byte",
    "tokens_per_s": "training tokens per second",
    "cache_bytes": "cache bytes of a row of 4,096 tokens",
    "train/loss": "training loss (nats per token)",
    "val/loss": "validation loss (nats per token)",
    "val/bpb": "validation, bits per byte",
    "train/tokens_per_s": "tokens per second",
    "train/grad_norm": "gradient norm",
    "train/lr": "learning rate",
}
CURVES = ("train/loss", "val/loss", "val/bpb", "train/tokens_per_s", "train/grad_norm", "train/lr")
LOG = ("train/grad_norm",)
STAGE = "train/stage"  # no curve of its own: where it changes, others are marked


def report(runs: Sequence[Run], out: Path, title: str = "Runs compared") -> str:
    """HTML of the page that will lie at `out` (its links to run folders are relative to that)."""
    trained = [run for run in runs if run.task == "train"]
    trained.sort(key=lambda run: _key(run.number(goal(trained))))
    others = [run for run in runs if run.task != "train"]
    parts: dict[str, str] = {}
    if trained:
        ranks = {run.label: i if i < SHOWN else GREY for i, run in enumerate(trained)}
        parts["In numbers"] = overview(trained, out)
        parts["Curves"] = page.grid(curves(trained, ranks))
        if fronts := paretos(trained, ranks):
            parts["What is paid for what"] = page.grid(fronts)
        if swept := sweeps(trained):
            parts["By what was varied"] = page.grid(swept)
        if spread := seed_table(trained):
            parts["Over seeds"] = spread
    for task in dict.fromkeys(run.task for run in others):
        parts[f"Task {task}"] = results([run for run in others if run.task == task], out)
    parts["What differs in the configurations"] = configurations([*trained, *others])
    intro = page.paragraph(f"{len(runs)} runs. {_sentence(trained)}")
    return page.page(title, parts, intro=intro)


def goal(runs: Sequence[Run]) -> str:
    """What runs are ranked by: bits per byte, which compares tokenizers too, if all have it; else validation loss; else loss."""
    for key in ("val_bpb", "val_loss"):
        if runs and all(math.isfinite(run.number(key)) for run in runs):
            return key
    return "val_loss" if any(math.isfinite(run.number("val_loss")) for run in runs) else "loss"


def _key(value: float) -> tuple[bool, float]:
    return (not math.isfinite(value), value if math.isfinite(value) else 0.0)


def _sentence(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    key, best = goal(runs), runs[0]
    words = WORDS.get(key, "training loss")
    end = f" The best of {len(runs)} by {words} is {best.label} ({short(best.number(key))})." if len(runs) > 1 else ""
    broken = sum(run.state != "done" for run in runs)
    return end.strip() + (f" {broken} have not ended as planned." if broken else "")


# --- parts ------------------------------------------------------------------------------------------------------------


def overview(runs: Sequence[Run], out: Path) -> str:
    varied = [key for key in differing(runs) if not isinstance(_first(runs, key), (list, dict))][:6]
    columns = [key for key in COLUMNS if any(math.isfinite(run.number(key)) for run in runs)]
    rows: list[list[object]] = [["run", *columns, *(".".join(key.split(".")[-2:]) for key in varied), "state", "files"]]
    for run in runs:
        cells = [short(run.number(key)) if math.isfinite(run.number(key)) else "" for key in columns]
        name = page.link(run.label, _href(run.folder, out))
        rows.append([name, *cells, *(_value(run, key) for key in varied), run.state, _files(run, out)])
    return page.table(rows)


def curves(runs: Sequence[Run], ranks: dict[str, int]) -> list[str]:
    out = []
    for key in CURVES:
        shown = [run for run in runs if len(run.curves.get(key, ((), ()))[0])]
        if not shown:
            continue
        series = [Line(run.label, *run.curves[key], colour=ranks[run.label]) for run in shown]
        words, marks = _ends(series), stage_marks(shown)
        bounds = _bulk(series, key)
        picture = charts.lines(
            series, title=key, x="step", y=WORDS[key], log_y=key in LOG, bounds=bounds, words=words, marks=marks
        )
        legend = [(line.colour, line.name) for line in series if line.colour != GREY]
        rest = len(series) - len(legend)
        stages = f" Dotted: {', '.join(name for _, name in marks)}." if marks else ""
        caption = f"{words}.{stages}" + (f" In grey: {rest} other runs." if rest else "")
        rows = [
            ["run", "first", "lowest", "last"],
            *([s.name, *map(short, (s.y[0], min(s.y), s.y[-1]))] for s in series),
        ]
        out.append(page.figure(picture, caption, legend=legend, data=page.table(rows)))
    return out


def stage_marks(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """Where stages begin, if that is the same in all runs that have some: the lines of several plans would say nothing."""
    plans = {tuple(stage_starts(*run.curves[STAGE])) for run in runs if STAGE in run.curves}
    found = [plan for plan in plans if plan]
    return [(float(step), f"stage {stage} from step {step}") for step, stage in found[0]] if len(found) == 1 else []


def paretos(runs: Sequence[Run], ranks: dict[str, int]) -> list[str]:
    """Loss against speed, and against the cache: filled points are those that no run beats in both."""
    key = goal(runs)
    out = []
    for x, better, log in (("tokens_per_s", "more", False), ("cache_bytes", "fewer", True)):
        shown = [run for run in runs if all(math.isfinite(run.number(k)) for k in (key, x))]
        if len(shown) < 2 or len({run.number(x) for run in shown}) < 2:
            continue
        front = pareto(shown, [key], [x]) if better == "more" else pareto(shown, [key, x])
        other = "cache_bytes" if x == "tokens_per_s" else "tokens_per_s"
        sizes = [run.number(other) for run in shown]
        sized = all(math.isfinite(s) for s in sizes) and len(set(sizes)) > 1
        marks = [
            Point(r.label, r.number(x), r.number(key), ranks[r.label], size if sized else 1.0, r.label not in front)
            for r, size in zip(shown, sizes, strict=True)
        ]
        words = WORDS.get(key, "training loss")
        picture = charts.points(marks, title=f"{key} and {x}", x=WORDS[x], y=words, log_x=log, front=True)
        area = f" The larger a point, the more {WORDS[other]}." if sized else ""
        names = ", ".join(run.label for run in shown if run.label in front)
        caption = f"Lower is better, and {better} {WORDS[x]}. Filled: no other run is better in both ({names}).{area}"
        rows = [["run", key, x, other], *([r.label, *(short(r.number(k)) for k in (key, x, other))] for r in shown)]
        legend = [(ranks[r.label], r.label) for r in shown if ranks[r.label] != GREY]
        out.append(page.figure(picture, caption, legend=legend, data=page.table(rows)))
    return out


def sweeps(runs: Sequence[Run]) -> list[str]:
    """The goal over each number that was varied; names (mixers, say) as bars of their best."""
    key = goal(runs)
    done = [run for run in runs if math.isfinite(run.number(key))]
    out = []
    for varied in [k for k in differing(done) if k != "seed" and not k.endswith("_target_")][:8]:
        values = [run.config.get(varied) for run in done]
        if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values):
            numbers = [float(v) for v in values if isinstance(v, (int, float))]
            log = min(numbers) > 0 and max(numbers) / min(numbers) >= 8
            marks = [Point(run.label, v, run.number(key)) for run, v in zip(done, numbers, strict=True)]
            picture = charts.points(
                marks, title=varied, x=varied + (" (log)" if log else ""), y=WORDS.get(key, key), log_x=log
            )
        elif len(names := {_value(run, varied) for run in done}) <= 24:
            best = {name: min(run.number(key) for run in done if _value(run, varied) == name) for name in names}
            picture = charts.bars(
                sorted(best.items(), key=lambda item: item[1]), title=varied, x=f"best {WORDS.get(key, key)}"
            )
        else:
            continue
        top = min(done, key=lambda run: run.number(key))
        caption = (
            f"{WORDS.get(key, key)} by {varied}; the best run has {_value(top, varied)} ({short(top.number(key))})."
        )
        out.append(page.figure(picture, caption))
    return out


def seed_table(runs: Sequence[Run]) -> str:
    groups, key = seeds(runs), goal(runs)
    rows: list[list[object]] = [["runs", "seeds", f"{key}, mean", "lowest", "highest", "standard deviation"]]
    for group in groups:
        values = [run.number(key) for run in group if math.isfinite(run.number(key))]
        if len(values) > 1:
            spread = statistics.stdev(values)
            numbers = (statistics.fmean(values), min(values), max(values), spread)
            rows.append([", ".join(run.label for run in group), len(values), *(f"{v:.4g}" for v in numbers)])
    return page.table(rows) if len(rows) > 1 else ""


def results(runs: Sequence[Run], out: Path) -> str:
    """A task that is no training: whatever numbers it ended with."""
    columns = list(dict.fromkeys(key for run in runs for key in run.result))[:16]
    rows: list[list[object]] = [["run", *columns, "state", "files"]]
    for run in runs:
        cells = [short(run.number(key)) if key in run.result else "" for key in columns]
        rows.append([page.link(run.label, _href(run.folder, out)), *cells, run.state, _files(run, out)])
    return page.table(rows)


def configurations(runs: Sequence[Run]) -> str:
    """One line a key that is not the same everywhere, one column a run."""
    keys = differing(runs)
    if not keys:
        return page.paragraph("Nothing: all of them are the same." if len(runs) > 1 else "There is one run.")
    rows = [["key", *(run.label for run in runs)], *([key, *(_value(run, key) for run in runs)] for key in keys)]
    table = page.table(rows)
    return table if len(keys) <= 12 else page.details(f"{len(keys)} keys", table)


# --- pieces -----------------------------------------------------------------------------------------------------------


def _first(runs: Sequence[Run], key: str) -> Any:
    return next((run.config[key] for run in runs if key in run.config), None)


def _value(run: Run, key: str) -> str:
    if key not in run.config:
        return "–"
    value = run.config[key]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def _ends(series: Sequence[Line]) -> str:
    best = min(series, key=lambda s: s.y[-1])
    if len(series) == 1:
        return f"from {short(series[0].y[0])} to {short(series[0].y[-1])}"
    worst = max(series, key=lambda s: s.y[-1])
    return (
        f"{len(series)} runs, at the end from {short(best.y[-1])} ({best.name}) to {short(worst.y[-1])} ({worst.name})"
    )


def _bulk(series: Sequence[Line], key: str) -> tuple[float, float] | None:
    """Limits that one exploding run cannot stretch: from the lowest value to what 98 % of all values lie below."""
    values = sorted(float(v) for s in series for v in s.y if math.isfinite(v))
    if key in LOG or len(values) < 20:
        return None
    low, high = values[0], values[min(len(values) - 1, int(0.98 * len(values)))]
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - pad, high + pad


def _files(run: Run, out: Path) -> page.Raw:
    return page.Raw(" ".join(page.link(path.stem, _href(path, out)) for path in run.files))


def _href(path: Path, out: Path) -> str:
    return quote(os.path.relpath(path, out.parent).replace(os.sep, "/"))
