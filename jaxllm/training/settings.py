"""The `train:` and `eval:` nodes of the config and one entry of its `stages:` list. Plain data: no jax here."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxllm.errors import UserError

NonFinite = Literal["skip", "stop", "dump"]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """How long, how wide, and how often. `*_every` counts steps; 0 = never. A step is one optimiser update.

    steps: of the whole run (unless `stages` give their own). batch_size: rows of a step over all devices and
    micro-batches. seq_len: tokens of a row. accumulate: micro-batches a step is cut into; gradients do not change.
    The end of the run is always validated, saved and sampled. eval_batches: validation batches at most, null = all.
    log_every: steps between two records of the tracker. sample_*: texts continued by the model; no tokens = no samples.
    nonfinite: what a loss or gradient that is not finite does: `skip` the step (nothing moves), `stop` the run, or
    `dump` the batch and the first bad layer into the run folder, then skip. max_skipped: that many in a row stop the
    run whatever. watch: log gradient norm and relative update of every parameter, and name those that move unlike the rest.
    ema: decay of running averages of the parameters (0.999, say), null = none are kept. Where they are, they are what is validated, sampled
    and opened by every other task; training itself goes on from the parameters.
    """

    steps: int = 1000
    batch_size: int = 8
    seq_len: int = 256
    accumulate: int = 1
    eval_every: int = 100
    eval_batches: int | None = None
    save_every: int = 100
    keep_last: int = 3
    keep_best: int = 1
    log_every: int = 1
    sample_every: int = 0
    sample_prompts: tuple[str, ...] = ("",)
    sample_tokens: int = 128
    sample_temperature: float = 0.8
    nonfinite: NonFinite = "skip"
    max_skipped: int = 50
    prefetch: int = 2
    watch: bool = False
    ema: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "seq_len",
            "accumulate",
            "log_every",
            "keep_last",
            "max_skipped",
            "prefetch",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("eval_every", "save_every", "keep_best", "sample_every", "sample_tokens"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}: {getattr(self, name)} must be 0 (never) or more")
        if self.eval_batches is not None and self.eval_batches < 1:
            raise UserError(f"eval_batches: {self.eval_batches} must be at least 1, or null for all")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UserError(f"ema: {self.ema} must be above 0 and below 1, or null for no averages")
        if self.batch_size % self.accumulate:
            raise UserError(f"accumulate: {self.accumulate} does not divide batch_size={self.batch_size}")


@dataclasses.dataclass(frozen=True)
class StageSettings:
    """One stage of a run; a field left at null keeps what the run has.

    steps: of this stage, null = what is left of `train.steps` (the last stage only). freeze, train_only: globs over
    parameter paths such as `g0/*/mixer/*`; a parameter trains if `train_only` is empty or names it, and `freeze` does
    not. data: another data node. lr, schedule: another peak and shape, counted from the stage's start. weights:
    objective weights by objective name. model: new values of non-shape model fields by dotted name
    (`mixers.local.window`). reset_optimizer: start the moments anew; null = when the set of trained parameters changes.
    """

    name: str | None = None
    steps: int | None = None
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    data: dict[str, Any] | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    lr: float | None = None
    schedule: dict[str, Any] | None = None
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    reset_optimizer: bool | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: {value} must be at least 1")


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """What `task=eval` looks at besides the loss of its text.

    positions: loss by how many tokens of the document stand before a token in its row, in ranges that double. domains: texts by name,
    a path, glob or list each, with a loss and bits per byte of its own. choices: jsonl files of questions by name, answered by likelihood
    (`jaxllm.data.probes.read_questions`). recall: made-up recall tasks by name, each the fields of `jaxllm.data.synthetic.Synthetic`
    (length, filler, queries, documents). needle: lengths in tokens of a text with a needle, each at `needle_depths` depths, `needle_count`
    texts each. lm_eval: tasks of lm-evaluation-harness by name; lm_eval_path: a folder with yaml of further ones. limit: questions of
    each task of `choices` and `lm_eval` at most.
    """

    positions: bool = True
    domains: dict[str, str | list[str]] = dataclasses.field(default_factory=dict)
    choices: dict[str, str] = dataclasses.field(default_factory=dict)
    recall: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    needle: tuple[int, ...] = ()
    needle_depths: int = 5
    needle_count: int = 8
    lm_eval: tuple[str, ...] = ()
    lm_eval_path: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("needle_depths", "needle_count", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: {value} must be at least 1")
        if any(length < 1 for length in self.needle):
            raise UserError(f"needle: {list(self.needle)} must be lengths of at least 1")

    @property
    def asked(self) -> bool:
        """Is there any suite beside the loss?"""
        return bool(self.domains or self.choices or self.recall or self.needle or self.lm_eval)


@dataclasses.dataclass(frozen=True)
class LabelSettings:
    """What `task=label` writes down of a teacher for each token: its `top_k` likeliest next ids with the logarithms of their
    probabilities, as `dtype`, and that of all others together. temperature: of the distribution, and then of the student's objective.
    max_gb: refused beyond it, before anything runs. flush_every: batches between two points that an interrupted run goes on from.
    """

    top_k: int = 32
    temperature: float = 2.0
    dtype: Literal["float16", "float32"] = "float16"
    max_gb: float = 20.0
    flush_every: int = 50

    def __post_init__(self) -> None:
        for name in ("top_k", "flush_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} must be at least 1")
        if not self.temperature > 0 or not self.max_gb > 0:
            raise UserError(f"temperature: {self.temperature} and max_gb: {self.max_gb} must be above 0")
