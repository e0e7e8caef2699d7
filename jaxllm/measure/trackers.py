"""Trackers: where the numbers of a run go. JSON lines always, Weights & Biases or trackio beside them if wanted.

A tracker never stops or slows training: W&B runs in a daemon thread behind a bounded queue, whatever it raises is
counted and said once, and `close` waits no longer than it is told to. Only process 0 of a multi-process run tracks.
"""

from __future__ import annotations

import dataclasses
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxllm.errors import UserError
from jaxllm.measure.jsonl import JsonlTracker, as_histogram, plain
from jaxllm.measure.trackio_tracker import TrackioTracker
from jaxllm.measure.wandb_tracker import WandbTracker, choose_mode, describe_wandb, is_id, new_id

Log = Callable[[str], None]


class Tracker(Protocol):
    """What the training loop talks to. `step` is always explicit and may go back after a resume: the last counts."""

    id: str | None
    """Names the remote run, so that a resumed run continues it (`resume_id`); None where there is none."""
    histograms: bool
    """Whether the caller should spend time on histograms."""

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None: ...
    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...
    def histogram(self, step: int, name: str, values: Any) -> None: ...
    def image(self, step: int, name: str, path: str | Path) -> None: ...
    def summary(self, values: Mapping[str, Any]) -> None: ...
    def describe(self) -> str: ...
    def close(self, timeout: float = 60.0) -> None: ...


class Tee:
    """Hands every call to several trackers. One that raises is named once and training goes on."""

    def __init__(self, members: Sequence[Tracker], log: Log, histograms: bool = False):
        self.members = list(members)
        self.histograms = histograms
        self._log = log
        self._failed: set[str] = set()

    @property
    def id(self) -> str | None:
        return next((member.id for member in self.members if member.id), None)

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None:
        # Device values are read here, once: a background thread may find their buffers donated.
        self._each("log", lambda: (step, {key: plain(value) for key, value in metrics.items()}, axis))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._each("table", lambda: (step, name, list(columns), [list(row) for row in rows]))

    def histogram(self, step: int, name: str, values: Any) -> None:
        self._each("histogram", lambda: (step, name, as_histogram(values)))

    def image(self, step: int, name: str, path: str | Path) -> None:
        self._each("image", lambda: (step, name, Path(path)))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._each("summary", lambda: ({key: plain(value) for key, value in values.items()},))

    def describe(self) -> str:
        return "; ".join(member.describe() for member in self.members)

    def close(self, timeout: float = 60.0) -> None:
        self._each("close", lambda: (timeout,))

    def _each(self, method: str, prepare: Callable[[], tuple[Any, ...]]) -> None:
        try:
            arguments = prepare()
        except Exception as error:
            return self._say("values", f"values for {method} could not be read", error)
        for member in self.members:
            try:
                getattr(member, method)(*arguments)
            except Exception as error:
                self._say(str(id(member)), f"{type(member).__name__} failed", error)

    def _say(self, source: str, what: str, error: Exception) -> None:
        if source not in self._failed:
            self._failed.add(source)
            self._log(f"tracking: {what}, training goes on: {_short(error)}")


