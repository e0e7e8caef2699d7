"""The command line: `python -m jaxllm.run [task=...] [+experiment=...] key=value ...`

Compose, check, make the run folder, run one task. Progress goes to stderr; the last line of stdout is one JSON object.
Exit codes: 0 done, 2 the user's mistake (one line on stderr), 1 our fault (traceback), 130 interrupted after saving.
With `-m` every job has a folder and a JSON line of its own, and the exit code is the worst of them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jaxllm import __version__, folder
from jaxllm.backend import prepare
from jaxllm.compose import CONFIG_NAME, asked, lift, plain, split_overrides, translate
from jaxllm.config import CONF, Common, Config, common_keys, differences, options
from jaxllm.errors import UserError
from jaxllm.folder import RunFolder
from jaxllm.tasks import TASKS, WRITES, TaskIO

# Hydra's flags, first those that take a value. Anything else that starts with a dash is a mistake worth a clear word.
# (Its pickled re-run is left out: nothing here reads pickles.)
FLAGS_WITH_VALUE = "-cd --config-dir -cn --config-name -cp --config-path -c --cfg -p --package".split()
FLAGS = "-h --help --hydra-help --resolve -r --run -m --multirun -i --info -sc --shell-completion".split()
# Values that are free text: kept whole, whatever commas, quotes or brackets they hold. Paths only outside sweeps.
TEXT_KEYS = ("prompt", "system")
PATH_KEYS = ("source", "run_dir", "prompts", "name", "data.path", "out", "tokens", "reference", "runs")
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        print(f"jaxllm {__version__}")
        return 0
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    session = Session(main_pid=os.getpid(), cwd=Path.cwd(), full_error=full_error)
    before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # a process that ends need not look through all that was traced once more
    collections = gc.get_threshold()
    if "task=count" in arguments:
        # It traces millions of objects, hardly a cycle among them, and looking for one took a fifth of its time.
        gc.set_threshold(100_000, 50, 50)
    try:
        sys.argv = ["jaxllm", *session.read(arguments)]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise instead of printing and exiting
        _register_resolvers()
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=CONFIG_NAME)(session.job)()
        session.collect()
    except SystemExit as stop:  # --help and the like
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        session.codes.append(session.report(error, TaskIO()))
    finally:
        gc.set_threshold(*collections)
        sys.argv = before[0]
        if before[1] is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = before[1]
    return _worst(session.codes)


def _worst(codes: Sequence[int]) -> int:
    return next((code for code in (INTERRUPTED, 1, 2) if code in codes), max(codes, default=0))


@dataclass
class Session:
    """One command line: what was typed, and what its jobs came to. Launchers may send it to other processes."""

    main_pid: int
    cwd: Path
    full_error: bool = False
    conf_dirs: list[Path] = field(default_factory=lambda: [CONF])
    typed: list[str] = field(default_factory=list)
    literal: dict[str, Any] = field(default_factory=dict)
    sweep_dir: Path | None = None
    codes: list[int] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    # ---- before Hydra

    def read(self, arguments: Sequence[str]) -> list[str]:
        """The arguments for Hydra: flags checked, free text taken out, keys lifted (see `compose.lift`)."""
        multirun = "-m" in arguments or "--multirun" in arguments
        flags, texts = self._flags(arguments)
        self.typed = texts
        kept = []
        for text in texts:
            if "=" not in text and not text.startswith("~"):
                raise UserError(f"{text}: expected key=value (tasks are chosen with task=NAME: {', '.join(TASKS)})")
            key, _, value = text.partition("=")
            key = key.lstrip("+")
            if key in TEXT_KEYS or (key in PATH_KEYS and not multirun and not value.startswith("[")):
                self.literal[key] = _literal(key, value)
            else:
                kept.append(lift(text, self.conf_dirs))
        if multirun:
            typed = next((t.partition("=")[2] for t in kept if t.startswith("hydra.sweep.dir=")), None)
            self.sweep_dir = Path(typed or f"multirun/{time.strftime('%Y%m%d-%H%M%S')}")
            kept += [] if typed else [f"hydra.sweep.dir={self.sweep_dir}"]
        return flags + kept

    def _flags(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        flags: list[str] = []
        texts: list[str] = []
        rest = iter(arguments)
        for argument in rest:
            name = argument.partition("=")[0]
            if argument in FLAGS_WITH_VALUE:
                value = next(rest, None)
                if value is None:
                    raise UserError(f"{argument}: expected a value after it")
                flags += [argument, value]
            elif name in FLAGS_WITH_VALUE or argument in FLAGS:
                flags.append(argument)
                value = argument.partition("=")[2]
            elif argument.startswith("-") and not argument.startswith("-="):
                raise UserError(f"{argument}: unknown flag; settings are key=value without dashes, see --help")
            else:
                texts.append(argument)
                continue
            if name in ("-cd", "--config-dir"):
                self.conf_dirs.append(Path(str(value)).absolute())
        return flags, texts

    # ---- one job

    def job(self, raw: DictConfig) -> None:
        """Hydra's task function: never raises, so that a sweep goes on after a failed job."""
        if INTERRUPTED in self.codes:
            return
        now = HydraConfig.get()
        sweep = now if now.mode == RunMode.MULTIRUN else None
        io = TaskIO(out=sys.stdout, err=sys.stderr)
        started = time.monotonic()
        fields: dict[str, Any] = {"task": str(raw.get("task")), "run_dir": None, "seconds": None}
        run: RunFolder | None = None
        code = 0
        with contextlib.redirect_stdout(sys.stderr):  # stray prints of other packages are not results
            try:
                cfg, composed = self._config(raw, now)
                fields["task"] = cfg.task
                io.level = cfg.log_level
                run, cfg = self._folder(cfg, composed, sweep, io)
                fields["run_dir"] = str(run.path) if run is not None else None
                if run is not None:
                    io.run_dir, io.resume = run.path, run.resumed
                with io.stop.on_signals(io.log):
                    fields |= importlib.import_module(TASKS[cfg.task]).run(cfg, io)
                # A signal that came when the work was already done interrupted nothing; the task knows.
                if fields.pop("interrupted", io.stop.requested):
                    fields["interrupted"], code = True, INTERRUPTED
            except BaseException as error:
                code = self.report(error, io)
                fields |= {"error": _line(error), "exit_code": code}
        fields["seconds"] = round(time.monotonic() - started, 3)
        self._close(fields, code, run, io, sweep)

    def _config(self, raw: DictConfig, now: Any) -> tuple[Config, bool]:
        """The checked configuration, and whether groups were chosen on the command line (`+experiment=`, `model=`)."""
        tree = plain(raw, self.literal)
        common = common_keys(tree)
        prepare(common)
        typed, choices = asked(now)
        values, groups = split_overrides(typed, self.conf_dirs)
        values |= self.literal
        if tree.get("name") is None:
            tree["name"] = choices.get("experiment") or choices.get("model") or common.task
        if common.resume and common.task in WRITES and not groups and common.run_dir is not None:
            target = self._job_path(common, now)
            if (target / folder.CONFIG).is_file():  # go on with what the folder says, but for what was typed now
                return Config.load(target, values, common.allow_targets, self.cwd), False
        return Config(tree, explicit=values, choices=choices, groups=groups, original_cwd=self.cwd), True

    @staticmethod
    def _job_path(common: Common, now: Any) -> Path:
        path = Path(str(common.run_dir)).expanduser()
        return path / str(now.job.num) if now.mode == RunMode.MULTIRUN else path

    def _folder(self, cfg: Config, composed: bool, sweep: Any, io: TaskIO) -> tuple[RunFolder | None, Config]:
        """Claim the run folder, if this job has one, and write the resolved configuration into it."""
        if cfg.resume and cfg.run_dir is None and cfg.task in WRITES:
            raise UserError("resume=true: also say which folder to go on with: run_dir=FOLDER")
        if cfg.run_dir is None and sweep is None and cfg.task not in WRITES:
            return None, cfg
        if cfg.run_dir is None:
            parent, name = (Path(sweep.sweep.dir), str(sweep.job.num)) if sweep is not None else (Path("runs"), "")
            run = folder.fresh(parent, name or folder.default_name(str(cfg.name)))
        else:
            path = self._job_path(cfg.common, HydraConfig.get())
            if cfg.resume and (sweep is None or path.exists()):  # a resumed sweep starts what it had not come to
                run = folder.again(path)
            else:
                run = folder.named(path, cfg.to_yaml())
        try:
            if run.resumed and composed:
                _log_changes((run.path / folder.CONFIG).read_text(encoding="utf-8"), cfg, io)
            cfg = cfg.replace({"run_dir": str(run.path)})
            folder.write_text(run.path / folder.CONFIG, cfg.to_yaml())
        except BaseException:
            run.release()
            raise
        return run, cfg

    def _close(self, fields: dict[str, Any], code: int, run: RunFolder | None, io: TaskIO, sweep: Any) -> None:
        """Leave the result in the folder, print it, release the folder."""
        self.codes.append(code)
        here = self._here()
        if sweep is not None and run is None and not here:  # a result the parent process can find
            run = folder.fresh(Path(sweep.sweep.dir), str(sweep.job.num))
            fields["run_dir"] = str(run.path)
        if run is not None and sweep is None and code in (2, INTERRUPTED) and run.discard_if_untouched():
            fields["run_dir"] = None
            run.release()
            run = None
        line = folder.to_json(fields)
        if run is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide the result
                folder.write_text(run.path / folder.RESULT, line + "\n")
            run.release()
        if here and ("error" not in fields or sweep is not None):
            io.result(line)
            self.printed.append(str(fields["run_dir"]))

    def _here(self) -> bool:
        """Whether this is the process the command was typed in, not a launcher's."""
        return os.getpid() == self.main_pid

    # ---- after

    def collect(self) -> None:
        """Print what jobs in other processes left in their folders, in the order of the jobs."""
        if self.sweep_dir is None or not self.sweep_dir.is_dir() or self.printed:
            return
        folders = [p for p in self.sweep_dir.iterdir() if p.name.isdigit()]
        for path in sorted(folders, key=lambda p: int(p.name)):
            file = path / folder.RESULT
            if not file.is_file():
                self.codes.append(1)
                print(f"error: {path}: the job ended without a result", file=sys.stderr)
                continue
            line = file.read_text(encoding="utf-8").strip()
            self.codes.append(int(json.loads(line).get("exit_code", 0)))
            print(line, flush=True)

    def report(self, error: BaseException, io: TaskIO) -> int:
        """Say what went wrong, on stderr, and return the exit code."""
        code = _code(error)
        if isinstance(error, KeyboardInterrupt):
            io.log("interrupted", "error")
        elif code == 1 or self.full_error:
            io.log("".join(traceback.format_exception(error)).rstrip(), "error")
        if code == 2:
            io.log(f"error: {_line(error, self.conf_dirs, self.typed)}", "error")
        return code


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, UserError | HydraException | OmegaConfBaseException):
        return 2
    return 2 if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) else 1


