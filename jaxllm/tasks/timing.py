"""`task=time`: how long a model and each of its layers take, beside the least that the chip would need for the same work.

    time.jsonl  plots/time_<what>.png  trace/  result.json        in the run folder; a table on stderr, a summary as JSON line, W&B

Compiling, the first run and steady runs are told apart; every output is awaited; the calls of one point are timed in turn.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jax

from jaxllm.config import CONF, Config
from jaxllm.errors import UserError
from jaxllm.measure import time_plots
from jaxllm.measure.chips import Chip, detect, filled
from jaxllm.measure.environment import environment
from jaxllm.measure.probe import cache_file, measured
from jaxllm.measure.roofline import Phase, predict, total, utilisation
from jaxllm.measure.settings import TimeSettings, listed
from jaxllm.measure.timing import Timing, time_calls
from jaxllm.model import LanguageModel
from jaxllm.params import init_params
from jaxllm.tasks import TaskIO
from jaxllm.tasks.count import vocabulary
from jaxllm.tasks.timing_hardware import hardware
from jaxllm.tasks.timing_subjects import Subject, one_layer, whole_model

ROWS = "time.jsonl"
COLUMNS = tuple(
    "what layer context batch dtype compile_s first_ms median_ms spread_ms predicted_ms limit gflops_s gb_s mfu mbu peak_mb".split()
)


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """JSON fields: `rows`, the file that has one a call; `calls`; `median_ms` by phase and layer; `chip`; `left_out`; `environment`."""
    assert io.run_dir is not None, "timing always has a run folder"
    settings: TimeSettings = cfg.section("time")
    chip = chip_of(cfg, io)
    tracker = cfg.build("track").open(io.run_dir, config={**cfg.to_dict(), "environment": environment()}, log=io.log)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    try:
        if "hardware" in settings.parts:
            for row in hardware(settings, chip, io.progress):
                rows.append(row)
                _write(io, row)
        if set(settings.parts) & {"model", "layers"}:
            for found in _Model(cfg, io, settings, chip).points(left_out):
                for row in found:
                    rows.append(row)
                    _write(io, row)
                    _track(tracker, row)
        for line in table(rows):
            io.log(line)
        if rows:
            tracker.table(0, "time/rows", COLUMNS, [[_cell(row, name) for name in COLUMNS] for row in rows])
        for path in time_plots.draw(io.run_dir, rows, chip):
            tracker.image(0, f"time/{path.stem}", path)
            io.log(f"picture: {path}")
        if io.run_dir.name.isdigit() and len([p for p in io.run_dir.parent.iterdir() if p.name.isdigit()]) > 1:
            for path in time_plots.draw_sweep(io.run_dir.parent, ROWS, chip):
                io.log(f"picture of the sweep so far: {path}")
        if chip.measured and any(isinstance(row[k], float) and row[k] > 1.1 for row in rows for k in ("mfu", "mbu")):
            io.log(
                f"some calls outdo the probe of this processor; delete {cache_file()} and time again on a quiet machine",
                "warning",
            )
        tracker.summary({f"time/{name}": value for name, value in summary(rows).items()})
    finally:
        tracker.close()
    facts = {"name": chip.name, "matmul": dict(chip.matmul), "bandwidth": chip.bandwidth, "source": chip.source}
    return {
        "rows": str(io.run_dir / ROWS),
        "calls": len(rows),
        "median_ms": {name.removesuffix("_ms"): value for name, value in summary(rows).items()},
        "chip": facts,
        "left_out": left_out,
        "environment": environment(),
    }


def chip_of(cfg: Config, io: TaskIO) -> Chip:
    """The chip that was chosen with `chip=NAME`, else that of this device; measured where it is this machine's processor."""
    chip = filled(cfg.build("chip")) if cfg.get("chip") is not None else detect(jax.devices()[0], CONF / "chip")
    return measured(chip, log=io.log)


