"""Bytes, counted from shapes alone: nothing here allocates an array."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays, or of what `ShapeDtypeStruct`s describe."""
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's share: leaves carry a sharding, or lie whole on the device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        size = jnp.dtype(leaf.dtype).itemsize
        for n in shape:
            size *= n
        total += size
    return total


def saved_for_backward(loss: Callable[..., jax.Array], params: Any, *args: Any) -> int:
    """Bytes that the backward pass of `loss(params, *args)` keeps from the forward, remat included; the parameters themselves and
    the arguments are not counted again.

    The residuals of `jax.vjp` are read from its traced program: whatever a `custom_vjp`, a scan or a remat policy keeps is there.
    """
    closed = jax.make_jaxpr(lambda p, *rest: jax.vjp(lambda q: loss(q, *rest), p)[1])(params, *args)
    inputs = {id(v) for v in [*closed.jaxpr.invars, *closed.jaxpr.constvars]}
    seen: set[int] = set()
    total = 0
    for var in closed.jaxpr.outvars:
        if id(var) in inputs or id(var) in seen or isinstance(var, Literal):
            continue  # a parameter passed through, a residual named twice, or a literal
        seen.add(id(var))
        aval: Any = var.aval
        total += aval.size * jnp.dtype(aval.dtype).itemsize
    return total
