"""trackio behind the `Tracker` interface: a live dashboard on this machine, without an account. Imported only when a run opens.

    pip install "jaxllm[trackio]";   track=trackio;   trackio show --project jaxllm

Runs lie in trackio's folder (TRACKIO_DIR, or its cache in the home folder), so that one dashboard shows them all. What it prints goes to
stderr: stdout is for a task's JSON line.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError
from jaxllm.measure.jsonl import as_histogram, plain
from jaxllm.measure.panels import panel

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID")  # with one of them trackio uploads


def trackio_module(environ: Mapping[str, str] = os.environ) -> Any:
    """The package; a UserError where it is missing, or would send numbers away."""
    if away := next((name for name in ELSEWHERE if environ.get(name)), None):
        raise UserError(
            f"track=trackio: {away} would send the run away from this machine; unset it, or use track=wandb"
        )
    try:
        return importlib.import_module("trackio")
    except ImportError as error:
        raise UserError('track=trackio: trackio is not installed; pip install "jaxllm[trackio]"') from error


class TrackioTracker:
    """One run. identity: its name there, under which a later start goes on. trackio's own thread writes, so a call costs little."""

    histograms = True

    def __init__(
        self, config: Mapping[str, Any], identity: str, project: str, group: str | None = None, module: Any = None
    ):
        self._trackio = trackio_module() if module is None else module
        self.id: str | None = identity
        self._project = project
        self._summary: dict[str, Any] = {}
        self._last = 0
        with contextlib.redirect_stdout(sys.stderr):
            self._run = self._trackio.init(
                project=project, name=identity, group=group, config=dict(config), resume="allow", embed=False,
                auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None:
        """Text ("n/a") is no point of a curve and is left out. Another axis than steps is the step of its own metrics."""
        values = {panel(key): plain(value) for key, value in metrics.items()}
        self._send(step, {key: value for key, value in values.items() if not isinstance(value, str)})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = [[None if cell == "n/a" else cell for cell in row] for row in rows]
        self._send(step, {panel(name): self._trackio.Table(columns=list(columns), data=cells)})

    def histogram(self, step: int, name: str, values: Any) -> None:
        counts, edges = as_histogram(values)
        self._send(step, {panel(name): self._trackio.Histogram(np_histogram=(counts, edges))})

    def image(self, step: int, name: str, path: str | Path) -> None:
        self._send(step, {panel(name): self._trackio.Image(str(path))})

    def summary(self, values: Mapping[str, Any]) -> None:
        """trackio has no summary: the final numbers are one row at the last step."""
        kept = {f"result/{key.removeprefix('result/')}": plain(value) for key, value in values.items()}
        self._send(self._last, {key: value for key, value in kept.items() if isinstance(value, int | float)})

    def describe(self) -> str:
        return (
            f"trackio run {self.id} of project {self._project}, on this machine alone; look at it with"
            f" `trackio show --project {self._project}`"
        )

    def close(self, timeout: float = 0.0) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()  # the run's own would be said again when Python ends, on stdout

    def _send(self, step: int, values: dict[str, Any]) -> None:
        self._last = max(self._last, step)
        if values:
            self._run.log(values, step)