class _Model:
    """The calls of one model: every combination of dtype, batch, context and phase is a point, whose calls are timed in turn."""

    def __init__(self, cfg: Config, io: TaskIO, settings: TimeSettings, chip: Chip) -> None:
        self.cfg, self.io, self.settings, self.chip = cfg, io, settings, chip
        self.model: LanguageModel = cfg.build("model", **vocabulary(cfg))
        longest = max(listed(settings.context))
        if self.model.max_seq_len is not None and longest >= self.model.max_seq_len:
            raise UserError(f"time.context: {longest} must be below model.max_seq_len={self.model.max_seq_len}")
        self.roles = list(dict.fromkeys(role for g in self.model.groups for pair in g.period for role in pair))
        self.kinds = {role: self._kind(role) for role in self.roles} | {"model": str(cfg.choices.get("model", ""))}

    def _kind(self, role: str) -> str:
        """The file of conf/mixer or conf/ffn that the role stands for, if the command line says so; else the class."""
        mixes = role in self.model.mixers
        group = f"mixer@model.mixers.{role}" if mixes else f"ffn@model.ffns.{role}"
        layer = self.model.mixer(role) if mixes else self.model.ffn(role)
        return str(self.cfg.choices.get(group, type(layer).__name__))

    def points(self, left_out: list[str]) -> Iterator[list[dict[str, Any]]]:
        """Rows of one point after another. What does not fit into memory is named in `left_out`, and the rest goes on."""
        whats: tuple[Phase, ...] = listed(self.settings.what)
        dtypes = listed(self.settings.dtype) or (str(self.model.compute_dtype),)
        for dtype in dtypes:
            model = self.model.clone(dtype=dtype)
            params = init_params(model, jax.random.key(self.cfg.seed)) if "model" in self.settings.parts else {}
            grid = itertools.product(listed(self.settings.batch), listed(self.settings.context), whats)
            for batch, context, what in grid:
                where = f"{what}, context {context:,}, batch {batch}, {dtype}"
                self.io.progress(f"timing {where}")
                try:
                    subjects = self._subjects(model, params, what, batch, context)
                    timings = time_calls({name: s.call for name, s in subjects.items()}, self.settings.repeats)
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        raise
                    left_out.append(where)
                    self.io.log(f"{where}: does not fit into memory, left out", "warning")
                    continue
                if self.settings.trace:
                    self._trace(subjects, what, batch, context, dtype)
                place = {"what": what, "context": context, "batch": batch}
                yield [self._row(place, name, s, timings[name]) for name, s in subjects.items()]

    def _subjects(self, model: LanguageModel, params: Any, what: Phase, batch: int, context: int) -> dict[str, Subject]:
        chunk, made = self.settings.chunk, {}
        if "model" in self.settings.parts:
            training = {"optimiser": self.cfg.build("optim"), "objectives": self.cfg.build("objective")}
            made["model"] = whole_model(model, params, what, batch, context, chunk=chunk, **training)
        if "layers" in self.settings.parts and what != "train":
            for role in self.roles:
                made[role] = one_layer(model, role, what, batch, context, chunk=chunk, seed=self.cfg.seed)
        return made

    def _row(self, place: dict[str, Any], name: str, subject: Subject, timing: Timing) -> dict[str, Any]:
        what = place["what"]
        tokens = place["batch"] * (1 if what == "decode" else place["context"])
        row = {**place, "layer": name, "kind": self.kinds[name], "dtype": subject.dtype}
        row |= row_of(subject, timing, self.chip, memory_bound=what == "decode")
        return row | {"tokens_per_s": tokens / timing.median_ms * 1e3}

    def _trace(self, subjects: dict[str, Subject], *place: Any) -> None:
        """A profile of three calls of each, with the names of the modules, for Perfetto, TensorBoard or xprof."""
        assert self.io.run_dir is not None
        folder = self.io.run_dir / "trace" / "-".join(map(str, place))
        with jax.profiler.trace(str(folder)):
            for name, subject in subjects.items():
                with jax.profiler.TraceAnnotation(name):
                    for _ in range(3):
                        jax.block_until_ready(subject.call())


def row_of(subject: Subject, timing: Timing, chip: Chip, *, memory_bound: bool) -> dict[str, Any]:
    """The numbers of one call; docs/numbers.md says what each means. MFU where products are the point, MBU where reading is."""
    work, seconds = total(subject.works), timing.median_ms / 1e3
    predicted = predict(subject.works, chip, subject.dtype)
    return {
        "compile_s": round(subject.compile_s, 3),
        "first_ms": timing.first_ms,
        "median_ms": timing.median_ms,
        "min_ms": timing.min_ms,
        "spread_ms": timing.spread_ms,
        "repeats": len(timing.samples_ms),
        "flops": work.flops,
        "bytes": work.bytes,
        "flops_per_s": work.flops / seconds,
        "bytes_per_s": work.bytes / seconds,
        "mfu": "n/a" if memory_bound else utilisation(work.flops, seconds, chip.peak(subject.dtype)),
        "mbu": utilisation(work.bytes, seconds, chip.bandwidth) if memory_bound else "n/a",
        "predicted_ms": "n/a" if predicted is None else 1e3 * predicted.seconds,
        "limit": "n/a" if predicted is None else predicted.limit,
        "reached": "n/a" if predicted is None else predicted.seconds / seconds,
        "peak_bytes": subject.peak_bytes,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """For sweeps: the model's (or, without it, every layer's) median of each phase at the longest context and the widest batch."""
    found: dict[str, float] = {}
    for row in sorted((r for r in rows if "context" in r), key=lambda r: (r["context"], r["batch"])):
        found[f"{row['what']}_{row['layer']}_ms"] = row["median_ms"]
    return found


# ---- what a person reads -----------------------------------------------------------------------------------------------


def _cell(row: dict[str, Any], name: str) -> Any:
    scaled = {"gflops_s": ("flops_per_s", 1e9), "gb_s": ("bytes_per_s", 1e9), "peak_mb": ("peak_bytes", 1e6)}
    if name in scaled:
        key, unit = scaled[name]
        value = row.get(key)
        return "n/a" if not isinstance(value, int | float) else value / unit
    value = row.get(name, "n/a")
    return "n/a" if value is None else value


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a call."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"

    lines = [list(COLUMNS)] + [[text(_cell(row, name)) for name in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return [
        "",
        *(
            "  ".join(c.rjust(w) if i > 1 else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ),
    ]


def _write(io: TaskIO, row: dict[str, Any]) -> None:
    """Rows are kept as they come: a later one that fails takes none of them away."""
    assert io.run_dir is not None
    with open(io.run_dir / ROWS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _track(tracker: Any, row: dict[str, Any]) -> None:
    """Charts over the context, one line a layer, batch and dtype."""
    name = f"time/{row['what']}/{row['layer']}_b{row['batch']}_{row['dtype']}"
    numbers = {key: row[key] for key in ("median_ms", "predicted_ms", "mfu", "mbu", "reached", "tokens_per_s")}
    tracker.log(row["context"], {f"{name}/{key}": v for key, v in numbers.items() if v != "n/a"}, axis="time/context")
