"""Run folders: made exclusively, locked while in use, written atomically.

Two runs never share a folder: a new one is claimed with `mkdir` or with the exclusive creation of its config.yaml, and
the process that uses it holds a lock which the system drops when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import UserError

CONFIG, RESULT, LOCK = "config.yaml", "result.json", ".lock"


class RunFolder:
    """A claimed folder and its lock. `resumed`: it held a run before."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        self.resumed = resumed
        self._lock = _lock(path)

    def discard_if_untouched(self) -> bool:
        """Remove a new folder that holds nothing but its configuration: a mistake found early leaves no trace."""
        if self.resumed or any(p.name not in (CONFIG, LOCK) for p in self.path.iterdir()):
            return False
        for name in (CONFIG, LOCK):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()
        return True

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def fresh(parent: Path, name: str) -> RunFolder:
    """A new folder `parent/name`, or `name-2`, `name-3`, ... when that is taken."""
    parent.mkdir(parents=True, exist_ok=True)
    for n in itertools.count(1):
        path = parent / (name if n == 1 else f"{name}-{n}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return RunFolder(path, resumed=False)
    raise AssertionError("unreachable")


def named(path: Path, config: str) -> RunFolder:
    """The folder the user named, for a new run: absent or empty, else refused before anything is written."""
    if path.exists() and not path.is_dir():
        raise UserError(f"run_dir={path}: is a file; choose a folder")
    held = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    if held:
        what = "already holds a run" if CONFIG in held else f"is not empty ({', '.join(held[:3])})"
        go_on = "add resume=true to go on with it, or " if CONFIG in held else ""
        raise UserError(f"run_dir={path}: {what}; {go_on}choose another folder")
    path.mkdir(parents=True, exist_ok=True)
    try:
        with open(path / CONFIG, "x", encoding="utf-8") as file:  # of two runs started at once, one gets here
            file.write(config)
    except FileExistsError:
        raise UserError(f"run_dir={path}: another run has just started there; choose another folder") from None
    return RunFolder(path, resumed=False)


def again(path: Path) -> RunFolder:
    """The folder of an earlier run, to go on with it."""
    if not path.is_dir():
        raise UserError(f"run_dir={path}: no such folder, so there is nothing to resume; drop resume=true to start")
    if not (path / CONFIG).is_file():
        raise UserError(f"run_dir={path}: not a run folder (no {CONFIG}), so there is nothing to resume")
    return RunFolder(path, resumed=True)


def default_name(name: str, now: float | None = None) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name).strip('-.') or 'run'}-{stamp}"


def _lock(path: Path) -> int | None:
    handle = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"run_dir={path}: in use by another process; wait for it or choose another folder") from None
    except OSError:  # a file system without locks: exclusive creation still keeps new runs apart
        os.close(handle)
        return None
    return handle


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader, or a crash, sees the old text or the new, never half."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def to_json(fields: Mapping[str, Any]) -> str:
    """One line of strict JSON: numpy scalars become numbers, paths text, and what is not finite null."""
    return json.dumps(_plain(fields), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return _plain(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None
