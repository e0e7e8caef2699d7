"""What a report knows of a run, and what follows from many: which keys differ, which runs are not beaten, what seeds spread."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Curve = tuple[list[float], list[float]]
OWN = (
    "name",
    "run_dir",
    "resume",
    "log_level",
    "compile_cache",
    "track",
    "platform",
    "cpu_devices",
)  # no property of what is compared


@dataclasses.dataclass(frozen=True)
class Run:
    """label: short, unlike the others'. config: the leaves of its configuration. result: the numbers it ended with. curves: by key,
    (x, y). state: done, interrupted, failed or running. files: what a reader may want to open."""

    label: str
    folder: Path
    task: str
    state: str
    config: Mapping[str, Any]
    result: Mapping[str, float]
    curves: Mapping[str, Curve]
    files: Sequence[Path] = ()

    def number(self, key: str) -> float:
        return float(self.result.get(key, math.nan))


def labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; a sweep's bare numbers keep the sweep's name before them."""
    for count in range(1, max((len(f.parts) for f in folders), default=1) + 1):
        names = ["/".join(f.parts[-count - (count == 1 and f.name.isdecimal()) :]) for f in folders]
        if len(set(names)) == len(names):
            return names
    return [str(f) for f in folders]


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys of the configuration on which the runs do not agree, in the order of the first that has them."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    keys = [key for key in keys if key.split(".")[0] not in OWN]
    return [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]


def seeds(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but their seed, together; groups of at least two."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {k: v for k, v in run.config.items() if k != "seed" and k.split(".")[0] not in OWN}
        groups.setdefault(repr(sorted(same.items(), key=lambda item: item[0])), []).append(run)
    return [group for group in groups.values() if len({run.config.get("seed") for run in group}) > 1]


def pareto(runs: Sequence[Run], lower: Sequence[str], higher: Sequence[str] = ()) -> set[str]:
    """Labels of the runs that no other beats: nowhere worse, somewhere better. Runs without all of the numbers take no part."""
    signed = {
        run.label: [run.number(k) for k in lower] + [-run.number(k) for k in higher]
        for run in runs
        if all(math.isfinite(run.number(k)) for k in (*lower, *higher))
    }

    def beats(a: list[float], b: list[float]) -> bool:
        return all(x <= y for x, y in zip(a, b, strict=True)) and a != b

    return {label for label, mine in signed.items() if not any(beats(other, mine) for other in signed.values())}
