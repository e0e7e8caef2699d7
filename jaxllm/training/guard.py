"""What happens after a step whose loss or gradient was not finite. The step itself already moved nothing.

`skip` counts it and goes on. `stop` ends the run at the state before it. `dump` also writes what it takes to look at
the step again: the batch, and the first layer or parameter where something is not finite. `max_skipped` bad steps in a
row end the run whatever the mode: such a run has diverged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import UserError
from jaxllm.measure.debug import first_nonfinite
from jaxllm.model import LanguageModel
from jaxllm.training.settings import NonFinite

MOST_DUMPS = 20


class Guard:
    """One for a run. run_dir: where dumps go, `nonfinite/step_<n>.npz` and `.json`."""

    def __init__(self, mode: NonFinite, max_skipped: int, run_dir: Path | None):
        self.mode, self.max_skipped = mode, max_skipped
        self.folder = None if run_dir is None else run_dir / "nonfinite"
        self.in_a_row = self.dumps = 0

    @property
    def needs_batch(self) -> bool:
        """Must the loop keep each batch, and read a step before the next one starts, so that the state is still the
        same?"""
        return self.mode == "dump"

    def good(self) -> None:
        self.in_a_row = 0

    def bad(
        self,
        step: int,
        metrics: Mapping[str, Any],
        model: LanguageModel,
        params: Mapping[str, Any],
        batch: Mapping[str, np.ndarray] | None,
    ) -> str:
        """A line for the log; raises UserError where the run must end. `params` are those the step started from."""
        self.in_a_row += 1
        what = f"loss {float(metrics['loss']):g}, gradient norm {float(metrics['grad_norm']):g}"
        line = f"step {step}: not finite ({what}); skipped, nothing moved"
        if self.mode == "dump" and batch is not None and self.dumps < MOST_DUMPS:
            line += f"; {self._dump(step, what, model, params, batch)}"
        if self.mode == "stop":
            raise UserError(
                f"step {step}: not finite ({what}) and train.nonfinite=stop; it moved nothing and the state is saved:"
                " lower optim.lr, look with train.nonfinite=dump, or go on with train.nonfinite=skip resume=true"
            )
        if self.in_a_row >= self.max_skipped:
            raise UserError(
                f"step {step}: {self.in_a_row} steps in a row were not finite (train.max_skipped); the state before"
                " them is saved: lower optim.lr, or look with train.nonfinite=dump resume=true"
            )
        return line

    def _dump(self, step: int, what: str, model: LanguageModel, params: Any, batch: Mapping[str, np.ndarray]) -> str:
        self.dumps += 1
        where = first_nonfinite(model, params, batch)
        if self.folder is None:
            return f"first at {where}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:08d}.npz"
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in batch.items()}
        np.savez(path, **arrays, step=np.int64(step))
        note = {"step": step, "message": what, "first_nonfinite": where, "batch": path.name}
        path.with_suffix(".json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        return f"first at {where}; batch in {path}"


def read_dump(path: str | Path) -> tuple[int, dict[str, np.ndarray]]:
    """(step, batch) of a dump, for `first_nonfinite` or a train step. Holds plain arrays only: nothing is unpickled."""
    with np.load(path, allow_pickle=False) as file:
        batch = {name: file[name] for name in file.files}
    return int(batch.pop("step")), batch
