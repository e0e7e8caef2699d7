"""Bytes, counted from shapes alone, and whether they fit: nothing here allocates an array."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxllm.errors import UserError


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


def saved_by_layer(layer: Callable[..., Any], params: Any, moving: Any, still: Any) -> tuple[int, int]:
    """Bytes that the backward of `layer(params, moving, still)` keeps: (those that every repeat of it keeps, those that all repeats share).

    moving: what layers hand on; where the backward needs it as it came, it is counted. still: what is the same for all of them, counted
    nowhere; what is made of it alone is shared. Parameters are not counted.
    """
    closed = jax.make_jaxpr(lambda p, m, s: jax.vjp(lambda *own: layer(*own, s), p, m)[1])(params, moving, still)
    sizes = [len(jax.tree.leaves(tree)) for tree in (params, moving)]
    invars = closed.jaxpr.invars
    free = {id(v) for v in [*invars[: sizes[0]], *invars[sum(sizes) :], *closed.jaxpr.constvars]}
    own = _reached(closed.jaxpr, [i < sum(sizes) for i in range(len(invars))])
    found: dict[int, Any] = {id(v): v for v in closed.jaxpr.outvars if not isinstance(v, Literal) and id(v) not in free}
    size = {name: v.aval.size * jnp.dtype(v.aval.dtype).itemsize for name, v in found.items()}
    each = sum(n for name, n in size.items() if name in own)
    return each, sum(size.values()) - each


def _reached(jaxpr: Any, given: list[bool]) -> set[int]:
    """Ids of the variables of a program that depend on an input that is `given`. Called programs are looked into; loops are one step."""
    reached = {id(v) for v, yes in zip(jaxpr.invars, given, strict=True) if yes}
    for eqn in jaxpr.eqns:
        inputs = [id(v) in reached for v in eqn.invars]
        called = getattr(eqn.params.get("jaxpr"), "jaxpr", None)
        if called is not None and eqn.primitive.name in ("jit", "pjit", "closed_call"):
            inside = _reached(called, inputs)
            outputs = [id(v) in inside for v in called.outvars]
        else:
            outputs = [any(inputs)] * len(eqn.outvars)
        reached.update(id(v) for v, yes in zip(eqn.outvars, outputs, strict=True) if yes)
    return reached


def free_bytes(device: jax.Device) -> int | None:
    """Bytes this device can still hand out; on CPU the host's free memory, which all its devices share. None = not known."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return None
    lines = _lines(Path("/proc/meminfo"))
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    # A container may have less than its host; its limit counts the page cache too, which is given back when needed.
    free += [int(line) for line in _lines(Path("/sys/fs/cgroup/memory.max")) if line.strip().isdigit()]
    return min(free) // len(jax.local_devices()) if free else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def check_room(needed: int, device: jax.Device, parts: str, fix: str) -> None:
    """Refuse, before anything is allocated, what cannot fit. `needed`: bytes more than the device holds now."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise UserError(
            f"memory: {needed / 2**30:,.1f} GiB are needed on each {device.device_kind} device ({parts}),"
            f" {free / 2**30:,.1f} GiB are free; {fix}"
        )
