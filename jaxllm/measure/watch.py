"""What a run should be told of while it goes: an input too slow, a function compiled again, a parameter that moves unlike the rest."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


class SlowInput:
    """Says once when, over the last `steps` steps, more than `share` of the time went by with the device out of work for want of a batch.

    add(waited, took): seconds the device may have stood still before this step, and all of the step's seconds. A wait during which the
    device was still busy is none.
    """

    def __init__(self, log: Callable[[str], None], steps: int = 20, share: float = 0.2):
        self._log, self._share, self._said = log, share, False
        self._recent: deque[tuple[float, float]] = deque(maxlen=steps)

    def add(self, waited: float, took: float) -> None:
        self._recent.append((waited, took))
        if self._said or len(self._recent) < (self._recent.maxlen or 1):
            return
        lost, all_of_it = (sum(part) for part in zip(*self._recent, strict=True))
        if all_of_it > 0 and lost > self._share * all_of_it:
            self._said = True
            self._log(
                f"input: {min(1.0, lost / all_of_it):.0%} of the last {len(self._recent)} steps went by waiting for batches; raise"
                " train.prefetch, keep the data on a faster disk, or make the tokenizer's work beforehand (a token cache)"
            )


def outliers(ratios: Mapping[str, Any], factor: float = 30.0) -> list[str]:
    """One line for each parameter whose update, relative to its own size, is `factor` times the median or a `factor`-th of it.

    ratios: `|update| / |parameter|` by path, scalars or one number a repeat of a scanned group. Parameters of size zero (a ratio that is
    not finite) and ones that do not move are left out of the median; the latter are no outliers: they are frozen or unused.
    """
    flat = [(name, i, float(x)) for name, value in ratios.items() for i, x in enumerate(np.ravel(value))]
    moving = [x for _, _, x in flat if math.isfinite(x) and x > 0]
    if len(moving) < 3:
        return []
    middle = float(np.median(moving))
    lines = []
    for name, i, x in flat:
        if math.isfinite(x) and x > 0 and not middle / factor <= x <= middle * factor:
            place = f"{name}, repeat {i}" if np.size(ratios[name]) > 1 else name
            kind = "times" if x > middle else "of"
            size = x / middle if x > middle else middle / x
            lines.append(
                f"{place}: its update is {x:.1e} of its size, {'' if kind == 'times' else '1 / '}{size:.0f} {kind} the median {middle:.1e}"
            )
    return lines


class Programs:
    """The signatures that one function was compiled for."""

    def __init__(self, name: str):
        self._name = name
        self._seen: list[dict[str, str]] = []

    def see(self, args: Any, kwargs: Any) -> str | None:
        """Of a call that needs another program than all before it: which argument's shape, type or static value is new, in one line.
        None for the first call, which compiles in any case, and for one that needs nothing new."""
        now = signature(args, kwargs)
        if now in self._seen:
            return None
        self._seen.append(now)
        if len(self._seen) == 1:
            return None
        before = min(reversed(self._seen[:-1]), key=lambda old: len(changes(old, now)))
        changed = changes(before, now)
        rest = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"{self._name}: compiled again ({len(self._seen)} times now): {', '.join(changed[:3])}{rest}"


class Recompiled:
    """A jitted function that says which argument is new whenever a call makes it compile again.

    Looking costs a walk over the arguments' leaves at every call, some microseconds each. Where that is too much, `Programs.see` inside
    the function is called when it is traced and never else.
    """

    def __init__(self, function: Callable[..., Any], name: str, log: Callable[[str], None]):
        self._function, self._programs, self._log = function, Programs(name), log

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (line := self._programs.see(args, kwargs)) is not None:
            self._log(line)
        return self._function(*args, **kwargs)


def signature(args: Any, kwargs: Any) -> dict[str, str]:
    """What a compiled program depends on, leaf by leaf: `{"[0]['tokens']": "int32[8,256]"}`; a static leaf by its value."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
        name = jax.tree_util.keystr(path[1:])
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            out[name] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        else:  # traced as a scalar of its type, whatever its value
            out[name] = type(leaf).__name__
    out["structure"] = str(jax.tree.structure((args, kwargs)))
    return out


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """`argument [0]['tokens'] int32[8,256] -> int32[8,300]`; of another structure, what came and went."""
    found = [
        f"argument {name} {before.get(name, '-')} -> {now.get(name, '-')}"
        for name in dict.fromkeys([*before, *now])
        if name != "structure" and before.get(name) != now.get(name)
    ]
    return found or ([] if before == now else ["a static part of the arguments (context, capture, configuration)"])
