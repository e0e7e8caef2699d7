"""Schedules: pure functions from the number of updates made so far to a factor of the peak value.

    value(count) = peak * factor(count, total),    count = 0 ... total - 1

`count` is the number of optimiser updates before this one (skipped steps and micro-batches do not count), so the value
is the same after any number of restarts. Every schedule warms up alike: the first update already moves, with `1 /
warmup_steps` of the peak, and update `warmup_steps - 1` uses all of it. The last update, `total - 1`, uses exactly
`final` (Constant: 1), and so does every later one.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base: a warm-up over `warmup_steps` updates, then `shape`."""

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"warmup_steps: {self.warmup_steps} must be 0 or more")

    def factor(self, count: jax.Array | int, total: jax.Array | int) -> jax.Array:
        """The share of the peak that update `count` of `total` uses, float32 scalar."""
        count, total = jnp.asarray(count, jnp.float32), jnp.asarray(total, jnp.float32)
        shape = self.shape(count, total)
        if self.warmup_steps == 0:
            return shape
        return jnp.where(count < self.warmup_steps, (count + 1) / self.warmup_steps, shape)

    def shape(self, count: jax.Array, total: jax.Array) -> jax.Array:
        """The factor after the warm-up."""
        raise NotImplementedError

    def _peak(self) -> int:
        """The last update that uses the whole peak because of the warm-up."""
        return max(self.warmup_steps - 1, 0)


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """Warm-up, then the peak for ever."""

    def shape(self, count: jax.Array, total: jax.Array) -> jax.Array:
        del total
        return jnp.ones_like(count)


def _check_final(final: float) -> None:
    if not 0.0 <= final <= 1.0:
        raise UserError(f"final: {final} is a share of the peak, between 0 and 1")


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from the peak down to `final` of it (Loshchilov and Hutter 2017, arXiv 1608.03983)."""

    final: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_final(self.final)

    def shape(self, count: jax.Array, total: jax.Array) -> jax.Array:
        start = self._peak()
        done = jnp.clip((count - start) / jnp.maximum(total - 1 - start, 1), 0.0, 1.0)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))


@dataclasses.dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay (MiniCPM, arXiv 2404.06395): the peak, and over the last updates down to `final` of it.

    decay: the share of all updates that the decay takes. form: `linear`, or `sqrt`, 1 - sqrt(done) (Haegele et al.
    2024, arXiv 2405.18392). Only the end depends on `total`, so a run is lengthened by going back to before its decay.
    """

    decay: float = 0.2
    final: float = 0.0
    form: Literal["linear", "sqrt"] = "sqrt"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_final(self.final)
        if not 0.0 < self.decay <= 1.0:
            raise UserError(f"decay: {self.decay} is a share of all updates, above 0 and at most 1")
        if self.form not in ("linear", "sqrt"):
            raise UserError(f"form: {self.form!r} is not one of linear, sqrt")

    def shape(self, count: jax.Array, total: jax.Array) -> jax.Array:
        last = total - 1
        start = jnp.minimum(jnp.maximum(last - jnp.round(self.decay * total), self._peak()), last)
        # Where no update is left to decay over (last == start), only the last one is down.
        done = jnp.where(last > start, (count - start) / jnp.maximum(last - start, 1), count >= last)
        done = jnp.clip(done, 0.0, 1.0)
        fall = jnp.sqrt(done) if self.form == "sqrt" else done
        return self.final + (1.0 - self.final) * (1.0 - fall)
