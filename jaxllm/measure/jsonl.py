"""The tracker that is always on: plain JSON lines in the run folder, readable with any tool.

`metrics.jsonl` holds one object a line, `{"step": 12, "time": 1764.., "train/loss": 3.1, ...}`; several lines may speak
of one step. A run resumed from step k logs the later steps again, so **readers take, for every step and key, the last
value**; `read_metrics` does. What is no JSON number ("n/a", nan, inf) is a string; `float()` reads the latter two.
Every line is flushed: a crash tears at most the line being written, and readers skip it.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

METRICS = "metrics.jsonl"


class Histogram(NamedTuple):
    """counts: int [bins]; edges: float [bins + 1]."""

    counts: list[int]
    edges: list[float]


def as_histogram(values: Any, bins: int = 64) -> Histogram:
    """Histogram of the finite entries of an array; an empty one gives a single empty bin."""
    if isinstance(values, Histogram):
        return values
    flat = np.asarray(values).astype(np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    if flat.size == 0:
        return Histogram([0], [0.0, 1.0])
    counts, edges = np.histogram(flat, bins)
    return Histogram(counts.tolist(), edges.tolist())


def plain(value: Any) -> int | float | str:
    """A Python number (bool becomes int) or string; arrays of one element are read back from the device."""
    if isinstance(value, str):
        return value
    if hasattr(value, "item"):
        value = value.item()
    return int(value) if isinstance(value, (bool, int)) else float(value)


def _json(value: int | float | str) -> int | float | str:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class JsonlTracker:
    """Appends to `metrics.jsonl`, one file a table (`samples.jsonl`), `histograms.jsonl` and `summary.json`."""

    id: str | None = None
    histograms = True

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None:
        """One line of `metrics.jsonl`. `axis` names the counter: "step", or for another clock e.g. "serve/request"."""
        row = {key: _json(plain(value)) for key, value in metrics.items()}
        self._append(METRICS, {axis: int(step), "time": round(time.time(), 3), **row})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """One line a row in `<name>.jsonl`, e.g. samples.jsonl: {"step": .., "prompt": .., "text": ..}."""
        for row in rows:
            cells = {column: _json(plain(cell)) for column, cell in zip(columns, row, strict=True)}
            self._append(f"{_file_name(name)}.jsonl", {"step": int(step), **cells})

    def histogram(self, step: int, name: str, values: Any) -> None:
        counts, edges = as_histogram(values)
        self._append("histograms.jsonl", {"step": int(step), "name": name, "counts": counts, "edges": edges})

    def image(self, step: int, name: str, path: str | Path) -> None:
        """A line of `images.jsonl` that says where the picture lies: a file, which stays where it is."""
        self._append("images.jsonl", {"step": int(step), "name": name, "path": str(path)})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Merge final values into `summary.json`."""
        path = self.run_dir / "summary.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known |= {key: _json(plain(value)) for key, value in values.items()}
        part = path.with_suffix(".tmp")
        part.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)

    def describe(self) -> str:
        return f"metrics are in {self.run_dir / METRICS}"

    def close(self, timeout: float = 0.0) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            path = self.run_dir / name
            torn = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
            file = self._files[name] = path.open("a", encoding="utf-8")
            if torn:  # a killed run left half a line: keep the next one apart from it
                file.write("\n")
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()


def read_metrics(run_dir: str | Path, axis: str = "step") -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl`, one a step, ascending; for every key the last value logged for that step.

    Lines without `axis` and torn lines are skipped; "nan" and "inf" are floats again; no file gives no rows.
    """
    rows: dict[int, dict[str, Any]] = {}
    for line in _lines(Path(run_dir) / METRICS):
        if isinstance(line.get(axis), int):
            rows.setdefault(line[axis], {}).update(line)
    return [rows[step] for step in sorted(rows)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield {key: float(v) if v in ("nan", "inf", "-inf") else v for key, v in line.items()}


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "table"
