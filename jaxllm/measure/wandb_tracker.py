"""Weights & Biases behind the `Tracker` interface. The only file that imports wandb, and only when a run opens.

Steps. W&B's own counter refuses a smaller step, and what is refused is lost; a resumed run would lose every step it
logs again. So that counter is never used: each row carries its step as an ordinary field, declared as the axis of all
other fields with `define_metric`, and W&B appends the row whatever came before. One row is sent a step. Names are those of
`jaxllm.measure.panels`; what a sweep is sorted by also keeps its best value in the summary.
"""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxllm.errors import UserError
from jaxllm.measure.jsonl import as_histogram, plain
from jaxllm.measure.panels import SUMMARIES, panel

DEFAULT_SERVER = "https://api.wandb.ai"
MODES = {
    "online": "online", "run": "online", "shared": "online",
    "offline": "offline", "dryrun": "offline", "disabled": "disabled",
}  # fmt: skip


def choose_mode(wanted: str | None = None, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """("online" | "offline" | "disabled", why). WANDB_MODE wins, then `wanted`, then whether a key is configured."""
    if importlib.util.find_spec("wandb") is None:
        return "disabled", "the package wandb is not installed"
    if forced := environ.get("WANDB_MODE"):
        if forced.lower() not in MODES:
            raise UserError(f"WANDB_MODE={forced}: use online, offline or disabled")
        return MODES[forced.lower()], f"WANDB_MODE={forced}"
    if wanted:
        return wanted, f"track.mode={wanted}"
    where = key_source(environ)
    return ("online", f"key from {where}") if where else ("offline", "no key is configured")


def key_source(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where a W&B key is configured ("WANDB_API_KEY" or the netrc file), or None. The key itself is not kept."""
    if environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    host = urlsplit(environ.get("WANDB_BASE_URL") or DEFAULT_SERVER).hostname or ""
    home = Path(environ.get("HOME") or Path.home())
    candidates = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            if netrc.netrc(path.expanduser()).hosts.get(host):
                return str(path)
        except (OSError, netrc.NetrcParseError):
            continue
    return None


def describe_wandb(mode: str, reason: str, run_dir: str | Path, project: str, identity: str) -> str:
    """What happens with the run's data, said before anything could leave the machine."""
    what = (
        "the resolved config, metrics, git commit and package versions, device names, sampled text and pictures of a report, "
        "and this machine's host name and load"
    )
    if mode == "online":
        return (
            f"W&B is online ({reason}): project {project}, run {identity}. It uploads {what}. "
            "Neither code nor checkpoints nor data; WANDB_MODE=offline or track=none keeps everything here"
        )
    folder = Path(run_dir) / "wandb"
    return (
        f"W&B is offline ({reason}): project {project}, run {identity}, in {folder}. Nothing leaves this machine. Look "
        f"at it with `wandb leet {folder / 'latest-run'}`; `wandb sync {folder / 'offline-run-*'}` would upload {what}"
    )


def is_id(identity: str) -> bool:
    """Whether this can be a run id. They come out of checkpoints too, and W&B makes a folder name of them."""
    return re.fullmatch(r"[\w-]{1,64}", identity) is not None


def new_id() -> str:
    """A fresh run id: 8 letters and digits."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


class WandbTracker:
    """One W&B run. Blocks while connecting and finishing, so it is used behind `trackers.Background`.

    identity: the run's id, new or of the run to continue (`resume`). If the server cannot be reached while starting,
    the run is kept offline instead. module: stands in for the wandb package in tests.
    """

    histograms = True

    def __init__(
        self,
        run_dir: str | Path,
        config: Mapping[str, Any],
        identity: str,
        mode: str,
        log: Callable[[str], None],
        project: str = "jaxllm",
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        resume: bool = False,
        module: Any = None,
    ):
        if module is None:
            import wandb

            module = wandb
        self._wandb = module
        self.id: str | None = identity
        self._axes: set[str] = set()
        self._row: dict[str, Any] = {}
        self._at: tuple[str, int] | None = None
        arguments: dict[str, Any] = {
            "project": project, "name": name, "group": group, "tags": list(tags) or None, "config": dict(config),
            "dir": str(run_dir), "id": self.id, "resume": "allow" if resume else None, "settings": self._settings(),
        }  # fmt: skip
        try:
            self._run = module.init(mode=mode, **arguments)
        except Exception as error:
            if mode != "online":
                raise
            log(f"tracking: W&B cannot be used ({type(error).__name__}), the run is kept offline in {run_dir}/wandb")
            with contextlib.suppress(Exception):
                module.teardown()  # its service still holds the run's id
            mode, self._run = "offline", module.init(mode="offline", **arguments)
        if mode == "online":
            log(f"W&B run: {self._run.url}")
        self._declare("step", "*")
        for field, kept in SUMMARIES.items():
            self._run.define_metric(field, step_metric="step", summary=kept)

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None:
        """Add to the row of `step`; it is sent when another step begins. Text ("n/a") goes to the summary."""
        self._turn_to(axis, step)
        for key, value in metrics.items():
            value, name = plain(value), panel(key)
            if isinstance(value, str):
                self._run.summary[name] = value
            else:
                self._row[name] = value

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._turn_to("step", step)
        # W&B takes one type a column: a number that is not to be had ("n/a") is an empty cell there.
        cells = [[None if cell == "n/a" else cell for cell in row] for row in rows]
        self._row[panel(name)] = self._wandb.Table(columns=list(columns), data=cells)

    def histogram(self, step: int, name: str, values: Any) -> None:
        self._turn_to("step", step)
        counts, edges = as_histogram(values)
        self._row[panel(name)] = self._wandb.Histogram(np_histogram=(counts, edges))

    def image(self, step: int, name: str, path: str | Path) -> None:
        self._turn_to("step", step)
        self._row[panel(name)] = self._wandb.Image(str(path))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._send()
        self._run.summary.update({key: plain(value) for key, value in values.items()})

    def describe(self) -> str:
        return f"W&B run {self.id}"

    def close(self, timeout: float = 0.0) -> None:
        self._send()
        self._run.finish()

    def _turn_to(self, axis: str, step: int) -> None:
        axis = panel(axis) if "/" in axis else axis
        if self._at != (axis, step):
            self._send()
            self._at = (axis, step)
            if axis not in self._axes:
                self._declare(axis, axis.rpartition("/")[0] + "/*")

    def _send(self) -> None:
        if self._at is not None and self._row:
            axis, step = self._at
            row, self._row = {axis: step, **self._row}, {}
            self._run.log(row)

    def _declare(self, axis: str, fields: str) -> None:
        self._axes.add(axis)
        self._run.define_metric(axis)
        self._run.define_metric(fields, step_metric=axis)

    def _settings(self) -> Any:
        """Quiet, quick to give up, and sending no more than `describe_wandb` says: no code, git diff or arguments."""
        wanted = {
            "console": "off", "silent": True, "init_timeout": 30.0, "login_timeout": 10.0, "finish_timeout": 45.0,
            "disable_git": True, "disable_code": True, "save_code": False, "x_save_requirements": False,
            "x_disable_meta": True,
        }  # fmt: skip
        known = getattr(self._wandb.Settings, "model_fields", wanted)
        return self._wandb.Settings(**{key: value for key, value in wanted.items() if key in known})
