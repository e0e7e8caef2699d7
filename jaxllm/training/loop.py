"""The one training loop. It moves batches in, results out, and decides nothing about models or losses.

Step n + 1 is given to the device before the numbers of step n are read, so the device never waits for Python.
Everything that must see a settled state (validation, saving, sampling, stopping) first reads what is in flight.

A run is bit-equal to itself after any number of restarts: parameters, moments, counters and key come from the
checkpoint, and the batch, the random keys, the stage and the learning rate are functions of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.checkpoint import Checkpoints
from jaxllm.data.loader import Loader
from jaxllm.data.mix import MixLoader
from jaxllm.errors import UserError
from jaxllm.measure.memory import check_room
from jaxllm.measure.trackers import Tracker
from jaxllm.measure.watch import SlowInput, outliers
from jaxllm.mesh import Rules, batch_sharding, check_batch, use_mesh
from jaxllm.model import LanguageModel
from jaxllm.params import declare
from jaxllm.training.evaluation import Evaluator
from jaxllm.training.feed import place
from jaxllm.training.guard import Guard
from jaxllm.training.record import many, numbers
from jaxllm.training.settings import TrainSettings
from jaxllm.training.speed import Clock, mfu, progress_line, step_flops
from jaxllm.training.stages import Stage, stage_at
from jaxllm.training.state import TrainState, Tree, fresh_moments, leaves_by_path, stored, trained
from jaxllm.training.step import compile_step, make_train_step

Params = Mapping[str, Any]
Batch = Mapping[str, np.ndarray]
Teachers = Mapping[str, tuple[LanguageModel, Params]]


class Data(NamedTuple):
    """What a stage reads. `validation()` starts a fresh pass, None = nothing is held out; `token_bytes`: see
    `Evaluator`. parts: validation of each source of a mix, by name."""

    loader: Loader | MixLoader
    validation: Callable[[], Iterable[Batch]] | None = None
    token_bytes: np.ndarray | None = None
    parts: Mapping[str, Callable[[], Iterable[Batch]]] = MappingProxyType({})


class Sampler(Protocol):
    """Lets the model speak and keeps what it says. `step`: of the run."""

    def __call__(self, model: LanguageModel, params: Params, step: int) -> None: ...


@dataclasses.dataclass
class Outside:
    """Everything that is not arithmetic, passed in. `meta`: goes into every checkpoint. `peak`: FLOP/s of one chip or
    None."""

    tracker: Tracker
    checkpoints: Checkpoints | None = None
    log: Callable[[str], None] = print
    progress: Callable[[str], None] = lambda text: None
    stop: Callable[[], bool] = lambda: False
    sample: Sampler | None = None
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run_dir: Path | None = None
    peak: float | None = None


@dataclasses.dataclass
class Result:
    """How it ended. loss: of the last finite step (nan if none). val: of the final state. tokens: seen, over all
    restarts."""

    state: TrainState
    step: int
    loss: float
    val: dict[str, float]
    tokens: int
    tokens_per_s: float | None
    compile_s: float
    skipped: int
    interrupted: bool


class InFlight(NamedTuple):
    """A dispatched step whose numbers have not been read."""

    step: int
    metrics: dict[str, jax.Array]
    batch: Batch | None


class Loop:
    """One run. `data(stage)` opens a stage's data; `before`: what was saved beside the state of a
    run that goes on. teachers: frozen models and their parameters, for objectives that look at them."""

    def __init__(
        self,
        stages: list[Stage],
        settings: TrainSettings,
        data: Callable[[Stage], Data],
        outside: Outside,
        *,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        before: Mapping[str, Any] | None = None,
        declared: Tree | None = None,
        teachers: Teachers | None = None,
    ):
        self.teachers = {name: model for name, (model, _) in (teachers or {}).items()}
        self._frozen = {name: params for name, (_, params) in (teachers or {}).items()}
        self.stages, self.settings, self.data, self.outside = stages, settings, data, outside
        self.mesh, self.rules = mesh, rules
        self.shards = 1 if mesh is None else batch_shards(mesh, rules)
        for stage in stages:
            if mesh is not None:
                check_batch(stage.batch_size // stage.accumulate, stage.seq_len, mesh, rules)
        self.declared = declare(stages[0].model) if declared is None else declared
        self.clock = Clock()
        self.guard = Guard(settings.nonfinite, settings.max_skipped, outside.run_dir)
        before = before or {}
        self.tokens, self.compile_s = int(before.get("tokens", 0)), 0.0
        self.loss = math.nan if before.get("loss") is None else float(before["loss"])
        self._speed: float | None = before.get("tokens_per_s")
        self.val: dict[str, float] = {}
        self._loaders: dict[int, Loader | MixLoader] = {}
        self._before: Mapping[str, Any] = before.get("data_position") or {}
        self._flight: InFlight | None = None
        self._new_compile_s: float | None = None
        self._flops = 0.0
        self._slow = SlowInput(outside.log)
        self._starved = 0.0  # seconds the device may have waited for the batch of the step in flight
        self._unlike: set[str] = set()  # parameters that were named already

    def run(self, state: TrainState) -> Result:
        """From where `state` stands to the end, or to a request to stop; both end validated (if not stopped) and
        saved."""
        step = int(state.step)
        interrupted = False
        self._tell_stages(step)
        for stage in self.stages[stage_at(self.stages, step).index :]:
            state, interrupted = self._stage(stage, state)
            if interrupted:
                break
        return Result(
            state=state,
            step=int(state.step),
            loss=self.loss,
            val=self.val,
            tokens=self.tokens,
            tokens_per_s=self.speed,
            compile_s=self.compile_s,
            skipped=int(state.skipped),
            interrupted=interrupted,
        )

    def _tell_stages(self, step: int) -> None:
        """The plan of a run of several stages: a table where it begins, and where each stage starts in the summary."""
        if len(self.stages) == 1:
            return
        self.outside.tracker.summary({f"stage/{s.name}/start": s.start for s in self.stages})
        if step == 0:
            columns = ["stage", "name", "start", "end", "seq_len", "batch_size", "lr", "frozen", "data"]
            rows = [
                [
                    s.index,
                    s.name,
                    s.start,
                    s.end,
                    s.seq_len,
                    s.batch_size,
                    s.optimiser.lr,
                    len(s.frozen),
                    source_name(s),
                ]
                for s in self.stages
            ]
            self.outside.tracker.table(step, "stages", columns, rows)

    @property
    def speed(self) -> float | None:
        """Tokens per second; of the run so far where this process has trained nothing yet."""
        return self._speed if self.clock.tokens_per_s is None else self.clock.tokens_per_s

    # ---- one stage
    # -----------------------------------------------------------------------------------------------------

    def _stage(self, stage: Stage, state: TrainState) -> tuple[TrainState, bool]:
        begin, last = int(state.step), stage is self.stages[-1]
        data = self.data(stage)
        self._loaders[stage.index] = data.loader
        evaluator = Evaluator(
            stage.model,
            data.token_bytes,
            mesh=self.mesh,
            rules=self.rules,
            shards=self.shards,
            log=self.outside.log,
        )
        evaluate = self._evaluation(evaluator, data)
        if begin >= stage.end:  # nothing left to train: a finished run that was started once more
            if last:
                evaluate(state)
            return state, False
        if begin == stage.start and stage.index:
            state = self._enter(stage, state)
        if begin > stage.start and self._before.get("order", data.loader.facts()) != data.loader.facts():
            self.outside.log(
                f"data: not the text or the mix that the first {begin} steps read; what follows is read as it is now"
            )
        feed = data.loader.prefetch(begin - stage.start, self.settings.prefetch, stage.steps)
        try:
            index, batch = next(feed)
            with self._mesh():
                compiled = self._compile(stage, state, batch)
                total, more = np.int32(stage.steps), (self._frozen,) if self._frozen else ()
                for step in range(begin, stage.end):
                    if index != step - stage.start:
                        raise RuntimeError(
                            f"the loader gave batch {index} for step {step} of the stage at {stage.start}"
                        )
                    self.clock.dispatched()
                    state, metrics = compiled(state, place(batch, self.mesh, self.rules), total, *more)
                    previous, self._flight = (
                        self._flight,
                        InFlight(step, metrics, batch if self.guard.needs_batch else None),
                    )
                    try:
                        self._read(stage, state, previous)
                        if self.guard.needs_batch:
                            self._settle(stage, state)
                        stopping = _agreed(self.outside.stop())
                        self._after(stage, state, step + 1, evaluate, stopping)
                    except _Ended as ended:
                        if self._flight is not None:  # its update is in the state, so its tokens were seen
                            self.tokens += int(self._flight.metrics["tokens"])
                        self._save(state, int(state.step))
                        raise ended.error from None
                    if stopping:
                        return state, True
                    if step + 1 < stage.end:
                        start = time.perf_counter()
                        index, batch = next(feed)
                        self._starved = time.perf_counter() - start if _arrived(self._flight) else 0.0
        finally:
            feed.close()
        return state, False

    def _enter(self, stage: Stage, state: TrainState) -> TrainState:
        """Counters and moments as the stage starts with them."""
        frozen = f", {len(stage.frozen)} parameters frozen" if stage.frozen else ""
        self.outside.log(f"stage {stage.name}: steps {stage.start} to {stage.end}{frozen}")
        state = dataclasses.replace(state, updates=jax.device_put(np.int32(0), state.updates.sharding))
        if not stage.reset_optimizer:
            return state
        with self._mesh():
            return fresh_moments(state, stage.optimiser.transform(self.declared), trained(self.declared))

    def _compile(self, stage: Stage, state: TrainState, batch: Batch) -> Any:
        step = make_train_step(
            stage.model,
            stage.objectives,
            stage.optimiser,
            accumulate=stage.accumulate,
            free=stage.free,
            shards=self.shards,
            declared=self.declared,
            watch=self.settings.watch,
            ema=self.settings.ema,
            teachers=self.teachers,
        )
        self.outside.progress(f"compiling the train step ({stage.batch_size} x {stage.seq_len} tokens)")
        compiled, seconds = compile_step(step, state, place(batch, self.mesh, self.rules), self.mesh, self._frozen)
        self.compile_s += seconds
        self._new_compile_s = seconds
        self._check_room(stage, compiled)
        self._flops = step_flops(stage.model, stage.batch_size, stage.seq_len)
        self.clock.start_stage()
        return compiled

    def _check_room(self, stage: Stage, compiled: Any) -> None:
        """Before the first step: gradients, activations and scratch space, as the compiler planned them, must fit."""
        plan = compiled.memory_analysis()
        if plan is not None:  # not every backend tells
            rows = stage.batch_size // stage.accumulate
            check_room(
                int(plan.temp_size_in_bytes),
                jax.local_devices()[0],
                f"gradients and activations of {rows} x {stage.seq_len} tokens",
                "raise train.accumulate, lower train.batch_size or train.seq_len, or set model.remat=full",
            )

    # ---- after a step
    # --------------------------------------------------------------------------------------------------

    def _after(self, stage: Stage, state: TrainState, done: int, evaluate: Any, stopping: bool) -> None:
        """What is due when `done` steps of the run are dispatched."""
        every = self.settings
        end = done == self.stages[-1].end
        due = {
            "eval": not stopping and (_due(done, every.eval_every) or end),
            "save": stopping or _due(done, every.save_every) or done == stage.end,
            "sample": not stopping and (_due(done, every.sample_every) or end),
        }
        if not any(due.values()):
            return
        self._settle(stage, state)
        self.clock.pause()
        score = judged(evaluate(state)) if due["eval"] else None
        if due["save"]:
            self._save(state, done, score)
        if due["sample"] and self.outside.sample is not None:
            self.outside.sample(stage.model, state.averaged, done)

    def _evaluation(self, evaluator: Evaluator, data: Data) -> Callable[[TrainState], dict[str, float]]:
        def evaluate(state: TrainState) -> dict[str, float]:
            if data.validation is None:
                return {}
            with self._mesh():
                self.val = evaluator(state.averaged, data.validation(), self.settings.eval_batches)
                for part, batches in data.parts.items():
                    score = evaluator(state.averaged, batches(), self.settings.eval_batches)
                    self.val |= {f"{part}/{name}": score[name] for name in ("loss", "bpb")}
            step = int(state.step)
            self.outside.tracker.log(step, {f"val/{name}": value for name, value in self.val.items()})
            if getattr(self.outside.tracker, "histograms", False):
                for name, leaf in leaves_by_path(state.params).items():
                    self.outside.tracker.histogram(step, f"params/{name}", np.asarray(leaf))
            bits = f", {self.val['bpb']:.4f} bits per byte" if math.isfinite(self.val["bpb"]) else ""
            self.outside.log(f"step {step}: validation loss {self.val['loss']:.4f}{bits}")
            return self.val

        return evaluate

    def _save(self, state: TrainState, step: int, score: float | None = None) -> None:
        if self.outside.checkpoints is not None:
            meta = {**self.outside.meta, "step": step, "tokens": self.tokens, "loss": _json(self.loss), "val": self.val}
            meta["tokens_per_s"] = self.speed
            meta["data_position"] = self._position(step)
            self.outside.checkpoints.save(step, stored(state, self.stages[0].model, self.declared), meta, score)

    def _position(self, step: int) -> dict[str, Any]:
        """Which data the last step came from and where that stands now: a function of the step, written down for whoever asks."""
        stage = stage_at(self.stages, max(step - 1, 0))
        loader = self._loaders.get(stage.index)
        if loader is None:
            return {}
        taken = {"stage": stage.name, "step": step - stage.start, "taken": loader.position(step - stage.start)}
        return taken | {"order": loader.facts()}

    def _settle(self, stage: Stage, state: TrainState) -> None:
        flight, self._flight = self._flight, None
        self._read(stage, state, flight)

    def _read(self, stage: Stage, state: TrainState, flight: InFlight | None) -> None:
        """Wait for a step's numbers, log them, and act on a step that was not finite. `state` is the newest there
        is."""
        if flight is None:
            return
        done = flight.step + 1
        tokens = int(flight.metrics["tokens"])  # blocks
        seconds = self.clock.arrived(tokens)
        self._slow.add(self._starved, seconds)
        self.tokens += tokens
        finite = bool(flight.metrics["finite"])
        if finite:
            self.guard.good()
            self.loss = float(flight.metrics["loss"])
        end = done == self.stages[-1].end
        if _due(done, self.settings.log_every) or end or not finite or self._new_compile_s is not None:
            self._report(stage, done, flight.metrics, tokens, seconds)
        left = self.stages[-1].end - done
        self.outside.progress(
            progress_line(
                done,
                self.stages[-1].end,
                float(flight.metrics["loss"]),
                self.clock.tokens_per_s,
                self.clock.eta(left),
                val_bpb=self.val.get("bpb"),
                skipped=int(flight.metrics["skipped"]),
            )
        )
        if not finite:
            try:
                with self._mesh():
                    line = self.guard.bad(flight.step, flight.metrics, stage.model, state.params, flight.batch)
                self.outside.log(line)
            except UserError as error:
                raise _Ended(error) from error

    def _report(self, stage: Stage, done: int, metrics: Mapping[str, jax.Array], tokens: int, seconds: float) -> None:
        """One call of the tracker, one record of the step."""
        values = jax.device_get(metrics)
        kept = {f"train/{name}": value for name, value in values.items() if name not in ("tokens", "finite")}
        record: dict[str, Any] = numbers(kept)
        for name, value in many(kept).items():
            self.outside.tracker.histogram(done, name, value)
        record |= {
            "train/tokens": self.tokens,
            "train/tokens_per_s": tokens / seconds if seconds else math.nan,
            "train/step_ms": 1e3 * seconds,
            "train/mfu": mfu(self._flops, seconds, self.outside.peak, 1 if self.mesh is None else self.mesh.size),
            "train/stage": stage.index,
        }
        if self._new_compile_s is not None:
            record["train/compile_s"], self._new_compile_s = self._new_compile_s, None
        self.outside.tracker.log(done, record)
        if self.settings.watch:
            self._name_outliers(done, metrics)

    def _name_outliers(self, done: int, metrics: Mapping[str, jax.Array]) -> None:
        """With `train.watch`: each parameter that moves unlike the rest is named once."""
        head = "watch/update_ratio/"
        ratios = {name.removeprefix(head): value for name, value in metrics.items() if name.startswith(head)}
        for line in outliers(jax.device_get(ratios)):
            name = line.partition(":")[0]
            if name not in self._unlike:
                self._unlike.add(name)
                self.outside.log(f"step {done}: {line}")

    def _mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.mesh is None else use_mesh(self.mesh, self.rules)


def _arrived(flight: InFlight | None) -> bool:
    """Is the device done with it? Not told by every array; then it is taken to be busy."""
    ready = None if flight is None else getattr(flight.metrics["loss"], "is_ready", None)
    return ready is not None and bool(ready())


class _Ended(Exception):
    """The guard ended the run: save, then raise `error`."""

    def __init__(self, error: UserError):
        super().__init__(str(error))
        self.error = error


def source_name(stage: Stage) -> str:
    """The kind of a stage's own text, in a word; empty where it reads the run's."""
    return "" if stage.data is None else str(stage.data.get("_target_", "")).rpartition(".")[2]


def judged(val: Mapping[str, float]) -> float | None:
    """What the best checkpoint is chosen by: of a draft head its own loss, since its trunk's never changes."""
    return val.get("draft_1/loss", val.get("loss"))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def batch_shards(mesh: Mesh, rules: Rules | None) -> int:
    """Devices that split the batch."""
    axes = batch_sharding(mesh, rules).spec[0]
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    return math.prod(mesh.shape[name] for name in names)


def _agreed(stop: bool) -> bool:
    """Should all processes stop? A signal reaches them at different steps; they must leave the loop at the same one."""
    if jax.process_count() == 1:
        return stop
    from jax.experimental import multihost_utils

    return bool(multihost_utils.process_allgather(np.int32(stop)).any())
