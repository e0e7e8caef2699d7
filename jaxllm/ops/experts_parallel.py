"""Experts on a mesh: tokens stay on the devices that split the batch, experts live on the devices of the mesh axis `expert`.

Three things happen, each where the mesh has the axis for it, inside one shard_map:

- `fsdp`: weights are gathered before they are used (by the specs of the shard_map alone);
- `tensor`: each device holds a part of every expert's hidden width; the partial results are summed;
- `expert`: each device holds E / P experts. Every token is sent once to each device that holds one of its choices, is computed
  there by one of the paths of one device, and comes back as the sum over those choices (GShard, arXiv 2006.16668; sending once a
  device: DeepSeek-V2, arXiv 2405.04434).

Shapes are static, so a device keeps room for C tokens from each other one: all of them by default, which drops nothing, or
`capacity_factor` times an even share. The room travels whole (`padded`, any platform), or only what is in it (`ragged`:
`lax.ragged_all_to_all`, which has no CPU implementation).

Where the rules put `expert` on a mesh axis that does not split the batch, all of its devices see the same tokens: each computes its own
experts' part and the parts are summed, without any exchange.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.mesh import axes_in_force, shard_map_over
from jaxllm.ops.experts import Experts
from jaxllm.ops.queues import from_slots, line_up, rows_of, seats, to_slots

Local = Callable[[Array, Array, Array, Experts, int], tuple[Array, Array]]
"""`(x [n d], experts [n k], weights [n k], w, expected) -> (y [n d], dropped)`; expected: choices that are likely to be made among w."""

EXCHANGES = ("padded", "ragged")


def size_of(axes: tuple[str, ...]) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axes)


def splits(rows: int) -> bool:
    """Does the mesh in force have several devices, over which a batch of so many rows divides?"""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and rows % size_of(axes_in_force("batch")) == 0


def over_mesh(
    local: Local, x: Array, experts: Array, weights: Array, w: Experts, capacity_factor: float | None, exchange: str
) -> tuple[Array, Array]:
    """`x [b t d]`, experts int32 `[b t k]`, weights fp32 `[b t k]` -> `y [b t d]` and the number of choices dropped (fp32)."""
    batch, holders, parts = (axes_in_force(name) for name in ("batch", "expert", "mlp"))
    if not set(holders) <= set(batch) and set(holders) & set(batch):
        raise ValueError(f"mesh axes {holders} of the experts split the batch only in part")
    sharers = () if set(holders) <= set(batch) else holders  # see the same tokens

    def body(x: Array, experts: Array, weights: Array, w: Experts) -> tuple[Array, Array]:
        shape, k = x.shape, experts.shape[-1]
        x, experts, weights = x.reshape(-1, shape[-1]), experts.reshape(-1, k), weights.reshape(-1, k)
        if parts and w.down_bias is not None:  # added by one device, for the sum
            w = w._replace(down_bias=jnp.where(lax.axis_index(parts) == 0, w.down_bias, 0))
        if holders and not sharers:
            y, dropped = exchanged(local, x, experts, weights, w, holders, capacity_factor, exchange)
        else:
            if sharers:
                experts = experts - lax.axis_index(sharers) * w.number
            y, dropped = local(x, experts, weights, w, experts.size // size_of(sharers))
        if parts or sharers:
            y = lax.psum(y.astype(jnp.float32), parts + sharers).astype(y.dtype)
        return y.reshape(shape), lax.psum(dropped / size_of(parts), tuple(dict.fromkeys(batch + parts + sharers)))

    tokens = ("batch", "length", None)
    wide, narrow = ("expert", None, "mlp"), ("expert", "mlp")
    names = (wide, wide, ("expert", "mlp", None), narrow, narrow, ("expert", None))
    axes: Any = w
    axes = axes._replace(**{f: name for f, a, name in zip(w._fields, w, names, strict=True) if a is not None})
    return shard_map_over(body, (tokens, tokens, tokens, axes), (tokens, ()), check_vma=False)(x, experts, weights, w)


def exchanged(
    local: Local,
    x: Array,
    experts: Array,
    weights: Array,
    w: Experts,
    axes: tuple[str, ...],
    capacity_factor: float | None,
    exchange: str,
) -> tuple[Array, Array]:
    """On one device of a shard_map: send each token to the devices of its experts, compute what arrived, send the results back."""
    (n, k), devices, held = experts.shape, size_of(axes), w.number
    owner = jnp.where((experts >= 0) & (experts < devices * held), experts // held, devices)
    device = jnp.arange(devices, dtype=jnp.int32)
    goes = jnp.where(jnp.any(owner[:, :, None] == device, axis=1), device, devices)  # [n devices]
    room = n if capacity_factor is None else min(n, math.ceil(capacity_factor * n * min(k, devices) / devices))
    queues = line_up(goes, devices)
    rows, slot = seats(queues, goes, room)
    sent = jnp.minimum(queues.counts, room)
    got = lax.all_to_all(sent, axes, 0, 0, tiled=True)

    def move(a: Array, there: Array, back: Array, fill: float) -> Array:
        if exchange == "ragged":
            return _ragged(a, there, back, room, axes, fill)
        return lax.all_to_all(a, axes, 0, 0, tiled=True)

    ids = jnp.where((rows < slot.size)[:, None], rows_of(experts, rows, devices), -1)
    ids = move(ids, sent, got, -1)
    mine = jnp.where(ids >= 0, ids - lax.axis_index(axes) * held, -1)
    y, dropped = local(
        move(to_slots(x, rows, slot), sent, got, 0), mine, move(to_slots(weights, rows, slot), sent, got, 0), w, n * k
    )
    y = from_slots(move(y, got, sent, 0), rows, slot)
    kept = jnp.pad(slot < devices * room, ((0, 0), (0, 1)), constant_values=True)
    lost = ~jnp.take_along_axis(kept, owner, axis=1)
    return y, dropped + jnp.sum(lost, dtype=jnp.float32)


def _ragged(a: Array, sent: Array, got: Array, room: int, axes: tuple[str, ...], fill: float) -> Array:
    """`a [devices * room, ..]`: of each device's stretch only the first `sent` rows travel; they arrive in the sender's stretch."""
    starts = jnp.arange(sent.shape[0], dtype=jnp.int32) * room
    place = jnp.full_like(sent, lax.axis_index(axes) * room)
    axis = axes[0] if len(axes) == 1 else axes
    return lax.ragged_all_to_all(a, jnp.full_like(a, fill), starts, sent, place, got, axis_name=axis)
