"""`task=report runs='runs/*'`: one HTML page, without network or script, that compares runs and sweeps.

A run folder may come from anybody: its files are read as data, and what they say is escaped.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxllm.config import Config, leaves, read_tree
from jaxllm.errors import UserError
from jaxllm.folder import CONFIG, RESULT, write_text
from jaxllm.measure.jsonl import METRICS, read_metrics
from jaxllm.measure.plots import series, smoothed
from jaxllm.report import compare
from jaxllm.report.runs import Curve, Run, labels
from jaxllm.report.settings import ReportSettings
from jaxllm.targets import SAVED_TARGETS
from jaxllm.tasks import TaskIO

DEPTH = 3  # folders between the one that was named and a run
CACHE_TOKENS = 4096  # of a row, where runs are compared by their caches
FILES = (CONFIG, METRICS, RESULT, "samples.jsonl", "plots/loss.png", "plots/throughput.png")
SMOOTHED = ("train/loss", "train/tokens_per_s", "train/grad_norm")
Numbers = dict[str, float]


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """Writes the page; returns where it is (`html`), its `bytes`, and how many `runs` it compares."""
    settings: ReportSettings = cfg.section("report")
    if settings.runs is None:
        raise UserError("runs: missing; give runs='runs/*', a folder of runs, or several apart by commas")
    name = settings.out or str((io.run_dir or Path()) / "report.html")
    out = cfg.path(name)
    if out.is_dir():
        raise UserError(f"out={name}: is a folder; give the name of the page to write")
    folders = find(settings.runs, cfg.path)
    cost = Costs()
    runs = []
    for folder, label in zip(folders, labels(folders), strict=True):
        io.progress(f"reading {label}")
        try:
            runs.append(read_run(folder, label, cost))
        except UserError as error:
            io.log(f"report: {folder} is left out: {error}", "warning")
    if not runs:
        raise UserError(f"runs={settings.runs}: none of the {len(folders)} folders can be read")
    out.parent.mkdir(parents=True, exist_ok=True)
    text = compare.report(runs, out)
    write_text(out, text)
    io.log(f"{len(runs)} runs in {out}")
    return {"html": str(out), "runs": len(runs), "bytes": len(text.encode("utf-8"))}


def find(patterns: str, place: Callable[[str], Path]) -> list[Path]:
    """The run folders of the patterns, each once, in natural order; `place` says where a relative one lies."""
    found: dict[Path, None] = {}
    for pattern in filter(None, (part.strip() for part in patterns.split(","))):
        matches = sorted(glob.glob(str(place(pattern))), key=_natural)
        runs = [folder for match in matches for folder in _runs(Path(match), DEPTH)]
        if not runs:
            what = "no run folder among what it names" if matches else "nothing there"
            raise UserError(f"runs={pattern}: {what}; give run folders (they hold a {CONFIG}) or a folder of them")
        found |= dict.fromkeys(runs)
    if not found:
        raise UserError(f"runs={patterns}: names nothing; give runs='runs/*'")
    return list(found)


def _runs(path: Path, depth: int) -> Iterator[Path]:
    if not path.is_dir():
        return
    if (path / CONFIG).is_file():
        yield path
    elif depth:
        for child in sorted(path.iterdir(), key=lambda p: _natural(str(p))):
            yield from _runs(child, depth - 1)


def _natural(text: str) -> list[tuple[int, int, str]]:
    """`10` after `9`, as in a sweep's folders."""
    parts = Path(text).parts
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


# --- one run ----------------------------------------------------------------------------------------------------------


def read_run(folder: Path, label: str, costs: Costs) -> Run:
    """What the folder says. Missing files are missing numbers; a configuration that cannot be read is a UserError."""
    try:
        text = (folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{CONFIG}: cannot be read: {error}") from error
    tree = read_tree(text)
    ended, summary = _json(folder / RESULT), _json(folder / "summary.json")
    task = str(ended.get("task") or tree.get("task") or "train")
    curves = read_curves(folder) if task == "train" else {}
    numbers = {key.removeprefix("result/"): value for key, value in _numbers(summary).items()} | _numbers(ended)
    if task == "train":
        for key, name in (("val_loss", "val/loss"), ("val_bpb", "val/bpb"), ("loss", "train/loss")):
            if key not in numbers and name in curves:  # of a run that has not ended
                numbers[key] = curves[name][1][-1]
        numbers |= {key: value for key, value in costs(tree).items() if key not in numbers}
        if "cache_bytes_per_token" in numbers:
            per_token, constant = numbers["cache_bytes_per_token"], numbers.get("cache_bytes_constant", 0.0)
            numbers["cache_bytes"] = CACHE_TOKENS * per_token + constant
    files = [folder / name for name in FILES if (folder / name).is_file()]
    return Run(label, folder, task, _state(ended), dict(leaves(tree)), numbers, curves, files)


def read_curves(folder: Path) -> dict[str, Curve]:
    rows = read_metrics(folder)
    out: dict[str, Curve] = {}
    for key in (*compare.CURVES, compare.STAGE):
        steps, values = series(rows, key)
        if key in SMOOTHED:
            steps, values = smoothed(steps, values, most=200)
        if len(steps):
            out[key] = (steps.tolist(), values.tolist())
    return out


class Costs:
    """Cache bytes and parameters of a configuration's model, each model counted once."""

    def __init__(self) -> None:
        self._known: dict[str, Numbers] = {}

    def __call__(self, tree: dict[str, Any]) -> Numbers:
        key = json.dumps(tree.get("model"), sort_keys=True, default=str)
        if key not in self._known:
            try:
                config = Config(tree, allow=SAVED_TARGETS)
                size = {} if config.get("model.vocab_size") else {"vocab_size": 256}  # caches do not depend on it
                cost = config.build("model", **size).cost(1, 1, CACHE_TOKENS)
                self._known[key] = {
                    "cache_bytes_per_token": cost.cache_per_token,
                    "cache_bytes_constant": cost.cache_constant,
                }
            except UserError:  # of another version, or of targets that may not be built from a saved file
                self._known[key] = {}
        return self._known[key]


def _state(ended: dict[str, Any]) -> str:
    if not ended:
        return "unfinished"
    return "failed" if "error" in ended else "interrupted" if ended.get("interrupted") else "done"


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _numbers(values: dict[str, Any]) -> Numbers:
    def kept() -> Iterable[tuple[str, float]]:
        for key, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                yield key, float(value)

    return {key: value for key, value in kept() if key != "exit_code"}
