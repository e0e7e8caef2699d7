"""How tokens reach their experts, by name.

| name | what it is | drops | where |
| --- | --- | --- | --- |
| dense | every expert for every token: the truth (`jaxllm.ops.experts`) | nothing | tests |
| sorted | batched products over tokens sorted by expert (`jaxllm.ops.experts_sorted`) | nothing | anywhere, made for CPUs |
| ragged | grouped products (`jaxllm.ops.experts_ragged`) | nothing | GPUs, TPUs; on CPU every expert sees every token |
| capacity | `capacity_factor` times an even share for each expert (GShard, arXiv 2006.16668) | what is beyond it | anywhere |
| expert_parallel | tokens sent to their experts' devices (`jaxllm.ops.experts_parallel`) | as `capacity_factor` says | meshes |

`auto` never drops: it is ragged where the platform has a kernel, else sorted; and a handful of tokens (a decode step) reads the weights of
the chosen experts alone. On a mesh every path but `dense` runs on the devices that hold its tokens, and experts that are split over the
axis `expert` are always reached by an exchange, whatever the name: it says then how each device computes. Without such an axis
`expert_parallel` is `auto`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.errors import UserError
from jaxllm.ops.experts import Experts, Unit, experts_dense, experts_few
from jaxllm.ops.experts_parallel import EXCHANGES, over_mesh, splits
from jaxllm.ops.experts_ragged import experts_ragged
from jaxllm.ops.experts_sorted import capacity_of, experts_capacity, experts_sorted

DISPATCHES = ("auto", "dense", "sorted", "ragged", "capacity", "expert_parallel")


def check_dispatch(name: str, capacity_factor: float | None, exchange: str) -> None:
    """Raise `UserError` unless the names exist and the factor goes with them."""
    if name not in DISPATCHES:
        raise UserError(f"dispatch: {name!r} is not one of {', '.join(DISPATCHES)}")
    if exchange not in EXCHANGES:
        raise UserError(f"exchange: {exchange!r} is not one of {', '.join(EXCHANGES)}")
    if name == "capacity" and capacity_factor is None:
        raise UserError("capacity_factor: null, but dispatch=capacity needs one; 1.25 is usual")
    if capacity_factor is not None and name not in ("capacity", "expert_parallel"):
        raise UserError(
            f"capacity_factor: {capacity_factor} means nothing under dispatch={name}, which drops nothing; set dispatch=capacity"
        )
    if capacity_factor is not None and capacity_factor <= 0:
        raise UserError(f"capacity_factor: {capacity_factor} must be > 0")


def choose(name: str, choices: int, experts: int, *, platform: str | None = None) -> str:
    """How one device computes: dense, few, sorted, ragged or capacity."""
    if name not in ("auto", "expert_parallel"):
        return name
    platform = jax.default_backend() if platform is None else platform
    if platform in ("gpu", "cuda", "rocm", "tpu"):
        return "ragged"
    return "few" if choices <= experts else "sorted"


def on_device(
    name: str,
    factor: float | None,
    unit: Unit,
    x: Array,
    experts: Array,
    weights: Array,
    w: Experts,
    expected: int,
) -> tuple[Array, Array]:
    """`x [n d]`, experts int32 `[n k]`, weights fp32 `[n k]` -> `y [n d]` and how many choices were dropped (fp32 scalar). expected:
    choices that are likely to be made among these experts."""
    none, how = jnp.float32(0.0), choose(name, experts.size, w.number)
    if how == "capacity":
        assert factor is not None
        capacity = max(1, math.ceil(factor * expected / w.number))
        return experts_capacity(x, experts, weights, w, unit, min(capacity, x.shape[0]))
    if how == "sorted":
        return experts_sorted(x, experts, weights, w, unit, capacity_of(x.shape[0], expected, w.number)), none
    path = {"dense": experts_dense, "few": experts_few, "ragged": experts_ragged}[how]
    return path(x, experts, weights, w, unit), none


def dispatch(
    name: str,
    x: Array,
    experts: Array,
    weights: Array,
    w: Experts,
    unit: Unit,
    capacity_factor: float | None = None,
    exchange: str = "padded",
) -> tuple[Array, Array]:
    """`x [b t d]`, experts int32 `[b t k]`, weights fp32 `[b t k]` -> `y [b t d]` and how many choices were dropped (fp32 scalar)."""
    local = functools.partial(on_device, name, capacity_factor, unit)
    if name != "dense" and splits(x.shape[0]):
        factor = capacity_factor if name == "expert_parallel" else None
        return over_mesh(local, x, experts, weights, w, factor, exchange)
    k = experts.shape[-1]
    y, dropped = local(x.reshape(-1, x.shape[-1]), experts.reshape(-1, k), weights.reshape(-1, k), w, experts.size)
    return y.reshape(x.shape), dropped
