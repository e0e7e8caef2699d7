"""A run as a list of stages: what changes from one to the next, and at which step.

A stage may train fewer parameters, other data, longer rows, another learning rate, other objective weights, and may set
non-shape fields of the model anew. The state's structure is the same in all of them (moments exist for everything the
model trains), so a checkpoint of any stage fits, and which stage a step belongs to follows from the step alone.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxllm.errors import UserError
from jaxllm.model import LanguageModel
from jaxllm.params import declare, is_declared, path_name
from jaxllm.targets import matching
from jaxllm.training.objectives import Objective, reweighted
from jaxllm.training.optimisers import Optimiser
from jaxllm.training.schedules import Schedule
from jaxllm.training.settings import StageSettings, TrainSettings
from jaxllm.training.state import Tree, leaves_by_path, trained


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage with everything resolved. Steps `start ... end - 1` of the run belong to it."""

    index: int
    name: str
    start: int
    end: int
    model: LanguageModel
    optimiser: Optimiser
    objectives: Mapping[str, Objective]
    free: Tree  # booleans: false = frozen in this stage
    data: dict[str, Any] | None
    seq_len: int
    batch_size: int
    accumulate: int
    reset_optimizer: bool

    @property
    def steps(self) -> int:
        return self.end - self.start

    @property
    def frozen(self) -> list[str]:
        """Paths of the parameters that this stage holds still."""
        return [name for name, free in leaves_by_path(self.free).items() if not free]


def plan(
    settings: TrainSettings,
    stages: Sequence[StageSettings],
    model: LanguageModel,
    optimiser: Optimiser,
    objectives: Mapping[str, Objective],
    schedules: Mapping[int, Schedule] | None = None,
    declared: Tree | None = None,
) -> list[Stage]:
    """Resolve the list; an empty one is a single stage of `train.steps`. `schedules`: built `schedule` nodes by stage
    index. `declared`: of the model, where the caller has it."""
    declared = declare(model) if declared is None else declared
    out: list[Stage] = []
    start = 0
    entries = list(stages) or [StageSettings(name="train")]
    for i, entry in enumerate(entries):
        key = f"stages.{i}"
        if entry.steps is None and i + 1 < len(entries):
            raise UserError(f"{key}.steps: only the last stage may leave its steps out")
        steps = settings.steps - start if entry.steps is None else entry.steps
        if steps < 1:
            raise UserError(
                f"{key}.steps: train.steps={settings.steps} leaves no step for the last stage, which starts at {start}"
            )
        batch, accumulate = entry.batch_size or settings.batch_size, entry.accumulate or settings.accumulate
        if batch % accumulate:
            raise UserError(f"{key}.accumulate: {accumulate} does not divide batch_size={batch}")
        own = override(model, entry.model, f"{key}.model", declared) if entry.model else model
        free = free_parameters(declared, entry, key)
        changes = _trains(declared, free) != (_trains(declared, out[-1].free) if out else _trains(declared, free))
        peak = optimiser.lr if entry.lr is None else entry.lr
        out.append(
            Stage(
                index=i,
                name=entry.name or f"stage{i}",
                start=start,
                end=start + steps,
                model=own,
                optimiser=dataclasses.replace(
                    optimiser, lr=peak, schedule=(schedules or {}).get(i, optimiser.schedule)
                ),
                objectives=reweighted(objectives, entry.weights, f"{key}.weights"),
                free=free,
                data=entry.data,
                seq_len=entry.seq_len or settings.seq_len,
                batch_size=batch,
                accumulate=accumulate,
                reset_optimizer=bool(out) and (changes if entry.reset_optimizer is None else entry.reset_optimizer),
            )
        )
        start += steps
    return out


def stage_at(stages: Sequence[Stage], step: int) -> Stage:
    """The stage that step `step` belongs to; the last one for a run that is over."""
    return next((s for s in stages if s.start <= step < s.end), stages[-1])


def free_parameters(declared: Tree, entry: StageSettings, key: str = "stage") -> Tree:
    """Tree of booleans from the globs of `train_only` and `freeze`; a glob that names nothing is an error."""
    names = list(leaves_by_path(declared, is_leaf=is_declared))
    only = matching(entry.train_only, names, f"{key}.train_only")
    frozen = matching(entry.freeze, names, f"{key}.freeze")
    free = {name for name in names if (not entry.train_only or name in only) and name not in frozen}
    tree = jax.tree_util.tree_map_with_path(lambda p, _: path_name(p) in free, declared, is_leaf=is_declared)
    if not any(_trains(declared, tree)):
        raise UserError(f"{key}.freeze: nothing is left to train in this stage")
    return tree


def _trains(declared: Tree, free: Tree) -> list[bool]:
    return [a and b for a, b in zip(jax.tree.leaves(trained(declared)), jax.tree.leaves(free), strict=True)]


def override(model: LanguageModel, fields: Mapping[str, Any], key: str, declared: Tree | None = None) -> LanguageModel:
    """The model with some fields set anew, `{"remat": "full", "mixers.local.window": 512}`; the parameters must stay as
    they are."""
    new = model
    for name, value in fields.items():
        new = _set(new, name.split("."), value, f"{key}.{name}")
    before = leaves_by_path(declare(model) if declared is None else declared, is_leaf=is_declared)
    after = leaves_by_path(declare(new), is_leaf=is_declared)
    for name in sorted(before.keys() | after.keys()):
        a, b = (tree[name].value if name in tree else None for tree in (before, after))
        if a is None or b is None or (a.shape, a.dtype) != (b.shape, b.dtype):
            changed = ", ".join(f"{n}={v!r}" for n, v in fields.items())
            raise UserError(
                f"{key}: {changed} would change parameter {name} from {_shape(a)} to {_shape(b)};"
                " a stage may not change shapes"
            )
    return new


def _shape(value: Any) -> str:
    return "nothing" if value is None else f"{value.dtype}{list(value.shape)}"


def _set(node: Any, path: Sequence[str], value: Any, key: str) -> Any:
    """A copy of a module, partial or mapping with the field at `path` replaced."""
    name, rest = path[0], path[1:]
    if isinstance(node, Mapping):
        if name not in node:
            raise UserError(f"{key}: no entry {name!r}; there are {', '.join(node)}")
        return {**node, name: _set(node[name], rest, value, key) if rest else value}
    is_partial = isinstance(node, functools.partial)
    owner: Any = node.func if is_partial else type(node)
    if not dataclasses.is_dataclass(owner):
        raise UserError(f"{key}: {getattr(owner, '__name__', owner)} has no fields")
    fields = [f.name for f in dataclasses.fields(owner) if f.init and f.name not in ("parent", "name")]
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=3)
        raise UserError(
            f"{key}: {getattr(owner, '__name__', owner)} has no field {name!r}; nearest: {', '.join(near or fields)}"
        )
    current = node.keywords.get(name, getattr(owner, name, None)) if is_partial else getattr(node, name)
    new = _set(current, rest, value, key) if rest else value
    if is_partial:
        return functools.partial(node.func, *node.args, **{**node.keywords, name: new})
    return node.clone(**{name: new}) if hasattr(node, "clone") else dataclasses.replace(node, **{name: new})
