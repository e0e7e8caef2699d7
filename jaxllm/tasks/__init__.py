"""The tasks of the command line, one file each, and what `jaxllm.run` hands to every one of them.

A task is a module with `run(cfg: Config, io: TaskIO) -> dict`: glue between the parts; it returns its JSON fields.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

# Imported only when chosen.
TASKS = {
    "train": "jaxllm.tasks.train",
    "eval": "jaxllm.tasks.evaluate",
    "label": "jaxllm.tasks.label",
    "generate": "jaxllm.tasks.generate",
    "count": "jaxllm.tasks.count",
    "convert": "jaxllm.tasks.convert",
    "logits": "jaxllm.tasks.logits",
    "check": "jaxllm.tasks.check",
    "read": "jaxllm.tasks.read",
    "time": "jaxllm.tasks.timing",
    "serve": "jaxllm.tasks.serve",
    "bench_serve": "jaxllm.tasks.bench_serve",
    "report": "jaxllm.tasks.report",
    "inspect": "jaxllm.tasks.inspect",
}
# Tasks that always make a run folder; the others do when `run_dir` is given, and in a sweep.
WRITES = frozenset({"train", "time"})
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3}
PROGRESS_SECONDS = 10.0  # between two progress lines where the line cannot be rewritten


class Stop:
    """Asked to stop? SIGTERM and Ctrl-C set the flag of a task that polls it.

    A task that has never polled is interrupted at once, since it has nothing to save. The second signal kills."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._polled = False

    def is_set(self) -> bool:
        self._polled = True
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    @property
    def requested(self) -> bool:
        """The flag, looked at without promising to obey it."""
        return self._event.is_set()

    @contextmanager
    def on_signals(self, say: Any) -> Iterator[Stop]:
        """Listen to SIGINT and SIGTERM within the block. Only the main thread can; elsewhere the block runs without."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return

        def received(number: int, frame: types.FrameType | None) -> None:
            name = signal.Signals(number).name
            if self._event.is_set():
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self._event.set()
            if not self._polled:
                raise KeyboardInterrupt(name)
            say(f"{name}: saving and stopping; once more kills")

        before = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class TaskIO:
    """Where a task writes and speaks. `run_dir`: its folder, already made, or None. `resume`: it held a run before."""

    run_dir: Path | None = None
    resume: bool = False
    stop: Stop = field(default_factory=Stop)
    level: str = "info"
    out: TextIO = field(default_factory=lambda: sys.stdout)
    err: TextIO = field(default_factory=lambda: sys.stderr)
    _live: bool = False  # stderr stands at the end of a line that may be rewritten
    _open_line: bool = False  # stdout stands in the middle of a line
    _last_progress: float = 0.0

    def log(self, text: str, level: str = "info") -> None:
        """One line to stderr."""
        if LEVELS[level] >= LEVELS[self.level]:
            self._end_live()
            print(text, file=self.err, flush=True)

    def progress(self, text: str) -> None:
        """The live line: rewritten in place on a terminal, else printed now and then."""
        if LEVELS[self.level] > LEVELS["info"]:
            return
        now = time.monotonic()
        if self.err.isatty():
            width = shutil.get_terminal_size().columns - 1
            self.err.write("\r\x1b[2K" + text[:width])
            self.err.flush()
            self._live = True
        elif now - self._last_progress >= PROGRESS_SECONDS or not self._last_progress:
            print(text, file=self.err, flush=True)
            self._last_progress = now

    def emit(self, text: str) -> None:
        """Text of the result itself, to stdout, as it is made."""
        if text:
            self._end_live()
            self.out.write(text)
            self.out.flush()
            self._open_line = not text.endswith("\n")

    def result(self, line: str) -> None:
        """The JSON line, on a line of its own."""
        self._end_live()
        self.out.write(("\n" if self._open_line else "") + line + "\n")
        self.out.flush()
        self._open_line = False

    def _end_live(self) -> None:
        if self._live:
            self.err.write("\n")
            self.err.flush()
            self._live = False
