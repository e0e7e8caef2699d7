"""Timing a compiled call: compiling, the first run and steady runs apart; every output awaited, so that dispatch fakes nothing.

JAX returns before a device has finished. A call is over when all arrays that it made are there, and only then the clock is read. Several
calls to be compared are timed in turn, round by round, so that a busy moment of the machine meets all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

REPEATS = 20
SHORTEST = 2e-4  # seconds of a sample: a shorter call is repeated within it, or the clock itself would be seen


@dataclasses.dataclass(frozen=True)
class Timing:
    """first_ms: of the first run, which also pays for memory. samples_ms: of steady calls."""

    first_ms: float
    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return float(np.median(self.samples_ms))

    @property
    def min_ms(self) -> float:
        return min(self.samples_ms)

    @property
    def spread_ms(self) -> float:
        """From the 10th to the 90th percentile."""
        low, high = np.percentile(self.samples_ms, [10, 90])
        return float(high - low)


def seconds_of(call: Callable[[], Any], calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call, from its start to the last of its outputs; the mean of `calls` of them, one after another."""
    start = clock()
    for _ in range(calls):
        jax.block_until_ready(call())
    return (clock() - start) / calls


def time_calls(calls: Mapping[str, Callable[[], Any]], repeats: int = REPEATS) -> dict[str, Timing]:
    """Each call once, then `repeats` samples of each, in turn."""
    first = {name: seconds_of(call) for name, call in calls.items()}
    inner = {name: max(1, round(SHORTEST / max(seconds_of(call), 1e-9))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            samples[name].append(1e3 * seconds_of(call, inner[name]))
    return {name: Timing(1e3 * first[name], tuple(samples[name])) for name in calls}


def compiled(function: Callable[..., Any], *arguments: Any, donate: int | None = None) -> tuple[Any, float]:
    """The function compiled for these arguments (arrays or their shapes), and the seconds of tracing and compiling."""
    start = time.perf_counter()
    made = jax.jit(function, donate_argnums=() if donate is None else donate).lower(*arguments).compile()
    return made, time.perf_counter() - start


def peak_bytes(program: Any) -> int | None:
    """Bytes on the device while the compiled program runs: arguments, results and scratch, by XLA's own plan. None = it does not say."""
    plan = program.memory_analysis()
    if plan is None:
        return None
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    return int(held + plan.temp_size_in_bytes)
