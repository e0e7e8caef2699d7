"""Where a run ran: what a reader needs to repeat it or to judge its numbers. Saved with the run and shown in W&B."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import jaxllm

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict[str, Any]:
    """JSON: git_commit, git_dirty (both None outside a source checkout), versions, platform, device kind and count."""
    commit, dirty = git_state(Path(jaxllm.__file__).resolve().parent.parent)
    device = jax.devices()[0]
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "versions": {"jaxllm": jaxllm.__version__, "python": platform.python_version(), **package_versions()},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
    }


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed versions by distribution name, None for one that is absent."""

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in names}


def git_state(root: Path) -> tuple[str | None, bool | None]:
    """(commit, whether tracked files differ from it) if `root` is the top of a git checkout, else (None, None).

    Only the top counts: an installed copy inside somebody's repository must not report that repository's commit.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None, None
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or status is None else bool(status)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True, text=True, timeout=5, env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
