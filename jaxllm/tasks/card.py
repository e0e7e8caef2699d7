"""The last words of a training run: what was made, where it is, and what to type next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import Config
from jaxllm.training.stages import Stage


def card(
    cfg: Config,
    run_dir: Path,
    fields: Mapping[str, Any],
    drawn: list[Path],
    stages: list[Stage],
    origin: list[str],
    *,
    interrupted: bool,
) -> str:
    """What was made, where it is, and the next three commands, ready to paste. `origin`: see `origin_of`."""
    offline = sorted((run_dir / "wandb").glob("offline-run-*")) if (run_dir / "wandb").is_dir() else []
    lines = ["", "interrupted; everything up to here is saved" if interrupted else "done", ""]
    lines.append(f"  run folder   {_quote(run_dir)}")
    if fields["checkpoint"]:
        lines.append(f"  checkpoint   {_quote(fields['checkpoint'])}")
    if drawn:
        lines.append(f"  plots        {'  '.join(_quote(path) for path in drawn)}")
    if offline:
        lines.append(f"  W&B offline  {_quote(offline[-1])}")
        lines.append(f"               look: wandb leet {_quote(offline[-1])}")
    listed, lr = cfg.section("stages"), cfg.get("optim.lr") or 1e-3
    onward = _command(f"run_dir={run_dir}", "resume=true", "" if interrupted else f"train.steps={2 * stages[-1].end}")
    if listed and listed[-1].steps is not None and not interrupted:  # its length is written in the list itself
        onward = _command("task=eval", f"source={run_dir}")
    lines += [
        "",
        "next:",
        f"  {_command('task=generate', f'source={run_dir}', 'prompt=def ')}",
        f"  {onward}",
        f"  {_command('-m', *origin, f'optim.lr={lr / 2:g},{lr:g},{lr * 2:g}')}",
        "",
    ]
    return "\n".join(lines)


def origin_of(cfg: Config) -> list[str]:
    """The arguments that started this run, but for where it writes and how fast it learns: what a sweep starts from."""
    own = ("task", "run_dir", "resume", "name", "optim.lr")
    return cfg.groups + [f"{key}={_plain(value)}" for key, value in cfg.explicit.items() if key not in own]


def _plain(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _command(*arguments: str) -> str:
    return " ".join(["python -m jaxllm.run", *(_quote(a) for a in arguments if a)])


def _quote(text: Any) -> str:
    return shlex.quote(str(text))
