"""Gated linear units beyond plain SwiGLU, as published models have them in dense layers and in experts alike.

    swiglu   silu(g) u                                                              Shazeer 2020, arXiv 2002.05202
    clamped  silu(min(g, L)) clip(u, -L, L)                                         DeepSeek-V4, GLM-5.3-Flash (L = 10)
    gpt_oss  m sigmoid(1.702 m) (clip(u, -L, L) + 1),  m = min(g, L)                gpt-oss (L = 7)
    situ     4 tanh(g / 4) sigmoid(g) 25 tanh(u / 25), fp32                         Kimi K3, arXiv 2607.24653

The gate is bounded above alone: below, its activation dies out by itself. All keep gate and up alone for the backward pass and make
the rest again, which is cheaper than to store arrays as wide as the hidden layer.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops.linear import swiglu_naive

SITU_GATE, SITU_UP = 4.0, 25.0
GPT_OSS_ALPHA = 1.702


def _bounded(gate: Array, up: Array, limit: float) -> tuple[Array, Array]:
    return jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)


def _clamped(gate: Array, up: Array, limit: float | None) -> Array:
    return swiglu_naive(*_bounded(gate, up, limit)) if limit is not None else swiglu_naive(gate, up)


def _gpt_oss(gate: Array, up: Array, limit: float | None) -> Array:
    if limit is not None:
        gate, up = _bounded(gate, up, limit)
    return gate * jax.nn.sigmoid(GPT_OSS_ALPHA * gate) * (up + 1)


def _situ(gate: Array, up: Array, limit: float | None) -> Array:
    del limit
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    hidden = SITU_GATE * jnp.tanh(g / SITU_GATE) * jax.nn.sigmoid(g) * (SITU_UP * jnp.tanh(u / SITU_UP))
    return hidden.astype(up.dtype)


GLUS: dict[str, Callable[[Array, Array, float | None], Array]] = {
    "swiglu": lambda gate, up, limit: swiglu_naive(gate, up),
    "clamped": _clamped,
    "gpt_oss": _gpt_oss,
    "situ": _situ,
}


def check_glu(key: str, kind: str, limit: float | None) -> None:
    """Raise `UserError` unless the kind exists and the limit suits it. `key` is the field's name, for the message."""
    if kind not in GLUS:
        raise UserError(f"{key}: {kind!r} is not one of {', '.join(GLUS)}")
    needs = kind in ("clamped", "gpt_oss")
    if (limit is not None) != needs or (limit is not None and limit <= 0):
        raise UserError(
            f"{key}: {kind} {'needs a positive limit' if needs else 'takes no limit'}, got {limit}; clamped and gpt_oss take one"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def glu(gate: Array, up: Array, kind: str = "swiglu", limit: float | None = None) -> Array:
    """The hidden layer of a gated unit from its two projections: `[.. f], [.. f] -> [.. f]`, one of `GLUS`."""
    return GLUS[kind](gate, up, limit)


def _backward(kind: str, limit: float | None, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    return jax.vjp(lambda gate, up: GLUS[kind](gate, up, limit), *saved)[1](dy)


glu.defvjp(lambda gate, up, kind, limit: (GLUS[kind](gate, up, limit), (gate, up)), _backward)
