"""How tokens reach their experts, by name.

| name | what it is | drops | where |
| --- | --- | --- | --- |
| dense | every expert for every token: the truth (`jaxllm.ops.experts`) | nothing | tests |
| sorted | tokens sorted by expert (`jaxllm.ops.experts_sorted`); for a handful of tokens, gathered weights | nothing | anywhere |
| capacity | `capacity_factor` times an even share for each expert (GShard, arXiv 2006.16668) | what is beyond it | anywhere |

`auto` never drops.
"""

import math

import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops.experts import Experts, Unit, experts_dense, experts_few
from jaxllm.ops.experts_sorted import experts_capacity, experts_sorted

DISPATCHES = ("auto", "dense", "sorted", "capacity")


def check_dispatch(name: str, capacity_factor: float | None) -> None:
    """Raise `UserError` unless the name exists and the factor goes with it."""
    if name not in DISPATCHES:
        raise UserError(f"dispatch: {name!r} is not one of {', '.join(DISPATCHES)}")
    if name == "capacity" and capacity_factor is None:
        raise UserError("capacity_factor: null, but dispatch=capacity needs one; 1.25 is usual")
    if capacity_factor is not None and capacity_factor <= 0:
        raise UserError(f"capacity_factor: {capacity_factor} must be > 0")


def dispatch(
    name: str, x: Array, experts: Array, weights: Array, w: Experts, unit: Unit, capacity_factor: float | None
) -> tuple[Array, Array]:
    """`x [n d]`, experts int32 `[n k]`, weights fp32 `[n k]` -> `y [n d]` and how many choices were dropped (fp32 scalar)."""
    none = jnp.float32(0.0)
    if name == "dense":
        return experts_dense(x, experts, weights, w, unit), none
    if name == "capacity":
        assert capacity_factor is not None
        capacity = max(1, math.ceil(capacity_factor * experts.size / w.number))
        return experts_capacity(x, experts, weights, w, unit, min(capacity, x.shape[0]))
    if experts.size <= w.number:
        return experts_few(x, experts, weights, w, unit), none
    return experts_sorted(x, experts, weights, w, unit), none
