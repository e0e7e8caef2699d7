"""What the reports of studies share: the finished runs of sweeps, means with their spread, tables, programs timed in turn."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from jaxllm.errors import UserError
from jaxllm.measure.jsonl import read_metrics
from jaxllm.measure.plots import series


@dataclass(frozen=True)
class Finished:
    """A run that came to its end. config: resolved, as nested mappings. result: the fields of its last line. rows: its metrics."""

    folder: Path
    config: Mapping[str, Any]
    result: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, where it was logged and is finite."""
        steps, values = series(self.rows, key)
        return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]

    def at(self, key: str, step: float) -> float:
        """A metric at a step between two of its records, on the straight line between them."""
        points = self.curve(key)
        before = [p for p in points if p[0] <= step]
        after = [p for p in points if p[0] >= step]
        if not before or not after:
            raise UserError(f"{self.folder}: {key} is not known at step {step:g}; train longer or validate more often")
        (x0, y0), (x1, y1) = before[-1], after[0]
        return y0 if x1 == x0 else y0 + (y1 - y0) * (step - x0) / (x1 - x0)


def other(file: str | Path, name: str) -> ModuleType:
    """The report of the study `name`, whose folder lies beside that of `file`."""
    path = Path(file).resolve().parents[1] / name / "report.py"
    spec = importlib.util.spec_from_file_location(f"{name}_report", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def finished(sweeps: Iterable[Path]) -> list[Finished]:
    """The finished runs of some sweeps' folders, in their order. Runs without an end, or that were interrupted, are left out."""
    found, sweeps = [], list(sweeps)
    for sweep in sweeps:
        for path in sorted(sweep.glob("*/result.json"), key=lambda p: (len(p.parent.name), p.parent.name)):
            result = json.loads(path.read_text(encoding="utf-8"))
            if result.get("interrupted"):
                continue
            config = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
            found.append(Finished(path.parent, config, result, read_metrics(path.parent)))
    if not found:
        raise UserError(f"{', '.join(map(str, sweeps))}: no finished run of the study in it")
    return found


def grouped(
    runs: Iterable[Finished], variant: Callable[[Finished], str], order: Iterable[str]
) -> dict[str, list[Finished]]:
    """{variant: its runs}, in the given order, without those that have none."""
    by: dict[str, list[Finished]] = {}
    for run in runs:
        by.setdefault(variant(run), []).append(run)
    return {name: by[name] for name in order if name in by}


def beside(
    runs: Iterable[Finished],
    base: Iterable[Finished],
    value: Callable[[Finished], float],
    reference: Callable[[Finished], float] | None = None,
) -> list[float]:
    """`value` of each run less that of the base's run of the same seed, so that the seed's share cancels. reference: what of the base's."""
    measured = {run.seed: (reference or value)(run) for run in base}
    return [value(run) - measured[run.seed] for run in runs if run.seed in measured]


def spread(values: Sequence[float], digits: int, sign: bool = False) -> str:
    """`3.512 ± 0.013`, mean and standard deviation; a single value stands alone, none is `-`."""
    if not values:
        return "-"
    deviation = f" ± {statistics.stdev(values):,.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{'+' if sign else ''},.{digits}f}{deviation}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int, times: int = 1) -> dict[str, list[float]]:
    """Seconds of one call, `rounds` values each. One after another in every round, so that a busy moment meets all; the first round,
    which warms up, is not kept."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(times):
                call()
            if number:
                taken[name].append((time.perf_counter() - start) / times)
    return taken


def ratios(taken: Mapping[str, Sequence[float]], name: str, base: str) -> list[float]:
    """Of each round, one program's time against another's: what a busy machine leaves comparable."""
    return [a / b for a, b in zip(taken[name], taken[base], strict=True)]