def _line(error: BaseException, conf_dirs: Sequence[Path] = (CONF,), typed: Sequence[str] = ()) -> str:
    if isinstance(error, HydraException | OmegaConfBaseException):
        error = translate(error, conf_dirs, typed)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the disk{f' for {error.filename}' if error.filename else ''}; free some and resume"
    text = " ".join(str(error).split())
    return text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"


def _literal(key: str, value: str) -> str | None:
    if key in TEXT_KEYS:
        return value
    if value == "":
        raise UserError(f"{key}=: is empty (an unset variable?); give a value, or leave the key out")
    if value == "null":
        return None
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _log_changes(before: str, cfg: Config, io: TaskIO) -> None:
    """On resume: which keys differ from the earlier run's, one line each."""
    for key, old, new in differences(before, cfg):
        if key not in ("resume", "run_dir", "name"):
            io.log(f"resume: {key} {old} -> {new}")


def _register_resolvers() -> None:
    names = {"task": lambda: list(TASKS)}

    def listed(group: str, column: int = 0) -> str:
        """The names of a group; lines that get too long go on below the given column of the help text."""
        text = "  ".join(names.get(group, lambda: options(group))()) or "-"
        return ("\n" + " " * column).join(textwrap.wrap(text, 126 - column)) if column else text

    OmegaConf.register_new_resolver("jaxllm_options", listed, replace=True)


if __name__ == "__main__":
    # Under its own name, not as __main__: launchers hand the job to other processes by name.
    from jaxllm.run import main as entry

    sys.exit(entry())