class Background:
    """Runs another tracker in a daemon thread, so that a slow, hanging or raising one costs the caller nothing.

    open: makes the tracker, inside the thread (connecting may hang too). id, description: known without connecting.
    capacity: calls that may wait; one more is dropped, counted, and said once.
    """

    def __init__(
        self, open: Callable[[], Tracker], id: str | None, description: str, log: Log,
        histograms: bool = False, capacity: int = 4096,
    ):  # fmt: skip
        self.id, self.histograms = id, histograms
        self.dropped = self.failed = 0
        self._description, self._log = description, log
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, args=(open,), name="tracker", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, Any], axis: str = "step") -> None:
        self._put("log", step, dict(metrics), axis)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._put("table", step, name, columns, rows)

    def histogram(self, step: int, name: str, values: Any) -> None:
        self._put("histogram", step, name, as_histogram(values))

    def image(self, step: int, name: str, path: str | Path) -> None:
        self._put("image", step, name, Path(path))

    def summary(self, values: Mapping[str, Any]) -> None:
        self._put("summary", dict(values))

    def describe(self) -> str:
        return self._description

    def close(self, timeout: float = 60.0) -> None:
        """Let the thread finish what waits, for at most `timeout` seconds, then leave it behind."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
                self._thread.join(timeout)
            except queue.Full:
                pass
        if self._thread.is_alive():
            self._log(f"tracking: not finished after {timeout:g} s and left behind; everything is in the run folder")
        lost = self.dropped + self.failed
        if lost:
            self._log(f"tracking: {lost} calls did not reach the tracker; everything is in the run folder")

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._queue.put_nowait((method, arguments))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._log("tracking: the tracker does not keep up, calls are dropped; everything is in the run folder")

    def _work(self, open: Callable[[], Tracker]) -> None:
        tracker: Tracker | None = None
        try:
            tracker = open()
        except Exception as error:
            self._log(f"tracking: could not start, training goes on without it: {_short(error)}")
        while (item := self._queue.get()) is not None:
            if tracker is not None:
                self._call(getattr(tracker, item[0]), *item[1])
        if tracker is not None:
            self._call(tracker.close)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            method(*arguments)
        except Exception as error:
            self.failed += 1
            if self.failed == 1:
                self._log(f"tracking: a call failed, training goes on: {_short(error)}")


# --- settings: the `track` group of the configuration -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NoTracker:
    """`track=none`: JSON lines in the run folder and nothing else. histograms: also log parameter histograms."""

    histograms: bool = False

    def open(
        self, run_dir: str | Path, config: Mapping[str, Any] | None = None, resume_id: str | None = None,
        log: Log | None = None,
    ) -> Tee:  # fmt: skip
        members = _local(run_dir)
        for member in members:
            (log or _stderr)(f"tracking: {member.describe()}")
        return Tee(members, log or _stderr, self.histograms)


@dataclasses.dataclass(frozen=True)
class Wandb:
    """`track=wandb`: Weights & Biases, with JSON lines beside it.

    mode: online, offline or disabled; None picks online if a key is configured and offline otherwise. The environment
    variable WANDB_MODE wins over it. histograms: also log parameter histograms.
    """

    project: str = "jaxllm"
    name: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    mode: str | None = None
    histograms: bool = False

    def __post_init__(self) -> None:
        if self.mode not in (None, "online", "offline", "disabled"):
            raise UserError(f"track.mode={self.mode!r}: use online, offline, disabled or null (pick by key)")

    def open(
        self, run_dir: str | Path, config: Mapping[str, Any] | None = None, resume_id: str | None = None,
        log: Log | None = None,
    ) -> Tee:  # fmt: skip
        """The tracker of one run. config: what W&B shows as the run's config. resume_id: the `id` of an earlier one."""
        log = log or _stderr
        members: list[Tracker] = _local(run_dir)
        mode, reason = choose_mode(self.mode)
        if members and mode != "disabled":
            identity = _identity(resume_id)
            words = describe_wandb(mode, reason, run_dir, self.project, identity)
            log(f"tracking: {words}")  # before the thread below exists: nothing has left the machine yet
            members.append(
                Background(
                    lambda: WandbTracker(
                        run_dir, dict(config or {}), identity, mode, log, project=self.project, name=self.name,
                        group=self.group, tags=tuple(self.tags), resume=identity == resume_id,
                    ),
                    identity,
                    words,
                    log,
                )
            )  # fmt: skip
        elif members:
            log(f"W&B is off ({reason})")
        return Tee(members, log, self.histograms)


@dataclasses.dataclass(frozen=True)
class Trackio:
    """`track=trackio`: a live dashboard on this machine, with JSON lines beside it. histograms: also log parameter histograms."""

    project: str = "jaxllm"
    group: str | None = None
    histograms: bool = False

    def open(
        self, run_dir: str | Path, config: Mapping[str, Any] | None = None, resume_id: str | None = None,
        log: Log | None = None,
    ) -> Tee:  # fmt: skip
        log = log or _stderr
        members: list[Tracker] = _local(run_dir)
        if members:
            identity = _identity(resume_id)
            tracker = TrackioTracker(dict(config or {}), identity, self.project, self.group)
            log(f"tracking: {tracker.describe()}")
            members.append(tracker)
        return Tee(members, log, self.histograms)


def make_tracker(
    kind: str, run_dir: str | Path, config: Mapping[str, Any] | None = None, project: str = "jaxllm",
    name: str | None = None, resume_id: str | None = None, log: Log | None = None, **fields: Any,
) -> Tee:  # fmt: skip
    """A tracker by name ("wandb" or "none"), JSON lines always inside. fields: the others of `Wandb`."""
    if kind == "none":
        return NoTracker(histograms=bool(fields.get("histograms", False))).open(run_dir, config, resume_id, log)
    if kind == "wandb":
        return Wandb(project=project, name=name, **fields).open(run_dir, config, resume_id, log)
    raise UserError(f"track={kind}: no such tracker, use wandb or none")


def _local(run_dir: str | Path) -> list[Tracker]:
    import jax

    return [JsonlTracker(run_dir)] if jax.process_index() == 0 else []


def _identity(resume_id: str | None) -> str:
    """Of the run that goes on, or a new one: what stands in a checkpoint may be no id at all."""
    return resume_id if resume_id and is_id(resume_id) else new_id()


def _stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _short(error: Exception, limit: int = 200) -> str:
    text = f"{type(error).__name__}: " + " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
